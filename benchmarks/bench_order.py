"""Closure, classes and Hasse diagram, and depth, against graph libraries.

Peers get their graph ready-made (building it is not timed); ours starts from the mask. Peers that lack a step are
named after what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from attnflow import masks, order
from benchmarks.harness import Case, main


def random(n: int, density: float) -> masks.Mask:
    return masks.from_dense(torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < density)


MASKS = {
    "full": masks.full,
    "causal": masks.causal,
    "sliding_window": lambda n: masks.sliding_window(n, 128),
    "dilated_window": lambda n: masks.dilated_window(n, 64, 4),
    "prefix_lm": lambda n: masks.prefix_lm(n, n // 4),
    "document": lambda n: masks.document([n // 8] * 8),
    "block_causal": lambda n: masks.block_causal(n, 16),
    "global_tokens": lambda n: masks.global_tokens(n, range(0, n, 100)),
    "longformer": lambda n: masks.longformer(n, 64, [0, n // 2]),
    "big_bird": masks.big_bird,
    "attention_sink": lambda n: masks.attention_sink(n, 4, 64),
    "tree": lambda n: masks.tree([-1, *(np.random.default_rng(0).random(n - 1) * np.arange(1, n)).astype(int)]),
    "permutation_lm": lambda n: masks.permutation_lm(np.random.default_rng(0).permutation(n // 2)),
    "block_two_stream": lambda n: masks.block_two_stream(n // 32 + 1, 16),
    "block_diffusion": lambda n: masks.block_diffusion(n // 32, 16),
    "butterfly": lambda n: masks.butterfly((n + 2) // 3),
    "look_ahead": lambda n: masks.look_ahead(n // 4, 4),
    "random": lambda n: random(n, 0.5),
    "random_sparse": lambda n: random(n, 2 / n),
    "random_8_keys": lambda n: random(n, 8 / n),
    "random_twentieth": lambda n: random(n, 0.05),
    "random_triangular": lambda n: masks.from_dense(
        (torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.5).tril()
    ),
}
LONG = 131_072  # where n^2 bits are 2 GB
LONGEST = 1_048_576
STREAMS = ("permutation_lm", "block_two_stream", "block_diffusion", "butterfly", "look_ahead")
TO_THE_LONGEST = ("causal", "sliding_window", "dilated_window", "document", *STREAMS)
STACKS = {
    "window": lambda n: [masks.sliding_window(n, 512)] * 4,
    "window_and_dilated": lambda n: [masks.sliding_window(n, 512), masks.dilated_window(n, 64, 4)] * 2,
    "longformer_and_global": lambda n: [masks.longformer(n, 512, [0]), masks.global_tokens(n, [0])] * 2,
}
WITH_PEERS = ("causal", "big_bird", "butterfly")
SCATTERED = ("random_sparse", "random_8_keys", "random_twentieth")


def ours(name: str, n: int) -> Callable[[], object]:
    mask = MASKS[name](n)

    def run() -> object:
        flow = order.analyze(mask)
        return flow.reaches(0, n // 2), flow.classes, flow.hasse

    order.analyze(masks.full(2)).hasse  # noqa: B018  the first call pays imports
    return run


def our_depth(name: str, n: int) -> Callable[[], object]:
    mask = MASKS[name](n)
    return lambda: order.analyze(mask).depth


def our_stack(name: str, n: int) -> Callable[[], object]:
    stack = STACKS[name](n)

    def run() -> object:
        flow = order.analyze(stack)
        return flow.depth, flow.hasse

    return run


def _edges(name: str, n: int) -> list[tuple[int, int]]:
    return [(int(k), int(q)) for q, k in np.argwhere(MASKS[name](n).dense().numpy()) if q != k]


def networkx_reduction(name: str, n: int) -> Callable[[], object]:
    import networkx

    graph = networkx.DiGraph(_edges(name, n))
    return lambda: networkx.transitive_reduction(networkx.condensation(graph))


def rustworkx_reduction(name: str, n: int) -> Callable[[], object]:
    import rustworkx

    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from_no_data(_edges(name, n))
    return lambda: rustworkx.transitive_reduction(rustworkx.condensation(graph))


def rustworkx_from_pairs(name: str, n: int) -> Callable[[], object]:
    """With the making of the graph from arrays of queries and keys: ours starts from a mask, too."""
    import rustworkx

    rows, keys = MASKS[name](n).dense().numpy().nonzero()

    def run() -> object:
        graph = rustworkx.PyDiGraph()
        graph.add_nodes_from(range(n))
        graph.add_edges_from_no_data([(k, q) for q, k in zip(rows.tolist(), keys.tolist(), strict=True) if q != k])
        return rustworkx.transitive_reduction(rustworkx.condensation(graph))

    return run


def igraph_closure(name: str, n: int) -> Callable[[], object]:
    import igraph

    graph = igraph.Graph(n, _edges(name, n), directed=True)
    return lambda: (graph.connected_components(mode="strong"), graph.neighborhood(order=n, mode="out"))


def scipy_distances(name: str, n: int) -> Callable[[], object]:
    """Depth as the largest finite distance."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import shortest_path

    graph = csr_array(MASKS[name](n).dense().numpy().astype(np.int8))

    def run() -> object:
        distance = shortest_path(graph, unweighted=True)
        return distance[np.isfinite(distance)].max()

    return run


def torch_powers(name: str, n: int) -> Callable[[], object]:
    """Depth by multiplying float matrices until nothing changes."""
    allow = (MASKS[name](n).dense() | torch.eye(n, dtype=torch.bool)).float()

    def run() -> object:
        power, depth = allow, 1
        while True:
            further = ((allow @ power) > 0).float()
            if torch.equal(further, power):
                return depth
            power, depth = further, depth + 1

    return run


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    here = "benchmarks.bench_order"
    listed: list[Case] = []
    for name in MASKS:
        n = 4096 if name.startswith("random") else 16384
        if name not in SCATTERED:
            listed.append(Case(f"order of {name}", "attnflow", n, here, "ours", (name, n)))
    for name in SCATTERED:
        for n in (256, 1024, 4096):
            for provider, function in (
                ("attnflow", "ours"),
                ("rustworkx (graph ready-made)", "rustworkx_reduction"),
                ("rustworkx (graph from pairs)", "rustworkx_from_pairs"),
                ("networkx (graph ready-made)", "networkx_reduction"),
            ):
                listed.append(Case(f"order of {name}", provider, n, here, function, (name, n)))
    for name in WITH_PEERS:  # of 1,024 positions: at 4,096 networkx and rustworkx take minutes
        listed.append(Case(f"order of {name}", "attnflow", 1024, here, "ours", (name, 1024)))
        for peer, function, note in (
            ("networkx", "networkx_reduction", ""),
            ("rustworkx", "rustworkx_reduction", ""),
            ("igraph", "igraph_closure", "classes and closure (neighborhood): it has no reduction"),
        ):
            provider = f"{peer} (graph ready-made)"
            listed.append(Case(f"order of {name}", provider, 1024, here, function, (name, 1024), note=note))
    for name in ("causal", "sliding_window", "random", "random_sparse"):
        for provider, function in (
            ("attnflow", "our_depth"),
            ("scipy shortest_path", "scipy_distances"),
            ("torch float32 powers", "torch_powers"),
        ):
            listed.append(Case(f"depth of {name}", provider, 1024, here, function, (name, 1024)))
    for name in MASKS:
        for n in (LONG, LONGEST) if name in TO_THE_LONGEST else (LONG,):
            if not name.startswith("random"):
                for what, function in (("order", "ours"), ("depth", "our_depth")):
                    repeats = 3 if n == LONG else 2
                    listed.append(Case(f"{what} of {name}", "attnflow", n, here, function, (name, n), repeats=repeats))
    stacks = [
        Case(f"order of a stack: {name}", "attnflow", LONG, here, "our_stack", (name, LONG), 3) for name in STACKS
    ]
    return [*listed, *stacks]


if __name__ == "__main__":
    sys.setrecursionlimit(100_000)
    main(cases, ["torch", "numpy", "scipy", "networkx", "rustworkx", "igraph"], time_limit=20)
