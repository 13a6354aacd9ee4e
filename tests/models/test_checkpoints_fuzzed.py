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
from attnflow.tasks.task import Task
from tests.models import ZOO
from tests.models.checkpoints import write_gguf

COUNT = int(os.environ.get("ATTNFLOW_FUZZ", "200"))
EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, *(b"0-9[]{},:\"'eE.")]


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four wounds: flipped, cut, doubled, overwritten, or with a number made extreme."""
    result = bytearray(data)
    head = min(len(result), draw.choice([64, 512, 4096, len(result)]))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(max(1, min(head, len(result))))
        kind = draw.randrange(6)
        if kind == 0 and result:
            result[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            result[at : at + 1] = bytes([draw.choice(EXTREMES)])
        elif kind == 2:
            del result[at : at + draw.randint(1, 32)]
        elif kind == 3:
            result[at:at] = result[at : at + draw.randint(1, 64)]
        elif kind == 4:
            result[at : at + 8] = draw.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        else:
            del result[draw.randrange(len(result) + 1) :]
    return bytes(result)


def read_whole(path):
    """Every tensor that can be read, and a run of rows of each."""
    weights = open_weights(path)
    for name, shape in weights.shapes.items():
        if name not in weights.packed:
            assert weights.read(name, None).numel() >= 0
            if len(shape) == 2:
                weights.read(name, (0, shape[0] // 2))


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"blk.0.attn_{letter}.weight": torch.randn(32, 32, generator=generator) for letter in "qk"}


def _safetensors(folder):
    tensors = _tensors()
    tensors["a.weight"] = torch.ones(32, 32).to(torch.float8_e4m3fn)
    tensors["a.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def _gguf(folder):
    return write_gguf(folder / "model.gguf", "llama", _tensors(), kv_heads=4)


def _archive(folder):
    torch.save(_tensors(), folder / "model.bin")
    return folder / "model.bin"


def _legacy(folder):
    torch.save(_tensors(), folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def _config(folder):
    _safetensors(folder)
    config = {"num_attention_heads": 4, "quantization_config": {"weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def _index(folder):
    shutil.move(_safetensors(folder), folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(_tensors(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize("write", [_safetensors, _gguf, _archive, _legacy, _config, _index])
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


@pytest.mark.parametrize(
    ("read", "spec"),
    [
        (mask_from_dict, {"and": [{"name": "causal", "parameters": {"n": 3}}, {"not": {"dense": ["100"] * 3}}]}),
        (mask_from_dict, {"edges": [[0, 1], [1, 1]], "num_queries": 3, "num_keys": 3}),
        (mask_from_dict, {"intervals": [[[0, 1]], [[0, 2]], []]}),
        (
            Task.from_dict,
            {
                "inputs": [5, {"id": [5, 9], "position": 1, "provenance": [1]}],
                "labels": [{"position": 0, "target": {"id": 7, "position": 1}, "task": 0, "weight": 1.0}],
                "mask": {"name": "causal", "parameters": {"n": 2}},
            },
        ),
    ],
    ids=["expression", "edges", "intervals", "task"],
)
def test_damaged_specs_are_value_errors(read, spec):
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
    _safetensors(tmp_path)
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
    with pytest.raises(BadCheckpoint, match=r"model\.gguf has a damaged header: lists in lists"):
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
