"""`infill`: the tokens of a gap from what stands on both sides of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded, split
from attnflow.tasks.decoded import Decoded
from attnflow.tasks.families import MASK_TOKEN
from attnflow.tasks.hf.decoding_choice import Choice
from attnflow.tasks.hf.decoding_fill import Fill, schedule
from attnflow.tasks.hf.decoding_pass import CachedPasses, decodable, prompts, require_in_vocabulary

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor


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

    The left side is read causally, the right side from its end back, and `length` [MASK]s at the gap read both and
    one another: exactly what the merged task computes. With `per_pass` the gap is refined: each pass fills the surest
    places and the next sees them; train it by `butterfly(..., block=length, masked="random")`.

    Args:
        model: a language model with attention alone, run by "sdpa" or "eager", or what `load_model` returns.
        left: token ids before the gap, [batch, n] of several texts or a list of any lengths; may be empty.
        right: token ids after it, likewise.
        length: tokens to write, as many as were masked in training.
        mask_token: id of [MASK], as in training.
        per_pass: places that a pass fills at least; by default all (one shot).
        threshold: with `per_pass`, fill also all places whose token has at least this probability.
        temperature: to draw tokens; greedy without `temperature`, `top_k` and `top_p`.
        top_k: draw from the best so many.
        top_p: draw from the best that make up this probability.
        seed: of the drawing.

    Returns:
        The tokens of each gap, and how many passes they took.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.
        ValueError: an argument out of range, other numbers of left and right sides, or both sides empty.

    Cost: a pass over both sides and the gap under a dense mask; with `per_pass` length / per_pass - 1 passes of
    `length` rows more.

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
            logits = run.run(rows, positions, _allow(places, first, length)[:, -rows.shape[1] :], length)
            run.drop(length)
            fill.reveal(logits.cpu(), choice, per_pass, threshold)
    return Decoded(tuple(tuple(tokens) for tokens in fill.tokens.tolist()), run.passes)


def _context(sides: list[tuple[list[int], list[int]]], length: int) -> tuple[Tensor, Tensor]:
    """(ids, positions) of [left, padded before | right, padded after]; positions are -1 at pads."""
    first, last = max(len(one) for one, _ in sides), max(len(other) for _, other in sides)
    ids = torch.zeros((len(sides), first + last), dtype=torch.int64)
    places = torch.full(ids.shape, -1)
    for row, (one, other) in enumerate(sides):
        left, right = slice(first - len(one), first), slice(first, first + len(other))
        start = len(one) + length
        ids[row, left], places[row, left] = torch.tensor(one, dtype=torch.int64), torch.arange(len(one))
        ids[row, right], places[row, right] = torch.tensor(other, dtype=torch.int64), start + torch.arange(len(other))
    return ids, places


def _allow(places: Tensor, first: int, length: int) -> Bool[Tensor, "batch n n"]:
    """[left | right | gap]: left reads what is before, right what is after, the gap everything; pads themselves."""
    real = torch.cat([places >= 0, torch.ones(len(places), length, dtype=torch.bool)], dim=1)
    n = real.shape[1]
    kind = (torch.arange(n) >= first).long() + (torch.arange(n) >= n - length).long()  # 0 left, 1 right, 2 gap
    query, key = torch.arange(n)[:, None], torch.arange(n)
    same = kind[:, None] == kind
    flows = (same & (kind == 0) & (key <= query)) | (same & (kind == 1) & (key >= query)) | (kind == 2)[:, None]
    return (flows & real[:, None, :] & real[:, :, None]) | (query == key)
