"""`attnflow geometry`: scores of models in text, JSON and files, and what happens to models that cannot be scored."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attnflow as af
from attnflow.geometry.score import Survey
from tests.models import tiny
from tests.report.reading import parse_page, parse_svg


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-t5")
    tiny("T5", torch.float32).save_pretrained(folder)
    return str(folder)


def test_one_model_is_listed_by_layer(run: Callable, tiny_model: str) -> None:
    code, out, err = run("geometry", tiny_model)
    assert (code, err) == (0, "")
    scores = af.geometry.score(tiny_model, per_head=False)
    for row in scores:
        assert f"{row.symmetry:z.3f}" in out
    assert "2 layers" in out
    assert "heads" not in out
    assert "gamma 2 and mode excess" in out
    assert "Ignored: biases, rotary position embeddings" in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_several_models_are_one_table(run: Callable, tiny_model: str, t5: str) -> None:
    code, out, err = run("geometry", tiny_model, t5, tiny_model)
    assert (code, err) == (0, "")
    assert out.count("2 layers") == 3  # the Llama once, T5's encoder and decoder
    assert "encoder, self: 2 layers" in out
    assert "norm" not in out.splitlines()[0]


def test_json_is_what_the_library_says(run: Callable, tiny_model: str) -> None:
    code, out, err = run("geometry", tiny_model, "--json", "--per-head", "--gamma", "1.5", "--mode", "norm")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["attnflow"], found["unscored"]) == ("Survey", {})
    (back,) = Survey.from_json(out).models
    assert back.matrices == af.geometry.score(tiny_model, 1.5, "norm").matrices
    assert (back.model, back.gamma, back.mode) == (tiny_model, 1.5, "norm")


def test_cross_attention(run: Callable, t5: str) -> None:
    (model,) = Survey.from_json(run("geometry", t5, "--attention", "all", "--json").out).models
    kinds = [(s.tower, s.kind, s.count) for s in model.summaries]
    assert kinds == [("encoder", "self", 2), ("decoder", "self", 2), ("decoder", "cross", 2)]


def test_a_bad_model_does_not_stop_the_others(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned"
    poisoned.mkdir()
    for source in Path(tiny_model).glob("*.json"):
        (poisoned / source.name).write_bytes(source.read_bytes())
    weights = {k: v.clone() for k, v in af.models.load_model(tiny_model).model.state_dict().items()}
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = math.nan
    save_file(weights, poisoned / "model.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((Path(tiny_model) / "model.safetensors").read_bytes()[:-100])
    pickled = tmp_path / "pickled.bin"
    torch.save(torch.nn.Linear(2, 2), pickled)
    bad = [str(tmp_path / "nothing"), str(poisoned), str(cut), str(pickled)]
    code, out, err = run("geometry", *bad[:2], tiny_model, *bad[2:], "--json")
    found = json.loads(out)
    assert code == 1
    assert [model["model"] for model in found["models"]] == [tiny_model]
    assert list(found["unscored"]) == bad
    assert "layers.1" in found["unscored"][str(poisoned)]
    assert "NaN or Inf" in found["unscored"][str(poisoned)]
    assert "unexpected" not in err
    lines = err.splitlines()
    assert [line.split(": ")[1] for line in lines] == bad


def test_a_defect_does_not_stop_the_others(run: Callable, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["attnflow.geometry.score"]
    score = vars(module)["score"]

    def broken(source, *arguments, **options):
        if source == "broken":
            raise KeyError("no such thing")
        return score(source, *arguments, **options)

    monkeypatch.setattr(module, "score", broken)
    code, out, err = run("geometry", "broken", tiny_model)
    assert code == 1
    assert "2 layers" in out
    assert "broken: unexpected KeyError: 'no such thing'" in err


@pytest.mark.parametrize("picture", ["plane", "layers", "heads"])
def test_figures(run: Callable, tiny_model: str, tmp_path: Path, picture: str) -> None:
    target = tmp_path / "figure.svg"
    code, out, _ = run("geometry", tiny_model, "-o", str(target), "--picture", picture)
    assert code == 0
    assert f"written: {target}" in out
    assert parse_svg(target.read_text()).tag == "svg"


def test_report_shows_heads_and_failures(run: Callable, tiny_model: str, t5: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    code, _, _ = run("geometry", tiny_model, t5, str(tmp_path / "nothing"), "-o", str(target))
    page = parse_page(target.read_text())
    assert code == 1
    assert {attributes.get("id") for attributes in page.of("section")} >= {"geometry", "layers", "heads"}
    assert f"{tmp_path / 'nothing'} could not be shown" in page.text


def test_what_no_config_says_is_an_option(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes((Path(tiny_model) / "model.safetensors").read_bytes())
    code, _, err = run("geometry", str(own))
    assert code == 2
    assert "--config num_attention_heads=12 on the command line" in err
    code, out, _ = run("geometry", str(own), "--config", "num_attention_heads=4", "--json")
    scores = Survey.from_json(out).models[0]
    assert code == 0
    expected = af.geometry.score(tiny_model, per_head=False)
    assert [row.directionality for row in scores] == [row.directionality for row in expected]
    assert [row.norm for row in scores] == [row.norm for row in expected]
