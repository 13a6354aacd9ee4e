"""Approximate search: LanceDB's index of the table finds entries, and their scores are computed anew in memory."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from attnflow.knowledge.store.entry import Floats
from attnflow.knowledge.store.rows import QUERIES, EntryRows
from attnflow.knowledge.store.table import EntryTable

RECALL: Final = 0.99  # share of the ten best to find, from which the number of lists to read follows
_K: Final = 10
_SAMPLE: Final = 256  # entries used as queries to measure it
_LEAST: Final = 8  # the fewest lists that a query reads


class ApproximateSearch:
    """Searches the index of a table; LanceDB compares entries that came after it, and without one all.

    `recall` is the share of the ten best that it found with stored entries as queries; `probes` is the number of lists
    read, doubled until recall reaches `RECALL`.
    """

    def __init__(self, table: EntryTable, rows: EntryRows) -> None:
        self._table, lists = table, table.lists()
        draw = np.random.default_rng(0)
        places = draw.choice(len(rows), size=min(len(rows), _SAMPLE), replace=False)
        columns = rows.width - rows.dim
        column, k = (int(draw.integers(columns)) if columns else None), min(_K, len(rows))
        queries = np.ascontiguousarray(rows.values[places, : rows.dim])
        truth = rows.best(queries, column, k)[0].numpy()
        self.probes = min(_LEAST, lists)
        while True:
            self.recall = recall_of(self.best(rows, queries, column, k)[0].numpy(), truth)
            if self.recall >= RECALL or self.probes == lists:
                break
            self.probes = min(2 * self.probes, lists)

    def __str__(self) -> str:
        where = f"reads {self.probes:,} lists of LanceDB's index" if self.probes else "has no index yet"
        return f"{where} and, with stored entries as queries, found {100 * self.recall:.1f} % of the ten best"

    def best(self, rows: EntryRows, queries: Floats, column: int | None, k: int) -> tuple[Tensor, Tensor]:
        """Return scores in falling order and ids of each query's k best found, padded with -inf and -1."""
        wide = np.zeros((len(queries), rows.width), dtype=np.float32)  # [query | onehot(column)]
        wide[:, : rows.dim] = queries
        if column is not None:
            wide[:, rows.dim + column] = 1
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        ids = np.full((len(queries), k), -1)
        for start in range(0, len(queries) if k else 0, QUERIES):
            block = wide[start : start + QUERIES]
            owners, near = self._table.nearest(block, k, self.probes)
            places = rows.places(near)
            owners, places = owners[places >= 0], places[places >= 0]  # another process may have written since
            products = np.einsum("nd,nd->n", rows.values[places], block[owners])
            order = np.lexsort((-products, owners))
            owners = owners[order]
            at = owners + start, np.arange(len(owners)) - np.searchsorted(owners, owners)
            scores[at], ids[at] = products[order], rows.ids[places[order]]
        return torch.from_numpy(scores), torch.from_numpy(ids)


def recall_of(found: Floats, truth: Floats) -> float:
    """Return the share of the true best scores [queries, k] that were found; ties count as found."""
    tolerance = 1e-5 * np.maximum(np.abs(truth[:, -1:]), 1e-3)
    reached = (found >= truth[:, -1:] - tolerance).sum(axis=1)
    return float((reached / max(truth.shape[1], 1)).mean()) if len(truth) else 1.0
