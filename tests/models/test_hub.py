"""Models on the hub: only headers and the ranges of queries and keys are fetched."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from safetensors import safe_open

from attnflow.geometry.score import score
from attnflow.models.checkpoints import BadCheckpoint
from attnflow.models.families.table import is_query_or_key
from tests.models import ZOO
from tests.models.checkpoints import write_gguf
from tests.models.hub_server import COMMIT, Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "llama"
    ZOO["Llama"].build().save_pretrained(folder, max_shard_size="20KB")
    served = Hub({"someone/llama": folder})
    constants = huggingface_hub.constants
    with served.running() as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield served
    huggingface_hub.close_session()


def test_only_headers_and_the_ranges_of_queries_and_keys_are_fetched(hub):
    folder = hub.models["someone/llama"]
    scores = score("someone/llama")
    assert scores.matrices == score(folder).matrices
    assert scores.model == "someone/llama"
    needed = _needed(folder)
    assert len({name for name, *_ in needed}) > 1  # several shards
    assert sorted(hub.ranges) == sorted(needed)
    assert hub.served < sum(file.stat().st_size for file in folder.iterdir()) / 2


def _needed(folder):
    """Every range that has to be read: JSON files, headers, and the tensors of queries and keys."""
    ranges = []
    for file in folder.iterdir():
        if file.name in ("config.json", "model.safetensors.index.json"):
            ranges.append((file.name, 0, file.stat().st_size))
        if file.suffix != ".safetensors":
            continue
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        ranges += [(file.name, 0, 8), (file.name, 8, 8 + length)]
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if is_query_or_key(name)]  # noqa: SIM118
        ranges += [(file.name, *(8 + length + at for at in header[name]["data_offsets"])) for name in names]
    return ranges


def test_a_connection_that_breaks_is_tried_again(hub):
    hub.break_at = 500
    assert score("someone/llama").matrices == score(hub.models["someone/llama"]).matrices
    assert hub.break_at is None


def test_a_server_without_ranges_is_refused(hub):
    hub.whole_files = True
    with pytest.raises(BadCheckpoint, match="whole files only"):
        score("someone/llama")


def test_models_that_are_not_there(hub, monkeypatch):
    with pytest.raises(FileNotFoundError, match="someone/nothing"):
        score("someone/nothing")
    with pytest.raises(FileNotFoundError, match="no file or folder 'some/where/else'"):
        score("some/where/else")
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        score("someone/llama")
    assert not hub.requests


@pytest.mark.parametrize("offline", [False, True])
def test_a_complete_cached_copy_is_taken(hub, tmp_path, monkeypatch, offline):
    folder = hub.models["someone/llama"]
    cache = tmp_path / "cache" / "models--someone--llama"
    shutil.copytree(folder, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    scores = score("someone/llama")
    assert scores.matrices == score(folder).matrices
    assert scores.model == "someone/llama"
    assert not hub.ranges


def test_an_incomplete_cached_copy_is_not(hub, tmp_path):
    cache = tmp_path / "cache" / "models--someone--llama" / "snapshots" / COMMIT
    cache.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(hub.models["someone/llama"] / name, cache)
    score("someone/llama")
    assert hub.ranges


def test_weights_that_are_not_read_by_ranges_are_not_fetched(hub, tmp_path):
    pickled, gguf = tmp_path / "pickled", tmp_path / "gguf"
    hub.models |= {"someone/pickled": pickled, "someone/gguf": gguf}
    for folder in (pickled, gguf):
        folder.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadCheckpoint, match="is not opened"):
        score("someone/pickled")
    tensors = {f"blk.0.{name}.weight": torch.randn(512, 512) for name in ("attn_q", "attn_k", "ffn_up")}
    write_gguf(gguf / "m.gguf", "llama", tensors, heads=8, kv_heads=8)
    with pytest.raises(BadCheckpoint, match=r"someone/gguf has its weights in m\.gguf, .* download it"):
        score("someone/gguf")
    assert not hub.ranges
