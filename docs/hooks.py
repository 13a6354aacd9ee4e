"""Experiments as pages of the site: they lie beside `docs/`, each with its README, results and figure."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
SHOWN = {".md", ".csv", ".json", ".png"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add them as if they lay in `docs/experiments`."""
    for path in sorted((ROOT / "experiments").rglob("*")):
        if path.suffix in SHOWN and "runs" not in path.parts:
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of `docs` to an experiment, as a reader of the repository follows them."""
    return re.sub(r"\]\(\.\./((?:\.\./)*experiments/)", r"](\1", markdown)
