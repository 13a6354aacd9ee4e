import io
import json
from pathlib import Path

import pytest

import attnflow as af
from attnflow.cli._arguments import EXAMPLES, mask_argument, settings_from
from attnflow.cli._output import BadUsage
from attnflow.masks.spec import mask_from_dict, named_masks


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_catalogue_mask_is_made_by_its_example(name: str) -> None:
    words = EXAMPLES[name].split()
    n = int(words[words.index("--n") + 1]) if "--n" in words else None
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    mask = mask_argument(name, n, settings)
    assert mask.name == name
    spec = {"name": name, "parameters": json.loads(json.dumps(dict(mask.parameters)))}
    assert mask_from_dict(spec) == mask


def test_examples_name_catalogue_masks_only() -> None:
    assert set(EXAMPLES) == set(named_masks())


def test_typed_values_reach_the_mask() -> None:
    mask = mask_argument("sliding_window", 9, ["window=3", "causal=False"])
    assert mask == af.masks.sliding_window(9, 3, causal=False)
    assert mask_argument("document", None, ["lengths=[2, 1]", "inner=full"]) == af.masks.document([2, 1], "full")
    assert mask_argument("document", None, ["lengths="]) == af.masks.document([])
    assert mask_argument("tree", None, ["parents=-1,0"]) == af.masks.tree([-1, 0])
    assert mask_argument("causal", None, []) == af.masks.causal(16)
    assert mask_argument("full", 3, ["num_keys=5"]).shape == (3, 5)


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
        ("causal", 10**15, {}, "n is at most 4,194,304 by name"),
        ("sliding_window", None, {"window": str(10**30)}, "window is at most"),
        ("sliding_window", 4, {"window": "3", "n": "5"}, "n is given twice"),
        ("document", 4, {"lengths": "3"}, "has no parameter n"),
        ("document", None, {"lengths": "3;4"}, "lengths must be integers with commas"),
        ("document", None, {"lengths": "3,,4"}, "lengths must be integers with commas"),
        ("document", None, {"lengths": "3,4", "inner": "half"}, "inner must be one of causal, full"),
        ("block_causal", 10, {"block": "4"}, "n must be a multiple of block = 4, got 10; pad to 12"),
        ("tree", None, {"parents": "0,0"}, r"parents\[0\] must be -1"),
        ("permutation_lm", None, {"permutation": "0,2"}, "permutation must be a permutation"),
    ],
)
def test_bad_names_and_settings(name: str, n: int | None, settings: dict[str, str], message: str) -> None:
    with pytest.raises((BadUsage, ValueError), match=message):
        mask_argument(name, n, [f"{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("texts", [["window"], ["=4"], ["window=3", "window=4"], [""]])
def test_bad_set_options(texts: list[str]) -> None:
    with pytest.raises(BadUsage, match="--set"):
        settings_from(texts)


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
