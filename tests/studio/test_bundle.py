"""The committed page is that of its sources, small, and asks for nothing that lies elsewhere."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRONTEND, ASSETS = ROOT / "frontend", ROOT / "src" / "attnflow" / "report" / "assets"
BUNDLES = ["studio.js", "studio.css"]


def digest_of_the_sources():
    names = ["build.mjs", "package.json", "package-lock.json"]
    names += [f"src/{path.name}" for path in sorted((FRONTEND / "src").iterdir())]
    content = hashlib.sha256()
    for name in names:
        content.update(f"{name}\0".encode() + (FRONTEND / name).read_bytes() + b"\0")
    return content.hexdigest()


@pytest.mark.parametrize("name", BUNDLES)
def test_the_bundle_is_that_of_its_sources(name):
    first = (ASSETS / name).read_text().split("\n", 1)[0]
    assert f"sha256 {digest_of_the_sources()}" in first, "the sources have changed: run `make studio`"


def test_bundling_again_gives_the_same_bytes(tmp_path):
    node = shutil.which("node")
    if node is None or not (FRONTEND / "node_modules" / "esbuild").exists():
        pytest.skip("needs node and the packages of frontend/ (`make studio`)")
    subprocess.run([node, FRONTEND / "build.mjs", tmp_path], check=True, capture_output=True)
    for name in BUNDLES:
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


def test_the_page_is_small():
    assert sum((ASSETS / name).stat().st_size for name in BUNDLES) < 120_000


def test_the_page_asks_nothing_of_a_network_and_runs_no_text():
    script, style, page = ((ASSETS / name).read_text() for name in (*BUNDLES, "studio.html"))
    code = script.split("*/", 1)[1]
    addresses = set(re.findall(r"https?://[^\"'`\s)]+", code + style + page))
    assert addresses <= {f"http://www.w3.org/{kind}" for kind in ("2000/svg", "1999/xhtml", "1998/Math/MathML")}
    assert not re.search(r"\beval\(|new Function|import\(|document\.write|fetch\(|XMLHttpRequest", code)
    assert "url(" not in style
    assert "@import" not in style


def test_the_licences_of_what_is_bundled_come_with_it():
    script = (ASSETS / "studio.js").read_text()
    assert script.count("MIT License") == 2
    assert script.count("Permission is hereby granted") == 2


def test_the_sources_compute_nothing_about_masks_and_set_no_markup():
    for path in (FRONTEND / "src").glob("*.js*"):
        text = path.read_text()
        assert "innerHTML" not in text, path.name
        assert "dangerouslySet" not in text, path.name
