"""Decoding for models trained on merged tasks: `generate_blocks` writes text block by block, `infill` fills a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from attnflow._core.checks import index_array, integer, number
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.results import Result
from attnflow.masks.hf.selfcheck import check_stack
from attnflow.models.anatomy.sites import mixers_beside
from attnflow.models.arguments import CACHES
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.embedding import additive, require_runnable
from attnflow.tasks.families import mask_id

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Decoded(Result):
    """The new tokens of each sequence, and the number of passes they took.

    Attributes:
        tokens: the new token ids of each sequence, up to its end-of-text token (included) if it wrote one.
        passes: forward passes of the model, the prompt's included; sequences of a batch share them.
    """

    tokens: tuple[tuple[int, ...], ...]
    passes: int

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that one pass added to a sequence, on average; 0 where nothing was written."""
        written = sum(map(len, self.tokens))
        return written / (self.passes * len(self.tokens)) if written else 0.0

    def rows(self) -> Sequence[Mapping[str, object]]:
        """One row for each sequence."""
        return [
            {"sequence": number, "tokens": " ".join(map(str, tokens)), "passes": self.passes}
            for number, tokens in enumerate(self.tokens)
        ]

    def __str__(self) -> str:
        written = sum(map(len, self.tokens))
        return f"{written} new tokens in {self.passes} passes: {self.tokens_per_pass:.2f} per pass"


@torch.no_grad()
def generate_blocks(
    model: nn.Module | Loaded,
    ids: Ids,
    block: int,
    *,
    max_new_tokens: int = 64,
    mask_token: int | None = None,
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
    eos_token: int | Sequence[int] | None = None,
) -> Decoded:
    """Write text block by block with a model trained on `block_two_stream` or `block_diffusion`.

    A pass reads [clean block k | block k + 1, masked] after the cache of blocks 0..k-1, exactly what the merged task
    computes: clean tokens read all blocks up to their own, masks also one another. The masks then leave the cache. One
    pass writes a block. With `per_pass` a block takes block / per_pass passes: each fills the most probable places, and
    the next pass sees them. Train such a model with `block_diffusion(..., masked="random")`.

    Blocks begin at multiples of `block`. A prompt that ends within a block leaves it partly filled; a model trained
    only on fully masked blocks has never seen that.

    Args:
        model: a causal language model without recurrent layers, run by "sdpa" or "eager", or what `load_model` returns.
        ids: token ids of one prompt, [batch, n] of several, or a list of prompts of any lengths; may be empty if the
            first block was trained too (`predict_first=True`).
        block: tokens per block, as in training.
        max_new_tokens: tokens to write.
        mask_token: id of [MASK], as in training; required.
        per_pass: how many places a pass fills at least; by default the whole block.
        threshold: with `per_pass`, fill also all places whose token has at least this probability.
        temperature: for sampling, above 0; by default the most probable token is taken.
        seed: of the sampling.
        eos_token: id or ids that end a text; by default those of the model's generation config, -1 for none.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.
        ValueError: an argument out of range, or more positions than the model has.

    Cost: a pass over the prompt under a dense mask, then a pass of 2 x block tokens for each block; with `per_pass`
    another block / per_pass - 1 passes of `block` tokens. A sequence that has ended keeps running with its batch.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> prompts = [[5, 6, 7, 8], [9, 8]]
    >>> written = af.tasks.generate_blocks(model, prompts, 2, max_new_tokens=6, mask_token=0, eos_token=-1)
    >>> written.passes, [len(tokens) for tokens in written.tokens]
    (3, [6, 6])
    """
    block, most, blank = integer("block", block, 1), integer("max_new_tokens", max_new_tokens), mask_id(mask_token)
    choice = _Choice(block, per_pass, threshold, temperature, seed)
    texts = _prompts("ids", ids)
    longest = max(map(len, texts))
    run = _CachedPasses(Subject.of(model), -(-(longest + most) // block) * block, "ids", texts, blank)
    ends = _end_tokens(run.model, eos_token)
    whole = [len(text) // block * block for text in texts]  # the clean tokens of each, all of its whole blocks
    slots = max(whole)
    pads = torch.tensor([slots - own for own in whole])
    clean = torch.tensor([[0] * (slots - own) + text[:own] for text, own in zip(texts, whole, strict=True)])
    clean = clean.reshape(len(texts), slots).to(torch.int64)
    begun = [text[own:] for text, own in zip(texts, whole, strict=True)]
    written: list[list[int]] = [[] for _ in texts]
    with evaluating(run.model):
        while not all(len(new) >= most or not ends.isdisjoint(new) for new in written):
            held = torch.tensor([len(known) for known in begun])[:, None]
            tokens = torch.tensor([known + [blank] * (block - len(known)) for known in begun])
            hidden = torch.arange(block) >= held
            while bool(hidden.any()):
                rows = torch.cat([clean, tokens], dim=1)
                place = run.past + torch.arange(rows.shape[1]) - pads[:, None]
                logits = run.run(rows, place.clamp(min=0), _block_rows(pads, run.past, rows.shape[1], block), block)
                clean = clean[:, :0]
                tokens, hidden = choice.fill(tokens, hidden, logits)
            clean = tokens
            for new, row, known in zip(written, clean.tolist(), begun, strict=True):
                new += row[len(known) :]
            begun = [[] for _ in texts]
    last = [next((place for place, token in enumerate(new) if token in ends), most) for new in written]
    return Decoded(tuple(tuple(new[: min(end + 1, most)]) for new, end in zip(written, last, strict=True)), run.passes)


def _block_rows(pads: Tensor, past: int, rows: int, block: int) -> Bool[Tensor, "batch q k"]:
    """A row reads the blocks up to its own; leading pads, whole blocks of them, read only themselves."""
    query, key = past + torch.arange(rows), torch.arange(past + rows)
    earlier = key // block <= query[:, None] // block
    itself = key == query[:, None]
    return (earlier & (key >= pads[:, None])[:, None, :]) | itself


@torch.no_grad()
def infill(
    model: nn.Module | Loaded,
    left: Ids,
    right: Ids,
    length: int,
    *,
    mask_token: int | None = None,
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
) -> Decoded:
    """Fill a gap of `length` tokens between `left` and `right` with a model trained on `butterfly(..., block=length)`.

    The left side is read causally and the right side from its end backwards. `length` [MASK]s in the gap read both
    sides and one another, exactly as in the merged task. With `per_pass` the gap is filled in several passes as in
    `generate_blocks`; train with `butterfly(..., block=length, masked="random")`.

    Args:
        model: a language model without recurrent layers, run by "sdpa" or "eager", or what `load_model` returns.
        left: token ids before the gap, [batch, n] of several texts or a list of any lengths; may be empty.
        right: token ids after it, in the same form.
        length: tokens to write, as many as were masked in training.
        mask_token: id of [MASK], as in training; required.
        per_pass, threshold, temperature, seed: as in `generate_blocks`.

    Raises:
        UnsupportedArchitecture: as in `generate_blocks`.
        ValueError: an argument out of range, unequal numbers of left and right sides, or both sides empty.

    Cost: a pass over both sides and the gap under a dense mask; with `per_pass` also length / per_pass - 1 passes of
    `length` tokens.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> written = af.tasks.infill(model, [5, 6, 7], [9, 10], 4, mask_token=0, per_pass=2)
    >>> written.passes, len(written.tokens[0])
    (2, 4)
    """
    length, blank = integer("length", length, 1), mask_id(mask_token)
    choice = _Choice(length, per_pass, threshold, temperature, seed)
    before, after = _prompts("left", left), _prompts("right", right)
    if len(before) != len(after):
        raise ValueError(f"left and right must have the same number of texts, got {len(before)} and {len(after)}")
    sides = list(zip(before, after, strict=True))
    if not all(one or other for one, other in sides):
        raise ValueError("a gap needs tokens on at least one side, got none on either")
    positions = max(len(one) + len(other) for one, other in sides) + length
    run = _CachedPasses(Subject.of(model), positions, "left and right", [*before, *after], blank)
    ids, places = _context(sides, length)
    gap = torch.tensor([len(one) for one in before])[:, None] + torch.arange(length)
    tokens, hidden = torch.full(gap.shape, blank), torch.ones(gap.shape, dtype=torch.bool)
    first = max(map(len, before))
    with evaluating(run.model):
        while bool(hidden.any()):
            fresh = run.past == 0
            rows = torch.cat([ids, tokens], dim=1) if fresh else tokens
            positions = torch.cat([places.clamp(min=0), gap], dim=1) if fresh else gap
            logits = run.run(rows, positions, _gap_rows(places, first, length)[:, -rows.shape[1] :], length)
            tokens, hidden = choice.fill(tokens, hidden, logits)
    return Decoded(tuple(tuple(row) for row in tokens.tolist()), run.passes)


def _context(sides: list[tuple[list[int], list[int]]], length: int) -> tuple[Tensor, Tensor]:
    """(ids, positions) of [left, padded before | right, padded after]; pads have position -1."""
    first, last = max(len(one) for one, _ in sides), max(len(other) for _, other in sides)
    ids = torch.zeros((len(sides), first + last), dtype=torch.int64)
    places = torch.full(ids.shape, -1)
    for row, (one, other) in enumerate(sides):
        left, right = slice(first - len(one), first), slice(first, first + len(other))
        start = len(one) + length
        ids[row, left], places[row, left] = torch.tensor(one, dtype=torch.int64), torch.arange(len(one))
        ids[row, right], places[row, right] = torch.tensor(other, dtype=torch.int64), start + torch.arange(len(other))
    return ids, places


def _gap_rows(places: Tensor, first: int, length: int) -> Bool[Tensor, "batch n n"]:
    """In [left | right | gap] left reads backwards, right forwards, the gap everything; pads read themselves."""
    real = torch.cat([places >= 0, torch.ones(len(places), length, dtype=torch.bool)], dim=1)
    n = real.shape[1]
    kind = (torch.arange(n) >= first).long() + (torch.arange(n) >= n - length).long()  # 0 left, 1 right, 2 gap
    query, key = torch.arange(n)[:, None], torch.arange(n)
    same = kind[:, None] == kind
    flows = (same & (kind == 0) & (key <= query)) | (same & (kind == 1) & (key >= query)) | (kind == 2)[:, None]
    return (flows & real[:, None, :] & real[:, :, None]) | (query == key)


class _CachedPasses:
    """A model with a cache of all it has read: only a mask limits that. Ids outside the vocabulary are refused."""

    def __init__(
        self, subject: Subject, positions: int, name: str, texts: Sequence[Sequence[int]], mask_token: int
    ) -> None:
        self.model = _decodable(subject, positions)
        self.passes = self.past = 0
        weight = next(self.model.get_input_embeddings().parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._cache, self._argument = DynamicCache(), cast(str, subject.accepted(*CACHES))
        self._keeps = subject.accepts("logits_to_keep")
        for what, rows in ((name, texts), ("mask_token", [[mask_token]])):
            wrong = next((token for row in rows for token in row if not 0 <= token < len(weight)), None)
            if wrong is not None:
                raise ValueError(
                    f"{what} must hold ids of the {len(weight)} entries of the model's vocabulary, got {wrong}"
                )

    def run(
        self,
        ids: Int[Tensor, "batch q"],
        positions: Int[Tensor, "batch q"],
        allow: Bool[Tensor, "batch q k"],
        rows: int,
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """Logits of the last `rows` rows, which then leave the cache; `allow` is over the cache, then the pass."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self._device),
            "position_ids": positions.to(self._device),
            "attention_mask": additive(allow.to(self._device), self._dtype)[:, None],
            self._argument: self._cache,
            "use_cache": True,
        }
        if self._keeps:
            arguments["logits_to_keep"] = rows
        logits = cast(Tensor, self.model(**arguments).logits)
        self.passes += 1
        self._cache.crop(-rows)
        self.past += ids.shape[1] - rows
        return logits[:, -rows:]


class _Choice:
    """Fills masked places pass by pass (MaskGIT's schedule, arXiv:2202.04200), by the best tokens or by drawn ones."""

    def __init__(
        self, places: int, per_pass: int | None, threshold: float | None, temperature: float | None, seed: int
    ) -> None:
        self._per_pass = places if per_pass is None else integer("per_pass", per_pass, 1, places)
        self._threshold = None if threshold is None else number("threshold", threshold, 0.0)
        if threshold is not None and per_pass is None:
            raise ValueError("threshold needs per_pass, the least number of places that a pass fills")
        self._temperature = None if temperature is None else number("temperature", temperature)
        if self._temperature is not None and self._temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {temperature}; leave it out to take the best token")
        self._generator = torch.Generator().manual_seed(integer("seed", seed))

    def fill(
        self,
        tokens: Int[Tensor, "batch places"],
        hidden: Bool[Tensor, "batch places"],
        logits: Float[Tensor, "batch places vocabulary"],
    ) -> tuple[Int[Tensor, "batch places"], Bool[Tensor, "batch places"]]:
        """(tokens, hidden) with the surest places filled; drawn on the CPU, where a seed draws the same."""
        flat = logits.cpu().reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        if self._temperature is None:
            chances, drawn = flat.softmax(dim=-1), flat.argmax(dim=-1)[:, None]
        else:
            chances = (flat / self._temperature).softmax(dim=-1)
            drawn = torch.multinomial(chances, 1, generator=self._generator)
        sure = chances.gather(-1, drawn).reshape(hidden.shape).masked_fill(~hidden, -1.0)
        rank = sure.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        now = rank < self._per_pass
        if self._threshold is not None:
            now |= sure >= self._threshold
        now &= hidden
        return torch.where(now, drawn.reshape(hidden.shape), tokens), hidden & ~now


def _decodable(subject: Subject, positions: int) -> PreTrainedModel:
    """`model`, if cached passes give what its merged tasks do; refused otherwise, or for too many positions."""
    require_runnable(subject)
    model, name, sites = subject.model, subject.kind, subject.sites
    if not isinstance(model, PreTrainedModel) or subject.accepted(*CACHES) is None:
        raise UnsupportedArchitecture(f"decoding needs a cache of keys and values, which {name} does not take")
    mixers = mixers_beside(model, sites)
    moved = next((site for site in sites if check_stack(model, site.owner, sites).moved), None)
    if mixers or moved is not None:
        where = ", ".join(mixers[:4]) or type(cast(Any, moved).owner).__name__
        raise UnsupportedArchitecture(
            f"{name} moves information between positions outside its attention ({where}): no mask can keep masked "
            "positions from later ones, and such a state cannot be cropped as a cache can. Use a model whose positions "
            "exchange information through attention alone, or model.generate"
        )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < positions:
        raise ValueError(f"{name} has {most} positions, but the text would take {positions}: ask for fewer tokens")
    return model


def _prompts(name: str, ids: object) -> list[list[int]]:
    nested = isinstance(ids, Sequence) and len(ids) and isinstance(ids[0], Sequence | Tensor)
    several = nested or (isinstance(ids, Tensor) and ids.ndim == 2)
    return [index_array(name, row).tolist() for row in (cast("Sequence[object]", ids) if several else [ids])]


def _end_tokens(model: PreTrainedModel, eos_token: int | Sequence[int] | None) -> frozenset[int]:
    default = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = (-1 if default is None else default) if eos_token is None else eos_token
    several = cast("Sequence[object]", ids if isinstance(ids, list | tuple) else [ids])
    return frozenset(integer("eos_token", token, -1) for token in several) - {-1}
