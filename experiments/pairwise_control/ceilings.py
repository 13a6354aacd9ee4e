"""What scores of a given form can reach at best in the task, exactly: as the share of problems that they get right.

For scores s(y, x) of a query y and a number x, the answer is the candidate with the highest score. The wrong candidates
are independent, so that the chance to be right is (1 - k / n)^(candidates - 1), where k of the n numbers that a
wrong candidate may have score higher than the right one.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.pairwise_control.task import Task

_RESTARTS, _STEPS = 256, 1000


def accuracy(task: Task, scores: Float[Tensor, "*tables queries numbers"]) -> Float[Tensor, "*tables"]:
    """The share of problems that a table of scores gets right; a tie is an error.

    >>> task = Task()
    >>> right = -((task.numbers - task.queries[:, None]).abs() - task.distance).abs()
    >>> accuracy(task, right.double()).item()
    1.0
    """
    return accuracy_by_query(task, scores).mean(dim=-1)


def best_end(task: Task) -> float:
    """The best rule that answers with the largest or the smallest number, whichever is better for each query."""
    ends = torch.tensor([1.0, -1.0]).double()[:, None, None] * task.numbers
    each = accuracy_by_query(task, ends.expand(2, len(task.queries), -1))
    return each.max(dim=0).values.mean().item()


def accuracy_by_query(task: Task, scores: Float[Tensor, "*tables queries numbers"]) -> Float[Tensor, "*tables queries"]:
    """`accuracy` for each query."""
    beaten = _of_targets(task, scores)[..., None] <= scores[..., None, :]
    return _right(task, (beaten & task.wrong(task.queries)[:, None]).double().sum(-1)).mean(dim=-1)


@cache
def best_key_only(task: Task) -> float:
    """The best scores a y x + f(x) that were found: all that one head can do with a bias of the key alone.

    Only the sign of a matters. By ascent from many starts on a smooth form of `accuracy`, so that the true
    maximum may be higher; `key_only_bound` is above it.
    """
    generator = torch.Generator().manual_seed(0)
    numbers, queries = task.numbers.double(), task.queries.double()
    start = task.distance * numbers.abs() - numbers**2 / 2  # both places of a query are local maxima of y x + this
    noise = torch.randn(_RESTARTS, len(numbers), generator=generator, dtype=torch.float64)
    bias = torch.cat([start + 4 * noise[::2], 30 * noise[1::2]]).requires_grad_()
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0]).double().repeat(_RESTARTS // 4)[:, None, None]
    product = signs * queries[:, None] * numbers
    optimiser = torch.optim.Adam([bias], lr=0.3)
    wrong = task.wrong(task.queries)[:, None]
    for step in range(_STEPS):
        scores = product + bias[:, None]
        softness = 0.1 + 5 * (1 - step / _STEPS)
        above = ((scores[..., None, :] - _of_targets(task, scores)[..., None]) / softness).sigmoid()
        loss = -_right(task, (above * wrong).sum(-1)).mean(dim=(-1, -2)).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return accuracy(task, product + bias.detach()[:, None]).max().item()


def key_only_bound(task: Task) -> float:
    """No scores a y x + f(x) get more right than this.

    Let y > z be queries, with a > 0. If y - c beats z + c for y, and z + c beats y - c for z, then the sum of both
    inequalities is a (y - z) (y - z - 2c) > 0, which is false for y - z < 2c. So of each such pair one loses. With
    a <= 0 the same holds for y - c and z - c, and for y + c and z + c, as a (y - z)^2 > 0 is false. A place that k
    numbers beat errs with chance e(k), which is concave: with `degree` pairs in all, k of them cost e(degree) k /
    degree at least. So each pair costs the smaller e(degree) / degree of its two places.
    """
    return max(1 - _least_error(task, across=True), 1 - _least_error(task, across=False))


def _least_error(task: Task, across: bool) -> float:
    """Of `key_only_bound`: with a > 0 places on two sides exclude each other, otherwise those on one."""
    queries = task.queries.tolist()
    near = range(task.margin, 2 * task.distance - task.margin + 1)  # so that each may be a candidate of the other
    sides = [(-1, 1)] if across else [(-1, -1), (1, 1)]
    pairs = [((y, one), (z, other)) for y in queries for z in queries if y - z in near for one, other in sides]
    counts = task.wrong(task.queries).sum(dim=1).tolist()

    def cost(place: tuple[int, int]) -> float:
        degree = sum(place in pair for pair in pairs)
        allowed = counts[place[0] + task.reach]
        return (1 - (1 - degree / allowed) ** (task.candidates - 1)) / degree

    costs = {place: cost(place) for place in {place for pair in pairs for place in pair}}
    return sum(min(costs[one], costs[other]) for one, other in pairs) / (2 * len(queries))


def _of_targets(task: Task, scores: Float[Tensor, "*tables queries numbers"]) -> Float[Tensor, "*tables queries 2"]:
    """Scores of the two places where the right candidate may be."""
    places = torch.stack([task.queries - task.distance, task.queries + task.distance], dim=1) + task.largest
    return scores.gather(-1, places.expand(*scores.shape[:-1], 2))


def _right(task: Task, beaten: Float[Tensor, "*tables queries 2"]) -> Float[Tensor, "*tables queries 2"]:
    allowed = task.wrong(task.queries).sum(dim=1).double()[:, None]
    return (1 - beaten / allowed).clamp(min=0.0) ** (task.candidates - 1)
