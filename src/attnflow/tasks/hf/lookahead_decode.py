"""Drafts of several tokens, verified in the pass that makes the next ones: the model's own text, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from attnflow._core.progress import Progress
from attnflow.models.evaluation import evaluating
from attnflow.tasks.decoded import Decoded
from attnflow.tasks.hf.decoding_choice import Choice
from attnflow.tasks.hf.decoding_pass import CachedPasses, until_end
from attnflow.tasks.hf.lookahead_adapter import GatedAdapter, inputs, layout

Mode = Literal["quadratic", "linear"]


@dataclass(frozen=True, eq=False)
class Drafts:
    """Tokens that may follow what is written, each with what it was drawn from."""

    tokens: list[int]
    chances: Float[Tensor, "drafts vocabulary"] | None  # None: nothing was drafted


NONE = Drafts([], None)


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    adapter: GatedAdapter,
    prompt: Sequence[int],
    *,
    most: int,
    mode: Mode,
    drafts: int,
    choice: Choice,
    ends: frozenset[int],
    progress: Progress | None,
) -> Decoded:
    """The new tokens of a prompt; see `Lookahead.generate`."""
    run = CachedPasses(model)
    written: list[int] = []
    clean, proposed = list(prompt), NONE
    drafted = accepted = 0
    with evaluating(model):
        while len(written) < most and ends.isdisjoint(written):
            guesses = proposed.tokens[: most - len(written) - 1]
            first = len(clean) - 1  # the row that predicts the first draft
            rows = len(clean) + len(guesses)
            wanted = min(drafts, most - len(written) - 1)
            after = [] if wanted == 0 else [rows - 1] if mode == "linear" else list(range(first, rows))
            positions, allow = layout(run.past, rows, after, wanted)
            positions = positions.clamp(max=len(prompt) + most - 1)  # masks behind the end are never drafts
            embedded = inputs(model, adapter, torch.tensor([clean + guesses], device=run.device), len(after), wanted)
            with adapter.gate(embedded.shape[1], len(after) * wanted):
                logits = run.run(embedded, positions[None], allow[None], embedded.shape[1] - first)[0].cpu()
            target, masked = logits[: len(guesses) + 1], logits[len(guesses) + 1 :]
            right, following = verify(target, Drafts(guesses, proposed.chances), choice)
            run.drop(embedded.shape[1] - len(clean) - right)
            written += [*guesses[:right], following]
            drafted, accepted = drafted + len(guesses), accepted + right
            group = after.index(first + right) if first + right in after else None
            proposed = NONE
            if group is not None:
                proposed = Drafts(*_drawn(masked[group * wanted : (group + 1) * wanted], choice))
            clean = [following]
            if progress is not None:
                progress(min(len(written), most), most, "tokens")
    return Decoded((until_end(written, ends, most),), run.passes, drafted, accepted)


def verify(logits: Float[Tensor, "rows vocabulary"], drafts: Drafts, choice: Choice) -> tuple[int, int]:
    """(drafts that stand, the token after them), so that text is the model's own.

    Greedy: a draft stands if it is the model's best token. Drawn: draft x of chance q(x) stands with probability
    min(1, p(x) / q(x)); in place of the first that does not, a token is drawn from max(p - q, 0), normalised, which
    together is a draw from p (Leviathan et al., arXiv:2211.17192, sec. 2.3).

    Args:
        logits: of the model, for the place of each draft and the one after them.
        drafts: the drafts.
        choice: how tokens are chosen.
    """
    if choice.greedy:
        best: list[int] = logits.argmax(dim=-1).tolist()
        right = next((i for i, token in enumerate(drafts.tokens) if token != best[i]), len(drafts.tokens))
        return right, best[right]
    chances = choice.probabilities(logits).double()
    if drafts.chances is not None:
        luck = choice.uniform(len(drafts.tokens)).tolist()
        for i, token in enumerate(drafts.tokens):
            proposed = drafts.chances[i].double()
            if luck[i] * float(proposed[token]) >= float(chances[i, token]):
                rest = (chances[i] - proposed).clamp(min=0)
                return i, int(choice.pick(rest if float(rest.sum()) > 0 else chances[i]))
    return len(drafts.tokens), int(choice.pick(chances[-1]))


def _drawn(logits: Float[Tensor, "drafts vocabulary"], choice: Choice) -> tuple[list[int], Tensor]:
    tokens, chances = choice.draw(logits)
    return tokens.tolist(), chances
