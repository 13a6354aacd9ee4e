"""The cache of unpacked models: the same bits, made again where it is damaged, safe under several processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.models.loading import loader as cache
from tests.models.checkpoints import write_llama


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNFLOW_CACHE", str(tmp_path / "cache"))


def entries():
    folder = cache.cache_folder()
    return [one.name for one in folder.iterdir() if not one.name.startswith(".")] if folder.is_dir() else []


def test_places(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_folder() != Path("/xdg/attnflow")
    monkeypatch.delenv("ATTNFLOW_CACHE")
    assert cache.cache_folder() == Path("/xdg/attnflow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "attnflow"


@pytest.fixture
def gguf(tmp_path):
    """A tiny Llama as a GGUF file that transformers reads, with its weights."""
    return write_llama(tmp_path / "tiny.gguf")


def logits(file, **options):
    model = af.load_model(file, tokenizer=False, **options).model
    with torch.no_grad():
        return model(input_ids=torch.arange(8)[None]).logits


def test_a_gguf_file_is_unpacked_once(gguf, monkeypatch):
    first, half = logits(gguf), logits(gguf, dtype="bfloat16")
    assert len(entries()) == 1

    def refuse(file):
        raise AssertionError("unpacked again")

    monkeypatch.setattr(cache, "_unpack", refuse)
    assert torch.equal(logits(gguf), first)
    assert torch.equal(logits(gguf, dtype="bfloat16"), half)
    model = af.load_model(gguf, tokenizer=False).model
    assert model.name_or_path == str(gguf.parent)
    assert not hasattr(model.config, "quantization_config")
    model.train()(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()  # weights that are read from the entry do not write to it
    assert torch.equal(logits(gguf), first)


def test_other_content_is_another_entry(gguf, tmp_path):
    first = logits(gguf)
    write_llama(gguf, seed=1)
    assert not torch.equal(logits(gguf), first)
    assert len(entries()) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_model_is_unpacked_again(gguf, tmp_path, name, caplog):
    first = logits(gguf)
    (damaged,) = (tmp_path / "cache").glob(f"*-model/{name}")
    damaged.write_bytes(damaged.read_bytes()[:-30])
    assert torch.equal(logits(gguf), first)
    assert "cannot be loaded and is made again" in caplog.text
    caplog.clear()
    assert torch.equal(logits(gguf), first)
    assert not caplog.text


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(gguf, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNFLOW_CACHE", str(tmp_path / "file" / "cache"))
    logits(gguf)
    assert "cannot be kept" in caplog.text


@pytest.mark.slow
def test_processes_side_by_side(gguf, tmp_path):
    code = "import sys, attnflow as af; print(af.load_model(sys.argv[1], tokenizer=False).model.lm_head.weight.sum())"
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(gguf)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = {run.communicate(timeout=300)[0] for run in runs}
    assert len(printed) == 1
    assert all(run.returncode == 0 for run in runs)
    assert [entry.name.startswith(".") for entry in (tmp_path / "cache").iterdir()] == [False]
