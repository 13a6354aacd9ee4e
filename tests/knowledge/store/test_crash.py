"""Killed at any moment, a store has every acknowledged write, and of the one that was cut short all or nothing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from attnflow.knowledge.store import Store
from tests.knowledge.store import crashing

ROUNDS = 3


def killed(directory, seed):
    """What a process said that was killed a moment after its first writes."""
    said = directory.with_name(f"said-{seed}")
    with said.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.knowledge.store.crashing", str(directory), str(seed)],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    while said.read_text().count("done") < 3 and child.poll() is None:
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0.0, 1.5))
    child.send_signal(signal.SIGKILL)
    _, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors
    return [json.loads(line) for line in said.read_text().splitlines() if line.endswith("}")]


def contents(store):
    """id -> (token, row, version), with embeddings and search compared on the way."""
    entries = store.get(store.ids())
    state = {}
    rows_of = {}
    for entry in entries:
        token, row = map(int, entry.text.split(":"))
        state[entry.id] = (token, row, entry.version)
        rows_of.setdefault(token, crashing.embeddings(token, 2001))
        np.testing.assert_array_equal(entry.embedding.numpy(), rows_of[token][row])
    if entries:
        some = entries[:: max(1, len(entries) // 50)]
        embeddings = torch.stack([entry.embedding for entry in some])
        found = store.range(embeddings, 0.0, mode="exact")
        for entry, one in zip(some, found, strict=True):
            assert entry.id in one.ids.tolist()
        assert set(torch.cat([one.ids for one in found]).tolist()) <= state.keys()
    return state


@pytest.mark.slow
def test_every_acknowledged_write_survives_a_kill(tmp_path):
    state, snapshots, acknowledged, cut_short = {}, {}, 0, 0
    for seed in range(1, ROUNDS + 1):
        said = killed(tmp_path / "store", seed)
        done = {line["done"] for line in said if "done" in line}
        steps = [line for line in said if "name" in line]
        pending = steps.pop() if steps[-1]["token"] not in done else None
        assert {step["token"] for step in steps} == done
        for step in steps:
            state = crashing.apply(state, snapshots, step)
        acknowledged += len(steps)
        with Store.open(tmp_path / "store") as store:
            found = contents(store)
            names = set(store.snapshots())
            if pending is not None and pending["name"] == "snapshot" and pending["label"] in names:
                snapshots[pending["label"]] = state
            assert names == set(snapshots)
        if found != state:
            assert pending is not None
            assert found == crashing.apply(state, dict(snapshots), pending)
            cut_short += 1
        state = found
    assert acknowledged >= 3 * ROUNDS
    print(f"{acknowledged} writes acknowledged, {cut_short} committed without it, {len(state)} entries at the end")
    with Store.open(tmp_path / "store") as store:  # snapshots are whole too
        for name, kept in snapshots.items():
            store.restore(name)
            assert contents(store) == kept
