"""The backend in Milvus: vectors, index and the knowledge of which entries there are stay on the server."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow.knowledge.certificate import Certificate
from attnflow.knowledge.index import Mode, Neighbours
from attnflow.knowledge.store.entry import Rows
from attnflow.knowledge.store.errors import StoreError, failures
from attnflow.knowledge.store.metadata import Wanted
from attnflow.knowledge.store.milvus import MilvusRows

_MOST: Final = 16_384  # results of a query, a limit of Milvus
_QUERIES: Final = 512  # in one request
_LOWEST: Final = -3e38


class MilvusBackend(MilvusRows):
    """Rows in Milvus, searched by it: a query of column l is [q ; onehot(l)] against rows [e | thresholds].

    The index is exact (FLAT) unless the store was opened with search="approximate" (IVF_FLAT); an exact search of an
    approximate index reads all its lists. An approximate one reads all of them, too, until `calibrate` finds how few
    will do, and again from the next write on: what was measured holds for the entries that there were.
    """

    def __init__(self, address: str, wanted: Wanted) -> None:
        super().__init__(address, wanted)
        self._target = wanted.target_recall
        self.mode: Mode = "approximate" if wanted.search == "approximate" else "exact"
        try:
            if self.mode == "approximate" and not self.record.lists:
                if wanted.read_only:
                    raise StoreError(
                        'the index of this store is exact: open it for writing with search="approximate" once'
                    )
                self.reindex()
        except BaseException:
            self.close()
            raise

    @property
    def reason(self) -> str:
        """The index on the server."""
        record = self.record
        if not record.lists:
            return "FLAT"
        calibrated = ", as calibrated, and nothing was written since" if record.probes < record.lists else ""
        return f"IVF_FLAT, {record.probes} of {record.lists} lists are read{calibrated}"

    def write(self, rows: Rows) -> None:
        """Of which nobody knows how few lists will do."""
        self._read_all()
        super().write(rows)

    def delete(self, ids: IntArray) -> None:
        """Likewise of those that stay."""
        self._read_all()
        super().delete(ids)

    def restore(self, name: str) -> None:
        """Likewise."""
        self._read_all()
        super().restore(name)

    def __len__(self) -> int:
        with failures("entries cannot be counted"):
            return int(self.client.query(self.live, filter="", output_fields=["count(*)"])[0]["count(*)"])

    def search(self, queries: Tensor, k: int, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """At most 16,384 entries for a query."""
        if k > _MOST:
            raise ValueError(f"Milvus finds up to {_MOST:,} entries for a query, got k={k:,}")
        total = len(self)
        ids, scores = self._ask(queries, threshold_column, self._parameters(mode), k, width=k)
        last = scores[..., min(k, total) - 1] if total else torch.full(queries.shape[:-1], -math.inf)
        return Neighbours(ids, scores, Certificate(self._is_approximate(mode), k, total, last))

    def range(self, queries: Tensor, threshold: float, threshold_column: int | None, mode: Mode | None) -> Neighbours:
        """At most 16,383 entries for a query."""
        total = len(self)
        parameters = self._parameters(mode) | {"radius": max(threshold, _LOWEST)}
        ids, scores = self._ask(queries, threshold_column, parameters, _MOST, width=None)
        if ids.shape[-1] == _MOST:
            raise StoreError(f"a query has {_MOST:,} or more entries above {threshold}, and Milvus returns no more")
        counts, last = (ids >= 0).sum(dim=-1), torch.full(queries.shape[:-1], threshold)
        return Neighbours(ids, scores, Certificate(self._is_approximate(mode), counts, total, last))

    def recall(self, queries: Tensor, k: int, threshold_column: int | None) -> float:
        """Against a search that reads all lists; equal scores count as equal."""
        exact = self.search(queries, k, threshold_column, "exact").scores
        scores = self.search(queries, k, threshold_column, None).scores
        lowest = torch.where(exact.isinf(), math.inf, exact).amin(dim=-1, keepdim=True)
        there = ~exact.isinf()
        return float((scores >= lowest - 1e-6 * lowest.abs())[there].double().mean()) if bool(there.any()) else 1.0

    def calibrate(self, queries: Tensor, k: int, threshold_column: int | None) -> None:
        """The smallest power of two of lists that reaches the target recall."""
        lists = self.record.lists
        for probes in (*(1 << i for i in range(lists.bit_length()) if 1 << i < lists), lists):
            self.save(probes=probes)
            if self.mode == "exact" or self.recall(queries, k, threshold_column) >= self._target:
                return

    def reindex(self) -> None:
        """Two lists for each square root of rows; all are read until it is calibrated."""
        self.build_index(max(1, round(2 * len(self) ** 0.5)) if self.mode == "approximate" else 0)

    def _read_all(self) -> None:
        self.save(probes=self.record.lists)

    def _is_approximate(self, mode: Mode | None) -> bool:
        if mode == "approximate" and not self.record.lists:
            raise ValueError('the index of this store is exact (FLAT): open it with search="approximate"')
        return (mode or self.mode) == "approximate"

    def _parameters(self, mode: Mode | None) -> dict[str, Any]:
        approximate, record = self._is_approximate(mode), self.record
        return {"nprobe": record.probes if approximate else record.lists} if record.lists else {}

    def _ask(
        self, queries: Tensor, column: int | None, parameters: dict[str, Any], limit: int, width: int | None
    ) -> tuple[Tensor, Tensor]:
        """Ids and scores [..., width], padded; the longest answer where no width is given."""
        flat = queries.reshape(-1, self.dim)
        asked = torch.zeros(len(flat), self.dim + self.num_thresholds)
        asked[:, : self.dim] = flat
        if column is not None:
            asked[:, self.dim + column] = 1
        options = {"search_params": {"metric_type": "IP", "params": parameters}, "output_fields": ["id"]}
        answers: list[Any] = []
        with failures("the search failed"):
            for part in asked.split(_QUERIES) if len(asked) else ():
                data = list(part.numpy())
                answers += self.client.search(self.live, data=data, limit=limit, **options)
        most = max(map(len, answers), default=0) if width is None else width
        ids, scores = torch.full((len(flat), most), -1), torch.full((len(flat), most), -math.inf)
        for row, answer in enumerate(answers):
            ids[row, : len(answer)] = torch.tensor([hit["id"] for hit in answer], dtype=torch.int64)
            scores[row, : len(answer)] = torch.tensor([hit["distance"] for hit in answer])
        return ids.view(*queries.shape[:-1], most), scores.view(*queries.shape[:-1], most)
