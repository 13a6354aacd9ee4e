"""The committed page is that of its sources, small, and asks for nothing that lies elsewhere."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONTEND, ASSETS = ROOT / "frontend", ROOT / "src" / "attnflow" / "report" / "assets"
BUNDLE = ASSETS / "studio.js"


def digest_of_the_sources():
    names = ["build.mjs", "package.json", "package-lock.json"]
    names += [f"src/{path.name}" for path in sorted((FRONTEND / "src").iterdir())]
    content = hashlib.sha256()
    for name in names:
        content.update(f"{name}\0".encode() + (FRONTEND / name).read_bytes() + b"\0")
    return content.hexdigest()


def test_the_bundle_is_that_of_its_sources():
    first = BUNDLE.read_text().split("\n", 1)[0]
    assert f"sha256 {digest_of_the_sources()}" in first, "the sources have changed: run `make studio`"


def test_bundling_again_gives_the_same_bytes(tmp_path):
    node = shutil.which("node")
    if node is None or not (FRONTEND / "node_modules" / "esbuild").exists():
        pytest.skip("needs node and the packages of frontend/ (`make studio`)")
    subprocess.run([node, FRONTEND / "build.mjs", tmp_path], check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["studio.js"]
    assert (tmp_path / "studio.js").read_bytes() == BUNDLE.read_bytes()


def test_the_page_asks_nothing_of_a_network_and_runs_no_text():
    code, page = BUNDLE.read_text().split("*/", 1)[1], (ASSETS / "studio.html").read_text()
    addresses = set(re.findall(r"https?://[^\"'`\s)]+", code + page))
    assert addresses <= {f"http://www.w3.org/{kind}" for kind in ("2000/svg", "1999/xhtml", "1998/Math/MathML")}
    assert not re.search(r"\beval\(|new Function|import\(|document\.write|fetch\(|XMLHttpRequest", code)
    style = "".join(path.read_text() for path in (FRONTEND / "src").glob("*.css"))
    assert "url(" not in style
    assert "@import" not in style


def test_nothing_in_it_may_end_a_script():
    text = BUNDLE.read_text()
    assert not re.search(r"</script|<!--", text, re.IGNORECASE)


def test_the_sources_compute_nothing_about_masks_and_set_no_markup():
    for path in (FRONTEND / "src").glob("*.js*"):
        text = path.read_text()
        assert "innerHTML" not in text, path.name
        assert "dangerouslySet" not in text, path.name
