"""Reading the k best entries: quality against time. `--figure FILE` draws what results.csv holds and says who wins.

Speeds are compared at equal quality alone. Of one layer with 65,536 clustered entries, of which 0.4 % are active,
quality is the relative error of its output.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from attnflow.knowledge import GeneralizedCrossAttention, Retrieval, Store
from attnflow.knowledge.reader import KnowledgeReader
from attnflow.knowledge.store.source import EntrySource
from benchmarks.harness import OURS, RESULTS, ROOT, Case, main

HERE = "benchmarks.bench_retrieval"
LAYER = "a layer reads 65,536 entries"
LAYER_K = (16, 64, 128, 256, 1024)
LEVELS = (1e-1, 1e-2, 1e-3, 1e-4)
_QUALITY = re.compile(r"error ([\d.e+-]+)")


@dataclass(frozen=True, eq=False)
class Timed:
    """What is timed, and what it is worth."""

    run: Callable[[], object]
    note: str

    def __call__(self) -> object:
        return self.run()


def clustered(dim: int = 512, centres: int = 256, each: int = 256) -> tuple[KnowledgeReader, Tensor, Tensor]:
    """A layer, entries in 256 clusters of 256, and tokens each of which activates about one cluster."""
    torch.manual_seed(0)
    middle = functional.normalize(torch.randn(centres, dim), dim=-1)
    near = 0.5 * functional.normalize(torch.randn(centres, each, dim), dim=-1)
    entries = functional.normalize(middle[:, None] + near, dim=-1).flatten(0, 1)
    hidden = functional.normalize(middle[:128] + 0.5 * functional.normalize(torch.randn(128, dim), dim=-1), dim=-1)
    attention = GeneralizedCrossAttention(dim, dim, dim, threshold="constant", bias=False)
    with torch.no_grad():
        attention.query[0], attention.key[0, 0] = torch.eye(dim) * dim**0.25, torch.eye(dim) * dim**0.25
        attention.constant.fill_(-0.25)
    return KnowledgeReader(0, attention).eval(), entries, hidden


@torch.no_grad()
def layer(way: str, k: int | None, tokens: int) -> Timed:
    """One reading: of a tensor ("dense", "exact") or of an index ("index", "approximate")."""
    torch.set_num_threads(1)
    reader, entries, hidden = clustered()
    hidden = hidden[:tokens]
    expected = reader(hidden, entries)
    source: Tensor | EntrySource = entries
    if way in ("index", "approximate"):
        store = Store.open("memory", dim=entries.shape[1])
        store.insert(embeddings=entries)
        source = EntrySource(store)
    if k is not None:
        reader.retrieval = Retrieval(k=k, search="approximate" if way == "approximate" else "exact")
    error = (reader(hidden, source) - expected).norm() / expected.norm()
    return Timed(torch.no_grad()(lambda: reader(hidden, source)), f"error {error:.3g}")


def cases(device: str) -> Sequence[Case]:
    if device != "cpu":
        return []
    listed = []
    ways = (("exact", "k = {}"), ("index", "exact index, k = {}"), ("approximate", "approximate, k = {}"))
    for tokens in (1, 128):
        listed.append(Case(LAYER, OURS, tokens, HERE, "layer", ("dense", None, tokens), repeats=21))
        for way, name in ways:
            listed += [
                Case(LAYER, name.format(k), tokens, HERE, "layer", (way, k, tokens), repeats=21) for k in LAYER_K
            ]
    return listed


def newest() -> dict[tuple[str, int], dict[str, tuple[float, float]]]:
    """(what, tokens) -> provider -> (quality, seconds), of the last run of each."""
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    with (ROOT / RESULTS).open(newline="") as file:
        for row in csv.DictReader(file):
            quality = _QUALITY.search(row["note"])
            if row["what"] == LAYER and quality and row["p50"]:
                one = found.setdefault((row["what"], int(row["size"])), {})
                one[row["provider"]] = float(quality[1]), float(row["p50"])
    return found


def verdicts(points: dict[str, tuple[float, float]]) -> list[str]:
    """For each level of quality, the fastest way that reaches it."""
    dense = points[OURS][1]
    said = []
    for level in LEVELS:
        name, (_, seconds) = min((p for p in points.items() if p[1][0] < level), key=lambda p: p[1][1])
        how = "reading all wins" if name == OURS else f"{name}, {dense / seconds:.2f} x as fast as reading all"
        said.append(f"below {level:g}: {how}")
    return said


def draw(path: Path) -> None:
    """One panel for each number of tokens; every point is labelled with its k."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    runs = newest()
    columns = (len(runs) + 1) // 2
    figure, axes = pyplot.subplots(2, columns, figsize=(4.6 * columns, 7), layout="constrained", squeeze=False)
    styles = {"the k best scores": ("o", "C0"), "exact index": ("s", "C2"), "approximate": ("^", "C1")}
    for axis, ((what, tokens), points) in zip(axes.flat, runs.items(), strict=False):
        print(f"{what}, {tokens} tokens at once\n  " + "\n  ".join(verdicts(points)))
        dense = points.pop(OURS)[1] * 1e3
        axis.axhline(dense, color="black", linewidth=1, linestyle="--", label="all entries (error 0)")
        for kind, (marker, color) in styles.items():
            chosen = {k: p for name, p in points.items() if (k := _k(name, kind)) is not None}
            if chosen:
                x, y = zip(*((max(q, 1e-7), seconds * 1e3) for q, seconds in chosen.values()), strict=True)
                axis.plot(x, y, marker=marker, color=color, markersize=4, label=kind)
                for k, q, seconds in zip(chosen, x, y, strict=True):
                    axis.annotate(k, (q, seconds), color=color, fontsize=7, textcoords="offset points", xytext=(3, 4))
        axis.set(xscale="log", yscale="log", ylabel="ms", title=f"{what}\n{tokens} token{'s' * (tokens > 1)} at once")
        axis.set_xlabel("relative error of the output")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        for part in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            part(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.title.set_fontsize(9)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    print(path)


def _k(name: str, kind: str) -> str | None:
    """The k of a provider, if it is of this kind."""
    before, _, k = name.rpartition("k = ")
    return k if (before.rstrip(", ") or "the k best scores") == kind else None


if __name__ == "__main__":
    if "--figure" in sys.argv:
        draw(Path(sys.argv[sys.argv.index("--figure") + 1]))
    else:
        main(cases, ["torch", "lancedb"], time_limit=300)
