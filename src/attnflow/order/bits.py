"""Boolean matrices as packed bits, and their products with interval relations: the arithmetic of depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.checks import IntArray
from attnflow.masks.intervals import BoolArray, IntervalRows

Words = npt.NDArray[np.uint64]  # [rows, ceil(columns / 64)], bit c of a row is bit c % 64 of word c // 64

_ROOM: Final = 1 << 33  # bytes of all bit matrices of one computation
_WORKSPACE: Final = 1 << 25  # bytes of temporaries per product


def pack(table: BoolArray) -> Words:
    """A bool table [rows, columns] as words."""
    padded = np.zeros((len(table), -(-table.shape[1] // 64) * 8), dtype=np.uint8)
    packed = np.packbits(table, axis=1, bitorder="little")
    padded[:, : packed.shape[1]] = packed
    return padded.view("<u8")


def unpack(words: Words, columns: int) -> BoolArray:
    """Words as a bool table [rows, columns]."""
    return np.unpackbits(words.view(np.uint8), axis=1, count=columns, bitorder="little").view(np.bool_)


def from_rows(rows: IntervalRows) -> Words:
    """The relation's bit matrix, packed by row chunks."""
    words = np.zeros((rows.num_rows, -(-rows.num_keys // 64)), dtype="<u8")
    for part in chunks(rows.num_rows, rows.num_keys):
        words[part] = pack(rows.to_bool(part))
    return words


def to_rows(words: Words, columns: int) -> IntervalRows:
    """The bit matrix as interval rows."""
    parts = [IntervalRows.from_bool(unpack(words[part], columns)) for part in chunks(len(words), columns)]
    return IntervalRows.stack(parts, columns)


def integers(rows: IntervalRows) -> Iterator[int]:
    """Each row as a Python int, bit k for key k: intervals shifted into place, or dense chunks where rows have many."""
    if len(rows.starts) > 8 * rows.num_rows:
        for part in chunks(rows.num_rows, rows.num_keys):
            yield from integers_of(rows.to_bool(part))
        return
    pairs = list(zip(rows.starts.tolist(), rows.ends.tolist(), strict=True))
    for first, last in zip(rows.indptr[:-1].tolist(), rows.indptr[1:].tolist(), strict=True):
        value = 0
        for start, end in pairs[first:last]:
            value |= ((1 << (end - start)) - 1) << start
        yield value


def integers_of(table: BoolArray) -> Iterator[int]:
    """Each row of a bool table as a Python int."""
    for packed in np.packbits(table, axis=1, bitorder="little"):
        yield int.from_bytes(packed.tobytes(), "little")


def chunks(num_rows: int, row_bytes: int, limit: int = 1 << 23) -> Iterator[slice]:
    """Consecutive row slices of at most `limit` bytes (at least one row)."""
    step = max(1, limit // max(1, row_bytes))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def require_room(matrices: int, size: int, what: str) -> None:
    """Refuse, before memory is taken, what needs more bit matrices of `size` squared than fit.

    Raises:
        ValueError: with what it would take.
    """
    needed = matrices * size * size // 8
    if needed > _ROOM:
        raise ValueError(
            f"{what} over {size:,} positions takes {needed / 1e9:,.1f} GB as bit matrices, of {_ROOM / 1e9:.1f}: "
            "take a shorter sequence, fewer layers, or one position for each block"
        )


def count(words: Words) -> int:
    """Number of set bits."""
    return int(np.bitwise_count(words).sum(dtype=np.int64))


def row_counts(words: Words) -> IntArray:
    """Number of set bits in each row."""
    return np.bitwise_count(words).sum(axis=1, dtype=np.int64)


def product(rows: IntervalRows, words: Words) -> Words:
    """The Boolean product: row i is the union of the rows `words[k]` over the keys k of row i.

    Rows of few intervals take unions over ranges from a sparse table, O((n log n + intervals) n / 64) word
    operations; shattered rows take the method of four Russians, O(n^3 / 512).
    """
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


def range_reduce(
    ufunc: np.ufunc, values: npt.NDArray[Any], starts: npt.NDArray[Any], ends: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """`ufunc.reduce(values[starts[t]:ends[t]])` for every t, for an idempotent ufunc (maximum, minimum, or).

    A range is the union of two overlapping ranges of a power of two; only one level of that sparse table is kept.
    """
    starts, ends = starts.astype(np.int64), ends.astype(np.int64)
    level = np.frexp((ends - starts).astype(np.float64))[1] - 1
    out = np.empty((len(starts), *values.shape[1:]), dtype=values.dtype)
    table = values
    for size in range(int(level.max(initial=-1)) + 1):
        chosen = np.flatnonzero(level == size)
        out[chosen] = ufunc(table[starts[chosen]], table[ends[chosen] - (1 << size)])
        table = ufunc(table[: -(1 << size)], table[1 << size :])
    return out


def depth_of(rows: IntervalRows, closure_nnz: int) -> int:
    """The smallest L >= 1 with A^L = R, for A given with its diagonal and the number of pairs of R.

    A^L only grows and never leaves R, so it is R as soon as it has as many pairs. Squares A^(2^k) up to R, then
    binary descent between the last two. Cost: at most 2 log2(depth) products and log2(depth) n^2 / 8 bytes.
    """
    n = rows.num_rows
    if int(rows.counts().sum()) == closure_nnz:
        return 1
    powers = [(rows, from_rows(rows))]
    while True:
        require_room(len(powers) + 2, n, "the depth of a mask")
        square = product(*powers[-1])
        if count(square) == closure_nnz:
            break
        powers.append((to_rows(square, n), square))
    depth, (_, reached) = 1 << (len(powers) - 1), powers.pop()
    for exponent in reversed(range(len(powers))):
        further = product(powers[exponent][0], reached)
        if count(further) < closure_nnz:
            depth, reached = depth + (1 << exponent), further
    return depth + 1


def _four_russians(left: Words, right: Words) -> Words:
    """The Boolean product of bit matrices: for eight rows of `right` at a time, all 256 unions are looked up."""
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
