"""What scores of a given form can reach at best in the task, exactly: as the share of problems that they get right.

For scores s(y, x) of a query y and a number x, the answer is the candidate with the highest score. The wrong candidates
are independent. The chance to be right is thus (1 - k / n)^(candidates - 1), where k of the n numbers that a
wrong candidate may have score higher than the right one.
"""

from __future__ import annotations

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.pairwise_control.task import Task

_STARTS = 32


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
    """The best scores y x + f(x) that were found: what one head can do with a bias of the key alone.

    (a y x + f(x) with any a > 0 has the order of these scores with another f. `key_only_bound` is lower for a <= 0.)
    One value of f after another is moved to where `accuracy` is highest, exactly, until none helps, from several
    starts. The true maximum may be higher.

    Cost: ten seconds of one core.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = task.numbers.double()
    product = task.queries[:, None] * numbers
    start = task.distance * numbers.abs() - numbers**2 / 2  # both places of a query are local maxima of y x + this
    best = 0.0
    for attempt in range(_STARTS):
        noise = torch.randn(len(numbers), generator=generator, dtype=torch.float64)
        bias = start + 4 * noise if attempt % 2 else 30 * noise
        right, before = 0.0, -1.0
        while right > before:
            before = right
            for place in torch.randperm(len(numbers), generator=generator).tolist():
                tries = bias.repeat(len(task.queries) * len(numbers) + 1, 1)
                tries[:, place] = _between(product + bias - product[:, [place]], len(tries))
                each = accuracy(task, product + tries[:, None])
                if each.max() > right:
                    right, bias = each.max().item(), tries[each.argmax()]
        best = max(best, right)
    return best


def _between(ties: Tensor, count: int) -> Float[Tensor, "count"]:
    """A value between each two neighbouring values that change the order, and one beyond each end."""
    places = ties.flatten().sort().values
    inner = (places[1:] + places[:-1]) / 2
    values = torch.cat([places[:1] - 1, inner, places[-1:] + 1])
    assert len(values) == count
    return values


def key_only_bound(task: Task) -> float:
    """No scores a y x + f(x) get more right than this.

    Let y > z be queries, with a > 0. If y - c beats z + c for y, and z + c beats y - c for z, their sum
    is a (y - z) (y - z - 2c) > 0. This is false for y - z < 2c. So of each such pair one loses. With
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
