"""Pages outside `docs/` that its pages link to: tutorials as notebooks, experiments, and tests as files."""

import os
import re
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import executed, markdown, notebook, sources, title

from attnflow._core.version import __version__

ROOT = Path(__file__).parent.parent
SHOWN = {".md", ".csv", ".json", ".jsonl", ".yaml", ".png"}
MATHJAX = re.compile(r"<script[^>]*mathjax[^>]*></script>")
LINKED = re.compile(r"\]\(\.\./((?:tests|experiments)/[\w/]+\.py)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the tutorials that there are, and name the version in the footer."""
    config.copyright = f"attnflow {__version__}, Apache-2.0"
    for section in config.nav or ():
        if isinstance(section, dict) and section.get("Tutorials") == []:
            section["Tutorials"] = [{title(source): f"tutorials/{source.stem}.md"} for source in sources()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add tutorials, experiments and the code that the page of claims links to, as if they lay in `docs`.

    Tutorials are executed, unless ATTNFLOW_TUTORIALS is "source": then they are shown without outputs.
    """
    for source in sources():
        made = notebook(source) if os.environ.get("ATTNFLOW_TUTORIALS") == "source" else executed(source)
        for suffix, content in ((".md", markdown(made, source.stem)), (".ipynb", nbformat.writes(made))):
            files.append(File.generated(config, f"tutorials/{source.stem}{suffix}", content=content))
    shown = [
        p for p in (ROOT / "experiments").rglob("*") if p.suffix in SHOWN and "runs" not in p.relative_to(ROOT).parts
    ]
    named = {ROOT / name for name in LINKED.findall((ROOT / "docs" / "claims.md").read_text())}
    for path in sorted((*shown, *named)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that lead out of `docs` or to a tutorial's source, as a reader of the repository follows them."""
    inside = re.sub(r"\]\(\.\./((?:\.\./)*(?:experiments|tests)/)", r"](\1", markdown)
    inside = re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", inside)
    return re.sub(r"(\]\((?:\.\./)*(?:tutorials/)?[0-9]_\w+)\.py(#[\w-]+)?\)", r"\1.md\2)", inside)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load MathJax, which is large, only where there is a formula."""
    return output if 'class="arithmatex"' in output else MATHJAX.sub("", output)
