"""The test files of the guide run as they are shown, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "pytest.md").read_text()
FILES = {match[1]: match[0] for match in re.finditer(r"(?<=```python\n)# (test_\w+\.py)\n.*?(?=```)", PAGE, re.DOTALL)}


def test_the_page_has_a_file_of_each_kind():
    names = ["flex_attention", "hugging_face", "one_line", "plain_module", "trl"]
    assert sorted(FILES) == [f"test_{name}.py" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_it_runs(name, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FILES[name].count('def test_')} passed" in done.stdout
