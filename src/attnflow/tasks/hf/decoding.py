"""`generate_blocks` writes text block by block, `infill` the tokens of a gap: models trained on merged tasks decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow._core.results import Result
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded, split
from attnflow.tasks.families import MASK_TOKEN
from attnflow.tasks.hf.passes import (
    CachedPasses,
    Choice,
    Fill,
    decodable,
    end_tokens,
    prompts,
    require_in_vocabulary,
    schedule,
    until_end,
)

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Decoded(Result):
    """New tokens of each sequence, and what they took.

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
        return f"{written} new tokens in {self.passes} passes: {self.tokens_per_pass:.2f} a pass"


@torch.no_grad()
def generate_blocks(
    model: nn.Module | Loaded,
    ids: Ids,
    block: int,
    *,
    max_new_tokens: int = 64,
    mask_token: int = MASK_TOKEN,
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_token: int | Sequence[int] | None = None,
) -> Decoded:
    """Write text in blocks, one pass for each, by a model trained on `block_two_stream` or `block_diffusion`.

    A pass reads [clean block k | block k + 1, masked] after the cache of blocks 0..k-1, exactly what the merged task
    computes: clean tokens read all blocks up to their own, masks also one another. The masks then leave the cache.
    With `per_pass` a block is refined: each pass fills the surest places and the next sees them, so that it takes
    block / per_pass passes; train it by `block_diffusion(..., masked="random")`.

    Blocks begin at multiples of `block`. A prompt that ends within a block leaves it partly filled, which a model
    trained on wholly masked blocks alone has never seen.

    Args:
        model: a causal language model with attention alone, run by "sdpa" or "eager", or what `load_model` returns.
        ids: token ids of a prompt, [batch, n] of several, or a list of prompts of any lengths; may be empty if the
            first block was trained, too (`predict_first=True`).
        block: tokens per block, as in training.
        max_new_tokens: tokens to write.
        mask_token: id of [MASK], as in training.
        per_pass: places that a pass fills at least; by default all of the block (one shot).
        threshold: with `per_pass`, fill also all places whose token has at least this probability.
        temperature: to draw tokens; greedy without `temperature`, `top_k` and `top_p`.
        top_k: draw from the best so many.
        top_p: draw from the best that make up this probability.
        seed: of the drawing.
        eos_token: id or ids that end a text; by default those of the model's generation config, -1 for none.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.
        ValueError: an argument out of range, or more positions than the model has.

    Cost: a pass over the prompt under a dense mask, then for each block a pass of 2 x block tokens, and with
    `per_pass` block / per_pass - 1 of `block`. A sequence that has ended goes on with its batch.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> written = af.tasks.generate_blocks(model, [[5, 6, 7, 8], [9, 8]], 2, max_new_tokens=6, eos_token=-1)
    >>> written.passes, [len(tokens) for tokens in written.tokens]
    (3, [6, 6])
    """
    model = split(model)[0]
    block, most = integer("block", block, 1), integer("max_new_tokens", max_new_tokens)
    per_pass, threshold = schedule(per_pass, threshold, block)
    texts = prompts("ids", ids)
    longest = max(map(len, texts))
    model = decodable(model, -(-(longest + most) // block) * block)
    require_in_vocabulary(model, "ids", texts)
    require_in_vocabulary(model, "mask_token", [[mask_token := integer("mask_token", mask_token)]])
    run = CachedPasses(model)
    choice = Choice(temperature, top_k, top_p, seed)
    ends = end_tokens(model, eos_token)
    whole = [len(text) // block * block for text in texts]  # the clean tokens of each, all of its whole blocks
    slots = max(whole)
    pads = torch.tensor([slots - own for own in whole])
    clean = torch.tensor([[0] * (slots - own) + text[:own] for text, own in zip(texts, whole, strict=True)])
    clean = clean.reshape(len(texts), slots).to(torch.int64)
    begun = [text[own:] for text, own in zip(texts, whole, strict=True)]
    written: list[list[int]] = [[] for _ in texts]
    with evaluating(model):
        while not all(_ended(new, ends, most) for new in written):
            held = torch.tensor([len(tokens) for tokens in begun])[:, None]
            start = torch.tensor([tokens + [mask_token] * (block - len(tokens)) for tokens in begun])
            fill = Fill(start, torch.arange(block) >= held)
            while not fill.done:
                rows = torch.cat([clean, fill.tokens], dim=1)
                place = run.past + torch.arange(rows.shape[1]) - pads[:, None]
                logits = run.run(rows, place.clamp(min=0), _block_rows(pads, run.past, rows.shape[1], block), block)
                run.drop(block)
                clean = clean[:, :0]
                fill.reveal(logits.cpu(), choice, per_pass, threshold)
            clean = fill.tokens
            for new, tokens, known in zip(written, clean.tolist(), begun, strict=True):
                new += tokens[len(known) :]
            begun = [[] for _ in texts]
    return Decoded(tuple(until_end(new, ends, most) for new in written), run.passes)


def _ended(tokens: list[int], ends: frozenset[int], most: int) -> bool:
    return len(tokens) >= most or not ends.isdisjoint(tokens)


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
    mask_token: int = MASK_TOKEN,
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Decoded:
    """Fill a gap of `length` tokens between `left` and `right`, by a model trained on `butterfly(..., block=length)`.

    The left side is read causally, the right side from its end back, and `length` [MASK]s at the gap read both and one
    another: exactly what the merged task computes. With `per_pass` the gap is refined as in `generate_blocks`; train
    it by `butterfly(..., block=length, masked="random")`.

    Args:
        model: a language model with attention alone, run by "sdpa" or "eager", or what `load_model` returns.
        left: token ids before the gap, [batch, n] of several texts or a list of any lengths; may be empty.
        right: token ids after it, in the same form.
        length: tokens to write, as many as were masked in training.
        mask_token: id of [MASK], as in training.
        per_pass, threshold, temperature, top_k, top_p, seed: as in `generate_blocks`.

    Raises:
        UnsupportedArchitecture: as in `generate_blocks`.
        ValueError: an argument out of range, other numbers of left and right sides, or both sides empty.

    Cost: a pass over both sides and the gap under a dense mask; with `per_pass` length / per_pass - 1 passes of
    `length` tokens more.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> written = af.tasks.infill(model, [5, 6, 7], [9, 10], 4, per_pass=2)
    >>> written.passes, len(written.tokens[0])
    (2, 4)
    """
    model = split(model)[0]
    length = integer("length", length, 1)
    per_pass, threshold = schedule(per_pass, threshold, length)
    before, after = prompts("left", left), prompts("right", right)
    if len(before) != len(after):
        raise ValueError(f"left and right must be as many, got {len(before)} left and {len(after)} right sides")
    sides = list(zip(before, after, strict=True))
    if not all(one or other for one, other in sides):
        raise ValueError("a gap needs tokens on at least one side, got none on both")
    model = decodable(model, max(len(one) + len(other) for one, other in sides) + length)
    require_in_vocabulary(model, "left and right", [*before, *after])
    require_in_vocabulary(model, "mask_token", [[mask_token := integer("mask_token", mask_token)]])
    run = CachedPasses(model)
    choice = Choice(temperature, top_k, top_p, seed)
    ids, places = _context(sides, length)
    gap = torch.tensor([len(one) for one in before])[:, None] + torch.arange(length)
    fill = Fill(torch.full(gap.shape, mask_token), torch.ones(gap.shape, dtype=torch.bool))
    first = max(map(len, before))
    with evaluating(model):
        while not fill.done:
            fresh = run.past == 0
            rows = torch.cat([ids, fill.tokens], dim=1) if fresh else fill.tokens
            positions = torch.cat([places.clamp(min=0), gap], dim=1) if fresh else gap
            logits = run.run(rows, positions, _gap_rows(places, first, length)[:, -rows.shape[1] :], length)
            run.drop(length)
            fill.reveal(logits.cpu(), choice, per_pass, threshold)
    return Decoded(tuple(tuple(tokens) for tokens in fill.tokens.tolist()), run.passes)


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
