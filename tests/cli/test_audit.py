import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af


def test_clean_model(run: Callable, tiny_model: str) -> None:
    out = run.ok("audit", tiny_model, "--tokens", "12")
    assert f"{tiny_model}: LlamaForCausalLM" in out
    assert "clean: causal" in out
    assert "2 x 12 positions, 2 layers" in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_a_leak_is_a_finding_with_its_module(run: Callable, tiny_model: str, masked: Callable) -> None:
    masked(af.masks.full(8))
    code, out, err = run("audit", tiny_model, "--tokens", "8")
    assert (code, err) == (1, "")
    assert "LEAK: causal" in out
    assert "model.layers.0.self_attn" in out
    found = json.loads(run("audit", tiny_model, "--tokens", "8", "--json").out)
    assert found["violations"][0]["module"] == "model.layers.0.self_attn"
    assert found["violations"][0]["source"] > found["violations"][0]["target"]


def test_order_ids_cache_and_precision(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    ids = ["--ids", "3,1,4,1,5,9,2,6"]
    assert run("audit", tiny_model, *ids, "--float64").code == 0
    assert run("audit", tiny_model, *ids, "--cache", "--passes", "3").code == 0
    unbounded = run("audit", tiny_model, *ids, "--order", "full")
    assert (unbounded.code, "nothing tested" in unbounded.out) == (1, True)
    window = tmp_path / "window.json"
    window.write_text(json.dumps({"name": "sliding_window", "parameters": {"n": 8, "window": 3}}))
    code, out, _ = run("audit", tiny_model, *ids, "--order", str(window), "--json")
    assert code == 1, "a causal model sees more than a window"
    assert json.loads(out)["positions"] == 8


def test_models_without_a_tokenizer(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model) / name, tmp_path)
    err = run.refused("audit", str(tmp_path))
    assert "has no tokenizer" in err
    assert "--ids 5,6,7" in err
    assert run("audit", str(tmp_path), "--ids", "5,6,7,8").code == 0


def test_a_saved_order(run: Callable, tiny_model: str, tmp_path: Path, masked: Callable) -> None:
    path = tmp_path / "order.json"
    out = run.ok("audit", tiny_model, "--tokens", "6", "--save", str(path))
    assert f"{path}: measured order of LlamaForCausalLM" in out
    saved = json.loads(path.read_text())
    assert len(saved["inputs"]["input_ids"][0]) == 6
    assert saved["backend"] == "sdpa"
    out = run.ok("audit", tiny_model, "--against", str(path))
    assert f"{path}: the same in 2 layers" in out
    both = json.loads(run("audit", tiny_model, "--against", str(path), "--json").out)
    assert (both["schema"], both["audit"]["ok"], both["difference"]["ok"]) == ("attnflow.audit.against/1", True, True)

    masked(af.masks.sliding_window(6, 2))
    code, out, _ = run("audit", tiny_model, "--against", str(path))
    assert code == 1, "nothing leaks, and pairs are missing"
    assert "clean: causal" in out
    assert "DIFFERENT in 2 of 2 layers: 0 extra, 20 missing" in out
    assert json.loads(run("audit", tiny_model, "--against", str(path), "--json").out)["difference"]["ok"] is False


def test_a_saved_order_of_another_model(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    assert run("audit", tiny_model, "--tokens", "5", "--save", str(path)).code == 0
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "model": "GPT2LMHeadModel", "inputs": {"input_ids": [[5000, 1]]}}))
    err = run.refused("audit", tiny_model, "--against", str(path))
    assert "another model: the saved order is of GPT2LMHeadModel" in err
    path.write_text(json.dumps({key: value for key, value in saved.items() if key != "flows"}))
    err = run.refused("audit", tiny_model, "--against", str(path))
    assert "damaged: it has no flows" in err


@pytest.mark.slow
def test_the_real_models_break_no_order(run: Callable) -> None:
    said = {"smollm2-135m": (0, "clean: causal"), "minilm": (1, "nothing tested: bidirectional")}
    for name, (status, words) in said.items():
        code, out, err = run("audit", name, "--tokens", "12", "--passes", "4")
        assert (code, err) == (status, "")
        assert words in out
