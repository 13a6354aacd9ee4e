"""The number of layers until everything has flowed."""

from __future__ import annotations

from attnflow.masks.intervals import IntervalRows
from attnflow.order import bits


def depth_of(rows: IntervalRows, closure_nnz: int) -> int:
    """The smallest L >= 1 with A^L = R, for A given with its diagonal and the number of pairs of R.

    A^L only grows and never leaves R, so it is R as soon as it has as many pairs. Squares A^(2^k) up to R, then
    binary descent between the last two. Cost: at most 2 log2(depth) products and log2(depth) n^2 / 8 bytes.
    """
    n = rows.num_rows
    if int(rows.counts().sum()) == closure_nnz:
        return 1
    powers = [(rows, bits.from_rows(rows))]
    while True:
        square = bits.product(*powers[-1])
        if bits.count(square) == closure_nnz:
            break
        powers.append((bits.to_rows(square, n), square))
    depth, (_, reached) = 1 << (len(powers) - 1), powers.pop()
    for exponent in reversed(range(len(powers))):
        further = bits.product(powers[exponent][0], reached)
        if bits.count(further) < closure_nnz:
            depth, reached = depth + (1 << exponent), further
    return depth + 1
