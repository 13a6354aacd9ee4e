"""What the runs say: rank correlations over the heads of each tower, with intervals over layers and over texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit
from scipy.stats import rankdata

from attnflow._core.markup import aligned
from experiments.geometry_in_use.study import ALL, INNER, USED
from experiments.runner.figures import SIZE, canvas, colour
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study

Array = npt.NDArray[np.float64]
SCORES: Final = {"symmetry": "S", "directionality": "D"}
_DRAWS: Final = 2000
_COLUMNS: Final = (
    *("tower", "length", "tokens", "layer", "head", "symmetry", "directionality"),
    *("symmetry_in_use", "form_symmetry_in_use", "directionality_in_use"),
)


def spearman(one: Array, other: Array) -> float:
    """Rank correlation; 0 where one side is constant."""
    ranks = [rankdata(each) - (len(each) + 1) / 2 for each in (one, other)]
    norm = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float(ranks[0] @ ranks[1]) / norm if norm else 0.0


def over_layers(one: Array, other: Array, layers: Array) -> Interval:
    """Rank correlation over heads, with the interval that further layers would be drawn from.

    Heads of one layer are not independent: a jackknife leaves out whole layers. The pseudo-values are of Fisher's z,
    and Student's t has one degree of freedom less than there are layers.
    """
    numbers = np.unique(layers)
    count = len(numbers)
    found = spearman(one, other)
    z = _fisher(found)
    left = [_fisher(spearman(one[layers != each], other[layers != each])) for each in numbers]
    spread = float(np.std([count * z - (count - 1) * each for each in left], ddof=1)) / math.sqrt(count)
    half = float(stdtrit(count - 1, 0.975)) * spread
    return Interval(found, math.tanh(z - half), math.tanh(z + half))


def _fisher(correlation: float) -> float:
    return math.atanh(min(max(correlation, -1 + 1e-9), 1 - 1e-9))


def within_layers(one: Array, other: Array, layers: Array) -> Interval:
    """Mean of the rank correlations over the heads of a single layer, with Student's t over layers."""
    each = [spearman(one[layers == number], other[layers == number]) for number in np.unique(layers)]
    return student(each)


def exchanged(one: Array, other: Array, layers: Array, within: bool) -> dict[str, float]:
    """The control: scores of weights given to other heads, of the tower or the layer; mean and 95th percentile."""
    draw = np.random.default_rng(0)
    groups = [layers == number for number in np.unique(layers)] if within else [np.ones(len(layers), dtype=bool)]
    found = np.empty(_DRAWS)
    for place in range(_DRAWS):
        mixed = one.copy()
        for group in groups:
            mixed[group] = draw.permutation(one[group])
        found[place] = spearman(mixed, other)
    return {"mean": float(found.mean()), "high": float(np.quantile(found, 0.95))}


def towers(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """ "Whisper encoder" and so on -> its weights, and what it has in use, [texts, heads], by length and tokens."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        if run["job"]["seed"] is None:
            for tower, numbers in run["towers"].items():
                found[f"{run['job']['arm']} {tower}".strip()] = {"weights": numbers, "read": {}, "tokens": {}}
    for run in sorted(runs, key=lambda run: run["job"]["seed"] or 0):
        for length, by_tower in run.get("lengths", {}).items():
            for tower, numbers in by_tower.items():
                one = found[f"{run['job']['arm']} {tower}".strip()]
                one["tokens"].setdefault(length, []).append(numbers["tokens"])
                for which in (ALL, INNER):
                    table = one["read"].setdefault(length, {}).setdefault(which, {name: [] for name in USED})
                    for name in USED:
                        table[name].append(numbers[which][name])
    return found


def quantities(tower: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each score, length and choice of tokens."""
    weights = {name: np.array(values) for name, values in tower["weights"].items()}
    layers = weights["layer"]
    rows: list[dict[str, Any]] = []
    for score in SCORES:
        mine = weights[score]
        for length, by_tokens in tower["read"].items():
            for which, table in by_tokens.items():
                texts = np.array(table[score])
                used = texts.mean(axis=0)
                row: dict[str, Any] = {"score": score, "length": length, "which": which}
                row |= {"tokens": float(np.mean(tower["tokens"][length])), "texts": len(texts)}
                row["weights and use"] = over_layers(mine, used, layers).numbers
                row["within a layer"] = within_layers(mine, used, layers).numbers
                row["over texts"] = student([spearman(mine, one) for one in texts]).numbers
                row["exchanged"] = exchanged(mine, used, layers, within=False)
                row["exchanged within layers"] = exchanged(mine, used, layers, within=True)
                row["medians"] = [float(np.median(mine)), float(np.median(used))]
                row["mean error"] = float(np.abs(used - mine).mean())
                row["mean error of the median"] = float(np.abs(used - np.median(used)).mean())
                if score == "symmetry":
                    form = np.array(table["form_symmetry"]).mean(axis=0)
                    row["weights and form"] = over_layers(mine, form, layers).numbers
                    row["form and use"] = over_layers(form, used, layers).numbers
                rows.append(row)
    return rows


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, runs = read_study(folder)
    every = {name: one for name, one in towers(runs).items() if one["read"]}
    if not every:
        raise FileNotFoundError(f"nothing in {folder} has been read")
    content: dict[str, Any] = {"missing": about["missing"], "towers": {}}
    content["says"] = [run["says"] for run in runs if run.get("says")]
    for name, one in every.items():
        weights = {key: np.array(values) for key, values in one["weights"].items()}
        white = {
            f"{score}, {which}": over_layers(
                weights[score], weights[f"{score}, {which} white tokens"], weights["layer"]
            )
            for score in SCORES
            for which in ("many", "few")
        }
        one_tower: dict[str, Any] = {"heads": len(weights["layer"]), "layers": len(np.unique(weights["layer"]))}
        one_tower |= {"white": {key: found.numbers for key, found in white.items()}, "rows": quantities(one)}
        content["towers"][name] = one_tower
    write(results / "results.json", content)
    write_table(results / "results.csv", _COLUMNS, (line for name, one in every.items() for line in _lines(name, one)))
    figure(every, content).savefig(results / "figure.png", dpi=100)
    return table(content)


def _lines(name: str, tower: Mapping[str, Any]) -> list[list[object]]:
    """A line for each head, length and choice of tokens: means over texts."""
    lines: list[list[object]] = []
    weights = tower["weights"]
    for length, by_tokens in tower["read"].items():
        for which, numbers in by_tokens.items():
            used = [np.array(numbers[key]).mean(axis=0) for key in ("symmetry", "form_symmetry", "directionality")]
            for place, layer in enumerate(weights["layer"]):
                head = place - weights["layer"].index(layer)
                means = [f"{one[place]:.4f}" for one in used]
                own = [weights[key][place] for key in SCORES]
                lines.append([name, length, which, layer, head, *own, *means])
    return lines


def main_row(tower: Mapping[str, Any], score: str, which: str = ALL) -> Mapping[str, Any]:
    return [row for row in tower["rows"] if row["score"] == score and row["which"] == which][-1]


def figure(every: Mapping[str, Mapping[str, Any]], content: Mapping[str, Any]) -> Any:
    """Each head's score in use against that of its weights, for all tokens; darker dots lie in later layers."""
    drawn, panels = canvas(4.2 * len(every), 8.4, len(SCORES), len(every))
    panels = np.array(panels).reshape(len(SCORES), len(every))
    for row, (score, letter) in zip(panels, SCORES.items(), strict=True):
        for axes, (name, one) in zip(row, every.items(), strict=True):
            layers = np.array(one["weights"]["layer"])
            length = list(one["read"])[-1]
            used = np.array(one["read"][length][ALL][score]).mean(axis=0)
            shade = 0.25 + 0.75 * layers / max(1, layers.max())
            axes.axline((0, 0), slope=1, color="0.8", linewidth=1)
            axes.scatter(one["weights"][score], used, s=22, color=colour(name), alpha=shade, linewidths=0)
            found = Interval(*main_row(content["towers"][name], score)["weights and use"])
            axes.set_title(f"{name}\n{letter}: {found:.2f}", fontsize=SIZE)
            axes.set_xlabel(f"{letter} of the weights", fontsize=SIZE)
            axes.tick_params(labelsize=SIZE - 2)
        row[0].set_ylabel(f"{letter} in use", fontsize=SIZE)
    return drawn


def table(content: Mapping[str, Any]) -> str:
    head = ["", "score", "length", "tokens", "rank correlation", "within a layer", "over texts", "exchanged", "medians"]
    lines = [head]
    for name, tower in content["towers"].items():
        for row in tower["rows"]:
            shown = [f"{Interval(*row[key]):.2f}" for key in ("weights and use", "within a layer", "over texts")]
            control = "{mean:+.2f} (95 % below {high:+.2f})".format(**row["exchanged"])
            medians = "{:+.3f} -> {:+.3f}".format(*row["medians"])
            lines += [[name, SCORES[row["score"]], row["length"], row["which"], *shown, control, medians]]
    more = [
        f"white tokens, {name}: " + ", ".join(f"{key} {one[0]:.3f}" for key, one in tower["white"].items())
        for name, tower in content["towers"].items()
    ]
    more += [f"not installed: {name} ({', '.join(names)})" for name, names in content["missing"].items()]
    return "\n".join([aligned(lines, left=range(4)), *more])
