"""Biases as commands load, look at and write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from attnflow._core.errors import MissingExtra
from attnflow.cli import _models
from attnflow.cli._output import BadUsage, output_path

if TYPE_CHECKING:
    from attnflow.bias import BiasGraph, BiasMap
    from attnflow.cli._output import Spinner

PROMPT: Final = "Q: John has 5 apples. He buys 6 more. A: 5 + 6 ="  # of the paper's figures
_SUFFIXES: Final = (".svg", ".png", ".html", ".csv", ".json", ".dot")
_GRAPHS: Final = (".svg", ".html", ".dot")
_CONFIG: Final = "bias_config.json"


@dataclass(frozen=True)
class View:
    """What of a map is shown.

    Attributes:
        layer: number of a layer, or None for all.
        query: position of a query, -1 for the last, or None.
        head: number of a head, or None for the mean.
        top_k: keys of each query in the graph, or None.
        threshold: least bias of an edge of the graph, or None.
    """

    layer: int | None
    query: int | None
    head: int | None
    top_k: int | None
    threshold: float | None

    @property
    def is_graph(self) -> bool:
        """Whether a graph was asked for."""
        return self.top_k is not None or self.threshold is not None

    def graph(self, found: BiasMap) -> BiasGraph:
        """The graph of a map."""
        return found.graph(top_k=self.top_k, threshold=self.threshold, layer=self.layer, head=self.head)


def target(path: Path, view: View) -> Path:
    """Where the result goes, if it can be written there: checked before the work.

    Raises:
        BadUsage: another suffix, no such folder, or a graph in a format that has none.
        MissingExtra: matplotlib is not installed.
    """
    found = output_path(path, _SUFFIXES)
    suffix = found.suffix.lower()
    if view.is_graph and suffix not in _GRAPHS:
        raise BadUsage(f"--top-k and --threshold make a graph, which is written as {', '.join(_GRAPHS)}; got {suffix}")
    if suffix in (".svg", ".png") and not view.is_graph and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", "a bias as a figure")
    return found


def look(
    model: str, bias: Path | None, text: str | None, generate: int | None, view: View, spinner: Spinner
) -> tuple[BiasMap, str]:
    """(the map, name of the bias): loads the model and its bias, and runs both on the text.

    Raises:
        BadUsage: no such model or bias, a bias of another model, or a layer, query or head that does not exist.
    """
    from attnflow import bias as biases

    folder = bias if bias is not None else Path(model)
    if bias is None:
        model = _base_of(folder)
        spinner(f"loading {model}")
    loaded = _models.load(model)
    try:
        biases.load(loaded.model, folder)
        spinner("running it with and without its bias")
        found = biases.capture(
            loaded.model,
            PROMPT if text is None else text,
            layers=None if view.layer is None else [view.layer],
            queries=None if view.query is None or view.query < 0 or view.is_graph else [view.query],
            heads=None if view.head is None else [view.head],
            generate=generate,
            tokenizer=loaded.tokenizer,
        )
        if view.query is not None:
            found.row(view.query)  # what does not exist is said before anything is written
        if view.is_graph:
            view.graph(found)
    except (ValueError, TypeError) as error:
        raise BadUsage(str(error)) from error
    return replace(found, model=model), str(folder)


def write(found: BiasMap, view: View, path: Path, bias: str) -> None:
    """Write what the suffix of `path` asks for; whole or not at all."""
    from attnflow._core.files import write_atomically
    from attnflow.report import bias_report, figure, save_figure
    from attnflow.report.graph_svg import graph_html

    suffix = path.suffix.lower()
    if suffix == ".html" and not view.is_graph:
        bias_report(found, details={"Bias": bias}).save(path)
    elif suffix in (".svg", ".png") and not view.is_graph:
        save_figure(figure(found, layer=view.layer, query=view.query, head=view.head), path)
    else:
        makers = {".csv": found.to_csv, ".json": found.to_json}
        if view.is_graph or suffix == ".dot":
            graph = view.graph(found)
            makers = {".svg": lambda: figure(graph), ".html": lambda: graph_html(graph), ".dot": graph.to_dot}
        text = cast(Any, makers[suffix])()
        with write_atomically(path) as file:
            file.write(text.encode())


def facts(found: BiasMap, view: View) -> dict[str, object]:
    """The numbers of a map as JSON holds them: by layer, for one query, and the graph."""
    energies = {rank: found.energy(rank) for rank in (1, 8)}
    row = found.row(-1 if view.query is None else view.query)
    layers = [
        {
            "layer": one.layer,
            "name": one.name,
            "strength": one.strength,
            "moved": one.moved,
            "energy": {f"rank_{rank}": energy[one.layer] for rank, energy in energies.items()},
            "bias": one.bias[:, row].mean(dim=0),
        }
        for one in found
    ]
    edges = [[edge.key, edge.query, edge.bias] for edge in view.graph(found).edges]
    return {
        "tokens": found.tokens,
        "queries": found.queries,
        "query": found.queries[row],
        "produced": found.produced[row] if found.produced else None,
        "layers": layers,
        "weights": found.values("weights", view.layer, view.head)[row],
        "weights_base": found.values("weights_base", view.layer, view.head)[row],
        "edges": edges,
    }


def lines(found: BiasMap, view: View, count: int = 3) -> list[str]:
    """For each layer how strong the bias is, and what one query is drawn to most and least."""
    from attnflow.report.bias_figures import query_name, token_name

    row = found.row(-1 if view.query is None else view.query)
    query = found.queries[row]
    head = "" if view.head is None else f", head {view.head}"
    said = [f"query {query_name(found, row)} at position {query}{head}", ""]
    said.append(f"{'layer':<6}{'strength':>9}{'moved':>8}  drawn to / turned away from")
    for one in found:
        table, allowed = found.values("bias", one.layer, view.head)[row], one.allowed.any(dim=0)[row]
        order = [key for key in table.argsort(descending=True).tolist() if allowed[key]]
        chosen = [f"{token_name(found, key)} {float(table[key]):+.2f}" for key in order if table[key] > 0][:count]
        against = [f"{token_name(found, key)} {float(table[key]):+.2f}" for key in order[::-1] if table[key] < 0][
            :count
        ]
        words = f"{', '.join(chosen) or 'nothing'} / {', '.join(against) or 'nothing'}"
        said.append(f"{one.layer:<6}{one.strength:>9.3g}{100 * one.moved:>7.1f}%  {words}")
    if view.is_graph:
        graph = view.graph(found)
        said += ["", f"graph ({graph.about}): {len(graph.edges)} edges"]
        for edge in sorted(graph.edges, key=lambda edge: -edge.bias)[:20]:
            names = f"{token_name(found, edge.key)} ({edge.key}) -> {token_name(found, edge.query)} ({edge.query})"
            said.append(f"  {names}  {edge.bias:+.2f}")
        said += [f"  and {len(graph.edges) - 20} more"] if len(graph.edges) > 20 else []
    return said


def _base_of(folder: Path) -> str:
    """The base model that a saved bias names."""
    config = folder / _CONFIG
    if not config.is_file():
        raise BadUsage(f"{folder} has no bias: give --bias DIR, a folder that af.bias.save_pretrained wrote")
    about = cast(Mapping[str, Any], json.loads(config.read_text(encoding="utf-8")))
    name = str(cast(Mapping[str, Any], about.get("base") or {}).get("name") or "")
    if not name:
        raise BadUsage(f"{config} does not name its base model: attnflow bias show MODEL --bias {folder}")
    return name
