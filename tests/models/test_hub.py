"""Models of the hub are scored from its cache, into which their safetensors and JSON files are downloaded."""

from __future__ import annotations

import fnmatch
import shutil

import huggingface_hub
import pytest

from attnflow.geometry.score import score
from attnflow.models.weights.checkpoints import BadCheckpoint
from tests.models import ZOO

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    ZOO["Llama"].build().save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    return tmp_path / "llama"


def test_files_of_safetensors_and_their_config_are_downloaded(folder, tmp_path, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"PK")

    def download(name, *, allow_patterns, ignore_patterns):
        (tmp_path / "there").mkdir()
        for file in folder.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, tmp_path / "there")
        return str(tmp_path / "there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    scores = score("someone/llama")
    assert scores.matrices == score(folder).matrices
    assert scores.model == "someone/llama"
    assert not (tmp_path / "there" / "pytorch_model.bin").exists()


def test_a_cached_copy_is_taken_offline(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache" / "models--someone--llama"
    with pytest.raises(FileNotFoundError, match="HF_HUB_OFFLINE"):
        score("someone/llama")
    shutil.copytree(folder, cache / "snapshots" / COMMIT)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    assert score("someone/llama").matrices == score(folder).matrices
    next((cache / "snapshots" / COMMIT).glob("*.safetensors")).unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of .* shards"):
        score("someone/llama")


def test_models_that_are_not_there(monkeypatch):
    def download(name, **_):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded from the hub \(no route\)"):
        score("someone/nothing")
    with pytest.raises(FileNotFoundError, match="no file or folder 'some/where/else'"):
        score("some/where/else")
