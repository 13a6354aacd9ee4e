"""Experiments as pages of the site, and tests as files: they lie beside `docs/`, and pages link to them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SHOWN = {".md", ".csv", ".json", ".png"}
LINKED = re.compile(r"\]\(\.\./(tests/[\w/]+\.py)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them as if they lay in `docs`: all that experiments show, and each test that the page of claims names."""
    shown = [path for path in (ROOT / "experiments").rglob("*") if path.suffix in SHOWN and "runs" not in path.parts]
    named = {ROOT / name for name in LINKED.findall((ROOT / "docs" / "claims.md").read_text())}
    for path in sorted((*shown, *named)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of `docs`, as a reader of the repository follows them."""
    return re.sub(r"\]\(\.\./((?:\.\./)*(?:experiments|tests)/)", r"](\1", markdown)
