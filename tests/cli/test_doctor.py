import json
from collections.abc import Callable

import pytest

from attnflow.cli import doctor


def test_text_and_json(run: Callable) -> None:
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert "PyTorch version" in out
    assert "transformers" in out
    assert out.rstrip().endswith("everything needed is installed")
    code, out, _ = run("doctor", "--json")
    said = json.loads(out)
    assert (code, said["ok"], said["schema"]) == (0, True, "attnflow.doctor/1")
    assert any(each["name"] == "torch" and each["version"] for each in said["packages"])


def test_something_missing_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: {"scipy": (None, None), "typer": (None, "1.0")})
    code, out, _ = run("doctor")
    assert code == 1
    assert "scipy                 not installed  pip install scipy" in out
    assert out.rstrip().endswith("missing: scipy")
