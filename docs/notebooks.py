"""Tutorials as notebooks: sources are `docs/tutorials/*.py` in jupytext's percent format.

    python docs/notebooks.py                # executes those that changed, or for which the package changed
    python docs/notebooks.py 1_packed_batch # only this one

An executed notebook is kept in `.cache/tutorials`. The site shows it, and offers it for download.
"""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "docs" / "tutorials"
CACHE = ROOT / ".cache" / "tutorials"
COLOURS = re.compile(r"\x1b\[[\d;]*m")
FIRST = "%matplotlib inline"  # for readers who run the notebook: charts of the library are unknown to pyplot
CHARTS = """
from IPython import get_ipython
from matplotlib.figure import Figure
from attnflow.report.charts import svg_of
from attnflow.report.svg import standalone
formatter = get_ipython().display_formatter.formatters["image/svg+xml"]
formatter.for_type(Figure, lambda chart: standalone(svg_of(chart, "a chart")).markup)
"""  # for the site: charts without a background, with colours that the page's style sheet sets


def sources() -> list[Path]:
    """The tutorials, in reading order."""
    return sorted(SOURCES.glob("[0-9]_*.py"))


def title(source: Path) -> str:
    """The first heading of a tutorial."""
    found = re.search(r"^# # (.+)$", source.read_text(), re.MULTILINE)
    assert found, f"{source.name} has no heading: expected a line '# # TITLE' in its first cell"
    return found[1]


def notebook(source: Path) -> Any:
    """The notebook without outputs, as somebody runs it."""
    made: Any = jupytext.read(source)
    made.cells.insert(0, nbformat.v4.new_code_cell(FIRST, id="matplotlib"))
    for index, cell in enumerate(made.cells):
        cell["id"] = f"cell-{index}"
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def executed(source: Path) -> Any:
    """The notebook with its outputs, from the cache if neither it nor the package changed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in [source, *sorted((ROOT / "src").rglob("*.py"))]))
    kept = CACHE / f"{source.stem}-{digest.hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    made = notebook(source)
    made.cells[0].source = CHARTS
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            made,
            timeout=1200,
            kernel_name="python3",
            coalesce_streams=True,  # else a cell that prints slowly has a block for each line
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    made.cells[0] = nbformat.v4.new_code_cell(FIRST, id="cell-0")
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # times of day
        outputs = [
            output for output in cell.get("outputs", ()) if output.get("name") != "stderr"
        ]  # paths of this machine
        for output in outputs:
            output.update({"text": COLOURS.sub("", output.text)} if "text" in output else {})  # of a terminal
        cell.update({"outputs": outputs} if "outputs" in cell else {})
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{source.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(made, kept)
    return made


def markdown(made: Any, name: str) -> str:
    """A notebook as a page of the site, with a link to download it."""
    parts: list[str] = []
    for cell in made.cells[1:]:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(f"```python\n{cell.source}\n```")
            parts += [text for output in cell.get("outputs", ()) if (text := shown(output))]
    heading, _, rest = "\n\n".join(parts).partition("\n")
    return f"{heading}\n\n[Download this notebook]({name}.ipynb)\n\n{rest.strip()}\n"


def shown(output: Any) -> str:
    """One output of a cell: a picture, HTML or text."""
    if output.output_type == "stream":
        return block(output.text)
    data = output.get("data", {})
    if "image/svg+xml" in data:
        drawing = re.sub(r">\s+<", "><", data["image/svg+xml"])
        return f'<div class="picture">{drawing}</div>'
    if "image/png" in data:
        return f'<div class="picture"><img alt="" src="data:image/png;base64,{data["image/png"].strip()}"></div>'
    if "text/html" in data:
        whole = re.sub(r"\n\s*\n", "\n", data["text/html"])
        return f'<div class="picture">{whole}</div>'
    return block(data["text/plain"]) if "text/plain" in data else ""


def block(text: str) -> str:
    """Printed text."""
    return f"```text\n{text.rstrip()}\n```"


if __name__ == "__main__":
    for one in sources():
        if len(sys.argv) == 1 or one.stem in sys.argv[1:]:
            print(f"{one.name}: {len(executed(one).cells)} cells")
