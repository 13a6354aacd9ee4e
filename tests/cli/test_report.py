import json
from collections.abc import Callable
from pathlib import Path

import attnflow as af


def test_mask(run: Callable, tmp_path: Path) -> None:
    target = tmp_path / "mask.html"
    out = run.ok("report", "butterfly", "--n", "5", "-o", str(target), "--json")
    found = json.loads(out)
    assert found["schema"] == "attnflow.report/1"
    assert (found["title"], found["ok"], found["written"]) == ("butterfly(n=5)", True, str(target))
    assert found["bytes"] == target.stat().st_size < 2_000_000
    assert {"mask", "order", "blocks"} <= set(found["sections"])
    assert target.read_text().startswith("<!doctype html>")
    out = run.ok("report", "butterfly", "--n", "5", "-o", str(target))
    assert out.startswith(f"butterfly(n=5): {target} (")


def test_task_and_its_leak(run: Callable, tmp_path: Path) -> None:
    target, file = tmp_path / "task.html", tmp_path / "task.json"
    task = af.tasks.merge(af.tasks.butterfly([5, 6, 7, 8])).task
    file.write_text(json.dumps(task.to_dict()))
    code, out, _ = run("report", str(file), "-o", str(target), "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    assert "leaks" in json.loads(out)["sections"]
    file.write_text(json.dumps({**task.to_dict(), "mask": {"name": "full", "parameters": {"n": 10}}}))
    code, out, _ = run("report", str(file), "-o", str(target))
    assert code == 1
    assert "It contains a leak." in out
    assert "layer 1" in target.read_text()


def test_model(run: Callable, tiny_model: str, tmp_path: Path, masked: Callable) -> None:
    target = tmp_path / "model.html"
    out = run.ok("report", tiny_model, "--text", "the rest of my life", "-o", str(target), "--json")
    found = json.loads(out)
    assert found["ok"]
    assert {"audit", "order"} <= set(found["sections"])
    masked(af.masks.full(8))
    code, out, _ = run("report", tiny_model, "--tokens", "8", "-o", str(target))
    assert code == 1
    assert "It contains a leak." in out
