"""Masks over one sequence, each stated as a relation with its source. q is the query, k the key, counted from 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, cast

import numpy as np

from attnflow._core.checks import Indices, IntArray, boolean, divides, index_array, integer, preview, size
from attnflow.masks.intervals import IntervalRows
from attnflow.masks.mask import Mask
from attnflow.masks.numbering import LARGEST, too_many
from attnflow.masks.registry import mask, named_masks

_DOUBTFUL: Final = 16  # documents from which lengths that look like ids, or are all 1, are refused


@mask(n="8")
def full(n: int, num_keys: int | None = None) -> Mask:
    """Every query attends to every key (BERT, arXiv:1810.04805).

    >>> full(3).density
    1.0
    """
    n = size("n", n)
    num_keys = n if num_keys is None else size("num_keys", num_keys)
    return _mask(np.arange(n), 0, num_keys, n, num_keys, "full", n=n, num_keys=num_keys)


@mask(n="8")
def causal(n: int) -> Mask:
    """k <= q (GPT; hasse, eq. 31 and 39).

    >>> causal(3).dense().int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    n = size("n", n)
    q = np.arange(n)
    return _mask(q, 0, q + 1, n, n, "causal", n=n)


@mask(window="4")
def sliding_window(n: int, window: int, causal: bool = True) -> Mask:
    """Causal: q - window < k <= q, so `window` keys with the query's own (Mistral). Otherwise |q - k| < window.

    >>> sliding_window(5, 2).keys(4).tolist()
    [3, 4]
    >>> sliding_window(5, 2, causal=False).keys(3).tolist()
    [2, 3, 4]
    """
    n = size("n", n)
    q = np.arange(n)
    window, causal = integer("window", window, 1), boolean("causal", causal)
    reach = min(window, n)
    last = q + 1 if causal else q + reach
    return _mask(q, q - reach + 1, last, n, n, "sliding_window", n=n, window=window, causal=causal)


@mask(window="3", dilation="2")
def dilated_window(n: int, window: int, dilation: int, causal: bool = True) -> Mask:
    """q - k is a multiple of `dilation` with 0 <= (q - k) / dilation < window; both directions if not causal.

    Source: Longformer, sec. 3.1 (arXiv:2004.05150).

    >>> dilated_window(8, window=3, dilation=2).keys(7).tolist()
    [3, 5, 7]
    """
    n = size("n", n)
    q = np.arange(n)
    window = integer("window", window, 1)
    dilation, causal = integer("dilation", dilation, 1), boolean("causal", causal)
    # Numbered by residue class, each row is one interval.
    reach, classes = min(window, n), max(min(dilation, n), 1)
    step, residue = q // classes, q % classes
    offset = np.concatenate([[0], np.cumsum(np.bincount(residue, minlength=classes))])
    rank = offset[residue] + step
    last = np.minimum(step + 1 if causal else step + reach, np.diff(offset)[residue])
    rows = IntervalRows.build(rank, offset[residue] + np.maximum(step - reach + 1, 0), offset[residue] + last, n, n)
    parameters = {"n": n, "window": window, "dilation": dilation, "causal": causal}
    return Mask(rows, "dilated_window", parameters, query_rank=rank, key_rank=rank)


@mask(prefix="6")
def prefix_lm(n: int, prefix: int) -> Mask:
    """k < prefix or k <= q: full inside the prefix, causal after it (T5, arXiv:1910.10683, fig. 4).

    >>> prefix_lm(4, 2).dense().int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    """
    n = size("n", n)
    q = np.arange(n)
    prefix = integer("prefix", prefix, 0, n)
    return _mask(q, 0, np.maximum(q + 1, prefix), n, n, "prefix_lm", n=n, prefix=prefix)


@mask(lengths="5,3,4")
def document(
    lengths: Indices | None = None,
    inner: Literal["causal", "full"] = "causal",
    *,
    ids: Indices | None = None,
    position_ids: Indices | None = None,
    cu_seqlens: Indices | None = None,
) -> Mask:
    """Packed sequences: q and k lie in the same document, and k <= q if `inner` is "causal".

    Exactly one argument says where documents end; `mask.parameters` holds their lengths. Padding is a document, too.

    Args:
        lengths: tokens of each document, at least 1; the mask is over their sum.
        inner: what holds inside a document.
        ids: for each token, the number of its document, whose tokens stand together. (Documents that interleave are
            `from_mask_mod(lambda b, h, q, k: ids[q] == ids[k], n)`.)
        position_ids: for each token, its place in its document: 0, 1, 2, ... and 0 again where the next one begins.
        cu_seqlens: the first token of each document and the end, as flash-attn takes them: 0, 5, 8. Repeats (empty
            documents) are left out.

    Raises:
        ValueError: none or several are given, or one holds what it cannot mean: a length below 1, an id that comes
            back, a position that is neither 0 nor the next one, offsets that decrease. From 16 documents on, also
            what another name would explain: documents of one token each, and lengths 1, 1, 2, 2, 2, 3, ... (ids).

    >>> document([2, 1]).dense().int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> document(ids=[7, 7, 9]) == document(position_ids=[0, 1, 0]) == document(cu_seqlens=[0, 2, 3])
    True
    """
    if inner not in ("causal", "full"):
        raise ValueError(f'inner must be "causal" or "full", got {inner!r}')
    sources = {"lengths": lengths, "ids": ids, "position_ids": position_ids, "cu_seqlens": cu_seqlens}
    given = [(name, index_array(name, values)) for name, values in sources.items() if values is not None]
    if len(given) != 1:
        got = " and ".join(name for name, _ in given) or "none"
        raise ValueError(f"document takes one of {', '.join(sources)}, such as lengths=5,3,4, got {got}")
    return packed(_lengths(*given[0]), inner)


def packed(sizes: IntArray, inner: str) -> Mask:
    """`document(sizes, inner)`, whatever the sizes look like."""
    n = size("the sum of lengths", sum(sizes.tolist()))
    q, ends = np.arange(n), np.cumsum(sizes)
    last = q + 1 if inner == "causal" else np.repeat(ends, sizes)
    return _mask(q, np.repeat(ends - sizes, sizes), last, n, n, "document", lengths=tuple(sizes.tolist()), inner=inner)


def _lengths(name: str, values: IntArray) -> IntArray:
    """The tokens of each document, from an argument of `document`."""
    count, step = len(values), np.diff(values)
    begins, first = np.append(True, step != (name == "position_ids"))[:count], np.unique(values, return_index=True)[1]
    rule, fine = {
        "lengths": ("must count at least 1 token", values >= 1),
        "ids": ("must stand together for each document", ~begins | np.isin(np.arange(count), first)),
        "position_ids": ("must count up from 0 in each document", ~begins | (values == 0)),
        "cu_seqlens": ("must start at 0 and never decrease", np.append(count > 0 and values[0] == 0, step >= 0)),
    }[name]
    sizes = {"lengths": values, "cu_seqlens": step[step != 0]}.get(name)
    if sizes is None:
        sizes = np.diff(np.append(np.flatnonzero(begins), count))
    shown, advice = (
        preview(values.tolist()),
        "ids of tokens as ids=, their positions as position_ids=, offsets as cu_seqlens=",
    )
    if not fine.all():
        raise ValueError(f"{name} {rule}, but entry {int(np.argmin(fine))} of {shown} does not; pass {advice}")
    rises = name == "lengths" and values[:1].tolist() == [1] and set(step.tolist()) == {0, 1}  # as ids from 1
    if len(sizes) >= _DOUBTFUL and (rises or (sizes == 1).all()):
        raise ValueError(
            f"{name}={shown} would be {len(sizes)} documents of {preview(np.unique(sizes).tolist())} tokens; pass "
            f"{advice}, and where each token is meant to see itself alone, take sliding_window(n, 1)"
        )
    return sizes


@mask(block="4")
def block_causal(n: int, block: int) -> Mask:
    """k // block <= q // block: full inside a block, causal between blocks (hasse, sec. 4.2.2).

    >>> block_causal(4, 2).dense().int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    n = size("n", n)
    q = np.arange(n)
    block = integer("block", block, 1)
    divides("n", n, block)
    return _mask(q, 0, (q // block + 1) * block, n, n, "block_causal", n=n, block=block)


@mask(indices="0,8")
def global_tokens(n: int, indices: Indices) -> Mask:
    """q is global, or k is global, or q == k (Longformer and ETC, arXiv:2004.08483).

    >>> global_tokens(4, [1]).dense().int().tolist()
    [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1]]
    """
    n = size("n", n)
    q = np.arange(n)
    chosen = np.unique(index_array("indices", indices, n))
    # Numbered with the global tokens first, each row is at most two intervals.
    order = np.concatenate([chosen, np.setdiff1d(q, chosen)])
    rank = np.argsort(order)
    rows = IntervalRows.of(n, n, (q, 0, np.where(q < len(chosen), n, len(chosen))), (q, q, q + 1))
    return Mask(rows, "global_tokens", {"n": n, "indices": tuple(chosen.tolist())}, query_rank=rank, key_rank=rank)


@mask(window="3", indices="0")
def longformer(n: int, window: int, indices: Indices = (0,)) -> Mask:
    """|q - k| < window, or q is global, or k is global (Longformer, arXiv:2004.05150, fig. 2d).

    `window` is one-sided and counts the query's own key; the paper's w is `2 * window - 1`.

    >>> longformer(5, 2, [0]).keys(3).tolist()
    [0, 2, 3, 4]
    """
    n = size("n", n)
    q, window = np.arange(n), integer("window", window, 1)
    everywhere = global_tokens(n, indices)
    rows, rank = everywhere.relabelled()
    assert rank is not None
    # Numbered as `global_tokens` does it, a window is a stretch of the global tokens and a stretch of the others.
    chosen = np.sort(np.argsort(rank)[: len(cast("tuple[int, ...]", everywhere.parameters["indices"]))])
    first, last = np.maximum(q - min(window, n) + 1, 0), np.minimum(q + min(window, n), n)
    low, high = np.searchsorted(chosen, np.stack([first, last]))
    others = IntervalRows.of(n, n, (rank, low, high), (rank, first - low + len(chosen), last - high + len(chosen)))
    parameters = {"n": n, "window": window, "indices": everywhere.parameters["indices"]}
    rows = rows.union(others)
    return Mask(rows, "longformer", parameters, query_rank=rank, key_rank=rank)


@mask(n="32", block="2")
def big_bird(
    n: int, block: int = 64, num_global: int = 1, num_window: int = 3, num_random: int = 3, seed: int = 0
) -> Mask:
    """Block-wise window, global and random attention (BigBird, arXiv:2007.14062, fig. 3; ITC variant).

    With blocks Q = q // block, K = k // block: Q < num_global, or K < num_global, or |Q - K| <= num_window // 2,
    or K is one of `num_random` blocks drawn for Q without replacement from the blocks not yet allowed.

    Args:
        n: sequence length, a multiple of `block`.
        block: tokens per block.
        num_global: leading blocks that attend to all blocks and that all attend to.
        num_window: blocks in the window, odd.
        num_random: random key blocks per query block, or all that are left if these are fewer.
        seed: seed of the random choice; the same seed gives the same mask on every machine.

    >>> big_bird(8, block=1, num_random=0).keys(4).tolist()
    [0, 3, 4, 5]
    """
    n, block = size("n", n), integer("block", block, 1)
    divides("n", n, block)
    num_global = integer("num_global", num_global)
    num_window = integer("num_window", num_window, 1)
    num_random, seed = integer("num_random", num_random), integer("seed", seed)
    if num_window % 2 == 0:
        raise ValueError(f"num_window must be odd, to be centred on the query's block, got {num_window}")
    count, half, generator = n // block, num_window // 2, np.random.default_rng(seed)
    if (intervals := n * (2 + min(num_random, count))) > LARGEST:
        raise too_many(f"big_bird(n={n}, num_random={num_random})", intervals)
    block_row = np.arange(count)
    last_global = np.where(block_row < num_global, count, min(num_global, count))
    first, last = np.maximum(block_row - half, last_global), np.minimum(block_row + half + 1, count)
    wide = np.maximum(last - first, 0)  # of the window, beyond the global blocks
    free = count - last_global - wide
    drawn = [generator.choice(left, size=min(num_random, left), replace=False) for left in free.tolist()]
    row = np.repeat(block_row, [len(blocks) for blocks in drawn])
    random = np.concatenate([*drawn, np.zeros(0, np.int64)]) + last_global[row]  # of the blocks not yet allowed
    random += np.where(random >= first[row], wide[row], 0)
    parameters = {"n": n, "block": block, "num_global": num_global, "num_window": num_window}
    parts = (block_row, 0, last_global), (block_row, first, last), (row, random, random + 1)
    rows = IntervalRows.of(count, count, *parts).in_blocks(block)
    return Mask(rows, "big_bird", parameters | {"num_random": num_random, "seed": seed})


@mask(sinks="2", window="4")
def attention_sink(n: int, sinks: int, window: int) -> Mask:
    """k <= q and (k < sinks or q - k < window) (StreamingLLM, arXiv:2309.17453).

    >>> attention_sink(6, sinks=1, window=2).keys(5).tolist()
    [0, 4, 5]
    """
    n = size("n", n)
    q = np.arange(n)
    sinks = integer("sinks", sinks)
    window = integer("window", window, 1)
    rows = IntervalRows.of(n, n, (q, 0, np.minimum(sinks, q + 1)), (q, q - min(window, n) + 1, q + 1))
    return Mask(rows, "attention_sink", {"n": n, "sinks": sinks, "window": window})


@mask(parents="-1,0,0,1,1,2")
def tree(parents: Indices) -> Mask:
    """k is q or an ancestor of q: verification of a draft tree (SpecInfer, arXiv:2305.09781; Medusa, 2401.10774).

    Args:
        parents: parent of each node; -1 for a root, which `parents[0]` must be.

    Raises:
        ValueError: `parents[0]` is not -1, a parent is out of range, or the parents form a cycle.

    >>> tree([-1, 0, 0, 1]).keys(3).tolist()
    [0, 1, 3]
    """
    parent = index_array("parents", parents)
    n = size("the number of parents", len(parent))
    if n and parent[0] != -1:
        raise ValueError(f"parents[0] must be -1, the root, got {parent[0]}")
    if n and (parent.min() < -1 or parent.max() >= n):
        raise ValueError(f"parents must lie in [-1, {n}), got {parent[(parent < -1) | (parent >= n)][0]}")
    head, rank = _heavy_paths(parent)
    # A node's ancestors are one stretch on each of its at most log2(n) + 1 heavy paths.
    node, here = np.arange(n), np.arange(n)
    pieces: list[tuple[object, object, object]] = [(node[:0], node[:0], node[:0])]
    while len(here):
        pieces.append((rank[node], rank[head[here]], rank[here] + 1))
        here = parent[head[here]]
        node, here = node[here >= 0], here[here >= 0]
    rows = IntervalRows.of(n, n, *pieces)
    return Mask(rows, "tree", {"parents": tuple(parent.tolist())}, query_rank=rank, key_rank=rank)


def _heavy_paths(parent: IntArray) -> tuple[IntArray, IntArray]:
    n = len(parent)
    children: list[list[int]] = [[] for _ in range(n)]
    for node, above in enumerate(parent.tolist()):
        if above >= 0:
            children[above].append(node)
    order = [node for node in range(n) if parent[node] < 0]
    for node in order:  # grows while it is walked: parents before children
        order += children[node]
    if len(order) < n:
        cyclic = sorted(set(range(n)) - set(order))
        raise ValueError(f"parents must form a forest, but nodes {cyclic[:8]} hang below a cycle")
    weight = np.ones(n, dtype=np.int64)
    for node in reversed(order):
        if parent[node] >= 0:
            weight[parent[node]] += weight[node]
    head, rank = np.arange(n), np.zeros(n, dtype=np.int64)
    stack = [node for node in reversed(range(n)) if parent[node] < 0]
    for number in range(n):
        node = stack.pop()
        rank[node] = number
        below = sorted(children[node], key=lambda c: weight[c])  # the heaviest ends up on top of the stack
        if below:
            head[below[-1]] = head[node]
        stack += below
    return head, rank


def _mask(
    rows: object, starts: object, ends: object, n: int, num_keys: int, name: str, /, **parameters: object
) -> Mask:
    return Mask(IntervalRows.build(rows, starts, ends, n, num_keys), name, parameters)


if not TYPE_CHECKING:
    __all__ = list(named_masks(__name__))
