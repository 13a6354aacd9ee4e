import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.cli._arguments import EXAMPLES


@pytest.mark.parametrize("to", sorted(af.masks.export.FORMATS))
def test_every_format(run: Callable, to: str, tmp_path: Path) -> None:
    mask = af.masks.causal(6)
    code, out, err = run("mask", "export", "causal", "--n", "6", "--to", to, "--json")
    assert (code, err) == (0, "")
    assert af.masks.Mask.from_json(out) == mask
    assert json.loads(out) == json.loads(af.masks.export.FORMATS[to](mask).to_json())
    file = tmp_path / "mask.json"
    code, shown, _ = run("mask", "export", "causal", "--n", "6", "--to", to, "-o", str(file))
    assert code == 0
    assert f"written          {file}" in shown
    assert file.read_text() == out
    assert json.loads(run("mask", "debug", str(file), "--json").out)["same_as"] == "causal(n=6)"


def test_the_whole_catalogue(run: Callable) -> None:
    for name, words in EXAMPLES.items():
        for to in af.masks.export.FORMATS:
            code, out, err = run("mask", "export", name, *words.split(), "--to", to)
            assert (code in (0, 1), err) == (True, ""), (name, to)
            assert ("cannot say" in out) == (code == 1)


def test_a_refusal_is_a_finding(run: Callable) -> None:
    code, out, err = run("mask", "export", "butterfly", "--n", "6", "--to", "flashmask", "--json")
    assert (code, err) == (1, "")
    refusal = json.loads(out)
    query, key = refusal["pair"]
    assert refusal["schema"] == "attnflow.mask.export.refused/1"
    assert refusal["allowed"] == af.masks.butterfly(6).allows(query, key)


def test_a_mask_upside_down(run: Callable, tmp_path: Path) -> None:
    file = tmp_path / "mask.pt"
    torch.save(~af.masks.causal(8).dense(), file)
    code, out, err = run("mask", "debug", str(file))
    assert (code, err) == (1, "")
    assert "inverted        its complement is causal(n=8)" in out
    assert run("mask", "debug", str(file), "--masked-true").code == 0
    code, out, _ = run("mask", "debug", str(file), "--masked-true", "--against", "sliding_window", "--set", "window=7")
    assert code == 1
    assert "allows query 7, key 0" in out
