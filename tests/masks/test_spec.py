"""Masks as plain data: every form, and messages that name the place of a mistake."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

import attnflow as af
from attnflow._core.plain import read_json
from attnflow.masks.registry import named_masks
from attnflow.masks.spec import mask_from_dict
from tests.catalogue_cases import MASKS
from tests.strategies import mask_pairs


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_round_trip_of_the_catalogue(mask: af.masks.Mask) -> None:
    spec = json.loads(mask.to_json())
    assert spec["name"] == mask.name
    assert mask_from_dict(spec) == mask


def test_text_settings() -> None:
    window = named_masks()["sliding_window"]
    assert window.signature == "sliding_window(n, window, causal=true)"
    assert window.read({"n": "9", "window": "3", "causal": "False"}) == {"n": 9, "window": 3, "causal": False}
    document = named_masks()["document"]
    assert document.read({"lengths": "[2, 1]", "inner": "full"}) == {"lengths": [2, 1], "inner": "full"}
    assert document.read({"lengths": ""}) == {"lengths": []}
    with pytest.raises(ValueError, match="no parameter 'windw': did you mean window"):
        window.read({"windw": "3"})
    with pytest.raises(ValueError, match="needs window"):
        window.require({"n": 3})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sliding_window", {"window": "3.5"}, "window must be an integer, got window=3.5"),
        ("sliding_window", {"window": ""}, "window must be an integer"),
        ("sliding_window", {"causal": "maybe"}, "causal must be true or false"),
        ("sliding_window", {"window": str(10**30)}, "window is at most 4,194,304"),
        ("document", {"lengths": "3;4"}, "lengths must be integers separated by commas"),
        ("document", {"lengths": "3,,4"}, "lengths must be integers separated by commas"),
        ("document", {"inner": "half"}, "inner must be one of causal, full"),
    ],
)
def test_bad_text_settings(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_masks()[name].read(settings)


def test_a_mask_without_a_name_is_written_by_its_intervals() -> None:
    mask = af.masks.full(2, 3) & af.masks.from_dense(af.masks.full(2, 3).dense())
    spec = mask.to_dict()
    assert spec == {"intervals": [[[0, 3]], [[0, 3]]], "num_keys": 3}
    assert mask_from_dict(spec) == mask


def test_mask_specs() -> None:
    causal = af.masks.causal(3)
    rows = [[[0, 1]], [[0, 2]], [[0, 3]]]
    pairs = [[q, k] for q in range(3) for k in range(q + 1)]
    assert mask_from_dict({"intervals": rows}) == causal
    assert mask_from_dict({"dense": ["100", "110", "111"]}) == causal
    assert mask_from_dict({"dense": [[1, 0, 0], [True, True, False], [1, 1, 1]]}) == causal
    assert mask_from_dict({"edges": pairs, "num_queries": 3}) == causal
    assert mask_from_dict({"dense": []}).shape == (0, 0)
    assert mask_from_dict({"intervals": [[[0, 2]]], "num_keys": 5}).shape == (1, 5)
    window = {"name": "sliding_window", "parameters": {"n": 4, "window": 2}}
    documents = {"name": "document", "parameters": {"lengths": [2, 2]}}
    expected = af.masks.sliding_window(4, 2) & af.masks.document([2, 2])
    assert mask_from_dict({"and": [window, documents]}) == expected
    assert mask_from_dict({"or": [{"not": window}, window]}) == af.masks.full(4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "expected a JSON object, got a list"),
        ({}, "a mask has one of name, intervals, dense, edges, and, or, not, attnflow; got nothing"),
        ({"nmae": "causal"}, "got nmae"),
        ({"name": "causal", "dense": []}, "got name and dense"),
        ({"name": 3}, "name must be text, got 3"),
        ({"name": "casual", "parameters": {"n": 3}}, "did you mean causal"),
        ({"name": "causal", "parameters": {"m": 3}}, "unknown name 'm'"),
        ({"name": "causal"}, r"causal\(n\) lacks n"),
        ({"name": "causal", "parameters": {"n": 10**15}}, "n is at most 4,194,304"),
        ({"name": "causal", "parameters": {"n": True}}, "n: expected an integer, got true"),
        ({"name": "causal", "parameters": {"n": 2.0}}, "n: expected an integer, got 2.0"),
        ({"name": "causal", "parameters": [3]}, r"mask.parameters: expected a JSON object, got a list"),
        ({"name": "causal", "n": 3}, "unknown name 'n'"),
        ({"name": "sliding_window", "parameters": {"n": 3, "window": 0}}, "window must be at least 1"),
        (
            {"name": "sliding_window", "parameters": {"n": 3, "window": 2, "causal": 1}},
            "causal: expected true or false, got 1",
        ),
        ({"name": "document", "parameters": {"lengths": [1, "2"]}}, "lengths: expected an integer, got the text '2'"),
        ({"name": "document", "parameters": {"lengths": 3}}, "lengths: expected a list, got 3"),
        ({"intervals": [[0, 1]]}, r"intervals\[0\]: expected a list, got 0"),
        ({"intervals": [[[0, 1, 2]]]}, "a pair of integers, got 3 entries"),
        ({"intervals": [[[0, 2]]]}, r"expected 0 <= start <= end <= 1, got the interval \(0, 2\)"),
        ({"dense": [[1, 0], [1]]}, r"dense\[1\]: expected 2 entries like row 0, got 1"),
        ({"dense": [[1, 2], [1, 1]]}, r"dense\[0\]\[1\]: expected 0, 1, true or false, got 2"),
        ({"dense": [[1.0]]}, "expected 0, 1, true or false"),
        ({"dense": "11"}, "expected a list"),
        ({"edges": [[0, 0]]}, "edges need num_queries"),
        ({"edges": [[0, 5]], "num_queries": 2}, r"keys of edges must hold positions in \[0, 2\), got 5"),
        ({"and": []}, "expected at least one mask"),
        ({"or": [{"dense": ["1"]}, {"dense": ["10", "11"]}]}, r"different shapes: \(1, 1\) and \(2, 2\)"),
        ({"not": {"and": [{"dense": ["1"]}, 3]}}, r"mask.not.and\[1\]: expected a JSON object, got 3"),
        ({"intervals": [[[0, 1]]], "query_rank": [1]}, "order must be a permutation"),
        ({"attnflow": "FlashMsk"}, "did you mean FlashMask"),
        ({"attnflow": "FlashMask", "version": 2}, "expected version 1"),
        ({"attnflow": "FlashMask", "version": 1}, "a saved FlashMask is damaged"),
    ],
)
def test_bad_mask_specs(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask_from_dict(spec)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: .* at line 1, column 2"),
        (b"", "not JSON"),
        (b"[1]", "expected a JSON object, got a list"),
        (b"null", "got null"),
        (b'{"n": NaN}', "NaN is not allowed in JSON"),
        (b'{"n": 1, "n": 2}', "'n' appears twice"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "spec.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_json(file)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.json", r"cannot read .*nothing\.json: No such file"
    for path, message in (missing, (tmp_path, "Is a d")):
        with pytest.raises(ValueError, match=message):
            read_json(path)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"dense": ["1"]}'))
    assert mask_from_dict(read_json("-")) == af.masks.causal(1)


def test_a_mask_numbered_anew_is_written_with_its_numbers() -> None:
    order = np.random.default_rng(0).permutation(200)
    mask = af.masks.sliding_window(200, 20).permute(order)
    spec = mask.to_dict()
    assert set(spec) == {"intervals", "query_rank", "key_rank"}
    assert af.masks.from_json(mask.to_json()) == mask
    shuffled = mask.permute(np.arange(200), order)
    assert af.masks.from_json(shuffled.to_json()) == shuffled


@given(mask_pairs())
def test_json_of_any_mask(pair: tuple[af.masks.Mask, af.masks.Mask]) -> None:
    for mask in (*pair, pair[0] & pair[1], ~pair[0]):
        assert af.masks.from_json(mask.to_json()) == mask


def test_json_that_is_no_mask() -> None:
    with pytest.raises(ValueError, match="the JSON of a mask is not JSON"):
        af.masks.from_json("")


def test_a_name_of_ones_own_may_be_one_of_the_catalogue() -> None:
    for name in named_masks():
        mask = af.masks.from_dense(af.masks.full(4).dense(), name=name)
        assert mask_from_dict(json.loads(mask.to_json())) == mask
