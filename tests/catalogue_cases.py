"""Every mask of the catalogue at several parameters, beside a definition that shares no code with the package.

A definition answers one pair (q, k) in plain Python. `CASES` is what other tests iterate over; `MASKS` are the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnflow import masks
from attnflow.masks import Mask

Relation = Callable[[int, int], bool]


@dataclass(frozen=True)
class Case:
    mask: Mask
    size: tuple[int, int]
    allows: Relation

    def table(self) -> np.ndarray:
        rows = [[bool(self.allows(q, k)) for k in range(self.size[1])] for q in range(self.size[0])]
        return np.array(rows, dtype=np.bool_).reshape(self.size)


def document_of(lengths):
    return [d for d, length in enumerate(lengths) for _ in range(length)]


def ancestors(parents, node):
    return set() if node == -1 else {node} | ancestors(parents, parents[node])


def block_two_stream_of(num_blocks, block, predict_first):
    p = num_blocks - 1

    def allows(q, k):
        i, j = q // block, k // block
        if i < p:  # content
            return j <= i
        t = i - p  # the t-th mask block
        return j == i or (j < p and (j < t if predict_first else j <= t))

    return allows


def block_diffusion_of(num_blocks, block):
    def allows(q, k):
        i, j = q // block, k // block
        if i < num_blocks:  # noised
            return j == i or (num_blocks <= j < num_blocks + i)
        return num_blocks <= j <= i

    return allows


def butterfly_of(n):
    """Two streams and the centres, each by what it has read, in words of tokens 0..n-1."""
    a = n - 1
    role = (
        [("forward", t) for t in range(a)] + [("backward", t + 1) for t in range(a)] + [("centre", s) for s in range(n)]
    )

    def allows(q, k):
        (kind, token), (other, source) = role[q], role[k]
        if kind == other == "forward":
            return source <= token
        if kind == other == "backward":
            return source >= token
        if kind == "centre":
            return q == k or (other == "forward" and source < token) or (other == "backward" and source > token)
        return False

    return allows


def multi_token_of(n, horizon):
    role = [(i, 0) for i in range(n)] + [(i, d) for i in range(n) for d in range(1, horizon)]

    def allows(q, k):
        (i, d), (j, e) = role[q], role[k]
        return j <= i if e == 0 else (i == j and e <= d)

    return allows


def two_stream_of(permutation):
    n = len(permutation)
    step = {position: t for t, position in enumerate(permutation)}

    def allows(q, k):
        if q < n:
            return k < n and step[k] <= step[q]
        return q == k or (k < n and step[k] < step[q - n])

    return allows


def big_bird_blocks(block, num_global, num_window):
    """The parts that no draw decides: global and window blocks."""
    half = num_window // 2

    def allows(q, k):
        i, j = q // block, k // block
        return i < num_global or j < num_global or abs(i - j) <= half

    return allows


def _cases():
    def square(mask, n, allows):
        return Case(mask, (n, n), allows)

    for n in (0, 1, 2, 7):
        yield square(masks.full(n), n, lambda q, k: True)
        yield square(masks.causal(n), n, lambda q, k: k <= q)
    for n, m in ((3, 5), (5, 3), (0, 3), (3, 0)):
        yield Case(masks.full(n, m), (n, m), lambda q, k: True)
    for n in (0, 1, 6, 9):
        for w in (1, 2, 3, 20):
            yield square(masks.sliding_window(n, w), n, lambda q, k, w=w: q - w < k <= q)
            yield square(masks.sliding_window(n, w, causal=False), n, lambda q, k, w=w: abs(q - k) < w)
    for n in (0, 1, 8, 11):
        for w, d in ((1, 1), (2, 1), (2, 3), (3, 2), (20, 4), (2, 30)):
            yield square(
                masks.dilated_window(n, w, d), n, lambda q, k, w=w, d=d: (q - k) % d == 0 and 0 <= (q - k) // d < w
            )
            yield square(
                masks.dilated_window(n, w, d, causal=False),
                n,
                lambda q, k, w=w, d=d: (q - k) % d == 0 and abs(q - k) // d < w,
            )
    for n, p in ((0, 0), (1, 0), (1, 1), (6, 0), (6, 1), (6, 4), (6, 6)):
        yield square(masks.prefix_lm(n, p), n, lambda q, k, p=p: k < p or k <= q)
    for lengths in ([], [1], [3], [2, 1, 4], [1, 1, 1]):
        doc = document_of(lengths)
        yield square(masks.document(lengths), len(doc), lambda q, k, doc=doc: doc[q] == doc[k] and k <= q)
        yield square(masks.document(lengths, inner="full"), len(doc), lambda q, k, doc=doc: doc[q] == doc[k])
    for n, b in ((0, 3), (1, 1), (6, 1), (6, 2), (6, 3), (6, 6)):
        yield square(masks.block_causal(n, b), n, lambda q, k, b=b: k // b <= q // b)
    for n, chosen in ((0, []), (1, []), (1, [0]), (5, []), (5, [2]), (7, [6, 0]), (7, [1, 3, 5]), (4, [0, 1, 2, 3])):
        yield square(masks.global_tokens(n, chosen), n, lambda q, k, g=tuple(chosen): q in g or k in g or q == k)
        yield square(
            masks.longformer(n, 2, chosen), n, lambda q, k, g=tuple(chosen): abs(q - k) < 2 or q in g or k in g
        )
    yield square(masks.longformer(8, 3), 8, lambda q, k: abs(q - k) < 3 or q == 0 or k == 0)
    for n, b, g, w in (
        (0, 2, 1, 3),
        (1, 1, 1, 1),
        (6, 1, 1, 3),
        (8, 2, 0, 3),
        (8, 2, 1, 1),
        (12, 2, 2, 5),
        (4, 2, 5, 1),
    ):
        yield square(masks.big_bird(n, b, g, w, num_random=0), n, big_bird_blocks(b, g, w))
    for n, sinks, w in ((0, 1, 1), (1, 0, 1), (1, 3, 2), (8, 0, 3), (8, 2, 3), (8, 1, 1), (8, 20, 2), (8, 2, 20)):
        yield square(masks.attention_sink(n, sinks, w), n, lambda q, k, s=sinks, w=w: k <= q and (k < s or q - k < w))
    for parents in ([], [-1], [-1, 0, 0, 1], [-1, 3, 0, 0, 2, 1], [-1, 0, 1, 2, 3], [-1, -1, 0, 1, 1, 4, 4, 2]):
        above = [ancestors(parents, node) for node in range(len(parents))]
        yield square(masks.tree(parents), len(parents), lambda q, k, above=above: k in above[q])
    for order in ([], [0], [1, 0], [0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        yield square(masks.permutation_lm(order), 2 * len(order), two_stream_of(order))
    for num_blocks, b in ((1, 1), (1, 3), (2, 1), (3, 2), (4, 1), (4, 3)):
        for first in (False, True):
            size = (2 * (num_blocks - 1) + first) * b
            mask = masks.block_two_stream(num_blocks, b, predict_first=first)
            yield square(mask, size, block_two_stream_of(num_blocks, b, first))
        yield square(masks.block_diffusion(num_blocks, b), 2 * num_blocks * b, block_diffusion_of(num_blocks, b))
    for n in (1, 2, 3, 6):
        yield square(masks.butterfly(n), 3 * n - 2, butterfly_of(n))
    yield square(masks.butterfly(0), 0, lambda q, k: False)
    for n, h in ((0, 2), (1, 1), (1, 3), (4, 1), (4, 2), (3, 4)):
        yield square(masks.look_ahead(n, h), n * h, multi_token_of(n, h))


CASES = list(_cases())
IDS = [f"{number}-{case.mask!r}"[:60] for number, case in enumerate(CASES)]
RANDOM_BIG_BIRDS = [masks.big_bird(12, 2, 1, 1, 2, seed=s) for s in range(3)]
MASKS = [case.mask for case in CASES] + RANDOM_BIG_BIRDS
