"""`ask`: a question to a model with a reader; its answer, and the entries that it read for it."""

from __future__ import annotations

import os
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow._core.checks import integer
from attnflow.knowledge.hf.attach import attach
from attnflow.knowledge.hf.store_reader import StoreReader
from attnflow.knowledge.layered import observed
from attnflow.knowledge.memory_layer.reader import Reading
from attnflow.knowledge.questions import PROMPT
from attnflow.knowledge.store import Store
from attnflow.knowledge.text_results import Answer, Match
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded

_TOKENS: Final = 24


def ask(
    model: Loaded, store: Store, question: str, reader: str | os.PathLike[str], *, top: int = 3, tokens: int = _TOKENS
) -> Answer:
    """What a model says to a question when it reads a store, and the entries that it read for it.

    The entries are those on which the reader's weight lies at the end of the question, the mean over its layers and
    heads. Where no more of it lies on entries than the threshold that `fit_reader` chose, the store does not have the
    answer, and the model is not asked to make one up. The model is as it was afterwards.

    Args:
        model: what `af.load_model` gave, with its tokenizer.
        store: of the encoder that the reader was fitted to.
        question: in words; `fit_reader` says in which frame the model sees it.
        reader: the folder that `fit_reader` or a handle's `save` wrote.
        top: how many entries are listed.
        tokens: of an answer, at most; it ends with its line.

    Raises:
        ValueError: an empty question, a model without a tokenizer, or as `attach`.
    """
    integer("top", top, 1)
    integer("tokens", tokens, 1)
    if not question.strip():
        raise ValueError("the question is empty")
    if model.tokenizer is None:
        raise ValueError("a question needs the model's tokenizer: pass what af.load_model returned")
    tokenizer: Any = model.tokenizer
    with attach(model, store, reader=reader) as handle, evaluating(model.model), torch.no_grad():
        readers = cast("list[StoreReader]", handle.readers)
        inputs = dict(tokenizer(PROMPT.format(question.strip()), return_tensors="pt").to(model.model.device))
        readings: list[Reading] = []
        with observed([(one, readings.append) for one in readers]):
            cast(Any, model.model)(**inputs, use_cache=False)
        shares = torch.stack([reading.weights[0, -1].double().mean(dim=0) for reading in readings]).mean(dim=0)
        best = shares.topk(min(top, len(shares)))
        ids: Tensor = readers[0].every()[best.indices.cpu()]
        read, said, enough = float(shares.sum()), None, readers[0].enough
        if read > enough:
            out = cast(Any, model.model).generate(
                **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
            text = str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
            said = text.strip().partition("\n")[0].strip()
    sources = tuple(
        Match(entry.id, score, entry.text, entry.source, entry.version, entry.encoder)
        for entry, score in zip(store.get(ids), best.values.tolist(), strict=True)
    )
    return Answer(question, said, read, enough, sources)
