"""Hostile files: each command ends in one sentence and exit code 2, within 4 GB, and waits for nobody."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

MANY = 1 << 27  # positions
TENSORS = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "rows": lambda: torch.eye(4).to_sparse_csr(),
    "meta": lambda: torch.eye(4, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "complex": lambda: torch.eye(4, dtype=torch.complex64),
    "expanded": lambda: torch.ones(1, 1, dtype=torch.bool).expand(300_000, 300_000),
}


def _named(name: str, **parameters: object) -> dict[str, object]:
    return {"name": name, "parameters": parameters}


def _shuffled(size: int, seed: int = 0) -> dict[str, object]:
    return _named("permutation_lm", permutation=random.Random(seed).sample(range(size), size))


LONG = {
    "packed": _named("document", lengths=[MANY]),
    "halves": {"not": _named("document", lengths=[MANY // 2, MANY // 2], inner="full")},
    "edge": {"edges": [[0, 0]], "num_queries": MANY},
    "wide": {"intervals": [[[0, 1]]], "num_keys": MANY},
    "streams": _named("look_ahead", n=1 << 21, horizon=1 << 21),
}
SPECS = {
    **LONG,
    "tree": _named("tree", parents=[-1, *(random.Random(0).randrange(i) for i in range(1, 200_000))]),
    "orders": {"or": [_shuffled(1 << 14), _shuffled(1 << 14, seed=1)]},
    "apart": {"and": [_shuffled(1 << 17), _named("sliding_window", n=1 << 18, window=1 << 10)]},
}
CASES = [
    *((f"debug {name}.pt", "expected a dense tensor") for name in TENSORS if name != "expanded"),
    ("debug expanded.pt", "90,000,000,000 pairs"),
    ("debug empty.npy", "expected shape [queries, keys]"),
    ("debug digits.json", "5000 digits"),
    *((f"{command} {name}.json", "positions, got") for name in LONG for command in ("show", "debug")),
    *((f"{command} {name}.json", "intervals of keys") for name in ("orders", "apart") for command in ("show", "debug")),
    *((f"debug pipe.{kind}", "is a pipe or a device") for kind in ("json", "npy", "pt")),
    ("show pipe.json", "is a pipe or a device"),
    ("check pipe.json", "is a pipe or a device"),
    ("show causal -o loop.svg", "symbolic links form a loop"),
    ("debug loop.json", "Too many levels of symbolic links"),
]
DRIVER = """
import json, os, resource, sys
from contextlib import redirect_stderr
from io import StringIO
import torch
from attnflow.cli._main import main
from attnflow.masks import diagnosis
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
os.chdir(sys.argv[1])
for line in json.load(sys.stdin):
    with redirect_stderr(StringIO()) as said:
        code = main(["mask", *line.split()])
    print(json.dumps([line, code, said.getvalue()]), file=sys.__stdout__)
"""


def _one_sentence(said: str, expected: str) -> None:
    assert expected in said
    assert "defect" not in said
    assert said.startswith("attnflow: ")
    assert said.count("\n") == 1


@pytest.mark.filterwarnings("ignore")  # torch warns of what it saves here
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are read from /proc")
def test_hostile_masks_end_in_a_sentence(tmp_path: Path) -> None:
    for name, make in TENSORS.items():
        torch.save(make(), tmp_path / f"{name}.pt")
    for name, spec in SPECS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(spec))
    (tmp_path / "digits.json").write_text('{"dense": [[' + "1" * 5000 + "]]}")
    np.save(tmp_path / "empty.npy", np.zeros(0))
    for kind in ("json", "npy", "pt"):
        os.mkfifo(tmp_path / f"pipe.{kind}")
    for name in ("loop.svg", "loop.json"):
        (tmp_path / name).symlink_to(name)
    lines = json.dumps([line for line, _ in CASES])
    run = subprocess.run(
        [sys.executable, "-c", DRIVER, tmp_path], input=lines, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    answers = [json.loads(answer) for answer in run.stdout.splitlines()]
    for (line, expected), (_, code, said) in zip(CASES, answers, strict=True):
        assert code == 2, (line, said)
        _one_sentence(said, expected)


def test_a_kernel_of_the_hub_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from attnflow.cli._main import main

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=8)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for kernel, expected in (("owner/kernel", "is code that is not fetched"), ("flash_attention_2", "FlashAttention")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "attn_implementation": kernel}))
        capsys.readouterr()
        assert main(["audit", str(tmp_path), "--ids", "1,2,3"]) == 2
        _one_sentence(capsys.readouterr().err, expected)


def test_a_model_in_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from attnflow.cli._main import main

    os.mkfifo(tmp_path / "model.gguf")
    assert main(["geometry", str(tmp_path / "model.gguf")]) == 2
    assert "is a pipe or a device" in capsys.readouterr().err
