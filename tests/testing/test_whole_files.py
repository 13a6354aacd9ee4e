"""The test files of the guides run as they are shown, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / "docs" / "guides" / name).read_text() for name in ("pytest.md", "audit.md"))
FILES = {match[1]: match[0] for match in re.finditer(r"(?<=```python\n)# (\w+\.py)\n.*?(?=```)", PAGES, re.DOTALL)}


def test_the_pages_have_a_file_of_each_kind():
    names = ["flex_attention", "hugging_face", "one_line", "plain_module", "train", "trl"]
    assert sorted(FILES) == [*(f"test_{name}.py" for name in names), "train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("test_")])
def test_it_runs(name, tmp_path):
    for each in (name, "train.py"):
        (tmp_path / each).write_text(FILES[each])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FILES[name].count('def test_')} passed" in done.stdout
