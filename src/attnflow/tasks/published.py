"""What the paper printed where it is wrong, kept to show that it is: `embedded` and `verify` tell the difference."""

from __future__ import annotations

import numpy as np

from attnflow._core.checks import integer
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask


def butterfly_as_printed(n: int) -> Mask:
    """Butterfly attention by eq. 58 of the paper as printed, which is off by one: never train with it.

    Its centre rows read `(j < i-2n+2) or (i-n+1 < j < 2n-2) or (j = i)`. The strict `i-n+1 < j` drops the right
    neighbour of every centre that has one, so n - 1 of the n subtasks are not embedded. The corrected relation,
    with `i-n+1 <= j`, is `af.masks.butterfly`.

    >>> import attnflow as af
    >>> af.masks.butterfly(4).difference(butterfly_as_printed(4))
    [(6, 3), (7, 4), (8, 5)]
    """
    integer("n", n)
    a = max(n - 1, 0)
    stream, centre = np.arange(a), 2 * a + np.arange(n)
    rows = IntervalRows.build(
        np.concatenate([stream, a + stream, centre, centre, centre]),
        np.concatenate([0 * stream, a + stream, 0 * centre, centre - n + 2, centre]),
        np.concatenate([stream + 1, 0 * stream + 2 * a, centre - 2 * n + 2, 0 * centre + 2 * a, centre + 1]),
        2 * a + n,
        2 * a + n,
    )
    return Mask(rows, "butterfly_as_printed", {"n": n})
