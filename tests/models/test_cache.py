"""The cache of unpacked models: the same bits, made again where it is damaged, safe under several processes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.models import loader as cache
from attnflow.models.checkpoints import open_weights
from attnflow.models.names import MODELS
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


@pytest.mark.slow
def test_the_real_model_in_the_cache_holds_what_its_file_holds(monkeypatch):
    monkeypatch.delenv("ATTNFLOW_CACHE")  # the cache of this machine, as other tests load this model, too
    af.load_model("smollm2-135m")
    monkeypatch.setattr(cache, "_unpack", None)
    monkeypatch.setattr(cache, "_tokenizer", None)
    started = time.perf_counter()
    model, tokenizer = af.load_model("smollm2-135m")
    assert time.perf_counter() - started < 10  # some 1 s; unpacking takes 20 s
    inside = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    inside |= {
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    names |= {f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight" for n in range(30) for a, b in inside.items()}
    weights = open_weights("smollm2-135m")  # a reader of its own
    for stored, ours in names.items():
        assert torch.equal(weights.read(stored, None), model.state_dict()[ours]), ours
        assert torch.equal(weights.read(stored, (5, 9)), model.state_dict()[ours][5:9]), ours
    assert tokenizer.decode(tokenizer("The capital of France is")["input_ids"]) == "The capital of France is"
    assert tokenizer.chat_template
    assert Path(tokenizer.name_or_path) == Path(model.name_or_path) == MODELS["smollm2-135m"].path().parent
