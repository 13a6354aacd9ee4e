import io
import json
from pathlib import Path

import pytest

import attnflow as af
from attnflow.cli._catalogue import EXAMPLES, entries, make_mask, settings_from
from attnflow.cli._output import BadUsage
from attnflow.cli._spec import mask_argument, mask_from, read_json


@pytest.mark.parametrize("name", sorted(entries()))
def test_every_catalogue_mask_is_made_by_its_example(name: str) -> None:
    words = EXAMPLES[name].split()
    n = int(words[words.index("--n") + 1]) if "--n" in words else None
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    mask = make_mask(name, n, settings_from(settings))
    assert mask.name == name
    spec = {"name": name, "parameters": json.loads(json.dumps(dict(mask.parameters)))}
    assert mask_from(spec, "spec") == mask


def test_examples_name_catalogue_masks_only() -> None:
    assert set(EXAMPLES) == set(entries())


def test_typed_values_reach_the_mask() -> None:
    mask = make_mask("sliding_window", 9, {"window": "3", "causal": "False"})
    assert mask == af.masks.sliding_window(9, 3, causal=False)
    assert make_mask("document", None, {"lengths": "[2, 1]", "inner": "full"}) == af.masks.document([2, 1], "full")
    assert make_mask("document", None, {"lengths": ""}) == af.masks.document([])
    assert make_mask("tree", None, {"parents": "-1,0"}) == af.masks.tree([-1, 0])
    assert make_mask("causal", None, {}) == af.masks.causal(16)
    assert make_mask("full", 3, {"num_keys": "5"}).shape == (3, 5)


@pytest.mark.parametrize(
    ("name", "n", "settings", "message"),
    [
        ("slidng_window", None, {}, "unknown mask 'slidng_window': did you mean sliding_window"),
        ("prefix-lm", None, {}, "did you mean prefix_lm"),
        ("zzzz", None, {}, r"unknown mask 'zzzz' \(`attnflow mask list` shows all\)"),
        ("sliding_window", None, {}, "needs window; for example: attnflow mask show sliding_window --set window=4"),
        ("sliding_window", None, {"windw": "3"}, "no parameter 'windw': did you mean window"),
        ("sliding_window", None, {"window": "0"}, "window must be at least 1, got 0"),
        ("sliding_window", None, {"window": "3.5"}, "window must be an integer, got window=3.5"),
        ("sliding_window", None, {"window": ""}, "window must be an integer"),
        ("sliding_window", None, {"window": "3", "causal": "maybe"}, "causal must be true or false"),
        ("causal", 10**15, {}, "n is at most 4,194,304 on the command line"),
        ("sliding_window", None, {"window": str(10**30)}, "window is at most"),
        ("sliding_window", 4, {"window": "3", "n": "5"}, "n is given twice"),
        ("document", 4, {"lengths": "3"}, "has no parameter n"),
        ("document", None, {"lengths": "3;4"}, "lengths must be integers with commas"),
        ("document", None, {"lengths": "3,,4"}, "lengths must be integers with commas"),
        ("document", None, {"lengths": "3,4", "inner": "half"}, "inner must be one of causal, full"),
        ("block_causal", 10, {"block": "4"}, "n must be a multiple of block = 4, got 10; pad to 12"),
        ("tree", None, {"parents": "0,0"}, r"parents\[0\] must be -1"),
        ("xlnet_two_stream", None, {"permutation": "0,2"}, "permutation must be a permutation"),
    ],
)
def test_bad_names_and_settings(name: str, n: int | None, settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        make_mask(name, n, settings)


@pytest.mark.parametrize("texts", [["window"], ["=4"], ["window=3", "window=4"], [""]])
def test_bad_set_options(texts: list[str]) -> None:
    with pytest.raises(BadUsage, match="--set"):
        settings_from(texts)


def test_mask_specs() -> None:
    causal = af.masks.causal(3)
    rows = [[[0, 1]], [[0, 2]], [[0, 3]]]
    pairs = [[q, k] for q in range(3) for k in range(q + 1)]
    assert mask_from({"intervals": rows}, "spec") == causal
    assert mask_from({"dense": ["100", "110", "111"]}, "spec") == causal
    assert mask_from({"dense": [[1, 0, 0], [True, True, False], [1, 1, 1]]}, "spec") == causal
    assert mask_from({"edges": pairs, "num_queries": 3}, "spec") == causal
    assert mask_from({"dense": []}, "spec").shape == (0, 0)
    assert mask_from({"intervals": [[[0, 2]]], "num_keys": 5}, "spec").shape == (1, 5)
    window = {"name": "sliding_window", "parameters": {"n": 4, "window": 2}}
    documents = {"name": "document", "parameters": {"lengths": [2, 2]}}
    expected = af.masks.sliding_window(4, 2) & af.masks.document([2, 2])
    assert mask_from({"and": [window, documents]}, "spec") == expected
    assert mask_from({"or": [{"not": window}, window]}, "spec") == af.masks.full(4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "expected a JSON object, got a list"),
        ({}, "a mask has one of name, intervals, dense, edges, and, or, not; got nothing"),
        ({"nmae": "causal"}, "got nmae"),
        ({"name": "causal", "dense": []}, "got name and dense"),
        ({"name": 3}, "name must be text, got 3"),
        ({"name": "casual", "parameters": {"n": 3}}, "did you mean causal"),
        ({"name": "causal", "parameters": {"m": 3}}, "unknown name 'm'"),
        ({"name": "causal"}, "needs n"),
        ({"name": "causal", "parameters": {"n": 10**15}}, "n is at most 4,194,304"),
        ({"name": "causal", "parameters": {"n": True}}, "n: expected an integer, got true"),
        ({"name": "causal", "parameters": {"n": 2.0}}, "n: expected an integer, got 2.0"),
        ({"name": "causal", "parameters": [3]}, r"spec.parameters: expected a JSON object, got a list"),
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
        ({"not": {"and": [{"dense": ["1"]}, 3]}}, r"spec.not.and\[1\]: expected a JSON object, got 3"),
    ],
)
def test_bad_mask_specs(spec: object, message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        mask_from(spec, "spec")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: .* at line 1, column 2"),
        (b"", "not JSON"),
        (b"[1]", "expected a JSON object, got a list"),
        (b"null", "got null"),
        (b'{"n": NaN}', "NaN is no number"),
        (b'{"n": 1, "n": 2}', "'n' stands twice"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "spec.json"
    file.write_bytes(content)
    with pytest.raises(BadUsage, match=message):
        read_json(str(file))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match=r"cannot read .*nothing\.json: No such file"):
        read_json(str(tmp_path / "nothing.json"))
    with pytest.raises(BadUsage, match="Is a directory"):
        read_json(str(tmp_path))


def test_a_file_stands_for_its_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "causal", "parameters": {"n": 3}}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8-sig")
    assert mask_argument(str(file), None, []) == af.masks.causal(3)
    file.write_text(json.dumps({"inputs": [1, 2, 3], "labels": [], "mask": spec}))
    assert mask_argument(str(file), None, []) == af.masks.causal(3)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(spec)))
    assert mask_argument("-", None, []) == af.masks.causal(3)
    with pytest.raises(BadUsage, match="belong to masks of the catalogue"):
        mask_argument(str(file), 3, [])
