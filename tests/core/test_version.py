"""The newest versions that were tried: one table, in step with what the checks run with; one warning beyond it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnflow._core import version

ROOT = Path(__file__).parents[2]
TABLE = version.NEWEST_TRIED
ENTRIES = ["attnflow.masks.hf", "attnflow.models.loading.loader", "attnflow.geometry.in_use"]


def test_the_checks_run_with_nothing_newer_than_the_table_says():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert [name for name in TABLE if version._minor(pins[name]) > version._minor(TABLE[name])] == []
    assert version.untried() == {}, "renew NEWEST_TRIED in _core/version.py, once all else passes"


def test_the_page_on_support_says_what_the_table_says():
    shown = {"torch": "PyTorch", "lancedb": "LanceDB", "numpy": "NumPy", "scipy": "SciPy", "trl": "TRL", "peft": "PEFT"}
    rows = re.findall(r"^\| (\w+) \| .* \| ([\d.]+) \|$", (ROOT / "docs" / "support.md").read_text(), re.MULTILINE)
    assert {name: dict(rows)[shown.get(name, name)] for name in TABLE} == TABLE


@pytest.mark.parametrize(
    ("tried", "given", "newer"),
    [
        ("5.24", "5.24.3", False),
        ("5.24", "5.25.0.dev0", True),
        ("5.24", "5.3.0", False),
        ("2.13", "2.13.0+cpu", False),
        ("2.13", "3.0", True),
        ("26.0", "26.0.1", False),
    ],
)
def test_a_patch_release_is_not_newer_and_a_minor_one_is(monkeypatch, tried, given, newer):
    monkeypatch.setattr(version, "NEWEST_TRIED", {"a": tried})
    monkeypatch.setattr(version.metadata, "version", lambda _: given)
    assert version.untried() == ({"a": given} if newer else {})


def imported(tried):
    code = f"import attnflow._core.version as v; v.NEWEST_TRIED.update({tried!r})\n"
    code += "".join(f"import {name}\n" for name in ENTRIES)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_the_warning_comes_once_and_only_beyond_the_table():
    assert "newer than" not in imported({})
    printed = imported({"transformers": "4.57", "torch": "2.1"})
    assert printed.count("newer than attnflow") == 1
    assert re.search(r"torch 2\.\S+, transformers 5\.\S+: newer than", printed)
    assert "install 'torch==2.1.*' 'transformers==4.57.*'" in printed
