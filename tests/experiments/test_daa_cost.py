"""What is counted is what the formulas say, rounds have every arm, and the rule."""

import json
from pathlib import Path

import pytest
import torch

import attnflow as af
from benchmarks.bench_bias import HIDDEN, LLAMA2, SMOLLM2, base_model
from experiments.daa_cost import operations, study
from experiments.daa_cost.recipe import EXPERIMENT, judge
from experiments.daa_cost.summary import costs
from experiments.runner.files import write
from tests.experiments.miniature import run_miniature

NARROW = study.miniature(study.tiny())


@pytest.mark.parametrize(("sizes", "pairs"), [(SMOLLM2, 576 + 192), (LLAMA2, 8192)])
def test_operations_of_the_network(sizes: dict[str, int], pairs: int) -> None:
    n, last = 64, 2 * 64 * 64 * HIDDEN
    found = operations.of_network(sizes, n)
    assert found["concatenated"] == 2 * n * n * pairs * HIDDEN + last
    assert found["separated"] == 2 * n * pairs * HIDDEN + last


def test_operations_of_a_model_are_those_of_its_matrices() -> None:
    sizes = NARROW.sizes
    model = base_model(sizes, "cpu")
    model.set_attn_implementation("eager")
    n, width = 8, sizes["hidden_size"]
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    expected = 2 * n * linear + sizes["num_hidden_layers"] * 4 * n * n * width
    rotary = 2 * n * (width // sizes["num_attention_heads"] // 2)  # frequencies by positions: a product as well
    assert operations.passes(model, n) - expected in (0, rotary)
    assert operations.passes(model, n) == operations.passes(_on_meta(sizes), n)


def _on_meta(sizes: dict[str, int]) -> torch.nn.Module:
    model = base_model(sizes, "meta")
    model.set_attn_implementation("eager")
    return model


def test_parameters_are_those_of_the_paper() -> None:
    arms = {name: one for name, one in study.arms().items() if name.startswith("guidance")}
    found = operations.counted(LLAMA2, arms, 8)["arms"]
    assert found["guidance, every other"] == {
        "parameters": 8_392_720, "layers": 16, "parameters by the formula": 8_392_720,
    }  # fmt: skip
    assert found["guidance, every"]["parameters"] == 2 * 8_392_720
    with af.bias.attach(base_model(SMOLLM2, "meta")) as handle:
        assert handle.num_parameters == operations.printed_parameters(SMOLLM2, 15)


def test_the_model_is_as_it_was_after_a_round() -> None:
    model = base_model(NARROW.sizes, "cpu")
    names = [name for name, _ in model.named_parameters()]
    found = study.run_passes(model, NARROW)
    assert found["base"] == found["base again"] < found["guidance, every other"] < found["guidance, every"]
    one = study.timed(model, NARROW, 3, lambda *_: None)
    again = study.timed(model, NARROW, 4, lambda *_: None)
    assert sorted(one["order"]) == sorted(again["order"]) == sorted(study.arms())
    assert one["order"] != again["order"]
    assert all(seconds > 0 for each in one["seconds"].values() for seconds in each.values())
    assert [name for name, _ in model.named_parameters()] == names
    assert model.config._attn_implementation == "sdpa"


def test_costs_are_those_of_table_5() -> None:
    seconds = {"base": {"training": 1.0, "decoding": 2.0}, "arm": {"training": 1.25, "decoding": 2.5}}
    rounds = [{"seconds": seconds}, {"seconds": {**seconds, "base": {"training": 2.0, "decoding": 4.0}}}]
    rounds[1]["seconds"]["arm"] = {"training": 2.5, "decoding": 5.0}
    assert costs(rounds, "arm", "training") == pytest.approx([0.2, 0.2, 0.2])
    assert costs(rounds, "arm", "decoding") == pytest.approx([0.25, 0.25, 0.25])


@pytest.mark.slow  # trains a step for each arm and round
def test_a_study_of_seconds(tmp_path: Path) -> None:
    said = run_miniature(EXPERIMENT, tmp_path, NARROW)
    assert "guidance, every other" in said
    assert "2 rounds" in said
    content = json.loads((tmp_path / "results" / "results.json").read_text())
    assert set(content["cost"]) == set(study.arms()) - {"base"}
    assert (tmp_path / "results" / "figure.png").stat().st_size > 10_000
    (found,) = judge(tmp_path / "results")
    assert (found.claim, found.verdict) == ("D19", "not testable here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_scale_of_a_gpu_says_so() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        study.setup(study.small())


@pytest.mark.parametrize(
    ("training", "decoding", "verdict"),
    [
        ((0.08, 0.07, 0.10), (0.12, 0.11, 0.13), "confirmed"),
        ((0.02, 0.01, 0.03), (0.03, 0.02, 0.04), "corrected"),
        ((0.02, 0.01, 0.03), (0.12, 0.11, 0.13), "not confirmed"),
        ((0.02, 0.01, 0.03), (0.30, 0.25, 0.35), "refuted"),
    ],
)
def test_the_rule(
    training: tuple[float, float, float], decoding: tuple[float, float, float], verdict: str, tmp_path: Path
) -> None:
    arm = "guidance, every other"
    shape = {"operations of the base": 100, "operations of g in a layer": {"concatenated": 16, "separated": 1}}
    content = {
        "shape": "LLaMA-2-7B",
        "device": "cuda",
        "length": 2048,
        "cost": {arm: {"training": training, "decoding": decoding}},
        "shapes": {"LLaMA-2-7B": {**shape, "arms": {arm: {"layers": 16}}}},
    }
    write(tmp_path / "results.json", content)
    (found,) = judge(tmp_path)
    assert found.verdict == verdict
    assert "256 % as algorithm 1 prints it and 16.0 % separated" in found.sentence
    write(tmp_path / "results.json", {**content, "device": "cpu"})
    assert judge(tmp_path)[0].verdict == "not testable here"
