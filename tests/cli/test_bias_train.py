import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaForCausalLM

import attnflow as af
from attnflow.bias import config
from attnflow.cli.bias_train import Kind

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
    assert (code, err) == (0, "")
    first, second, third = out.splitlines()
    assert first.startswith("bias on 1 of 2 attention layers: ")
    assert second.startswith("held-out loss ")
    assert third == f"written: {folder} (af.bias.load(model, {str(folder)!r}))"
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "bias.safetensors", "bias_config.json", "checkpoints", "curve.csv", "curve.png", "training.json"
    }  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(tiny_model)
    af.bias.load(model, folder)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        biased = model(ids).logits
        with disabled(model):
            assert not torch.equal(model(ids).logits, biased)


def test_json_and_the_same_command_again(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    command = ["bias", "train", tiny_model, "--data", text, *SHORT, "--kind", "key", "-o", str(tmp_path / "out")]
    code, out, err = run(*command, "--json")
    found = json.loads(out)
    assert (code, err, found["schema"]) == (0, "", "attnflow.bias.train/1")
    assert found["bias_parameters"] == found["trained_parameters"]
    assert [entry["step"] for entry in found["curve"]] == [0, 1, 2, 3, 4, 5, 6]
    assert found["held_out_after"] == found["curve"][-1]["eval_loss"]
    assert found["curve"][-1]["bias/layer_0"] > 0
    again = json.loads(run(*command, "--json").out)
    assert again["held_out_after"] == found["held_out_after"]
    code, _, err = run(*command, "--seed", "1")
    assert code == 2
    assert "a run with other settings (training)" in err


def test_the_whole_model_can_be_trained(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    code, out, _ = run("bias", "train", tiny_model, "--data", text, *SHORT, "--train", "all", "-o", str(folder))
    assert code == 0
    before, after = (float(out.splitlines()[1].split()[index]) for index in (2, 4))
    assert after < before - 0.1
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert af.bias.load(model, folder).parameters > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "tree"], "'tree' is not one of 'guidance', 'bilinear'"),
        (["--data", "none.txt"], "no file or folder 'none.txt'"),
        (["--length", "2000"], "which is not one row of 2000: give more text"),
        (["--rate", "0"], "learning_rate must be positive"),
    ],
)
def test_what_cannot_be_trained_is_said(
    run: Callable, tiny_model: str, text: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, out, err = run("bias", "train", tiny_model, "--data", text, *SHORT, "-o", str(tmp_path / "out"), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "defect" not in err


def test_every_kind_is_offered() -> None:
    assert [kind.value for kind in Kind] == list(get_args(config.Kind))


def test_models_that_predict_nothing_are_refused(run: Callable, tiny_model: str, text: str, tmp_path: Path) -> None:
    small = BertConfig(vocab_size=21, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertModel(small).save_pretrained(tmp_path / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bert" / name).write_text((Path(tiny_model) / name).read_text())
    code, _, err = run("bias", "train", str(tmp_path / "bert"), "--data", text, "-o", str(tmp_path / "out"))
    assert code == 2
    assert "needs a causal language model, got a BertModel" in err
