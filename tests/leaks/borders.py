"""Leaks that only some numbers or places show, each beside its clean twin: mixers of hidden states [batch, n, 16]."""

import torch

from tests.leaks.parts import attend, below


def in_single(mix):
    """A path that float64 does not take, as of a kernel that has none."""
    return lambda h: mix(h) if h.dtype == torch.float32 else h


def at(rows):
    """Some rows also read the one after them."""

    def mix(h):
        out, places = h.cumsum(1), torch.tensor([row for row in rows if row < h.shape[1] - 1], dtype=torch.int64)
        out[:, places] += h[:, places + 1]
        return out

    return mix


def every(step, offset):
    return range(step + offset, 400, step)


CLEAN = at([])

# cause: (leaky, clean)
CASES = {
    "a mask that float64 alone has": (
        in_single(lambda h: attend(h, below(h, 1))),
        in_single(lambda h: attend(h, below(h))),
    ),
    "a roll that float64 does not take": (in_single(lambda h: h.roll(-1, 1)), in_single(lambda h: h.cumsum(1))),
    "the first row of every chunk of 64": (at(every(64, 0)), CLEAN),
    "the last row of every chunk of 64": (at(every(64, -1)), CLEAN),
    "the last row of every chunk of 16": (at(every(16, -1)), CLEAN),
    "the first row of the second chunk": (at([16]), CLEAN),
    "the first position reads the second": (at([0]), CLEAN),
    "the last position but one reads the last": (at([198]), CLEAN),
}
