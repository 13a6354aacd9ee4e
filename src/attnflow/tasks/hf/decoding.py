"""Decoding for models trained on merged tasks: `generate` runs the plan that `decoder` derives from their family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnflow._core.checks import IntArray, index_array, integer
from attnflow._core.results import Result
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.families import Clean, block_two_stream, mask_id, towards
from attnflow.tasks.hf.cached import CachedPasses, Choice, decodable, require_room
from attnflow.tasks.plan import Decoder, decoder
from attnflow.tasks.task import Label, Task, Token
from attnflow.tasks.trained import require_trained
from attnflow.tasks.writing import Feed, Writing

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
Prompt = Sequence[int | None] | Sequence[Sequence[int | None]] | Tensor
Drafts = Callable[[list[int]], Sequence[int] | Sequence[Sequence[int]]]


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


def generate(
    model: nn.Module | Loaded,
    plan: Decoder,
    prompt: Prompt,
    *,
    max_new_tokens: int | None = None,
    draft: Drafts | None = None,
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
    eos_token: int | Sequence[int] | None = None,
) -> Decoded:
    """Write a text by the plan of a family (`decoder`), with the model's cache: what its merged task says, exactly.

    Each pass feeds the positions that the tokens to be written next need and the cache lacks, under the task's mask.
    What is not final then leaves the cache, and so does what nothing will read (a context behind gist tokens). Where
    the family drafts (some positions predict a token from less than another), a pass also runs the drafts' own
    positions, verifies them and makes the next drafts: self-speculation. The text is then the verifying position's own,
    token by token under greedy choice, and in distribution otherwise. The family's mask stands in place of the model's
    own windows and chunks, as in training; a causal family with a window has it in its tasks.

    Args:
        model: a language model without recurrent layers, run by "sdpa" or "eager", or what `load_model` returns. If it
            comes from a folder in which `Decoder.save` stored how its family decodes, other plans are refused.
        plan: the decoder of a family as long as the longest text.
        prompt: token ids of data tokens 0, 1, ... of one text, [batch, n] of several, or a list of texts of any
            lengths. None in a list is a place to be written, as is all after the end.
        max_new_tokens: tokens to write, the first unknown ones; by default all.
        draft: given the known ids, proposes how the text goes on: a list of ids, or several lists, which form a tree.
            A pass verifies all of it, for families that write one token after another. It must not know the tokens that
            will be drawn.
        per_pass: how many of the tokens that can be written a pass writes at least; by default all. The next pass sees
            them in place of their [MASK]s.
        threshold: with `per_pass`, write also all tokens of at least this probability.
        temperature: for sampling, above 0; by default the most probable token is taken.
        seed: of the sampling.
        eos_token: id or ids that end a text; by default those of the model's generation config, -1 for none.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.
        ValueError: a token cannot be written from this prompt; the plan is shorter than the prompt, or computes
            something else than the model was trained for; an argument out of range; more positions than the model has;
            a position predicts several tokens and the model's logits are not [batch, n, heads, vocabulary].

    Cost: see `plan.passes`: a pass over the prompt under a dense mask, then a pass over a few rows each time. Drafts of
    the family cost horizon rows after each draft. A sequence that has ended keeps running with its batch.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> plan = af.tasks.decoder(af.tasks.causal_lm(range(12)))
    >>> plain = generate(model, plan, [5, 6, 7], max_new_tokens=6, eos_token=-1)
    >>> drafted = generate(
    ...     model, plan, [5, 6, 7], max_new_tokens=6, eos_token=-1, draft=lambda ids: plain.tokens[0][len(ids) - 3 :])
    >>> drafted.tokens == plain.tokens, plain.passes, drafted.passes
    (True, 6, 1)
    """
    if not isinstance(plan, Decoder):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a plan that af.tasks.decoder(family) made, got {type(plan).__name__}")
    most = None if max_new_tokens is None else integer("max_new_tokens", max_new_tokens)
    choice = Choice(None, per_pass, threshold, temperature, seed)
    texts = _texts("prompt", prompt, holes=True)
    return _write(model, [plan] * len(texts), texts, most, choice, "prompt", draft, eos_token)


def generate_blocks(
    model: nn.Module | Loaded,
    ids: Ids,
    block: int,
    *,
    max_new_tokens: int = 64,
    mask_token: int | None = None,
    clean: Clean = "block",
    per_pass: int | None = None,
    threshold: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
    eos_token: int | Sequence[int] | None = None,
) -> Decoded:
    """Write text block by block with a model trained on `block_two_stream` or `block_diffusion`.

    It is `generate` by the decoder of `block_two_stream`. A pass reads [clean block k | block k + 1, masked] after the
    cache of blocks 0..k-1. The masks then leave the cache. One pass writes a block. With `per_pass` a block takes block
    / per_pass passes: each fills the most probable places, and the next pass sees them. Train such a model with
    `block_diffusion(..., masked="random")`.

    Blocks begin at multiples of `block`. A prompt that ends within a block leaves it partly filled; a model trained
    only on fully masked blocks has never seen that.

    Args:
        model: as in `generate`.
        ids: token ids of one prompt, [batch, n] of several, or a list of prompts of any lengths; may be empty if the
            first block was trained too (`predict_first=True`).
        block: tokens per block, as in training.
        max_new_tokens: tokens to write.
        mask_token: id of [MASK], as in training; required.
        clean: what a clean token reads, as in training: "block", all of its block, or "causal", the tokens up to it.
        per_pass: how many places a pass fills at least; by default the whole block.
        threshold, temperature, seed, eos_token: as in `generate`.

    Raises:
        UnsupportedArchitecture, ValueError: as in `generate`.

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
    choice = Choice(block, per_pass, threshold, temperature, seed)
    texts = _texts("ids", ids)
    blocks = max(1, -(-(max(map(len, texts)) + most) // block))
    family = block_two_stream(np.zeros(blocks * block, np.int64), block, True, blank, clean)
    plan = decoder(family[min(min(map(len, texts)) // block, blocks - 1) :])  # no task of what is given
    return _write(model, [plan] * len(texts), texts, most, choice, "ids", None, eos_token)


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

    It is `generate` by the decoder of one task of that family. The left side is read causally and the right side from
    its end backwards. `length` [MASK]s in the gap read both sides and one another. With `per_pass` the gap is filled in
    several passes as in `generate_blocks`; train with `butterfly(..., block=length, masked="random")`.

    Args:
        model: as in `generate`.
        left: token ids before the gap, [batch, n] of several texts or a list of any lengths; may be empty.
        right: token ids after it, in the same form.
        length: tokens to write, as many as were masked in training.
        mask_token: id of [MASK], as in training; required.
        per_pass, threshold, temperature, seed: as in `generate_blocks`.

    Raises:
        UnsupportedArchitecture: as in `generate`.
        ValueError: as in `generate`; or unequal numbers of left and right sides, or both sides empty.

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
    choice = Choice(length, per_pass, threshold, temperature, seed)
    before, after = _texts("left", left), _texts("right", right)
    if len(before) != len(after):
        raise ValueError(f"left and right must have the same number of texts, got {len(before)} and {len(after)}")
    sides = list(zip(before, after, strict=True))
    if not all(len(one) or len(other) for one, other in sides):
        raise ValueError("a gap needs tokens on at least one side, got none on either")
    plans: dict[tuple[int, int], Decoder] = {}
    for first, rest in {(len(one), len(other)) for one, other in sides}:
        gap, n = range(first, first + length), first + length + rest
        inputs = [Token(blank, place, ()) if place in gap else Token(0, place) for place in range(n)]
        task = Task(inputs, [Label(place, Token(0, place)) for place in gap], towards(n, first, first + length))
        plans[first, rest] = decoder(task)
    texts = [np.concatenate([one, np.full(length, -1), other]) for one, other in sides]
    chosen = [plans[len(one), len(other)] for one, other in sides]
    return _write(model, chosen, texts, None, choice, "left and right", None, -1)


@torch.no_grad()
def _write(
    model: nn.Module | Loaded,
    plans: Sequence[Decoder],
    prompts: Sequence[IntArray],
    most: int | None,
    choice: Choice,
    name: str,
    draft: Drafts | None,
    eos_token: int | Sequence[int] | None,
) -> Decoded:
    network = decodable(Subject.of(model))
    texts = list[Writing]()
    for plan, prompt in zip(plans, prompts, strict=True):
        facts = plan.facts
        if len(prompt) > facts.num_tokens:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, but the plan is for {facts.num_tokens}: make it of a longer family"
            )
        texts.append(Writing(facts, np.append(prompt, np.full(facts.num_tokens - len(prompt), -1))))
    wanted = [np.flatnonzero(text.tokens < 0)[:most] for text in texts]
    require_room(network, texts, wanted, name)
    for plan in {id(plan): plan for plan in plans}.values():
        require_trained(plan.facts, network.name_or_path)
    ends = _end_tokens(network, eos_token)
    run = CachedPasses(network, texts)
    with evaluating(network):
        while live := [i for i, text in enumerate(texts) if -1 in _until(text.tokens[wanted[i]], ends)]:
            for i in live if draft is not None else ():
                _plant(texts[i], wanted[i], cast(Drafts, draft), run.vocabulary)
            feeds = {i: texts[i].feed() for i in live}
            logits = run.run(feeds)
            kept: dict[int, tuple[Feed, np.ndarray]] = {}
            for i, feed in feeds.items():
                kept[i] = feed, choice.advance(texts[i], feed, logits[i], wanted[i])
            run.settle(kept)
    written = [_until(text.tokens[places], ends) for text, places in zip(texts, wanted, strict=True)]
    return Decoded(tuple(written), run.passes)


def _until(tokens: IntArray, ends: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to the first one that ends a text; -1 is one that is not yet written."""
    last = next((place for place, token in enumerate(tokens.tolist()) if token in ends), len(tokens))
    return tuple(tokens[: last + 1].tolist())


def _plant(text: Writing, wanted: IntArray, draft: Drafts, vocabulary: int) -> None:
    """Grow the tree of the drafts of a text; a path stops at the end of the tokens that are wanted."""
    if text.next_place(0) is None:
        raise ValueError(
            "drafts are verified one token after another, but this family writes several at once: leave draft out"
        )
    proposed = draft(text.tokens[text.tokens >= 0].tolist())
    for path in _texts("what draft proposes", proposed):
        leaf = 0
        for token in path.tolist():
            place = text.next_place(leaf)
            if place is None or place not in wanted:
                break
            leaf = text.grow(leaf, place, integer("a token of draft", token, 0, vocabulary - 1))


def _texts(name: str, ids: object, holes: bool = False) -> list[IntArray]:
    """Token ids of each text; with `holes`, None becomes -1."""
    nested = isinstance(ids, Sequence) and len(ids) and isinstance(ids[0], Sequence | Tensor | np.ndarray)
    several = nested or (isinstance(ids, Tensor | np.ndarray) and ids.ndim == 2)
    texts = list[IntArray]()
    for row in cast("Sequence[object]", ids) if several else [ids]:
        known = holes and isinstance(row, list | tuple)
        listed = [-1 if token is None else token for token in cast("Sequence[object]", row)] if known else row
        tokens = index_array(name, listed)
        unknown = cast("Sequence[object]", row).count(None) if known else 0
        if int((tokens < 0).sum()) > unknown:
            raise ValueError(f"{name} must hold token ids of at least 0, got {tokens.min()}")
        texts.append(tokens)
    return texts


def _end_tokens(model: PreTrainedModel, eos_token: int | Sequence[int] | None) -> frozenset[int]:
    default = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = (-1 if default is None else default) if eos_token is None else eos_token
    several = cast("Sequence[object]", ids if isinstance(ids, list | tuple) else [ids])
    return frozenset(integer("eos_token", token, -1) for token in several) - {-1}
