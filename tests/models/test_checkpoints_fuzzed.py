"""Files damaged in many ways are read as what they say or refused by `BadCheckpoint` with their name: nothing else.

200 files of each format; `make fuzz` reads 10,000.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from attnflow.masks.spec import mask_from_dict
from attnflow.models.checkpoints import BadCheckpoint, open_weights
from attnflow.models.loader import load_model
from tests.models import ZOO
from tests.models.damage import FORMATS, SPECS, damaged, read_whole

COUNT = int(os.environ.get("ATTNFLOW_FUZZ", "200"))


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused_by_name(write, tmp_path):
    file = write(tmp_path)
    read_whole(tmp_path)
    data, refused = file.read_bytes(), list[str]()
    for number in range(COUNT):
        file.write_bytes(damaged(data, random.Random(number)))
        try:
            read_whole(tmp_path)
        except BadCheckpoint as error:
            refused.append(str(error))
        except Exception as error:
            raise AssertionError(f"file {number}: {type(error).__name__}: {error}") from error
    assert refused
    assert all(str(tmp_path) in message or "weight_block_size" in message for message in refused)


@pytest.mark.parametrize("name", SPECS)
def test_damaged_specs_are_value_errors(name):
    read, spec = SPECS[name]
    data = json.dumps(spec).encode()
    read(spec)
    for number in range(COUNT):
        try:
            value = json.loads(damaged(data, random.Random(number)))
        except (ValueError, RecursionError):
            continue
        try:
            read(value)
        except ValueError:
            pass
        except Exception as error:
            raise AssertionError(f"spec {number}, {value}: {type(error).__name__}: {error}") from error


def test_masks_in_masks_in_masks():
    spec = {"dense": ["1"]}
    for _ in range(2000):
        spec = {"not": spec}
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        mask_from_dict(spec)


def _header(folder, header):
    file = folder / "model.safetensors"
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    return file


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a": "\xff"}',
        {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [-64, 0]}},
        {"a": {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": ["4", 4], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64, 64]}},
        {"a": {"dtype": "F32", "shape": [True, 16], "data_offsets": [0, 64]}},
        [1],
    ],
    ids=["deep", "bytes", "before", "negative", "text", "three", "bool", "list"],
)
def test_hostile_headers(tmp_path, header):
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors has a damaged header"):
        open_weights(_header(tmp_path, header))


def test_empty_tensors_are_read(tmp_path):
    save_file({"a": torch.zeros(0, 4), "b": torch.zeros(4, 0)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert weights.read("a", None).shape == (0, 4)
    assert weights.read("b", (1, 3)).shape == (2, 0)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '"a"', '{"a": "\\ud800'])
def test_hostile_configs(tmp_path, text):
    FORMATS["safetensors"](tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_weights(tmp_path)


def test_scales_of_no_size(tmp_path):
    tensors = {"a": torch.ones(4, 4).to(torch.float8_e4m3fn), "a_scale": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    for size in ([0, 0], [2], "no", [2, -2]):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": size}}))
        with pytest.raises(BadCheckpoint, match="weight_block_size of the config must be two sizes"):
            open_weights(tmp_path).read("a", None)


def test_lists_in_lists_of_gguf(tmp_path):
    key = b"a"
    nested = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    data = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    data += len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + nested * 5000
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(BadCheckpoint, match=r"model\.gguf has a damaged header: RecursionError"):
        open_weights(tmp_path)


def test_zip_bombs_are_not_unpacked(tmp_path):
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "bomb.bin", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for part in plain.infolist():
            bomb.writestr(part.filename, plain.read(part))
    with pytest.raises(BadCheckpoint, match=r"bomb\.bin is compressed"):
        open_weights(tmp_path / "bomb.bin")


def test_tensors_larger_than_what_is_stored(tmp_path):
    torch.save({"a": torch.zeros(1).expand(1 << 20, 1 << 15)}, tmp_path / "wide.bin")
    with pytest.raises(BadCheckpoint, match="larger than what is stored"):
        open_weights(tmp_path / "wide.bin")


@pytest.fixture
def saved(tmp_path):
    ZOO["Llama"].build().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors"])
def test_an_index_that_leaves_its_folder(saved, name):
    file = saved / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    file.write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="outside of its folder"):
        load_model(saved, tokenizer=False)
    with pytest.raises(BadCheckpoint, match="outside of its folder"):
        open_weights(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -4},
        {"hidden_size": "a"},
        {"vocab_size": None},
        {"rope_parameters": 3},
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": -1},
        {"hidden_size": 2**40},
        {"architectures": [3]},
        {"architectures": "LlamaForCausalLM"},
    ],
    ids=str,
)
def test_configs_that_transformers_refuses(saved, change):
    file = saved / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(BadCheckpoint, match="model"):
        load_model(saved, tokenizer=False)


def test_a_config_asks_for_no_class_that_is_no_model(saved):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    for name in ("Trainer", "AutoConfig", "no such class"):
        file.write_text(json.dumps({**config, "architectures": [name]}))
        assert type(load_model(saved, tokenizer=False).model).__name__ == "LlamaModel"


def test_weights_of_another_model(tmp_path):
    for name in ("Llama", "GPT2"):
        ZOO[name].build().save_pretrained(tmp_path / name)
    shutil.copy(tmp_path / "Llama" / "model.safetensors", tmp_path / "GPT2")
    with pytest.raises(BadCheckpoint, match="weights of another model than its config describes"):
        load_model(tmp_path / "GPT2", tokenizer=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"[]", b"\xff"])
def test_tokenizers_that_are_no_json(saved, name, text):
    (saved / name).write_bytes(text)
    with pytest.raises(BadCheckpoint, match="has no tokenizer"):
        load_model(saved)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]"])
def test_configs_that_are_no_json(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="model"):
        load_model(saved, tokenizer=False)
