"""Integers of any kind are converted once, booleans are booleans, and what is neither is refused by its name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from jaxtyping import config

from attnflow import masks, order, tasks
from attnflow._core import checks
from tests.arguments import CALLS

INTEGERS = {
    "numpy int8": np.int8,
    "numpy int32": np.int32,
    "numpy uint64": np.uint64,
    "numpy array": np.array,
    "torch": torch.tensor,
    "torch int8": lambda value: torch.tensor(value, dtype=torch.int8),
}
NO_INTEGERS = {
    "bool": True,
    "numpy bool": np.True_,
    "torch bool": torch.tensor(True),
    "text": "2",
    "float": 2.5,
    "whole float": 2.0,
    "numpy float": np.float32(2),
    "torch float": torch.tensor(2.0),
    "array": np.array([2]),
    "tensor": torch.tensor([2]),
    "list": [[2], [2]],
    "huge": 2**70,
    "negative and huge": -(2**70),
}
BOOLEANS = {"numpy": np.bool_, "torch": torch.tensor, "numpy array": np.array}
NO_BOOLEANS = {
    "text": "False",
    "empty text": "",
    "number": 2.5,
    "integer": 1,
    "zero": 0,
    "list": [True],
    "tensor": torch.tensor(1),
    "array": np.array([True]),
}
SEQUENCES = {
    "tuple": tuple,
    "numpy int8": lambda values: np.array(values, dtype=np.int8),
    "numpy int64": np.array,
    "torch": torch.tensor,
    "tensors": lambda values: [torch.tensor(value) for value in values],
    "numpy integers": lambda values: [np.int16(value) for value in values],
}
NO_SEQUENCES = {
    "floats": [0.5, 1.0],
    "bools": [True, False],
    "a bool among integers": [0, True],
    "a tensor of bools": torch.tensor([True, False]),
    "texts": ["0", "1"],
    "a text": "01",
    "huge": [2**70],
    "too large for int64": np.array([2**64 - 1], dtype=np.uint64),
    "ragged": [[0], [0, 1]],
    "a number": 2.5,
}


@pytest.fixture(autouse=True)
def no_type_checker():
    """Users have none: without it our own checks see what comes."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", before)


def places(kind):
    """(call, argument) of this kind of value."""
    return [
        pytest.param(function, arguments, name, id=f"{call}({name})")
        for call, (function, arguments) in CALLS.items()
        for name, value in arguments.items()
        if (type(value) is kind if kind is not list else type(value) is list and type(value[0]) is int)
    ]


def plain(value):
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


def refused(function, arguments, what):
    """It is an error of ours: a class that callers expect, and words that name the argument or what came."""
    with pytest.raises((TypeError, ValueError), match=r"must|expected|needs"):
        pytest.fail(f"{what} was accepted and gave {function(**arguments)!r:.80}")


@pytest.mark.parametrize(("function", "arguments", "name"), places(int))
def test_integers_are_of_any_kind(function, arguments, name):
    expected = plain(function(**arguments))
    for kind, make in INTEGERS.items():
        assert plain(function(**{**arguments, name: make(arguments[name])})) == expected, kind


@pytest.mark.parametrize(("function", "arguments", "name"), places(int))
def test_what_is_no_integer_is_refused(function, arguments, name):
    for kind, value in NO_INTEGERS.items():
        if name in ("id", "anchors") and kind in ("array", "tensor", "list"):
            continue  # these take several, too
        refused(function, {**arguments, name: value}, f"{name} = {kind}")


@pytest.mark.parametrize(("function", "arguments", "name"), places(bool))
def test_booleans_are_booleans(function, arguments, name):
    for given in (True, False):
        expected = function(**{**arguments, name: given})
        for kind, make in BOOLEANS.items():
            assert function(**{**arguments, name: make(given)}) == expected, kind
    for kind, value in NO_BOOLEANS.items():
        refused(function, {**arguments, name: value}, f"{name} = {kind}")


@pytest.mark.parametrize(("function", "arguments", "name"), places(list))
def test_sequences_of_integers_are_of_any_kind(function, arguments, name):
    expected = function(**arguments)
    for kind, make in SEQUENCES.items():
        assert function(**{**arguments, name: make(arguments[name])}) == expected, kind
    for kind, value in NO_SEQUENCES.items():
        if name != "provenance" or kind not in ("huge", "too large for int64"):
            refused(function, {**arguments, name: value}, f"{name} = {kind}")


@pytest.mark.parametrize("value", ["1", True, np.True_, torch.tensor(True), float("nan"), float("inf"), None, [1]])
def test_weights_are_numbers(value):
    function, arguments = CALLS["tasks.Label"]
    refused(function, {**arguments, "weight": value}, f"weight = {value!r}")


def test_parameters_are_plain():
    """What a mask was made with is shown and saved as Python's own numbers."""
    mask = masks.sliding_window(np.int32(8), torch.tensor(2), causal=np.False_)
    assert [type(value) for value in mask.parameters.values()] == [int, int, bool]


def test_no_arithmetic_in_the_callers_type():
    """300 positions do not fit in int8, nor the square of 50,000 in int32."""
    assert masks.longformer(np.int32(50_000), 64, [0]) == masks.longformer(50_000, 64, [0])
    assert masks.multi_token_prediction(np.int8(100), np.int8(3)).num_queries == 300
    assert masks.causal(200).keys(np.int8(127)).tolist() == list(range(128))
    blocks = tasks.block_two_stream(list(range(300)), np.int8(100))
    assert [task.size for task in blocks] == [200, 300]


@pytest.mark.parametrize(
    "make",
    [
        lambda n: masks.full(1, n),
        lambda n: masks.full(n),
        lambda n: masks.causal(n),
        lambda n: masks.sliding_window(n, 2),
        lambda n: masks.dilated_window(n, 2, 2),
        lambda n: masks.document([n]),
        lambda n: masks.document([n // 2] * 4),
        lambda n: masks.block_causal(n, n),
        lambda n: masks.prefix_lm(n, 2),
        lambda n: masks.global_tokens(n, [0]),
        lambda n: masks.longformer(n, 2, [0]),
        lambda n: masks.big_bird(n, 1),
        lambda n: masks.attention_sink(n, 1, 1),
        lambda n: masks.block_two_stream(n, 1),
        lambda n: masks.block_two_stream(2, n),
        lambda n: masks.block_diffusion(2, n),
        lambda n: masks.butterfly(n),
        lambda n: masks.multi_token_prediction(2, n),
        lambda n: masks.from_edges([], n),
        lambda n: masks.from_edges([], 1, n),
        lambda n: masks.from_intervals([[]], n),
        lambda n: masks.from_mask_mod(lambda b, h, q, k: q >= k, 1, n),
    ],
)
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

    class Two:
        def __index__(self):
            return 2

    assert dict(masks.block_diffusion(Two(), 1).parameters) == {"num_blocks": 2, "block": 1}
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
