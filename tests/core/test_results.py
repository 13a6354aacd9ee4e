"""Results: what they convert to is read back as it was, and what is no result of this kind is refused."""

import json
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jaxtyping import Float
from torch import Tensor

from attnflow._core.results import Result


@dataclass(frozen=True)
class Row:
    layer: int
    value: float


@dataclass(frozen=True)
class Sample(Result):
    name: str
    rows_of: tuple[Row, ...]
    weights: Float[Tensor, "a b"]
    counts: np.ndarray
    missing: int | None = None


@dataclass(frozen=True)
class Other(Result):
    name: str


SAMPLE = Sample(
    "x",
    (Row(0, math.nan), Row(1, -math.inf)),
    torch.tensor([[0.1, math.inf], [2.0, 3.0]], dtype=torch.float64),
    np.array([1, 2, 3], dtype=np.int64),
)


def test_json_is_read_back_as_it_was_with_numbers_that_are_not_finite():
    again = Sample.from_json(SAMPLE.to_json())
    assert torch.equal(again.weights, SAMPLE.weights)
    assert again.weights.dtype == torch.float64
    assert np.array_equal(again.counts, SAMPLE.counts)
    assert again.counts.dtype == np.int64
    assert math.isnan(again.rows_of[0].value)
    assert again.rows_of[1] == Row(1, -math.inf)
    assert again.missing is None
    assert again.to_json() == SAMPLE.to_json()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_type_survive(dtype):
    values = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    again = Sample.from_json(Sample("x", (), values, SAMPLE.counts).to_json())
    assert again.weights.dtype == dtype
    assert torch.equal(again.weights, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (Other("x").to_json(), "expected a saved Sample, got 'Other'"),
        ("{}", "got something without the key"),
        ("[]", "expected a JSON object with a saved Sample, got list"),
        (json.dumps({**SAMPLE.to_dict(), "version": 2}), "expected version 1 of a saved Sample, got 2"),
        (json.dumps({n: v for n, v in SAMPLE.to_dict().items() if n != "counts"}), "saved Sample is damaged.*counts"),
        (json.dumps({**SAMPLE.to_dict(), "extra": 1}), "saved Sample is damaged.*extra"),
    ],
)
def test_what_is_no_such_result_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Sample.from_json(text)


def test_files_and_data_frames(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.json.*'a\.txt'"):
        SAMPLE.save(tmp_path / "a.txt")
    assert not list(tmp_path.iterdir())
    assert Sample.from_json(SAMPLE.save(tmp_path / "a.json").read_text()).name == "x"
    assert SAMPLE.save(tmp_path / "a.csv").read_text() == "name,missing\nx,\n"
    assert list(SAMPLE.to_pandas().columns) == ["name", "missing"]


@dataclass(frozen=True)
class Leaf:
    name: str
    share: float
    kind: Literal["low", "high"] = "low"


@dataclass(frozen=True)
class Tree(Result):
    leaves: tuple[Leaf, ...]
    by_layer: dict[int, float]
    by_name: dict[str, list[int]]
    best: Leaf | None
    pair: tuple[int, float]
    label: int | str | None
    measured: bool


NUMBERS = st.floats(allow_nan=False)
LEAVES = st.builds(Leaf, st.text(), NUMBERS, st.sampled_from(["low", "high"]))
TREES = st.builds(
    Tree,
    st.lists(LEAVES, max_size=3).map(tuple),
    st.dictionaries(st.integers(), NUMBERS, max_size=3),
    st.dictionaries(st.text(), st.lists(st.integers(), max_size=3), max_size=3),
    st.none() | LEAVES,
    st.tuples(st.integers(), NUMBERS),
    st.none() | st.integers() | st.text(),
    st.booleans(),
)


@given(TREES)
def test_any_result_is_read_back_as_it_was(tree):
    again = Tree.from_json(tree.to_json())
    assert again == tree
    assert again.to_json() == tree.to_json()
    assert Tree.from_dict(tree.to_dict()) == tree


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    )
)
def test_any_array_and_tensor_survives_bit_for_bit(array):
    tensor = torch.from_numpy(array.copy())
    again = Sample.from_json(Sample("x", (), tensor, array).to_json())
    assert again.counts.dtype == array.dtype
    assert again.counts.shape == array.shape
    assert np.array_equal(again.counts, array, equal_nan=array.dtype.kind == "f")
    assert again.weights.dtype == tensor.dtype
    assert torch.equal(again.weights.nan_to_num(7), tensor.nan_to_num(7))


def test_numbers_of_numpy_are_numbers():
    tree = Tree((), {1: np.float32(0.5)}, {"a": [np.int64(3)]}, None, (np.int32(2), np.float64("inf")), None, np.True_)
    again = Tree.from_json(tree.to_json())
    assert again == Tree((), {1: 0.5}, {"a": [3]}, None, (2, math.inf), None, True)


def test_a_field_of_the_wrong_kind_is_named():
    values = Tree((), {}, {}, Leaf("a", 1.0), (1, 2.0), None, True).to_dict()
    with pytest.raises(ValueError, match=r"saved Tree is damaged.*best\.kind"):
        Tree.from_dict({**values, "best": {"name": "a", "share": 1.0, "kind": "middle"}})
