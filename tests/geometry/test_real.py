"""Released models, whose scores are known; and a checkpoint of the size of a large one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from attnflow.geometry.score import layers_of, score
from attnflow.models.loading.loader import load_model
from attnflow.models.loading.names import MODELS
from tests.memory import PEAK

pytestmark = pytest.mark.slow
VALUES = {"minilm": (0.491, -0.098, -0.013, 0.127), "smollm2-135m": (0.094, -0.245, -0.122, 0.020)}


@pytest.mark.parametrize("name", VALUES)
def test_scores_of_released_models(name):
    symmetry, excess, norm, of_heads = VALUES[name]
    path = MODELS[name].path()
    scores = score(path, fold=False)
    full, heads = scores.summaries
    assert full.symmetry.median == pytest.approx(symmetry, abs=0.002)
    assert full.directionality.median == pytest.approx(excess, abs=0.002)
    assert heads.symmetry.median == pytest.approx(of_heads, abs=0.002)
    assert score(path, mode="norm", fold=False).summaries[0].directionality.median == pytest.approx(norm, abs=0.002)
    assert not scores.notes
    assert not any(row.flags for row in scores)


@pytest.mark.parametrize(("name", "symmetry"), [("minilm", 0.602), ("smollm2-135m", 0.109)])
def test_scores_of_released_models_with_gains(name, symmetry):
    for source in (name, load_model(name, dtype="float32", tokenizer=False)):  # tables of names, and a pass
        scores = score(source)
        assert scores.summaries[0].symmetry.median == pytest.approx(symmetry, abs=0.002)
        assert not any(row.flags for row in scores)


@pytest.mark.parametrize("name", VALUES)
def test_files_hold_what_the_loaded_model_holds(name):
    model = load_model(name, dtype="float32", tokenizer=False).model
    for ours, theirs in zip(layers_of(name)[1], layers_of(model)[1], strict=True):
        assert (ours.layer, ours.num_heads, ours.num_kv_heads) == (theirs.layer, theirs.num_heads, theirs.num_kv_heads)
        assert torch.equal(ours.query().detach(), theirs.query().detach())
        assert torch.equal(ours.key().detach(), theirs.key().detach())


_MEASURE = f"""
{PEAK}
import sys
from attnflow.geometry.score import score
import torch
torch.set_num_threads(1)
torch.randn(512, 512) @ torch.randn(512, 512)  # the libraries of matrix products are loaded
before = peak()
scores = score(sys.argv[1], per_head=sys.argv[2] == "heads")
print(len(scores.matrices), peak() - before)
"""


def test_a_large_checkpoint_takes_the_memory_of_a_layer(tmp_path):
    """Four shards, each with a layer of LLaMA-3-8B's shapes in bfloat16 and a hole in place of its other weights."""
    config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    names = {}
    for shard in range(4):
        file = f"model-0000{shard + 1}-of-00004.safetensors"
        _write(tmp_path / file, [shard])
        names |= {f"model.layers.{shard}.self_attn.{p}_proj.weight": file for p in "qk"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), "heads"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, megabytes = run.stdout.split()
    assert int(rows) == 4 * 33
    assert float(megabytes) < 1024


def _write(path, layers):
    """Queries and keys of some layers, each followed by a hole of the size of the layer's other weights."""
    header, at, parts = {}, 0, []
    for layer in layers:
        for part, rows in (("q", 4096), ("k", 1024)):
            size = rows * 4096 * 2
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            header[name] = {"dtype": "BF16", "shape": [rows, 4096], "data_offsets": [at, at + size]}
            parts.append((at, rows))
            at += size
        rest = (14336 * 3 + 1024 + 4096) * 4096 * 2
        header[f"model.layers.{layer}.rest"] = {"dtype": "BF16", "shape": [rest // 2], "data_offsets": [at, at + rest]}
        at += rest
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for offset, rows in parts:
            file.seek(start + offset)
            torch.randn(rows, 4096).bfloat16().view(torch.uint8).numpy().tofile(file)
        file.truncate(start + at)
