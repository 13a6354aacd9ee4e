"""What the documentation shows is what happens: snippets run and print what is printed, examples run."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import attnflow as af
from tests.training_watch import watching_training

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?P<mark><!-- run -->\n)?```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
TRAINS = re.compile(r"\.backward\(\)|\.train\(")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[0-9]_*.py"))
EXAMPLES = [*sorted((ROOT / "examples").glob("*.py")), *TUTORIALS]
REAL_MODELS = {"README.md", "decoding.md", "explain.md", "geometry.md"}  # pages whose snippets read them
SHORT = {"train_on_text": ["--steps", "2", "--length", "64"]}  # arguments for a run that takes minutes otherwise


def snippets(page):
    """(line, code, expected output) of the blocks that are meant to run: all of README, marked ones elsewhere."""
    text = page.read_text()
    return [
        (text[: match.start("code")].count("\n") + 1, match["code"], match["output"])
        for match in BLOCK.finditer(text)
        if match["mark"] or page.name == "README.md"
    ]


def shown(page):
    name = page.relative_to(ROOT).as_posix()
    return pytest.param(page, id=name, marks=[pytest.mark.slow] if page.name in REAL_MODELS else [])


def test_readme_has_a_snippet():
    assert snippets(ROOT / "README.md")


@pytest.mark.parametrize("page", [shown(p) for p in PAGES if snippets(p)])
def test_snippets_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    with watching_training() as watch:  # raises where a label can be read at its own position
        for line, code, expected in snippets(page):
            printed = io.StringIO()
            padded = "\n" * (line - 1) + code  # tracebacks then show the page's own lines
            with contextlib.redirect_stdout(printed):
                exec(compile(padded, str(page), "exec"), names)
            if expected is not None:
                assert printed.getvalue() == expected, f"{page.name}:{line}"
    assert watch.proofs or not any(TRAINS.search(code) for _, code, _ in snippets(page))


def test_every_snippet_that_trains_is_run():
    """So that it is watched; but for one of a file that the reader has."""
    for page in PAGES:
        runs = {code for _, code, _ in snippets(page)}
        for block in BLOCK.finditer(page.read_text()):
            if block["code"].startswith("# test_"):  # whole files: tests/testing/test_whole_files.py runs them
                continue
            if TRAINS.search(block["code"]) and "notes.txt" not in block["code"]:
                assert block["code"] in runs, f"{page.name} shows training that no test runs:\n{block['code']}"


OLD_GUIDE = """
import torch
import attnflow as af
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
)
mask = af.masks.block_two_stream(num_blocks=3, block=2)
position_ids = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]])
tokens = torch.randint(64, (1, 8))

with af.masks.attach(model, mask):
    loss = model(tokens, position_ids=position_ids, labels=tokens).loss
    loss.backward()
"""  # what a guide of this project once opened with: transformers shifts labels, which this layout does not bear


def test_the_watch_sees_labels_that_their_own_positions_read():
    with watching_training(), pytest.raises(af.LeakFound, match=r"the label of position 0.*\(5 leaks in all\)"):
        exec(OLD_GUIDE, {})
    copied = "ids = torch.arange(5, 13)[None]\nBertForMaskedLM(config)(input_ids=ids, labels=ids).loss.backward()\n"
    bert = "BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)"
    head = f"import torch\nfrom transformers import BertConfig, BertForMaskedLM\nconfig = {bert}\n"
    with watching_training(), pytest.raises(af.LeakFound, match=r"8 leaks in all"):
        exec(head + copied, {})
    with watching_training() as watch:
        hidden = copied.replace("input_ids=ids", "input_ids=ids * (ids % 2)")
        exec(head + hidden.replace("labels=ids", "labels=ids.where(ids % 2 == 0, -100)"), {})
    assert watch.proofs == 1


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example, tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-m", "tests.training_watch", str(example)]
    command += SHORT.get(example.stem, [])
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Warning" not in done.stderr
    assert not TRAINS.search(example.read_text()) or "\n0 labelled calls proved" not in f"\n{done.stderr}"


def test_pictures_are_small_readable_and_known():
    pictures = sorted((ROOT / "docs" / "pictures").iterdir())
    script = (ROOT / "docs" / "pictures.py").read_text()
    assert {f"def {picture.stem}()" in script for picture in pictures} == {True}
    for picture in pictures:
        drawing = picture.read_text()
        assert picture.stat().st_size < 60_000, picture.name
        assert "prefers-color-scheme" in drawing or picture.stem == "terminal", (
            f"{picture.name} is for light pages only"
        )
        assert not re.search(r"(?:href|src|url)[=(][\"']?https?:", drawing), f"{picture.name} loads something"


def test_the_recording_is_small_and_moves():
    from PIL import Image

    path = ROOT / "docs" / "guides" / "studio.webp"
    assert path.stat().st_size < 600_000
    with Image.open(path) as recording:
        assert getattr(recording, "n_frames", 1) > 5


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (ROOT / target).exists(), f"{page.name} links to {target}"
        for name in re.findall(r"`(src/[\w/.]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    # --quiet would not count warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "ATTNFLOW_TUTORIALS": "source"}  # they ran above
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    for source in re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", page):
        pytest.fail(f"the site would load {source}")
    for room in (name for name in af.__all__ if (tmp_path / "reference" / name).exists()):
        page = (tmp_path / "reference" / room / "index.html").read_text()
        table = page[page.index('<table class="names">') :].partition("</table>")[0]
        names = dict(re.findall(r'<a href="#([\w.]+)"><code>(\w+)</code></a></td><td>\S', table))
        wanted = [
            name for name in getattr(af, room).__all__ if not isinstance(getattr(getattr(af, room), name), ModuleType)
        ]
        assert not {*wanted} - {*names.values()}, room
        assert len({*names.values()}) == len(names), room
        assert {f'id="{anchor}"' in page for anchor in names} == {True}
        assert not re.findall(r'doc-module-name|title="attnflow\._core\.results', page)
