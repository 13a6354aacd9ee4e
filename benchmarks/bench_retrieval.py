"""Reading the k best entries: quality against time. `--figure FILE` draws what results.csv holds and says who wins.

Speeds are compared at equal quality alone. Of SmolLM2-135M with its feed-forward layers opened, quality is the mean KL
divergence of the next token from the model that reads all its entries, over 512 tokens of text; of one layer with
65,536 clustered entries, of which 0.4 % are active, the relative error of its output.
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

import attnflow as af
from attnflow.knowledge import GeneralizedCrossAttention, Retrieval, Store
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reader import KnowledgeReader
from attnflow.knowledge.source import EntrySource
from benchmarks.harness import OURS, RESULTS, ROOT, Case, main

HERE = "benchmarks.bench_retrieval"
MODEL = "SmolLM2-135M reads its entries"
LAYER = "a layer reads 65,536 entries"
CONTEXT, WINDOWS = 128, 4
MODEL_K, LAYER_K = (16, 32, 64, 128, 256, 512, 1024), (16, 64, 128, 256, 1024)
LEVELS = (1e-1, 1e-2, 1e-3, 1e-4)
_QUALITY = re.compile(r"(?:KL|error) ([\d.e+-]+)")


@dataclass(frozen=True, eq=False)
class Timed:
    """What is timed, and what it is worth."""

    run: Callable[[], object]
    note: str

    def __call__(self) -> object:
        return self.run()


@torch.no_grad()
def model(k: int | None, tokens: int) -> Timed:
    """One forward pass of `tokens` tokens; a single one after a context that is cached."""
    torch.set_num_threads(1)
    loaded = af.models.load_model("smollm2-135m", dtype=torch.float32)
    converted, tokenizer = af.knowledge.from_ffn(loaded.model), loaded.tokenizer
    assert tokenizer is not None
    ids = tokenizer(af.models.sample_text(characters=8000), return_tensors="pt")["input_ids"]
    windows = ids[0, : WINDOWS * CONTEXT].view(WINDOWS, CONTEXT)
    dense = [log_probabilities(converted, row) for row in windows]
    for reader in readers(converted):
        reader.retrieval = None if k is None else Retrieval(k=k, search="exact")
    found = [log_probabilities(converted, row) for row in windows]
    divergence = torch.cat(
        [functional.kl_div(b, a, reduction="none", log_target=True).sum(-1) for a, b in zip(dense, found, strict=True)]
    )
    losses = [
        torch.cat([loss(one, row) for one, row in zip(made, windows, strict=True)]).mean() for made in (dense, found)
    ]
    note = f"KL {divergence.mean():.3g}; perplexity {losses[1].exp():.2f}, all entries {losses[0].exp():.2f}"
    row = windows[:1]
    if tokens == 1:
        cache = converted(input_ids=row, use_cache=True).past_key_values
        return Timed(lambda: decode(converted, cache, row[:, :1]), note)
    return Timed(torch.no_grad()(lambda: converted(input_ids=row, use_cache=False)), note)


@torch.no_grad()
def decode(converted: torch.nn.Module, cache: object, token: Tensor) -> object:
    """One token more; the cache is as long as before."""
    output = converted(input_ids=token, past_key_values=cache, use_cache=True)
    cache.crop(-1)  # type: ignore[attr-defined]
    return output


def log_probabilities(converted: torch.nn.Module, row: Tensor) -> Tensor:
    return converted(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)


def loss(logs: Tensor, row: Tensor) -> Tensor:
    return -logs[:-1].gather(-1, row[1:, None])[:, 0]


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
    for tokens in (1, CONTEXT):
        listed.append(Case(MODEL, OURS, tokens, HERE, "model", (None, tokens), repeats=21))
        listed += [Case(MODEL, f"k = {k}", tokens, HERE, "model", (k, tokens), repeats=21) for k in MODEL_K]
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
            if row["what"] in (MODEL, LAYER) and quality and row["p50"]:
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
    """One panel for each model or layer and number of tokens; every point is labelled with its k."""
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
        axis.set_xlabel("KL divergence from all entries" if what == MODEL else "relative error of the output")
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
        main(cases, ["torch", "transformers", "faiss-cpu"], time_limit=300)
