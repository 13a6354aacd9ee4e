"""What the documentation shows is what happens: snippets run and print what is printed, examples run."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?P<mark><!-- run -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def snippets(page):
    """(line, code, expected output) of the blocks that are meant to run: all of README, marked ones elsewhere."""
    text = page.read_text()
    return [
        (text[: match.start("code")].count("\n") + 1, match["code"], match["output"])
        for match in BLOCK.finditer(text)
        if match["mark"] or page.name == "README.md"
    ]


def test_readme_has_a_snippet():
    assert snippets(ROOT / "README.md")


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_snippets_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code, expected in snippets(page):
        printed = io.StringIO()
        padded = "\n" * (line - 1) + code  # tracebacks then show the page's own lines
        with contextlib.redirect_stdout(printed):
            exec(compile(padded, str(page), "exec"), names)
        if expected is not None:
            assert printed.getvalue() == expected, f"{page.name}:{line}"


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(example)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Warning" not in done.stderr


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"`(src/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    for source in re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", page):
        pytest.fail(f"the site would load {source}")
