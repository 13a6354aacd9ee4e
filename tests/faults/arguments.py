"""Arguments of masks, order and tasks that no caller should pass, and expressions over masks against their tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import config

from attnflow import masks
from attnflow.masks import Mask
from tests.arguments import CALLS, MASK_ARGUMENTS
from tests.catalogue_cases import (
    MASKS,
    ancestors,
    big_bird_blocks,
    block_diffusion_of,
    block_two_stream_of,
    butterfly_of,
    document_of,
    multi_token_of,
    two_stream_of,
)

PROMISE = (
    "A wrong argument is a TypeError or a ValueError with a message; an accepted one makes the mask of its definition; "
    "masks combined in any way allow the pairs of their tables."
)
TRIALS = 20_000
SHORT = 60


class _Index:
    """An integer of a class that nobody expects."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class _Broken:
    """What fails when it is asked for its value."""

    def __index__(self) -> int:
        raise RuntimeError("no value")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no items")


NUMBERS: list[Any] = [-(2**70), -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 8, 13, 2**27 + 1, 2**31, 2**63 - 1, 2**70]
OTHERS: list[Any] = [
    *(None, True, False, np.True_, "", "2", b"2", 0.0, 2.0, 2.5, float("nan"), float("inf"), 1j, object(), {}, {1: 2}),
    *(np.float64(3.0), np.array(3), np.array([3]), np.array([[1, 0]]), np.array("a"), np.datetime64("2030-01-01")),
    *(torch.tensor(3), torch.tensor(2.5), torch.tensor([1, 0]), torch.tensor(True), torch.empty(3, device="meta")),
    *([], [0], [1, 0], [0, 0], [-1, 0], [2, 0, 1], [-1, 0, 0, 1], [[0]], [[0], [0, 1]], [0.5], ["0"], [None], [2**70]),
    *((), (0, 1), range(3), {0}, iter([0]), [0, 2**40], np.array([2**64 - 1], dtype=np.uint64), np.zeros((0, 2))),
    *(_Index(2), _Broken(), [_Broken()], int, lambda *_: True, Ellipsis, slice(2), masks.causal(3), "causal", "full"),
]


def trial(seed: int, folder: Path) -> str | None:
    """One call with one or two arguments that are other ones; every third trial is an expression."""
    draw = random.Random(seed)
    with _no_type_checker():
        return _expression(draw) if seed % 3 == 2 else _call(draw)


@contextmanager
def _no_type_checker() -> Iterator[None]:
    """Users have none: without it the package's own checks see what comes."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)


def _call(draw: random.Random) -> str | None:
    name = draw.choice(list(CALLS))
    function, right = CALLS[name]
    arguments = dict(right)
    for argument in draw.sample(list(right), k=min(len(right), draw.choice([1, 1, 2]))):
        kinds = [lambda: draw.choice(NUMBERS), lambda: draw.choice(OTHERS), lambda: draw.randrange(-3, 40)]
        value = draw.choice(kinds)()
        if type(value) is int and draw.random() < 0.3:
            value = draw.choice([_Index, float, str, lambda v: [v]])(value)
        arguments[argument] = value
    what = f"{name}({', '.join(f'{k}={v!r:.60}' for k, v in arguments.items())})"
    try:
        result = function(**arguments)
    except (TypeError, ValueError) as error:
        return None if len(str(error)) > 10 else f"{what}: {type(error).__name__} says {str(error)!r}"
    except RuntimeError as error:
        return None if str(error) in ("no value", "no items") else f"{what}: RuntimeError: {error}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    if name.removeprefix("masks.") in MASK_ARGUMENTS and isinstance(result, Mask):
        return _as_defined(what, name.removeprefix("masks."), result)
    return None


def _as_defined(what: str, name: str, mask: Mask) -> str | None:
    """Its parameters make the mask by a definition that shares no code with the package."""
    allows = _definition(name, dict(mask.parameters))
    if mask.num_queries * mask.num_keys > 16_000_000:  # two streams of 40 blocks of 40 have 3,200 positions
        return f"{what}: a mask of shape {mask.shape} came of small arguments"
    table = [[bool(allows(q, k)) for k in range(mask.num_keys)] for q in range(mask.num_queries)]
    same = np.array_equal(np.array(table, dtype=np.bool_).reshape(mask.shape), mask.dense().numpy())
    return None if same else f"{what}: allows other pairs than its definition"


def _definition(name: str, given: dict[str, Any]) -> Any:
    g = given
    if name == "document":
        doc = document_of(g["lengths"])
        return lambda q, k: doc[q] == doc[k] and (g["inner"] == "full" or k <= q)
    if name == "tree":
        above = [ancestors(g["parents"], node) for node in range(len(g["parents"]))]
        return lambda q, k: k in above[q]
    if name == "big_bird":
        sure = big_bird_blocks(*(g[part] for part in ("n", "block", "num_global", "num_window", "num_random", "seed")))
        made = masks.big_bird(**g)  # which random blocks: only their number is defined
        return lambda q, k: sure(q, k) or made.allows(q, k)
    definitions: dict[str, Any] = {
        "attention_sink": lambda q, k: k <= q and (k < g["sinks"] or q - k < g["window"]),
        "block_causal": lambda q, k: k // g["block"] <= q // g["block"],
        "causal": lambda q, k: k <= q,
        "dilated_window": lambda q, k: (
            (q - k) % g["dilation"] == 0
            and (0 if g["causal"] else 1 - g["window"]) <= (q - k) // g["dilation"] < g["window"]
        ),
        "full": lambda q, k: True,
        "global_tokens": lambda q, k: q in g["indices"] or k in g["indices"] or q == k,
        "longformer": lambda q, k: abs(q - k) < g["window"] or q in g["indices"] or k in g["indices"],
        "prefix_lm": lambda q, k: k < g["prefix"] or k <= q,
        "sliding_window": lambda q, k: (0 if g["causal"] else 1 - g["window"]) <= q - k < g["window"],
    }
    makers: dict[str, Any] = {
        "block_diffusion": block_diffusion_of,
        "block_two_stream": block_two_stream_of,
        "butterfly": butterfly_of,
        "multi_token_prediction": multi_token_of,
        "permutation_lm": two_stream_of,
    }
    return definitions[name] if name in definitions else makers[name](**g)


def _expression(draw: random.Random) -> str | None:
    """A few random operations on masks of one size, against numpy on their tables."""
    sizes = [mask for mask in MASKS if mask.num_queries == mask.num_keys]
    first = draw.choice(sizes)
    same = [mask for mask in sizes if mask.shape == first.shape]
    mask, table = first, first.dense().numpy()
    for _ in range(draw.randint(1, 8)):
        n, other = mask.num_queries, draw.choice(same)
        order = np.array(draw.sample(range(n), n), dtype=np.int64)
        other_table = other.dense().numpy()
        if draw.random() < 0.5:
            other, other_table = other.permute(order), other_table[np.ix_(order, order)]
        step = draw.choice(["and", "or", "not", "permute", "keys"])
        if step == "and":
            mask, table = mask & other, table & other_table
        elif step == "or":
            mask, table = mask | other, table | other_table
        elif step == "not":
            mask, table = ~mask, ~table
        elif step == "permute":
            mask, table = mask.permute(order), table[np.ix_(order, order)]
        else:
            mask, table = mask.permute(np.arange(n), order), table[:, order]
    again = masks.from_dense(torch.from_numpy(table.copy()))
    a, b, c, d = (draw.randint(0, mask.num_queries) for _ in range(4))
    queries, keys = slice(min(a, b), max(a, b)), slice(min(c, d), max(c, d))
    checks = {
        "its table": np.array_equal(mask.dense().numpy(), table),
        "its count": mask.nnz == int(table.sum()),
        "a slice": np.array_equal(mask[queries, keys].dense().numpy(), table[queries, keys]),
        "being equal": mask == again and mask.difference(again) == [],
        "its intervals": np.array_equal(mask.intervals().to_bool(), table),
    }
    wrong = [name for name, holds in checks.items() if not holds]
    return f"{mask!r}: wrong are {', '.join(wrong)}" if wrong else None
