"""Scores of geometry straight from the weights against forming every d x d matrix with its symmetric and skew parts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from attnflow.geometry import score
from attnflow.geometry.scores import FormScores, full_scores, head_scores
from attnflow.models.loading.names import MODELS
from benchmarks.harness import Case, main

HEAD_DIM = 128
LAYERS, SHARDS = 32, 4  # of LLaMA-3-8B


def weights(num_heads: int, num_kv_heads: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights, some directions of which stand out, as in trained ones."""
    torch.manual_seed(0)
    scale = torch.randn(width).exp() / width**0.5
    return torch.randn(num_heads * HEAD_DIM, width) * scale, torch.randn(num_kv_heads * HEAD_DIM, width) * scale


def formed(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both scores as their definitions read."""
    symmetric, skew = (matrix + matrix.T) / 2, (matrix - matrix.T) / 2
    symmetry = (symmetric.norm() ** 2 - skew.norm() ** 2) / matrix.norm() ** 2
    sums = []
    for norms in (matrix.norm(dim=1), matrix.norm(dim=0)):
        threshold = norms.mean() + 2 * norms.std()
        sums.append((norms[norms > threshold] - threshold).sum())
    rows, columns = sums
    return symmetry, (rows - columns) / (rows + columns)


def formed_heads(query: torch.Tensor, key: torch.Tensor, num_heads: int, num_kv_heads: int) -> list[torch.Tensor]:
    """Both scores of every head, [2] each."""
    group = num_heads // num_kv_heads
    keys = key.split(HEAD_DIM)
    return [torch.stack(formed(q.T @ keys[h // group])) for h, q in enumerate(query.split(HEAD_DIM))]


def formed_full(query: torch.Tensor, key: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Both scores of the full matrix, keys repeated for the query heads that share them."""
    repeated = key.unflatten(0, (num_kv_heads, HEAD_DIM)).repeat_interleave(num_heads // num_kv_heads, 0)
    return torch.stack(formed(query.T @ repeated.flatten(0, 1)))


def heads(provider: str, num_heads: int, width: int) -> Callable[[], object]:
    query, key = weights(num_heads, num_heads, width)
    if provider == "formed":
        return lambda: formed_heads(query, key, num_heads, num_heads)
    few = slice(0, 2 * HEAD_DIM)  # no speed of a wrong result
    check(head_scores(query[few], key[few], 2, 2), torch.stack(formed_heads(query[few], key[few], 2, 2)).T)
    return lambda: head_scores(query, key, num_heads, num_heads)


def full(provider: str, num_heads: int, num_kv_heads: int, width: int) -> Callable[[], object]:
    query, key = weights(num_heads, num_kv_heads, width)
    if provider == "product":
        return lambda: query.T @ key
    if provider == "formed":
        return lambda: formed_full(query, key, num_heads, num_kv_heads)
    check(full_scores(query, key, num_heads, num_kv_heads), formed_full(query, key, num_heads, num_kv_heads))
    return lambda: full_scores(query, key, num_heads, num_kv_heads)


def check(found: FormScores, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.stack([found.symmetry, found.directionality]), expected, atol=1e-4, rtol=1e-3)


def smollm2() -> Callable[[], object]:
    path = MODELS["smollm2-135m"].path()
    median = score(path, per_head=False, fold=False).summaries[0].symmetry.median
    assert abs(median - 0.094) < 0.002, median
    return lambda: score(path, fold=False)


def command() -> Callable[[], object]:
    """The whole process: imports, reading, scores, table."""
    arguments = [sys.executable, "-m", "attnflow", "geometry", "smollm2-135m", "--per-head", "--stored"]
    return lambda: subprocess.run(arguments, check=True, capture_output=True)


def llama3_8b() -> Callable[[], object]:
    """A checkpoint of random bfloat16 queries and keys in the shapes of LLaMA-3-8B, in several files."""
    folder = tempfile.TemporaryDirectory()
    query, key = (weight.bfloat16() for weight in weights(32, 8, 4096))
    places: dict[str, str] = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for layer in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            for projection, weight in (("q_proj", query), ("k_proj", key)):
                tensors[f"model.layers.{layer}.self_attn.{projection}.weight"] = weight.clone()
        save_file(tensors, Path(folder.name) / name)
        places |= dict.fromkeys(tensors, name)
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": LAYERS,
    }
    (Path(folder.name) / "config.json").write_text(json.dumps(config))
    (Path(folder.name) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    del tensors, query, key

    def run() -> object:
        return score(folder.name, fold=False)

    return run


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    here = "benchmarks.bench_geometry"
    listed: list[Case] = []
    peers = (("attnflow", "attnflow"), ("every d x d formed", "formed"))
    for provider, key in peers:
        listed.append(Case("scores of 32 heads", provider, 4096, here, "heads", (key, 32, 4096)))
    for kv_heads, what in ((8, "GQA 32:8"), (4, "GQA 32:4"), (32, "multi-head")):
        for provider, key in peers:
            listed.append(
                Case(f"scores of the full matrix, {what}", provider, 4096, here, "full", (key, 32, kv_heads, 4096))
            )
    bound = "what any way that forms M takes at least"
    arguments = ("product", 32, 32, 4096)
    listed.append(
        Case("scores of the full matrix, multi-head", "W_q^T W_k alone", 4096, here, "full", arguments, note=bound)
    )
    size = 135_000_000
    listed.append(Case("score SmolLM2-135M from GGUF", "attnflow", size, here, "smollm2", note="all layers and heads"))
    listed.append(Case("attnflow geometry smollm2-135m", "attnflow", size, here, "command", note="whole process"))
    shapes = "32 layers and their heads, sharded safetensors"
    listed.append(Case("score LLaMA-3-8B shapes", "attnflow", 8_000_000_000, here, "llama3_8b", note=shapes))
    return listed


if __name__ == "__main__":
    main(cases, ["torch", "numpy", "safetensors"], time_limit=300)
