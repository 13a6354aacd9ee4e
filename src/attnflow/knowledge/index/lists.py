"""Rows in faiss's inverted lists (IVF, flat), which take single rows in and out; each query says which it reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnflow._core.errors import MissingExtra
from attnflow.knowledge.index.exact import Flags, Floats, Ints


class InvertedLists:
    """Up to `count` lists of rows of one width. Without faiss, raises `MissingExtra`."""

    def __init__(self, width: int, count: int) -> None:
        self._faiss = faiss()
        self._quantizer = self._faiss.IndexFlatIP(width)  # never asked; faiss wants one
        self._lists: Any = self._faiss.IndexIVFFlat(self._quantizer, width, count, self._faiss.METRIC_INNER_PRODUCT)
        self._lists.is_trained = True
        self._lists.set_direct_map_type(self._faiss.DirectMap.Hashtable)

    def add(self, rows: Floats, slots: Ints, homes: Ints) -> None:
        """Rows with numbers that no row has, into lists."""
        held = [np.ascontiguousarray(values) for values in (rows, slots, homes)]  # alive while faiss reads them
        self._lists.add_core(len(rows), *map(self._faiss.swig_ptr, held))

    def remove(self, slots: Ints) -> None:
        """Take rows out."""
        if len(slots):
            self._lists.remove_ids(slots)

    def best(self, queries: Floats, lists: Ints, k: int) -> tuple[Floats, Ints]:
        """The k best rows of lists [queries, lists] (-1: none): scores and slots, -inf and -1 where there are fewer."""
        lists, nothing = np.ascontiguousarray(lists), np.zeros(lists.shape, dtype=np.float32)
        scores, slots = np.empty((len(queries), k), dtype=np.float32), np.empty((len(queries), k), dtype=np.int64)
        asked, *others = map(self._faiss.swig_ptr, (queries, lists, nothing, scores, slots))
        self._lists.search_preassigned_c(len(queries), asked, k, *others, False, self._parameters(lists))
        return np.where(slots < 0, np.float32(-np.inf), scores), slots

    def above(self, queries: Floats, may: Flags, bound: float) -> tuple[Floats, Ints, Ints]:
        """All rows above a score of the lists of a mask [queries, lists]: scores, slots and their queries, in order."""
        query, which = np.nonzero(may)
        counts = np.bincount(query, minlength=len(may))
        lists = np.full((len(may), counts.max()), -1)
        lists[query, np.arange(len(query)) - (counts.cumsum() - counts)[query]] = which
        result = self._faiss.RangeSearchResult(len(queries))
        nothing = np.zeros(lists.shape, dtype=np.float32)
        asked, keys, distances = map(self._faiss.swig_ptr, (queries, lists, nothing))
        self._lists.range_search_preassigned_c(
            len(queries), asked, bound, keys, distances, result, False, self._parameters(lists)
        )
        ends = self._faiss.rev_swig_ptr(result.lims, len(queries) + 1).astype(np.int64)
        scores, slots = (
            self._faiss.rev_swig_ptr(part, int(ends[-1])).copy() for part in (result.distances, result.labels)
        )
        return scores, slots, np.repeat(np.arange(len(queries)), np.diff(ends))

    def _parameters(self, lists: Ints) -> Any:
        """How many lists a query reads: not kept in the index, which threads share."""
        parameters = self._faiss.SearchParametersIVF()
        parameters.nprobe = lists.shape[1]
        return parameters


def faiss() -> Any:
    """The module, imported on first use."""
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss", "knowledge", "an approximate search") from error
    return faiss
