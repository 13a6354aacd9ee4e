"""`generate_blocks`: text block by block, from a model that was trained on merged block tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from attnflow._core.checks import integer
from attnflow._core.progress import Progress
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded, split
from attnflow.tasks.decoded import Decoded
from attnflow.tasks.families import MASK_TOKEN
from attnflow.tasks.hf.decoding_choice import Choice
from attnflow.tasks.hf.decoding_fill import Fill, schedule
from attnflow.tasks.hf.decoding_pass import (
    CachedPasses,
    decodable,
    end_tokens,
    prompts,
    require_in_vocabulary,
    until_end,
)


@torch.no_grad()
def generate_blocks(
    model: nn.Module | Loaded,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
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
    attention_mask: Tensor | None = None,
    eos_token: int | Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """Write text in blocks, one pass for each, by a model trained on `block_two_stream` or `block_diffusion`.

    A pass reads [clean block k | block k + 1, masked] after the cache of blocks 0..k-1, exactly what the merged task
    computes: clean rows read all blocks up to their own, masked rows also one another. The masked rows then leave the
    cache. With `per_pass` a block is refined: each pass fills the surest places and the next sees them, so that it
    takes block / per_pass passes; train it by `block_diffusion(..., masked="random")`.

    Blocks begin at multiples of `block`, as in training. A prompt that ends within a block leaves that block partly
    filled, which a model trained on wholly masked blocks alone has never seen.

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
        attention_mask: [batch, n], 0 at pads before or after the tokens of `ids`.
        eos_token: id or ids that end a text; by default those of the model's generation config, -1 for none.
        progress: called with (tokens written, tokens to write, what).

    Returns:
        The new tokens of each prompt, and how many passes they took.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.
        ValueError: an argument out of range, or more positions than the model has.

    Cost: a pass over the prompt under a dense mask (n^2 numbers for each prompt), then a pass of 2 x block rows for
    each block, and with `per_pass` block / per_pass - 1 of `block` rows. A sequence that has ended goes on with its
    batch.

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
    texts = prompts("ids", ids, attention_mask)
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
                logits = run.run(rows, place.clamp(min=0), _allow(pads, run.past, rows.shape[1], block), block)
                run.drop(block)
                clean = clean[:, :0]
                fill.reveal(logits.cpu(), choice, per_pass, threshold)
            clean = fill.tokens
            for new, tokens, known in zip(written, clean.tolist(), begun, strict=True):
                new += tokens[len(known) :]
            begun = [[] for _ in texts]
            if progress is not None:
                progress(min(map(len, written)), most, "tokens")
    return Decoded(tuple(until_end(new, ends, most) for new in written), run.passes)


def _ended(tokens: list[int], ends: frozenset[int], most: int) -> bool:
    return len(tokens) >= most or not ends.isdisjoint(tokens)


def _allow(pads: Tensor, past: int, rows: int, block: int) -> Bool[Tensor, "batch q k"]:
    """Every row of a pass reads the blocks up to its own; leading pads, whole blocks of them, read themselves alone."""
    query, key = past + torch.arange(rows), torch.arange(past + rows)
    earlier = key // block <= query[:, None] // block
    itself = key == query[:, None]
    return (earlier & (key >= pads[:, None])[:, None, :]) | itself
