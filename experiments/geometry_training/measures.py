"""What is read off the curves of a model size and corpus, each quantity by several definitions, the main one first."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from experiments.geometry_init import rates
from experiments.runner.statistics import Array, speed_up

OBJECTIVES: Final = ("encoder", "decoder")
CORPORA: Final = ("jigsaw", "wikipedia", "red_pajama")
SHOWN: Final = {"jigsaw": "Jigsaw", "wikipedia": "Wikipedia", "red_pajama": "RedPajama"}
LAYERS: Final = {"bert-small": 4, "bert": 12}

SYMMETRY: Final = "S, encoder less decoder"
DIRECTIONALITY: Final = "D, encoder less decoder"
LATE_SYMMETRY: Final = "S of late less early layers, encoder"
LATE_DIRECTIONALITY: Final = "D of late less early layers, decoder"
MIDDLE: Final = "S of the middle layers, decoder"
SETTLING: Final = "share of the steps until S has settled, late less early layers, encoder"
LOSS: Final = "loss at the end, symmetric less default start"
SPEED: Final = "speed-up of the symmetric start, less that of the default start over itself"

Measures = dict[str, dict[str, float]]  # quantity -> definition -> value; the first definition is the main one

_DATA: Final = Path(__file__).parent / "data"
_SHARES: Final = (0.2, 0.1, 0.5)  # of the largest distance from the end: within it for good, a layer has settled
_LAST: Final = (1, 10, 100)  # points of a curve of losses
_WINDOWS: Final = (1, 3, 25)  # points that a curve of losses is smoothed over


@dataclass(frozen=True)
class Course:
    """S and D of a run by layer and checkpoint."""

    steps: Array  # [checkpoints]
    symmetry: Array  # [checkpoints, layers]
    directionality: Array  # likewise


def _rows(name: str) -> list[dict[str, str]]:
    with gzip.open(_DATA / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def courses() -> Mapping[tuple[str, str, str], Course]:
    """The authors' runs, by (model, objective, corpus)."""
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in _rows("runs"):
        found.setdefault((row["model"], row["objective"], row["corpus"]), []).append(row)
    return {key: _course(rows, LAYERS[key[0]]) for key, rows in found.items()}


def _course(rows: list[dict[str, str]], layers: int) -> Course:
    rows = sorted(rows, key=lambda row: (int(row["step"]), int(row["layer"])))
    places = np.array([int(row["layer"]) for row in rows]).reshape(-1, layers)
    if not (places == np.arange(layers)).all():
        raise ValueError(f"a checkpoint lacks one of {layers} layers")
    steps, *scores = (
        np.array([float(row[name]) for row in rows]).reshape(-1, layers)
        for name in ("step", "symmetry", "directionality")
    )
    return Course(steps[:, 0], *scores)


@cache
def losses() -> Mapping[tuple[str, str], tuple[Array, Array]]:
    """The logged losses of an encoder by (model, corpus): from the default start, and from the symmetric one."""
    rows = _rows("losses")

    def curve(model: str, corpus: str, end: str) -> Array:
        return np.array([float(row[f"{model.replace('-', '_')}--encoder--{corpus}{end}"]) for row in rows])

    return {
        (model, corpus): (curve(model, corpus, ""), curve(model, corpus, "--symmetric-init"))
        for model in LAYERS
        for corpus in CORPORA
    }


def measures(model: str, corpus: str) -> Measures:
    """All quantities of the runs of a size on a corpus."""
    encoder, decoder = (courses()[model, objective, corpus] for objective in OBJECTIVES)
    default, symmetric = losses()[model, corpus]
    places = np.arange(1, len(default) + 1).tolist()  # one point of the losses each 200 steps

    def ahead(curve: Array, window: int) -> float:
        return speed_up(places, curve.tolist(), default.tolist(), window)

    return {
        SYMMETRY: _apart(encoder.symmetry, decoder.symmetry),
        DIRECTIONALITY: _apart(encoder.directionality, decoder.directionality),
        LATE_SYMMETRY: _late(encoder.symmetry[-1]),
        LATE_DIRECTIONALITY: _late(decoder.directionality[-1]),
        MIDDLE: _middle(decoder.symmetry[-1]),
        SETTLING: {f"within {share:g}": _thirds(settled(encoder, share)) for share in _SHARES},
        LOSS: {f"mean of the last {n}": float(symmetric[-n:].mean() - default[-n:].mean()) for n in _LAST},
        SPEED: {f"smoothed over {n}": ahead(symmetric, n) - ahead(default, n) for n in _WINDOWS},
    }


def table_1(model: str, corpus: str) -> dict[str, float]:
    """Losses at the end and the speed-up as Table 1 prints them, and what the default start has over itself."""
    default, symmetric = losses()[model, corpus]
    places = np.arange(1, len(default) + 1).tolist()
    ahead = [speed_up(places, curve.tolist(), default.tolist(), 1) for curve in (symmetric, default)]
    ends = {"default": float(default[-1]), "symmetric": float(symmetric[-1])}
    return {**ends, "speed-up": ahead[0], "over itself": ahead[1]}


def _apart(one: Array, other: Array) -> dict[str, float]:
    half = len(one) // 2
    over_time = [np.median(each[half:], axis=1).mean() for each in (one, other)]
    return {
        "median over layers": float(np.median(one[-1]) - np.median(other[-1])),
        "mean over layers": float(one[-1].mean() - other[-1].mean()),
        "median, second half of training": float(over_time[0] - over_time[1]),
    }


def _thirds(values: Array) -> float:
    third = len(values) // 3
    return float(values[-third:].mean() - values[:third].mean())


def _late(values: Array) -> dict[str, float]:
    half = len(values) // 2
    return {
        "last less first third": _thirds(values),
        "last less first half": float(values[half:].mean() - values[:half].mean()),
        "last less first layer": float(values[-1] - values[0]),
    }


def _middle(values: Array) -> dict[str, float]:
    third, quarter = len(values) // 3, len(values) // 4
    half = values[quarter : len(values) - quarter]
    return {
        "between the outer thirds": float(values[third : len(values) - third].mean()),
        "middle half": float(half.mean()),
        "lowest of the middle half": float(half.min()),
    }


def settled(course: Course, share: float) -> Array:
    """[layers], the share of all steps after which S stays within a share of its largest distance from its end."""
    return rates.settled(course.steps, course.symmetry.T, share)
