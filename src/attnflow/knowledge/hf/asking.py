"""`ask`: a question to a model with a reader; its answer, and the entry that it read for it."""

from __future__ import annotations

import os
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from attnflow._core.checks import integer
from attnflow.knowledge.hf.attach import attach
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.store_reader import StoreReader
from attnflow.knowledge.questions import PROMPT
from attnflow.knowledge.store import Store
from attnflow.knowledge.text_results import Answer, Match
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded

_TOKENS: Final = 24


def ask(
    model: Loaded, store: Store, question: str, reader: str | os.PathLike[str], *, top: int = 3, tokens: int = _TOKENS
) -> Answer:
    """What a model says to a question when it reads the entry of a store that is nearest to it.

    The store searches its keys by the question, embedded by the encoder that made them; the model reads the nearest
    entry and no other (see `Attached.reading`), so that the answer comes from one entry, which is named. Where none is
    nearer than the threshold that `fit_reader` chose, the store does not have the answer, and the model is not asked to
    make one up. The model is as it was afterwards.

    Args:
        model: what `af.load_model` gave, with its tokenizer.
        store: of the encoder that the reader was fitted to.
        question: in words; `fit_reader` says in which frame the model sees it.
        reader: the folder that `fit_reader` or a handle's `save` wrote.
        top: how many entries are listed.
        tokens: of an answer, at most; it ends with its line.

    Raises:
        ValueError: an empty question, a model without a tokenizer, an encoder that has changed since, or as `attach`.

    Cost: one embedding of the question, one search, and the model's own answer; of the entries one is read.
    """
    integer("top", top, 1)
    integer("tokens", tokens, 1)
    if not question.strip():
        raise ValueError("the question is empty")
    if model.tokenizer is None:
        raise ValueError("a question needs the model's tokenizer: pass what af.load_model returned")
    tokenizer: Any = model.tokenizer
    with attach(model, store, reader=reader) as handle:
        nearest = store.search(TextEncoder.of(store).query(question.strip()), min(top, len(store)))
        sources = Match.of(store, nearest, top)
        said, near = None, cast("list[StoreReader]", handle.readers)[0].near
        if sources and sources[0].score > near:
            inputs = dict(tokenizer(PROMPT.format(question.strip()), return_tensors="pt").to(model.model.device))
            length = inputs["input_ids"].shape[1]

            def ended(ids: Tensor, _: object) -> Tensor:
                line = str(tokenizer.decode(ids[0, length:], skip_special_tokens=True)).lstrip()
                return torch.full((len(ids),), "\n" in line, device=ids.device)

            with evaluating(model.model), torch.no_grad(), handle.reading([sources[0].id]):
                out: Tensor = cast(Any, model.model).generate(
                    **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id,
                    stopping_criteria=StoppingCriteriaList([ended]),
                )  # fmt: skip
            text = str(tokenizer.decode(out[0, length:], skip_special_tokens=True))
            said = text.strip().partition("\n")[0].strip()
    return Answer(question, said, near, sources)
