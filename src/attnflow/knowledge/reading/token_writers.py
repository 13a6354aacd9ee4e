"""`writers`: which entries of all layers write a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch.nn import functional

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.results import Result
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.layered import LayerReader, numbering, readers, reads_entries, unobserved
from attnflow.knowledge.reading.ablation import LocatedEntry
from attnflow.knowledge.reading.direct_effect import Stream, directions
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_BLOCK: Final = 1 << 14  # entries whose values are held at once


@dataclass(frozen=True)
class WritingEntry:
    """An entry whose value points towards a token; a negative weight lets it write against the token."""

    name: str  # layer and number within it, such as "L24N1005"
    layer: int  # of the model
    neuron: int  # its number within that layer
    reader: int  # number of the layer of entries that reads it
    entry: int  # its id
    head: int
    cosine: float  # of its value and the direction that raises the token's logit above the mean of all
    push: float  # what the value adds to that logit at weight 1, where the final norm's scale is 1


@dataclass(frozen=True)
class TokenWriters(Result):
    """The entries of a model that write a token, the closest first; `af.knowledge.writers` returns it."""

    model: str
    token: str
    token_id: int
    entries: tuple[WritingEntry, ...]

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each entry."""
        return [vars(entry) for entry in self.entries]


def writers(
    model: nn.Module | Loaded,
    token: str | int,
    count: int = 20,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TokenWriters:
    """Find the entries of all layers whose values raise a token's logit, or lower it, by direction.

    The direction of token t is N (w_t - mean of w): the rows w of the unembedding, through the gain of the final norm.

    Args:
        model: any model with logits, or what `af.load_model` returned.
        token: the token, as text or id.
        count: how many entries to list, those with the largest absolute cosine.
        tokenizer: needed for a text unless `model` has one.

    Raises:
        ValueError: the text is not one token, or the id is not in the vocabulary.
        UnsupportedArchitecture: the model has no unembedding behind a final norm, or unknown feed-forward layers.

    Cost: one forward pass of two tokens, and one product with all values.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> len(writers(model, 7, count=5).entries)
    5
    """
    subject = Subject.of(model, tokenizer).inside
    checks.integer("count", count, 1)
    subject.require_weights("writers")
    if not reads_entries(subject.model):
        subject = Subject(from_ffn(subject.model), subject.tokenizer)
    wanted = subject.token(token) if isinstance(token, str) else token
    ids = torch.tensor([subject.ordinary_tokens(2)], device=subject.device)
    run = partial(cast(Any, subject.model), input_ids=ids, **subject.sparing)

    def target(logits: torch.Tensor) -> list[int]:
        return [checks.integer("token", wanted, 0, len(logits) - 1)]

    with unobserved(subject.model), evaluating(subject.model), torch.no_grad():
        towards = directions(Stream(subject.model, [1]), run, target)
        if isinstance(towards, str):
            raise UnsupportedArchitecture(f"the tokens that entries of {subject.kind} write are not known: {towards}")
        row = towards.unembedding[wanted] - towards.unembedding.mean(dim=0)
        direction = row.to(towards.norm.gain) * towards.norm.gain
        best: list[tuple[float, float, LayerReader, int, int]] = []
        for reader in readers(subject.model):
            for places in reader.every().to(subject.device).split(_BLOCK):
                values = reader.values(places).to(direction)  # [heads, entries, width]
                values = values - values.mean(-1, keepdim=True) if towards.norm.centred else values
                pushes = values @ direction
                cosines = functional.cosine_similarity(values, direction, dim=-1)
                for at in cosines.abs().flatten().topk(min(count, cosines.numel())).indices.tolist():
                    head, place = divmod(at, len(places))
                    numbers = float(cosines[head, place]), float(pushes[head, place])
                    best.append((*numbers, reader, head, int(places[place])))
    numbered = numbering(subject.model)
    listed: list[WritingEntry] = []
    for cosine, push, reader, head, place in sorted(best, key=lambda found: -abs(found[0]))[:count]:
        entry = int(reader.ids(torch.tensor([place], device=subject.device))[0])
        where = LocatedEntry(reader, place, head).numbered(numbered)
        listed.append(WritingEntry(*where, reader.layer, entry, head, cosine, push))
    return TokenWriters(subject.name, subject.texts([wanted])[0], wanted, tuple(listed))
