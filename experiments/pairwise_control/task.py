"""The task: which of twelve candidates has a number at a given distance from the query's number?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Problems:
    """Problems whose first candidate is the right one; models see no order, so that its place tells them nothing."""

    query: Int[Tensor, "batch"]  # number of the query
    numbers: Int[Tensor, "batch candidates"]  # of the candidates
    labels: Int[Tensor, "batch candidates"]  # of the candidates, all different

    @property
    def answers(self) -> Int[Tensor, "batch"]:
        return self.labels[:, 0]


@dataclass(frozen=True)
class Task:
    """Numbers are integers; exactly one candidate lies at `distance` from the query, above or below it.

    The query's number is drawn from -reach to reach, a range wider than twice the distance. The right candidate lies
    above or below it with equal chances. The others are drawn, independently, from all numbers whose distance from the
    query differs from `distance` by `margin` at least.
    """

    candidates: int = 12  # of a problem, and labels
    distance: int = 6  # c, between the query and the right candidate
    reach: int = 7  # largest number of a query; reach + distance is the largest one of a candidate
    margin: int = 3  # by how much a wrong candidate's distance differs from c, at least

    @property
    def largest(self) -> int:
        return self.reach + self.distance

    @property
    def queries(self) -> Int[Tensor, "queries"]:
        return torch.arange(-self.reach, self.reach + 1)

    @property
    def numbers(self) -> Int[Tensor, "numbers"]:
        return torch.arange(-self.largest, self.largest + 1)

    def wrong(self, query: Int[Tensor, "batch"]) -> Bool[Tensor, "batch numbers"]:
        away = (self.numbers - query[:, None]).abs() - self.distance
        return away.abs() >= self.margin

    def draw(self, count: int, generator: torch.Generator | None = None) -> Problems:
        query = torch.randint(-self.reach, self.reach + 1, (count,), generator=generator)
        side = 2 * torch.randint(2, (count,), generator=generator) - 1
        chances = self.wrong(query).float()
        numbers = torch.multinomial(chances, self.candidates, replacement=True, generator=generator) - self.largest
        numbers[:, 0] = query + side * self.distance
        labels = torch.rand(count, self.candidates, generator=generator).argsort(dim=1)
        return Problems(query, numbers, labels)
