"""What the survey says: a row for each part of each model, its layers, the published numbers beside, and the figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.runner.figures import SIZE, canvas, colour, enlarge, label_ends
from experiments.runner.files import write, write_table
from experiments.runner.study import read_study

_MEDIANS: Final = {
    "symmetry": "symmetry",
    "directionality": "directionality",
    "directionality_norm": "directionality_norm",
    "head_symmetry": "head_symmetry",
    "head_directionality": "head_directionality",
    "published_symmetry": "published_way_symmetry",
    "published_directionality": "published_way_directionality",
}
_COLUMNS: Final = ("model", "modality", "tower", "side", "layer", *_MEDIANS)


def parts(runs: Sequence[Mapping[str, Any]], published: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each tower of each model: medians over its layers, quartiles of S and D, and published records."""
    found: list[dict[str, Any]] = []
    for run in runs:
        name = run["job"]["arm"]
        for tower in dict.fromkeys(layer["tower"] for layer in run.get("layers", ())):
            layers = [layer for layer in run["layers"] if layer["tower"] == tower]
            row: dict[str, Any] = {"model": name, "modality": run["modality"], "tower": tower}
            row |= {"side": layers[0]["side"], "layers": len(layers), "notes": run["notes"]}
            row |= {"shared_keys": any(layer["shared_keys"] for layer in layers), "beside": run["beside"]}
            row |= {to: float(np.median([layer[of] for layer in layers])) for of, to in _MEDIANS.items()}
            for of in ("symmetry", "directionality"):
                row[f"{of}_quartiles"] = np.percentile([layer[of] for layer in layers], [25, 75]).tolist()
            row["published"] = [one for one in published[name] if one["tower"] in (tower, "") or not tower]
            found.append(row)
    return found


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    rows = parts(runs, about["published"])
    if not rows:
        raise FileNotFoundError(f"nothing in {folder} has been scored")
    content: dict[str, Any] = {
        "about": "medians over layers, of the full matrix; of heads, medians over layers of medians over heads",
        "parts": rows,
        "missing": about["missing"],
        "refused": {run["job"]["arm"]: run["refused"] for run in runs if "refused" in run},
    }
    write(results / "results.json", content)
    lines = [
        [run["job"]["arm"], run["modality"], layer["tower"], layer["side"], layer["layer"]]
        + [f"{layer[name]:.6f}" for name in _MEDIANS]
        for run in runs
        for layer in run.get("layers", ())
    ]
    write_table(results / "results.csv", _COLUMNS, lines)
    figure(runs).savefig(results / "figure.png", dpi=110)
    return table(content)


def figure(runs: Sequence[Mapping[str, Any]]) -> Any:
    """S and D by layer, encoders filled and decoders dashed; crosses where heads are paired as was published."""
    drawn, panels = canvas(15.0, 8.5, 1, 2)
    titles = {"symmetry": "symmetry S of a layer", "directionality": "directionality D of a layer (below 0: columns)"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        axes.set(title=title, xlabel="depth of the layer in its model, %")
        axes.axhline(0, color="0.4", linewidth=0.8)
        ends: dict[str, tuple[float, float]] = {}
        for run in runs:
            for tower in dict.fromkeys(layer["tower"] for layer in run.get("layers", ())):
                layers = [layer for layer in run["layers"] if layer["tower"] == tower]
                name = " ".join(filter(None, (run["job"]["arm"], tower)))
                ends[name] = _draw(axes, layers, what, name)
        label_ends(axes, ends, size=SIZE - 2)
        enlarge(axes)
    return drawn


def _draw(axes: Any, layers: Sequence[Mapping[str, Any]], what: str, name: str) -> tuple[float, float]:
    places = [100 * (number + 1) / len(layers) for number in range(len(layers))]
    values = [layer[what] for layer in layers]
    style = "-" if layers[0]["side"] == "encoder" else "--"
    axes.plot(places, values, style, color=colour(name), marker="o", markersize=4.5, linewidth=2)
    if any(layer["shared_keys"] for layer in layers):
        axes.plot(places, [layer[f"published_{what}"] for layer in layers], "x", color=colour(name), markersize=7)
    return places[-1], values[-1]


def table(content: Mapping[str, Any]) -> str:
    lines = [
        [
            "model",
            "",
            "sees",
            "layers",
            "S",
            "the published way",
            "D",
            "the published way",
            "D of def. 3.2",
            "S of heads",
        ]
    ]
    for one in content["parts"]:
        low_high = ["[{:+.2f}, {:+.2f}]".format(*one[f"{of}_quartiles"]) for of in ("symmetry", "directionality")]
        lines.append(
            [
                one["model"],
                one["tower"],
                "both sides" if one["side"] == "encoder" else "the past",
                str(one["layers"]),
                f"{one['symmetry']:+.3f} {low_high[0]}",
                f"{one['published_way_symmetry']:+.3f}",
                f"{one['directionality']:+.3f} {low_high[1]}",
                f"{one['published_way_directionality']:+.3f}",
                f"{one['directionality_norm']:+.3f}",
                f"{one['head_symmetry']:+.3f}",
            ]
        )
    more = [
        f"published for {record['model']} {record['tower']}: S {record['symmetry']:+.3f}, "
        f"D {record['directionality']:+.3f}" + (f"; {record['fault']}" if record["fault"] else "")
        for one in content["parts"]
        for record in one["published"]
    ]
    more += [f"not installed: {name} ({requirement})" for name, requirement in content["missing"].items()]
    more += [f"refused: {name}: {why}" for name, why in content["refused"].items()]
    return "\n".join([aligned(lines, left=range(4)), *more])
