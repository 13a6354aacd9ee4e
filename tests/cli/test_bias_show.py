"""`attnflow bias show` on a tiny model with a saved bias."""

import json
import shutil

import pytest

from attnflow.bias import BiasMap
from attnflow.bias.map import QueryBias
from tests.bias.hf.common import rewrite

TEXT = "I the of thou with thy"


def test_text(run, tiny_model, saved):
    out = run.ok("bias", "show", tiny_model, "--bias", saved, "--text", TEXT)
    lines = out.splitlines()
    assert lines[0] == f"{tiny_model} with the bias {saved}"
    assert lines[1] == "query thy (5)"
    assert lines[3].split()[:3] == ["layer", "strength", "moved"]
    assert [line.split()[0] for line in lines[4:]] == ["0", "1"]
    assert all(" / " in line for line in lines[4:])


def test_json(run, tiny_model, saved):
    command = ("bias", "show", tiny_model, "--bias", saved, "--text", TEXT, "--json")
    view = QueryBias.from_json(run(*command).out)
    assert view.tokens == tuple(TEXT.split())
    assert (view.query, view.head, view.produced) == (5, None, None)
    assert [layer.layer for layer in view.layers] == [0, 1]
    assert sum(view.layers[0].bias) == pytest.approx(0.0, abs=1e-5)
    assert sum(view.weights) == pytest.approx(1.0)
    assert sum(view.weights_base) == pytest.approx(1.0)
    assert set(view.layers[0].energy) == {1, 8}


def test_files(run, tiny_model, saved, tmp_path):
    for suffix in ("svg", "png", "html", "csv", "json"):
        file = tmp_path / f"map.{suffix}"
        out = run.ok("bias", "show", tiny_model, "--bias", saved, "--text", TEXT, "-o", str(file))
        assert f"written: {file}" in out
        assert file.stat().st_size > 100
    found = BiasMap.from_json((tmp_path / "map.json").read_text())
    assert found.to_csv() == (tmp_path / "map.csv").read_text()
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "The bias, layer by layer" in (tmp_path / "map.html").read_text()


def test_generation_and_choices(run, tiny_model, saved):
    base = ("bias", "show", tiny_model, "--bias", saved, "--text", TEXT)
    view = QueryBias.from_json(run(*base, "--generate", "2", "--json").out)
    assert view.query == 6
    assert view.produced is not None
    view = QueryBias.from_json(run(*base, "--head", "3", "--layer", "1", "--query", "2", "--json").out)
    assert (view.query, view.head, len(view.layers)) == (2, 3, 1)
    assert view.layers[0].bias[3:] == (None, None, None)  # what the mask forbids
    assert sum(view.weights[:3]) == pytest.approx(1.0)
    assert "query of (2), head 3" in run(*base, "--head", "3", "--query", "2").out


def test_a_saved_bias_names_its_base_model(run, tiny_model, saved, tmp_path):
    assert run("bias", "show", saved, "--text", TEXT).code == 0
    folder = tmp_path / "nameless"
    shutil.copytree(saved, folder)
    config = json.loads((folder / "bias_config.json").read_text())
    config["base"]["name"] = ""
    rewrite(folder, base=config["base"])
    err = run.refused("bias", "show", str(folder))
    assert "does not name its base model; give it: attnflow bias show MODEL --bias" in err
