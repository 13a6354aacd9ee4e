import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaForCausalLM, TrainerCallback, TrainerState

import attnflow as af
from attnflow.bias import GuidanceConfig, TrainingConfig
from attnflow.bias.hf.saving import KINDS
from attnflow.bias.run import run_settings
from attnflow.bias.trained import Trained
from attnflow.cli.bias import Kind

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

TEXT = "the king of the land is not with thee and it is not for thee to be in it . " * 20
SHORT = ["--steps", "6", "--length", "16", "--batch", "2", "--rate", "1e-2"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_a_bias_is_trained_and_can_be_loaded(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, err = run("bias", "train", tiny_model, "--data", text, *SHORT, "-o", str(folder))
    assert code == 0
    assert err.splitlines()[0].startswith("step 0 of 6: held-out loss ")  # not on a terminal: a line for each entry
    assert [line.split(":")[0] for line in err.splitlines()[1:-1]] == [f"step {k} of 6" for k in range(1, 7)]
    first, second, third = out.splitlines()
    assert first.startswith("bias on 1 of 2 attention layers: ")
    assert second.startswith("held-out loss ")
    assert third == f"written: {folder} (af.bias.load(model, {str(folder)!r}))"
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "bias.safetensors", "bias_config.json", "checkpoints", "curve.csv", "curve.png",
        "settings.json", "training.json",
    }  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    af.bias.load(model, folder)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        biased = model(ids).logits
        af.bias.handle(model).enabled = False
        assert not torch.equal(model(ids).logits, biased)


def test_json_and_the_same_command_again(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    command = ["bias", "train", tiny_model, "--data", text, *SHORT, "--kind", "key", "-o", str(tmp_path / "out")]
    code, out, _ = run(*command, "--json")
    done = Trained.from_json(out)
    assert (code, done.steps) == (0, 6)
    assert done.num_parameters == done.num_trained
    assert [entry["step"] for entry in done.curve] == [0, 1, 2, 3, 4, 5, 6]
    assert done.curve[-1]["bias/layer_0"] > 0
    assert Trained.from_json(run(*command, "--json").out) == done


def test_other_settings_are_named_before_the_model_is_loaded(run: Callable, text: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")  # looks like a model, and cannot be loaded
    settings = run_settings(TrainingConfig(steps=12, log_every=2, save_every=4), [GuidanceConfig()], "guidance", 512)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text(json.dumps(settings))
    code, out, err = run(
        "bias",
        "train",
        str(tmp_path / "empty"),
        "--data",
        text,
        "--steps",
        "20",
        "--every",
        "4",
        "-o",
        str(tmp_path / "out"),
    )
    assert (code, out) == (2, "")
    assert "training.steps was 12 and is 20; training.log_every was 2 and is 4; training.evaluate_every was 50" in err
    assert "choose another folder" in err


def test_an_interrupted_run_says_how_it_goes_on(
    run: Callable, tiny_model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bias", "train", tiny_model, "--data", text, *SHORT, "--every", "2", "-o", str(tmp_path / "out")]
    stop = {"at": 1}

    def on_step_end(self: object, args: object, state: TrainerState, *_: object, **__: object) -> None:
        if state.global_step == stop["at"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainerCallback, "on_step_end", on_step_end)
    code, out, err = run(*command)
    assert (code, out) == (130, "")
    assert "interrupted; the same command goes on from the start: no checkpoint was due yet" in err
    stop["at"] = 5
    code, _, err = run(*command)
    assert code == 130
    assert err.splitlines()[-1] == "attnflow: interrupted; the same command goes on from step 4"
    stop["at"] = -1
    code, _, err = run(*command)
    assert code == 0
    assert "step 5 of 6" not in err
    assert "step 6 of 6" in err


def test_a_run_that_meets_nan_stops_and_goes_on_from_what_was_good(
    run: Callable, tiny_model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    command = ["bias", "train", tiny_model, "--data", text, *SHORT, "--every", "2", "-o", str(folder)]

    def poison(self: object, args: object, state: TrainerState, *_: object, **more: Any) -> None:
        if state.global_step == 4:
            more["model"].model.layers[0].mlp.up_proj.weight.data[3, 3] = torch.nan

    with monkeypatch.context() as patch:
        patch.setattr(TrainerCallback, "on_step_begin", poison)
        code, out, err = run(*command)
    assert (code, out) == (2, "")
    assert "training stopped at step 5: the loss is nan, because model.layers.0.mlp.up_proj.weight holds NaN" in err
    assert "Nothing of it is saved; the last checkpoint is of step 4." in err
    assert "step 5 of 6" not in err
    assert not (folder / "bias.safetensors").exists()
    assert not (folder / "training.json").exists()
    code, _, err = run(*command)
    assert code == 0
    assert "step 4 of 6" not in err
    assert "step 6 of 6" in err


def test_the_whole_model_can_be_trained(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, _ = run("bias", "train", tiny_model, "--data", text, *SHORT, "--train", "all", "-o", str(folder))
    assert code == 0
    before, after = (float(out.splitlines()[1].split()[index]) for index in (2, 4))
    assert after < before - 0.1
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert af.bias.load(model, folder).num_parameters > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "tree"], "'tree' is not one of 'guidance', 'bilinear'"),
        (["--data", "none.txt"], "no file or folder 'none.txt'"),
        (["--length", "2000"], "which is not one row of 2000: give more text"),
        (["--rate", "0"], "learning_rate must be positive"),
        (["-o", "text.txt/out"], "is a file; results need a folder"),
    ],
)
def test_what_cannot_be_trained_is_said(
    run: Callable, tiny_model: str, text: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    arguments = [argument.replace("text.txt", text) for argument in arguments]
    code, out, err = run("bias", "train", tiny_model, "--data", text, *SHORT, "-o", str(tmp_path / "out"), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "defect" not in err


def test_every_kind_is_offered() -> None:
    assert get_args(Kind) == tuple(KINDS)


def test_models_that_predict_nothing_are_refused(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    small = BertConfig(vocab_size=21, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertModel(small).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bert" / name).write_text((Path(tiny_model) / name).read_text())
    code, _, err = run("bias", "train", str(tmp_path / "bert"), "--data", text, "-o", str(tmp_path / "out"))
    assert code == 2
    assert "needs a causal language model, got a BertModel" in err
