"""What the runs say: medians by basis, shares with intervals over texts, rank correlations, training runs, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.geometry_function.study import ALL, BASES, INNER, OBJECTIVES, beyond, halves
from experiments.geometry_in_use.summary import spearman
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, student
from experiments.runner.study import read_study
from experiments.runner.verdict import Side, decide

EXCESS: Final = "key share beyond random weights"
SMALLEST: Final = 0.05  # of shares, S and D: the smallest effect that matters, stated before the run
PAIRS: Final = {"text": ("SmolLM2", "MiniLM"), "audio": ("Whisper decoder", "Whisper encoder")}
ENCODERS: Final = ("MiniLM", "AntiBERTy", "Whisper encoder")


def summarise(folder: Path, results: Path) -> str:
    about, runs = read_study(folder)
    weights: dict[str, Any] = {}
    texts: dict[str, list[Any]] = {}
    training: dict[str, list[Any]] = {objective: [] for objective in OBJECTIVES}
    for run in sorted(runs, key=lambda run: run["job"]["seed"] or 0):
        kind, _, name = run["job"]["arm"].partition(" ")
        if kind == "train":
            training[name].append(run)
        for tower, found in run.get("towers", {}).items():
            label = f"{name} {tower}".strip()
            if kind == "weights":
                weights[label] = found
            else:
                each = len(found["sink"]) // len(found["chance"])  # heads of a layer
                random = [one[1] for one in found["chance"] for _ in range(each)]
                found[EXCESS] = [beyond(*pair) for pair in zip(found[f"key share, {ALL}"], random, strict=True)]
                texts.setdefault(label, []).append(found)
    content: dict[str, Any] = {"missing": about["missing"], "smallest": SMALLEST}
    content["weights"] = {name: of_basis(one) for name, one in weights.items()}
    content["texts"] = {name: of_texts(each, weights[name]) for name, each in texts.items()}
    content["training"] = of_training(training)
    content["verdicts"] = verdicts(content, texts, training)
    write(results / "results.json", content)
    write_table(results / "results.csv", _COLUMNS, lines(weights, texts))
    return table(content)


def of_basis(tower: Mapping[str, Any]) -> dict[str, Any]:
    """By basis: median S of layers and heads, and median D; of rotations their mean and spread over draws."""
    found: dict[str, Any] = {"not folded": tower["not folded"]}
    for basis in BASES:
        one = tower[basis]
        draws = np.median(np.array(one["directionality"]), axis=0)
        found[basis] = {
            "S": median(one["symmetry"]), "D": float(draws.mean()), "head S": median(one["head symmetry"]),
            "head D": median(one["head directionality"]), "D over draws": [float(draws.min()), float(draws.max())],
            "S late less early": halves(one["symmetry"], tower["layer"]),
        }  # fmt: skip
    moved = np.abs(np.array(tower["folded"]["symmetry"]) - np.array(tower["stored"]["symmetry"]))
    found["largest move of S in a layer"] = float(moved.max())
    return found


def heads_of(tower: Mapping[str, Any]) -> list[int]:
    """The layer of each head."""
    each = len(tower["folded"]["head symmetry"]) // len(tower["layer"])
    return [layer for layer in tower["layer"] for _ in range(each)]


def of_texts(texts: Sequence[Mapping[str, Any]], tower: Mapping[str, Any]) -> dict[str, Any]:
    """Intervals of Student's t over texts."""
    layers = heads_of(tower)
    found: dict[str, Any] = {"texts": len(texts), "tokens": fmean(one["tokens"] for one in texts)}
    for which in (ALL, INNER):
        for name in ("key share", "form key share", "causal key share"):
            found[f"{name}, {which}"] = student([median(one[f"{name}, {which}"]) for one in texts]).numbers
        found[f"late less early, {which}"] = student(
            [halves(one[f"key share, {which}"], layers) for one in texts]
        ).numbers
    found[EXCESS] = student([median(one[EXCESS]) for one in texts]).numbers
    chances = np.array([one["chance"] for one in texts]).mean(1)
    for place, name in enumerate(("noise", "random weights", "formula")):
        found[f"chance of {name}"] = student(chances[:, place].tolist()).numbers
    found["sink"] = student([median(one["sink"]) for one in texts]).numbers
    measures = {
        **{f"key share, {which}": [one[f"key share, {which}"] for one in texts] for which in (ALL, INNER)},
        **{f"-D {basis}": [[-d for d in tower[basis]["head directionality"]]] * len(texts) for basis in BASES},
        "S folded": [tower["folded"]["head symmetry"]] * len(texts),
    }
    found["rank correlation with the sink"] = {
        name: student(
            [spearman(np.array(mine), np.array(one["sink"])) for mine, one in zip(each, texts, strict=True)]
        ).numbers
        for name, each in measures.items()
    }
    found["rank correlation of -D folded and share"] = student(
        [
            spearman(-np.array(tower["folded"]["head directionality"]), np.array(one[f"key share, {INNER}"]))
            for one in texts
        ]
    ).numbers
    return found


def of_training(training: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """objective -> step -> quantity -> mean over layers, with the interval over seeds."""
    found: dict[str, Any] = {}
    for objective, runs in training.items():
        for number, at in enumerate(runs[0]["measured"] if runs else ()):
            rows = [run["measured"][number] for run in runs]
            found.setdefault(objective, {})[str(at["step"])] = {
                name: student([float(np.mean(row[name])) for row in rows]).numbers for name in at if name != "step"
            }
    return found


def verdicts(content: Mapping[str, Any], texts: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """Claims of the paper in the measures that belong to the function: the interval, and what the rule makes of it."""
    found: dict[str, Any] = {}

    def judged(name: str, value: Interval, claimed: Side) -> None:
        decision = decide(value, claimed, SMALLEST)
        found[name] = {"claimed": claimed, "value": value.numbers, "verdict": decision.verdict, "tags": decision.tags}

    def last(objective: str, name: str) -> list[list[float]]:
        return [run["measured"][-1][name] for run in training[objective]]

    keys = [f"{measure}, {which}" for which in (ALL, INNER) for measure in ("key share", "causal key share")]
    for name, (decoder, encoder) in PAIRS.items():
        for key in (*keys, EXCESS) if decoder in texts and encoder in texts else ():
            pairs = zip(texts[decoder], texts[encoder], strict=True)
            difference = student([median(one[key]) - median(other[key]) for one, other in pairs])
            judged(f"{name}: decoder above encoder in {key}", difference, "above")
    for name, each in content["texts"].items():
        for which in (ALL, INNER) if name not in ENCODERS else ():
            late = Interval(*each[f"late less early, {which}"])
            judged(f"{name}: late layers above early in key share, {which}", late, "above")
    if not training["causal"]:
        return found
    claims: dict[str, Side] = {
        "key share": "above", "excess": "above", "folded symmetry": "below", "stored symmetry": "below",
        "folded directionality": "below", "stored directionality": "below",
    }  # fmt: skip
    for name, side in claims.items():
        pairs = zip(last("causal", name), last("masked", name), strict=True)
        judged(f"ours: decoder {side} encoder in {name}", student([fmean(a) - fmean(b) for a, b in pairs]), side)
    for objective, name in (("causal", "key share"), ("masked", "folded symmetry"), ("masked", "stored symmetry")):
        late = student([halves(one, range(len(one))) for one in last(objective, name)])
        judged(f"ours, {objective}: late layers above early in {name}", late, "above")
    return found


_COLUMNS: Final = (
    *("tower", "layer", "head", "symmetry stored", "symmetry folded", "directionality stored", "directionality folded"),
    *("directionality rotated", "key share", "key share without ends", "form key share", "sink"),
)


def lines(weights: Mapping[str, Any], texts: Mapping[str, Any]) -> list[list[object]]:
    """A line for each head: of the weights, and means over texts."""
    found: list[list[object]] = []
    for name, tower in weights.items():
        layers = heads_of(tower)
        keys = (f"key share, {ALL}", f"key share, {INNER}", f"form key share, {ALL}", "sink")
        means = [np.array([one[key] for one in texts[name]]).mean(0) for key in keys]
        columns = [tower[basis][f"head {score}"] for score, basis in _OF_HEADS]
        for place, layer in enumerate(layers):
            head = place - layers.index(layer)
            found.append([name, layer, head, *(one[place] for one in columns), *(f"{one[place]:.4f}" for one in means)])
    return found


_OF_HEADS: Final = (
    *(("symmetry", basis) for basis in BASES[:2]),
    *(("directionality", basis) for basis in BASES),
)


def table(content: Mapping[str, Any]) -> str:
    first = [["", *(f"{letter} {basis}" for letter in "SD" for basis in BASES), "D of rotations", "largest move of S"]]
    for name, one in content["weights"].items():
        numbers = [f"{one[basis][letter]:+.3f}" for letter in "SD" for basis in BASES]
        spread = "{:+.2f} to {:+.2f}".format(*one["rotated"]["D over draws"])
        first.append([name, *numbers, spread, f"{one['largest move of S in a layer']:.3f}"])
    second: list[list[str]] = []
    for name, one in content["texts"].items():
        values = {key: value for key, value in one.items() if isinstance(value, list)}
        values |= {f"sink ~ {key}": value for key, value in one["rank correlation with the sink"].items()}
        second += [[name, key, f"{Interval(*value):.3f}"] for key, value in values.items()]
    for objective, steps in content["training"].items():
        step, last = list(steps.items())[-1]
        second += [[objective, f"{key}, step {step}", f"{Interval(*value):.3f}"] for key, value in last.items()]
        second += [[objective, f"{key}, step 0", f"{Interval(*value):.3f}"] for key, value in steps["0"].items()]
    third = [
        [key, f"{Interval(*one['value']):.3f}", " ".join([one["verdict"], *one["tags"]])]
        for key, one in content["verdicts"].items()
    ]
    return "\n\n".join([aligned(first, left=[0]), aligned(second, left=[0, 1]), aligned(third, left=[0])])
