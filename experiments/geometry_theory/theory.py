"""The statements of the geometry paper about updates of M = W_q^T W_k: an identity to check and averages to measure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.progress import Progress
from attnflow.geometry.scores import directionality, symmetry
from experiments.geometry_theory.language_model import LENGTH, LanguageModel, Objective
from experiments.runner.statistics import Interval, student
from experiments.runner.training import Course, Loop, train

Stage = Literal["gradient", "first step", "late gradient", "training"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("causal", "bidirectional")
STAGES: Final[tuple[Stage, ...]] = ("gradient", "first step", "late gradient", "training")
PAIRS: Final = {
    "share": "both masked, of pairs of a masked query",
    "agreement": "S of the coefficients where both are masked",
    "both": "S of the sum where both are masked",
    "one": "S of the sum where the query alone is masked",
    "unmasked": "energy of queries that are not masked, first layer",
}


def score_gradient(
    weights: Float[Tensor, "*batch query key"], weights_gradient: Float[Tensor, "*batch query key"]
) -> Float[Tensor, "*batch query key"]:
    """How the loss changes with every score before the softmax, from how it changes with every attention weight.

    `beta_ij = a_ij (g_ij - sum_l a_il g_il)`, the Jacobian of the softmax applied by hand. These are the coefficients
    of prop. 2.2, up to the scaling factor of the scores; the paper's proof leaves the softmax out (eq. S33). Each
    row adds up to 0: what the gradient gives to one key of a query it takes from the query's other keys.

    Args:
        weights: attention weights a, [..., query, key]; 0 where the mask forbids a pair.
        weights_gradient: gradient of the loss with respect to them.
    """
    return weights * (weights_gradient - (weights * weights_gradient).sum(-1, keepdim=True))


def rank_one_sum(
    tokens: Float[Tensor, "batch position d"], coefficients: Float[Tensor, "batch position position"]
) -> Float[Tensor, "d d"]:
    """The gradient of the loss with respect to M as a sum over pairs of tokens (prop. 2.2): `sum_ij beta_ij x_i x_j^T`.

    Args:
        tokens: what the layer projects to queries and keys, after its norm if it has one.
        coefficients: gradient of the loss with respect to `x_i^T M x_j`, [batch, query, key]: `score_gradient` times
            the factor by which the model scales its scores.

    Cost: batch * position * d * (position + d) multiplications.

    >>> tokens = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]])
    >>> rank_one_sum(tokens, torch.tensor([[[0.0, 1.0], [0.0, 0.0]]]))  # query 0 with key 1
    tensor([[0., 2.],
            [0., 0.]])
    """
    return (tokens.mT @ (coefficients @ tokens)).sum(0)


def implicit_step(
    query: Float[Tensor, "head_dim d"], key: Float[Tensor, "head_dim d"], gradient: Float[Tensor, "d d"]
) -> Float[Tensor, "d d"]:
    """How M moves when W_q and W_k take a small step down the gradient: `-(G W_k^T W_k + W_q^T W_q G)` a learning rate.

    Remark S1.6. M itself is not a parameter, and its step is not proportional to -G: the gradient passes through both
    projections. Of one pair, `G = beta_ij x_i x_j^T`, both terms have rank 1 (eq. S41); of a batch, head_dim at most.
    """
    return -(gradient @ key.mT @ key + query.mT @ query @ gradient)


def masked_pairs(model: LanguageModel) -> Float[Tensor, "5"]:
    """Remark S1.15 on the last batch: do pairs of two masked tokens, which predict each other, add what is symmetric?

    The remark sums over queries that are masked, as the gradient of the last layer does: no other position has a loss.
    In a layer below it, every query has a gradient.

    Returns:
        In the order of `PAIRS`. Of the last layer: the share of pairs (i, j), i masked and j another token, in which
        j is masked too; tr(beta beta) / |beta|^2 over these, 1 if beta_ij = beta_ji; S of their sum; S of the sum of
        the others. Of the first layer: the share of |beta|^2 that queries have which are not masked.
    """
    masked = model.masked
    same = torch.eye(masked.shape[1], dtype=torch.bool)
    both = (masked[:, :, None] & masked[:, None, :] & ~same)[:, None]
    one = (masked[:, :, None] & ~masked[:, None, :])[:, None]
    first, last = model.layers()[0], model.layers()[-1]
    tokens, weights, gradient = last.recorded()
    beta = score_gradient(weights, gradient)
    mutual = beta * both
    agreement = (mutual * mutual.mT).sum() / mutual.square().sum()
    sums = [symmetry(rank_one_sum(tokens, (beta * part).sum(1))) for part in (both, one)]
    energy = score_gradient(*first.recorded()[1:]).square().sum((1, 3))
    share = both.sum() / (both.sum() + one.sum())
    return torch.stack([share, agreement, *sums, energy[~masked].sum() / energy.sum()])


@dataclass(frozen=True)
class Measured:
    """The scores of one kind of update, over seeds."""

    # "causal" (next token), "bidirectional" (masked tokens), or "difference" (bidirectional - causal, by seed)
    objective: Objective | Literal["difference"]
    # "gradient" (the sum of prop. 2.2 at initialisation), "first step" (`implicit_step` of it), "late gradient" (the
    # sum in the last step) or "training" (M after training less M before).
    stage: Stage
    symmetry: Interval  # theorem 2.4 says that it is positive for "bidirectional"
    directionality: Interval  # reading "excess"; negative where columns dominate
    # share of columns minus share of rows with norms above one common threshold, mean + 2 std of all of them: theorem
    # 2.3 says that it is positive for "causal"
    more_columns: Interval


@dataclass(frozen=True)
class UpdateStudy:
    rows: tuple[Measured, ...]  # one for each stage and objective, and their difference
    seeds: int  # models trained for each objective
    steps: int  # optimiser steps of each
    # of the masked objective, at "gradient" and "late gradient": what `masked_pairs` returns
    pairs: dict[str, dict[str, Interval]]
    losses: dict[Objective, Interval]  # mean loss of the last tenth of the steps, by objective
    unigram_loss: float  # entropy of the frequencies of tokens, the loss of a guess that looks at no context

    def row(self, objective: str, stage: str) -> Measured:
        for row in self.rows:
            if (row.objective, row.stage) == (objective, stage):
                return row
        raise KeyError(f"no row for objective {objective!r} and stage {stage!r}; stages are {', '.join(STAGES)}")

    def __str__(self) -> str:
        head = f"{'stage':<14} {'objective':<14} {'symmetry':<25} {'directionality':<25} more columns than rows"
        lines = [f"{self.seeds} seeds, {self.steps} steps; mean and 95 % interval", head]
        for row in self.rows:
            cells = [f"{cell:.3f}" for cell in (row.symmetry, row.directionality, row.more_columns)]
            lines.append(f"{row.stage:<14} {row.objective:<14} {cells[0]:<25} {cells[1]:<25} {cells[2]}")
        for stage, found in self.pairs.items():
            lines += [f"{stage:<14} {PAIRS[name]:<55} {value:.3f}" for name, value in found.items()]
        return "\n".join(lines)


def run_updates(
    text: Int[Tensor, "length"],
    objective: Objective,
    seed: int,
    folder: Path,
    *,
    steps: int,
    width: int = 64,
    num_heads: int = 4,
    num_layers: int = 2,
    mask_share: float = 0.15,
    progress: Progress | None = None,
) -> dict[str, object]:
    """Theorems 2.3 and 2.4 as a measurement on one small language model, trained from scratch on one objective.

    The theorems are statements on average, under assumptions (independent embeddings with a common covariance, beta_ij
    correlated with beta_ji) that a model need not meet; this reports what is seen. Both objectives share seed,
    initial weights and data, so that their difference is taken by seed.

    Args:
        text: to learn, as ids from 0 without gaps.
        objective: what is predicted.
        seed: of the initial weights and of what is drawn.
        folder: for checkpoints.
        steps: optimiser steps (AdamW, learning rate 3e-3, 32 sequences of 32 tokens each).
        width: of the embeddings.
        num_heads: of each layer.
        num_layers: over which the scores are averaged.
        mask_share: share of tokens that the bidirectional objective masks and predicts.
        progress: of the steps.

    Returns:
        What `study_of` reads.

    Cost: with 600 steps about 8 s on one core.
    """
    checks.integer("steps", steps, 1)
    if len(text) <= LENGTH:
        raise ValueError(f"the text must have at least {LENGTH + 1} tokens, got {len(text)}")
    frequencies = text.bincount() / len(text)
    model = LanguageModel(len(frequencies), width, num_heads, num_layers, seed)
    generator, course = torch.Generator().manual_seed(seed), Course()
    before, last = model.bilinear_forms(), max(1, steps // 10)

    def losses(_: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        del step, part  # the numbers of the first version, which drew one after the other, are those of the results
        return {"loss": model.loss(text, objective, mask_share, generator)}

    def observe(_: nn.Module, step: int) -> None:
        if step == 0:
            course.tensors["gradient"], course.tensors["first step"] = _gradient_and_step(model)
        if step == steps - 1:
            course.tensors["late gradient"], _ = _gradient_and_step(model)
        for stage, when in (("gradient", 0), ("late gradient", steps - 1)):
            if step == when and objective == "bidirectional":
                course.tensors[f"pairs, {stage}"] = masked_pairs(model)

    train(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        losses,
        Loop(steps, 3e-3, lambda _: 1.0, clip=math.inf, log_every=1, save_every=200),
        folder,
        seed=seed,
        identity={"objective": objective, "steps": steps, "width": width, "text": len(text)},
        observe=observe,
        course=course,
        generator=generator,
        progress=progress,
    )
    found = {**course.tensors, "training": model.bilinear_forms() - before}
    return {
        "scores": {stage: _scores(found[stage]).tolist() for stage in STAGES},
        "pairs": {
            stage: dict(zip(PAIRS, found[f"pairs, {stage}"].tolist(), strict=True))
            for stage in STAGES
            if f"pairs, {stage}" in found
        },
        "loss": statistics.fmean(entry["loss"] for entry in course.log[-last:]),
        "entropy": torch.special.entr(frequencies).sum().item(),
        "seconds": course.seconds,
    }


def study_of(runs: Mapping[Objective, Sequence[Mapping[str, Any]]], steps: int) -> UpdateStudy:
    """What runs of both objectives say, over their seeds, in the same order."""

    def values(objective: Objective, stage: Stage) -> Tensor:
        return torch.tensor([run["scores"][stage] for run in runs[objective]])

    rows = [row for stage in STAGES for row in _rows(stage, *(values(objective, stage) for objective in OBJECTIVES))]
    losses: dict[Objective, Interval] = {o: student([run["loss"] for run in runs[o]]) for o in OBJECTIVES}
    entropy = statistics.fmean(run["entropy"] for run in runs["causal"])
    masked = [run["pairs"] for run in runs["bidirectional"]]
    pairs = {stage: {name: student([run[stage][name] for run in masked]) for name in PAIRS} for stage in masked[0]}
    return UpdateStudy(tuple(rows), len(runs["causal"]), steps, pairs, losses, entropy)


def _gradient_and_step(model: LanguageModel) -> tuple[Tensor, Tensor]:
    """The gradient of every layer, summed over its heads, and the step that it makes M take."""
    gradients: list[Tensor] = []
    moves: list[Tensor] = []
    for layer in model.layers():
        query, key = layer.heads()
        tokens, weights, weights_gradient = layer.recorded()
        beta = score_gradient(weights, weights_gradient) * layer.scaling
        per_head = [rank_one_sum(tokens, beta[:, head]) for head in range(len(query))]
        gradients.append(torch.stack(per_head).sum(0))
        steps = [implicit_step(q, k, g) for q, k, g in zip(query, key, per_head, strict=True)]
        moves.append(torch.stack(steps).sum(0))
    return torch.stack(gradients), torch.stack(moves)


def _scores(matrices: Float[Tensor, "layers d d"]) -> Float[Tensor, "3"]:
    """Symmetry, directionality and the excess of strong columns, averaged over the layers."""
    rows, columns = matrices.norm(dim=2), matrices.norm(dim=1)
    both = torch.cat([rows, columns], dim=1)
    threshold = both.mean(1, keepdim=True) + 2 * both.std(1, keepdim=True)
    more_columns = (columns > threshold).float().mean(1) - (rows > threshold).float().mean(1)
    return torch.stack([symmetry(matrices), directionality(matrices), more_columns]).mean(1)


def _rows(stage: Stage, causal: Tensor, bidirectional: Tensor) -> list[Measured]:
    named: list[tuple[Objective | Literal["difference"], Tensor]] = [
        ("causal", causal),
        ("bidirectional", bidirectional),
        ("difference", bidirectional - causal),
    ]
    return [Measured(name, stage, *(student(column) for column in values.T.tolist())) for name, values in named]
