"""`Mask.block_mask` against torch's `create_block_mask`, building included."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.attention.flex_attention import create_block_mask

from attnflow import masks
from benchmarks.bench_order import MASKS
from benchmarks.harness import Case, main


def ours(name: str, n: int) -> Callable[[], object]:
    masks.causal(256).block_mask()
    return lambda: MASKS[name](n).block_mask()


def torch_eager(name: str, n: int) -> Callable[[], object]:
    mask = MASKS[name](n)
    mask_mod, (queries, keys) = mask.mask_mod, mask.shape
    return lambda: create_block_mask(mask_mod, None, None, queries, keys, device="cpu")


def torch_eager_closed_form(name: str, n: int) -> Callable[[], object]:
    """The peer at its best: a causal mask_mod that is one comparison."""
    assert name == "causal"
    return lambda: create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device="cpu")


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    here = "benchmarks.bench_masks"
    listed: list[Case] = []
    for name in ("causal", "sliding_window", "dilated_window", "document", "big_bird", "block_two_stream", "butterfly"):
        for n in (4096, 16384, 131072):
            listed.append(Case(f"block_mask of {name}", "attnflow", n, here, "ours", (name, n)))
            if n <= 16384 and name in ("causal", "butterfly"):
                peer = "torch create_block_mask"
                listed.append(Case(f"block_mask of {name}", peer, n, here, "torch_eager", (name, n), repeats=3))
            if n <= 16384 and name == "causal":
                peer, function = "torch create_block_mask, q >= k", "torch_eager_closed_form"
                listed.append(Case(f"block_mask of {name}", peer, n, here, function, (name, n), repeats=3))
    return listed


if __name__ == "__main__":
    main(cases, ["torch", "numpy"])
