"""Integers of any kind are converted once, booleans are booleans, and what is neither is refused by its name."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from jaxtyping import config

from attnflow import masks, order, tasks
from attnflow._core import checks
from attnflow.masks.registry import named_masks
from attnflow.tasks.derivation import named_families

FAMILIES = {
    "block_diffusion": {
        "tokens": [5, 6, 7, 8],
        "block": 2,
        "masked": [2, 3],
        "mask_token": 1,
        "clean": "causal",
        "noisy": "causal",
        "next_token": True,
        "prompt": 2,
    },
    "block_two_stream": {"tokens": [5, 6, 7, 8], "block": 2, "predict_first": True, "mask_token": 1},
    "butterfly": {"tokens": [5, 6, 7, 8], "block": 2, "masked": [1, 3], "mask_token": 1},
    "causal_lm": {"tokens": [5, 6, 7]},
    "look_ahead": {"tokens": [5, 6, 7, 8], "horizon": 2, "mask_token": 1, "chained": False},
    "masked_lm": {"tokens": [5, 6, 7], "masked": [1], "mask_token": 1},
    "multi_token_prediction": {"tokens": [5, 6, 7], "horizon": 2},
    "permutation_lm": {"tokens": [5, 6, 7], "permutation": [1, 2, 0], "mask_token": 1},
}
METHODS = {
    masks.causal(6): {
        "keys": {"query": 2},
        "allows": {"query": 3, "key": 1},
        "permute": {"order": [0, 2, 1, 3, 4, 5]},
        "difference": {"other": masks.full(6), "limit": 3},
        "block_counts": {"block_size": 2},
    },
    order.analyze(masks.causal(6)): {
        "reaches": {"source": 1, "target": 3, "layers": 2},
        "receptive_field": {"query": 3, "layers": 1},
        "path": {"source": 1, "target": 3},
        "class_of": {"position": 3},
        "growth": {"max_layers": 2},
        "reachability": {"layers": 1},
        "sparsify": {"window": 2, "anchors": 2},
    },
}
FUNCTIONS = {
    masks.from_edges: {"edges": [(1, 0)], "num_queries": 3, "num_keys": 4},
    masks.from_intervals: {"rows": [[(0, 1)], [(1, 2)]], "num_keys": 4},
    masks.from_mask_mod: {"mask_mod": lambda b, h, q, k: q >= k, "num_queries": 3, "num_keys": 4},
    tasks.check: {"task": tasks.merge(tasks.causal_lm([5, 6, 7])), "layers": 2},
    tasks.Token: {"id": 7, "position": 1, "provenance": [1]},
}


def example(name):
    """Arguments of a mask of the catalogue, with its defaults."""
    entry = named_masks()[name]
    given = {each.name: each.default for each in entry.parameters if each.default is not None}
    length = {"n": 12} if any(each.name == "n" for each in entry.parameters) else {}
    return given | length | entry.read(named_masks()[name].example)


def collated(**given):
    batch = tasks.Collator(**given)([[5, 6, 7]])
    return torch.cat([value.flatten().double() for value in batch.values()]).tolist()


CALLS = {
    **{f"masks.{name}": (getattr(masks, name), example(name)) for name in named_masks()},
    **{f"tasks.{name}": (getattr(tasks, name), FAMILIES[name]) for name in named_families()},
    **{
        f"{type(one).__name__}.{n}": (getattr(one, n), given)
        for one, all in METHODS.items()
        for n, given in all.items()
    },
    **{function.__name__: (function, given) for function, given in FUNCTIONS.items()},
    "Collator": (collated, {"family_fn": tasks.causal_lm, "by_length": True, "pad_to_multiple_of": 4}),
    "Label": (partial(tasks.Label, target=tasks.Token(1, 0)), {"weight": 2.0, "position": 1, "task": 1}),
}
RIGHT = {
    int: [np.int8, np.int32, np.uint64, np.array, torch.tensor, lambda value: torch.tensor(value, dtype=torch.int8)],
    bool: [np.bool_, torch.tensor, np.array],
    list: [
        tuple,
        lambda values: np.array(values, dtype=np.int8),
        np.array,
        torch.tensor,
        lambda values: [torch.tensor(value) for value in values],
        lambda values: [np.int16(value) for value in values],
    ],
}
SEVERAL = [np.array([2]), torch.tensor([2]), [[2], [2]]]
HUGE = [[2**70], np.array([2**64 - 1], dtype=np.uint64)]
WRONG = {
    int: [
        *(True, np.True_, torch.tensor(True), "2", 2.5, 2.0, np.float32(2), torch.tensor(2.0), 2**70, -(2**70)),
        *SEVERAL,
    ],
    bool: ["False", "", 2.5, 1, 0, [True], torch.tensor(1), np.array([True])],
    list: [
        *([0.5, 1.0], [True, False], [0, True], torch.tensor([True, False]), ["0", "1"], "01", [[0], [0, 1]], 2.5),
        *HUGE,
    ],
}
TAKEN = {"id": SEVERAL, "anchors": SEVERAL, "provenance": HUGE}  # what is right for one argument


@pytest.fixture(autouse=True)
def no_type_checker():
    """Users have none: without it our own checks see what comes."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def refused(function, arguments, what):
    """It is an error of ours: a class that callers expect, and words that name the argument or what came."""
    with pytest.raises((TypeError, ValueError), match=r"must|expected|needs"):
        pytest.fail(f"{what} was accepted and gave {function(**arguments)!r:.80}")


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        pytest.param(function, arguments, name, id=f"{call}({name})")
        for call, (function, arguments) in CALLS.items()
        for name, value in arguments.items()
        if type(value) in (int, bool) or (type(value) is list and type(value[0]) is int)
    ],
)
def test_numbers_switches_and_sequences_are_of_any_kind_and_nothing_else(function, arguments, name):
    kind = type(arguments[name])
    for value in (True, False) if kind is bool else (arguments[name],):
        expected = plain(function(**{**arguments, name: value}))
        for make in RIGHT[kind]:
            assert plain(function(**{**arguments, name: make(value)})) == expected, make
    for value in WRONG[kind]:
        if not any(value is taken for taken in TAKEN.get(name, ())):
            refused(function, {**arguments, name: value}, f"{name} = {value!r}")


@pytest.mark.parametrize("value", ["1", True, np.True_, torch.tensor(True), float("nan"), float("inf"), None, [1]])
def test_weights_are_numbers(value):
    function, arguments = CALLS["Label"]
    refused(function, {**arguments, "weight": value}, f"weight = {value!r}")


def test_parameters_are_plain():
    """What a mask was made with is shown and saved as Python's own numbers."""
    mask = masks.sliding_window(np.int32(8), torch.tensor(2), causal=np.False_)
    assert [type(value) for value in mask.parameters.values()] == [int, int, bool]


def test_no_arithmetic_in_the_callers_type():
    """300 positions do not fit in int8, nor the square of 50,000 in int32."""
    assert masks.longformer(np.int32(50_000), 64, [0]) == masks.longformer(50_000, 64, [0])
    assert masks.look_ahead(np.int8(100), np.int8(3)).num_queries == 300
    assert masks.causal(200).keys(np.int8(127)).tolist() == list(range(128))
    blocks = tasks.block_two_stream(list(range(300)), np.int8(100), mask_token=0)
    assert [task.size for task in blocks] == [200, 300]


LONG = {  # masks whose one size is n
    **{name: getattr(masks, name) for name in ("full", "causal", "butterfly")},
    **{name: partial(getattr(masks, name), window=2) for name in ("sliding_window", "longformer")},
    "keys": lambda n: masks.full(1, n),
    "dilated_window": lambda n: masks.dilated_window(n, 2, 2),
    "document": lambda n: masks.document([n]),
    "documents": lambda n: masks.document([n // 2] * 4),
    "block_causal": lambda n: masks.block_causal(n, n),
    "prefix_lm": lambda n: masks.prefix_lm(n, 2),
    "global_tokens": lambda n: masks.global_tokens(n, [0]),
    "big_bird": lambda n: masks.big_bird(n, 1),
    "attention_sink": lambda n: masks.attention_sink(n, 1, 1),
    "num_blocks": lambda n: masks.block_two_stream(n, 1),
    "block_two_stream": lambda n: masks.block_two_stream(2, n),
    "block_diffusion": lambda n: masks.block_diffusion(2, n),
    "look_ahead": lambda n: masks.look_ahead(2, n),
    "from_edges": lambda n: masks.from_edges([], n),
    "edges of keys": lambda n: masks.from_edges([], 1, n),
    "from_intervals": lambda n: masks.from_intervals([[]], n),
    "from_mask_mod": lambda n: masks.from_mask_mod(lambda b, h, q, k: q >= k, 1, n),
}


@pytest.mark.parametrize("make", LONG.values(), ids=LONG)
@pytest.mark.parametrize("n", [2 * checks.LARGEST_SIZE, 2**31, 2**62])
def test_sizes_are_capped_before_memory_is_taken(make, n):
    with pytest.raises(ValueError, match=rf"must be at most {checks.LARGEST_SIZE} positions, got \d+: a mask so long"):
        make(n)


@pytest.mark.parametrize("wide", [100, 2**31, 2**40, 2**62, 2**63 - 1])
def test_widths_beyond_the_sequence_allow_all_of_it(wide):
    assert masks.sliding_window(8, wide) == masks.causal(8)
    assert masks.sliding_window(8, wide, causal=False) == masks.full(8)
    assert masks.dilated_window(8, wide, 1) == masks.causal(8)
    assert masks.dilated_window(8, 3, wide) == masks.sliding_window(8, 1)
    assert masks.attention_sink(8, 1, wide) == masks.causal(8)
    assert masks.attention_sink(8, wide, 1) == masks.causal(8)
    assert masks.longformer(8, wide, []) == masks.full(8)
    assert masks.big_bird(8, 1, num_global=wide) == masks.full(8)
    assert masks.big_bird(8, 1, num_window=wide | 1) == masks.full(8)
    assert masks.big_bird(8, 1, num_random=wide) == masks.full(8)


def test_what_random_arguments_found():
    """Tensors without values, an integer of its own class, a family beyond any memory."""
    assert dict(masks.block_diffusion(Index(2), 1).parameters) == {"num_blocks": 2, "block": 1}
    empty = torch.empty(3, device="meta", dtype=torch.int64)
    refused(masks.permutation_lm, {"permutation": empty}, "a tensor on the meta device")
    refused(masks.causal, {"n": torch.empty((), device="meta", dtype=torch.int64)}, "a number on the meta device")
    with pytest.raises(ValueError, match=r"20,000 subtasks with 400,000,000 positions \(3\.2 GB\)"):
        tasks.butterfly(range(20_000))
    assert order.analyze(masks.causal(6)).receptive_field(3, layers=2**62).tolist() == [0, 1, 2, 3]


class Index:
    """An integer of a class that nobody expects."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


ANYTHING = [
    *(-(2**70), -(2**63), -2, -1, 0, 1, 2, 3, 5, 8, 13, 2**27 + 1, 2**31, 2**63 - 1, 2**70, Index(2), Index(-1)),
    *(None, True, np.True_, "", "2", b"2", 2.0, 2.5, float("nan"), float("inf"), 1j, object(), {}, {1: 2}, {0}, int),
    *(np.float64(3.0), np.array(3), np.array([[1, 0]]), np.array("a"), np.datetime64("2030-01-01"), np.zeros((0, 2))),
    *(torch.tensor(3), torch.tensor([1, 0]), torch.empty(3, device="meta"), masks.causal(3), "causal", Ellipsis),
    *([], [0], [1, 0], [0, 0], [-1, 0], [2, 0, 1], [[0], [0, 1]], [0.5], ["0"], [None], [2**70], (0, 1), slice(2)),
]


@pytest.mark.parametrize("name", CALLS)
def test_anything_at_all_is_taken_or_refused_in_words(name):
    """Any value in place of one or two arguments: a result, or a `TypeError` or `ValueError` with a message."""
    function, right = CALLS[name]
    draw = random.Random(name)
    for _ in range(60):
        changed = draw.sample(list(right), k=min(len(right), draw.choice([1, 1, 2])))
        arguments = {**right, **{argument: draw.choice(ANYTHING) for argument in changed}}
        try:
            function(**arguments)
            continue
        except (TypeError, ValueError) as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"{name}({arguments}): {type(error).__name__}: {error}") from error
        assert len(said) > 10, f"{name}({arguments})"
