"""Files damaged in many ways are read as what they say or refused by `BadCheckpoint` with their name: nothing else.

200 files of each format; `make fuzz` reads 10,000.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attnflow._core.errors import AttnflowError
from attnflow.geometry.score import layers_of
from attnflow.masks.spec import mask_from_dict
from attnflow.models.weights.checkpoints import BadCheckpoint, open_weights
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


def _config(folder):
    _safetensors(folder)
    config = {"num_attention_heads": 4, "quantization_config": {"weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


STRANGE = ["8", -8, None, [4, 4], {}, float("nan"), 2**70, True, [{"num_heads": "4"}]]


def test_a_config_with_a_strange_value_is_read_or_refused_by_name(tmp_path):
    ZOO["Llama"].build().save_pretrained(tmp_path)
    file, scored, refused = tmp_path / "config.json", 0, list[str]()
    plain = json.loads(file.read_text())
    for word, value in itertools.product([*plain, "head_dim", "text_config", "num_heads"], STRANGE):
        file.write_text(json.dumps(plain | {word: value}))
        try:
            scored += len(layers_of(tmp_path)[1]) == 2
        except AttnflowError as error:
            refused.append(str(error))
    file.write_text(json.dumps([plain]))
    with pytest.raises(BadCheckpoint, match=r"config\.json holds no JSON object"):
        layers_of(tmp_path)
    assert scored
    assert refused
    assert all(str(tmp_path) in message for message in refused)


def _index(folder):
    shutil.move(_safetensors(folder), folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(_tensors(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model.safetensors.index.json"


# Each writes a checkpoint into a folder and returns the file that is to be damaged.
FORMATS: dict[str, Callable[[Path], Path]] = {
    "safetensors": _safetensors,
    "gguf": _gguf,
    "config": _config,
    "index": _index,
}
SPECS: dict[str, tuple[Callable[[Any], object], dict[str, Any]]] = {
    "expression": (
        mask_from_dict,
        {"and": [{"name": "causal", "parameters": {"n": 3}}, {"not": {"dense": ["100"] * 3}}]},
    ),
    "edges": (mask_from_dict, {"edges": [[0, 1], [1, 1]], "num_queries": 3, "num_keys": 3}),
    "intervals": (mask_from_dict, {"intervals": [[[0, 1]], [[0, 2]], []]}),
    "task": (
        Task.from_dict,
        {
            "inputs": [5, {"id": [5, 9], "position": 1, "provenance": [1]}],
            "labels": [{"position": 0, "target": {"id": 7, "position": 1}, "task": 0, "weight": 1.0}],
            "mask": {"name": "causal", "parameters": {"n": 2}},
        },
    ),
}


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
