"""The dense route: bit matrices and their products, and the order of a short or scattered mask by one walk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows, offsets, ragged
from attnflow.order.products import range_reduce, reads_only_before

Words = npt.NDArray[np.uint64]  # [rows, ceil(columns / 64)], bit c of a row is bit c % 64 of word c // 64

LARGEST: Final = 1 << 25  # edges of a Hasse diagram: about 5 GB as pairs of Python's integers
_ROOM: Final = 1 << 33  # bytes of all bit matrices of one computation
_WORKSPACE: Final = 1 << 25  # bytes of temporaries per product
_LISTED: Final = 1 << 24  # pairs that are listed one by one, in about 0.6 GB


def pack(table: BoolArray) -> Words:
    padded = np.zeros((len(table), -(-table.shape[1] // 64) * 8), dtype=np.uint8)
    packed = np.packbits(table, axis=1, bitorder="little")
    padded[:, : packed.shape[1]] = packed
    return padded.view("<u8")


def unpack(words: Words, columns: int) -> BoolArray:
    return np.unpackbits(words.view(np.uint8), axis=1, count=columns, bitorder="little").view(np.bool_)


def from_rows(rows: IntervalRows) -> Words:
    words = np.zeros((rows.num_rows, -(-rows.num_keys // 64)), dtype="<u8")
    for part in chunks(rows.num_rows, rows.num_keys):
        words[part] = pack(rows.to_bool(part))
    return words


def to_rows(words: Words, columns: int) -> IntervalRows:
    parts = [IntervalRows.from_bool(unpack(words[part], columns)) for part in chunks(len(words), columns)]
    return IntervalRows.stack(parts, columns)


def chunks(num_rows: int, row_bytes: int, limit: int = 1 << 23) -> Iterator[slice]:
    step = max(1, limit // max(1, row_bytes))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def require_room(matrices: int, size: int, what: str) -> None:
    needed = matrices * size * size // 8
    if needed > _ROOM:
        raise ValueError(
            f"{what} over {size:,} positions takes {needed / 1e9:,.1f} GB as bit matrices, more than the allowed "
            f"{_ROOM / 1e9:.1f} GB: take a shorter sequence, fewer layers, or one position for each block"
        )


def refuse_more(edges: int) -> None:
    if edges > LARGEST:
        raise ValueError(
            f"the Hasse diagram has at least {edges:,} edges, more than {LARGEST:,}: take a shorter sequence, or one "
            "position for each block"
        )


def product(rows: IntervalRows, words: Words) -> Words:
    """The Boolean product: unions over ranges of few intervals, else the method of four Russians, O(n^3 / 512)."""
    n = rows.num_keys
    if 2 * len(rows.starts) + n * n.bit_length() > (n // 8 + 1) * (n + 256):
        return _four_russians(from_rows(rows), words)
    result = np.zeros((rows.num_rows, words.shape[1]), dtype="<u8")
    filled = np.flatnonzero(np.diff(rows.indptr))
    width = max(1, _WORKSPACE // (8 * (len(rows.starts) + 2 * n + 1)))
    for left in range(0, words.shape[1] if len(filled) else 0, width):
        part = slice(left, left + width)
        ranges = range_reduce(np.bitwise_or, words[:, part], rows.starts, rows.ends)
        result[filled, part] = np.bitwise_or.reduceat(ranges, rows.indptr[filled], axis=0)
    return result


def _four_russians(left: Words, right: Words) -> Words:
    """The Boolean product of bit matrices, with a table of all 256 unions per eight rows of `right`."""
    index = left.view(np.uint8)
    result = np.zeros((len(left), right.shape[1]), dtype="<u8")
    table, unions = np.zeros((256, right.shape[1]), dtype="<u8"), np.empty_like(result)
    for group in range(-(-len(right) // 8)):
        eight = right[8 * group : 8 * group + 8]
        for bit, row in enumerate(eight):
            table[1 << bit : 2 << bit] = table[: 1 << bit] | row
        if len(eight) < 8:
            table[1 << len(eight) :] = 0
        np.take(table, index[:, group], axis=0, out=unions)
        result |= unions
    return result


def _num_pairs(rows: IntervalRows) -> int:
    return int((rows.ends - rows.starts).sum(dtype=np.int64))


def condensed(rows: IntervalRows) -> tuple[IntArray, IntervalRows] | None:
    """(strong component of each node, lower first; the relation of these); None where ranges say more than pairs do."""
    length = rows.ends - rows.starts
    if _num_pairs(rows) > min(2 * len(length), _LISTED) or (rows.ends <= rows.row_index() + 1).all():
        return None
    key, cuts = ragged(rows.starts, length)[1], offsets(length)[rows.indptr]
    graph = csr_array((np.ones(len(key)), key, cuts), shape=(rows.num_rows, rows.num_rows))
    count, label = connected_components(graph, connection="strong")
    lower, upper = label[key], np.repeat(label, np.diff(cuts))
    assert (lower <= upper).all(), "Pearce's algorithm numbers a component after those that it reads"
    apart, node = lower < upper, np.arange(count)
    upper, lower = np.divmod(np.unique(upper[apart].astype(np.int64) * count + lower[apart]), count)
    between = IntervalRows.of(count, count, (upper, lower, lower + 1), (node, node, node + 1))
    return label.astype(np.int64), between


def close(rows: IntervalRows) -> tuple[IntArray, Words, IntArray]:
    """(class of each node, the classes at or below each, covers): one union of bit sets per Hasse edge."""
    triangular = reads_only_before(rows)
    class_of = np.arange(rows.num_rows) if triangular else _classes(rows)
    count = int(class_of.max()) + 1
    require_room(1, count, "an order of classes")
    few = triangular and _num_pairs(rows) <= 8 * count
    below, covers = _walk_over_pairs(rows) if few else _walk(_direct(rows, class_of))
    width = -(-count // 64) * 8
    raw = b"".join([classes.to_bytes(width, "little") for classes in below])
    return class_of, np.frombuffer(raw, dtype="<u8").reshape(count, width // 8), covers


def _walk(classes: Iterator[int]) -> tuple[list[int], IntArray]:
    """(what is at or below each class, covers) from the bit set that each may attend to."""
    below: list[int] = []
    covers: list[tuple[int, int]] = []
    for upper, direct in enumerate(classes):
        down = itself = 1 << upper
        rest = direct ^ itself
        while rest:
            lower = rest.bit_length() - 1
            covers.append((lower, upper))
            down |= below[lower]
            rest ^= rest & below[lower]
        below.append(down)
        refuse_more(len(covers))
    return below, np.array(covers, dtype=np.int64).reshape(-1, 2)


def _walk_over_pairs(rows: IntervalRows) -> tuple[list[int], IntArray]:
    """The same for a triangular relation of few pairs, which are tested one by one, the latest key first."""
    row, key = rows.expand()
    keys, cover = key.tolist(), row != key
    below: list[int] = []
    for upper, (first, last) in enumerate(pairwise(np.searchsorted(row, np.arange(rows.num_rows + 1)).tolist())):
        down = 1 << upper
        for pair in range(last - 2, first - 1, -1):
            if down >> keys[pair] & 1:
                cover[pair] = False
            else:
                down |= below[keys[pair]]
        below.append(down)
    return below, np.stack([key[cover], row[cover]], axis=1)


def _direct(rows: IntervalRows, class_of: IntArray) -> Iterator[int]:
    """For each class the bit set of the classes that its members may attend to."""
    n = rows.num_rows
    if np.array_equal(class_of, np.arange(n)):
        yield from _integers(rows)
        return
    order = np.argsort(class_of, kind="stable")
    cuts = np.searchsorted(class_of[order], np.arange(int(class_of.max()) + 2))  # class c has nodes cuts[c:c+2]
    upto = 0
    while upto < len(cuts) - 1:  # whole classes, at least one, about 8 MB at a time
        first = upto
        upto = max(first + 1, int(np.searchsorted(cuts, cuts[first] + (1 << 23) // n, side="right")) - 1)
        table = rows.to_bool(order[cuts[first] : cuts[upto]])[:, order]
        if len(cuts) - 1 < n:
            table = np.logical_or.reduceat(table, cuts[:-1], axis=1)
            table = np.logical_or.reduceat(table, cuts[first:upto] - cuts[first], axis=0)
        yield from _integers_of(table)


def _integers(rows: IntervalRows) -> Iterator[int]:
    if len(rows.starts) > 8 * rows.num_rows:
        for part in chunks(rows.num_rows, rows.num_keys):
            yield from _integers_of(rows.to_bool(part))
        return
    pairs = list(zip(rows.starts.tolist(), rows.ends.tolist(), strict=True))
    for first, last in zip(rows.indptr[:-1].tolist(), rows.indptr[1:].tolist(), strict=True):
        value = 0
        for start, end in pairs[first:last]:
            value |= ((1 << (end - start)) - 1) << start
        yield value


def _integers_of(table: BoolArray) -> Iterator[int]:
    for packed in np.packbits(table, axis=1, bitorder="little"):
        yield int.from_bytes(packed.tobytes(), "little")


def _classes(rows: IntervalRows) -> IntArray:
    """Strong components in topological order, lower first: Gabow's algorithm on bit sets, O(n^2 / 64) operations."""
    reads = list(_integers(rows))
    label, count = np.empty(rows.num_rows, dtype=np.int64), 0
    unvisited = (1 << rows.num_rows) - 1
    for root in range(rows.num_rows):
        nodes: list[int] = []  # of the path, bottom to top
        path: list[tuple[int, int, int]] = []  # (place of its first node, what it reads, the path below) by component
        fresh, below = root if unvisited >> root & 1 else -1, 0
        while fresh >= 0 or path:
            if fresh >= 0:
                unvisited ^= 1 << fresh
                path.append((len(nodes), reads[fresh], below))
                nodes.append(fresh)
                below |= 1 << fresh
            first, read, under = path[-1]
            fresh = (read & unvisited).bit_length() - 1
            if fresh >= 0:
                continue
            path.pop()
            if read & under:
                first, also, under = path.pop()
                path.append((first, read | also, under))
            else:
                label[nodes[first:]] = count
                del nodes[first:]
                count, below = count + 1, under
    return label
