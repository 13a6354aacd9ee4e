import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af


def write(folder: Path, spec: object) -> str:
    file = folder / "task.json"
    file.write_text(json.dumps(spec))
    return str(file)


def next_token(mask: object, n: int = 4) -> dict[str, object]:
    labels = [{"position": i, "target": {"id": 10 + i + 1, "position": i + 1}} for i in range(n - 1)]
    return {"inputs": [10 + i for i in range(n)], "labels": labels, "mask": mask}


def test_clean(run: Callable, tmp_path: Path) -> None:
    file = write(tmp_path, next_token({"name": "causal", "parameters": {"n": 4}}))
    code, out, err = run("mask", "check", file)
    assert (code, err) == (0, "")
    assert out.startswith("no label leaks within any number of layers\n")
    assert "dead positions: [3]" in out


def test_leak_with_its_path(run: Callable, tmp_path: Path) -> None:
    # Two layers are needed: 0 reads 1 reads 2 ... but the label of 1 is token 2, one layer away.
    file = write(tmp_path, next_token({"edges": [[0, 2], [2, 1]], "num_queries": 4}))
    code, out, err = run("mask", "check", file)
    assert (code, err) == (1, "")
    assert "labels leak" in out or "label leaks" in out
    assert "layer 1: 1 -> 2, layer 2: 2 -> 0" in out
    assert "Traceback" not in err
    found = json.loads(run("mask", "check", file, "--json").out)
    assert found["attnflow"] == "LeakReport"
    assert not found["ok"]
    assert [leak["witness"] for leak in found["leaks"]] == [[1, 2, 0]]


def test_layers(run: Callable, tmp_path: Path) -> None:
    file = write(tmp_path, next_token({"edges": [[0, 2], [2, 1]], "num_queries": 4}))
    assert run("mask", "check", file, "--layers", "1").code == 0
    assert run("mask", "check", file, "--layers", "2").code == 1


def test_tasks_that_the_package_writes(run: Callable, tmp_path: Path) -> None:
    merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7, 8]))
    file = write(tmp_path, merged.task.to_dict())
    assert run("mask", "check", file).code == 0
    code, out, _ = run("mask", "show", file, "--json")
    assert code == 0
    assert json.loads(out)["allowed_pairs"] == af.masks.butterfly(4).nnz


def test_stdin(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next_token({"name": "causal", "parameters": {"n": 4}})
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(spec)))
    assert run("mask", "check", "-").code == 0
