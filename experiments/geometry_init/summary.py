"""What the runs say: losses against their controls, speed-ups with their null, S and D by layer, files and figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnflow._core.markup import aligned
from experiments.geometry_init.curves import QUANTITIES, Curves, read_curves, read_table
from experiments.geometry_init.model import CONTROLS
from experiments.geometry_init.rates import MIDDLE, SETTLING, by_rate, choices_of, late, middle, said_of, settling
from experiments.runner.figures import SIZE, canvas, colour, label_ends, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Array, Interval, permutation_test, speed_up, student
from experiments.runner.study import LINES, RUNS


@dataclass(frozen=True)
class Comparison:
    """An arm against the control that differs from it in one thing."""

    objective: str  # of both
    arm: str  # what is compared
    control: str  # with what
    loss: Interval  # held-out loss of the arm less that of the control at the end, paired by seed
    p: float  # of that difference, by permutations
    speed_up: float  # share of the steps saved, over all pairs of a run of the arm and one of the control
    # the same for pairs of different seeds of the control: mean, 2.5 % and 97.5 % of these pairs
    null: tuple[float, float, float]


def compare(arm: Curves, control: Curves) -> Comparison:
    """An arm with its control, on the seeds that both have."""
    shared = [seed for seed in arm.seeds if seed in control.seeds]
    mine, theirs = (each.of_seeds(shared, each.held_out) for each in (arm, control))
    pairs = [speed_up(arm.steps, a, b) for a in mine for b in theirs]
    null = [speed_up(arm.steps, a, b) for i, a in enumerate(theirs) for j, b in enumerate(theirs) if i != j] or [0.0]
    low, high = np.percentile(null, [2.5, 97.5])
    ends = mine[:, -1], theirs[:, -1]
    return Comparison(
        arm.objective,
        arm.arm,
        control.arm,
        student((ends[0] - ends[1]).tolist()),
        permutation_test(*(end.tolist() for end in ends)),
        float(np.mean(pairs)),
        (float(np.mean(null)), float(low), float(high)),
    )


def comparisons(every: Sequence[Curves]) -> list[Comparison]:
    """Of all arms that have a control that has run."""
    of = {(one.objective, one.arm): one for one in every}
    pairs = [(one, of.get((one.objective, CONTROLS.get(one.arm, "")))) for one in every]
    return [compare(one, control) for one, control in pairs if control is not None]


def contrasts(every: Sequence[Curves]) -> dict[str, Interval]:
    """What the paper says of S and D over training, on the default initialisation; differences are paired by seed."""
    of = {(one.objective, one.arm): one for one in every}
    found: dict[str, Interval] = {}

    def add(name: str, one: Curves | None, other: Curves | None, take: Any) -> None:
        if one is not None and other is not None:
            seeds = [seed for seed in one.seeds if seed in other.seeds]
            values = [each.of_seeds(seeds, take(each)) for each in (one, other)]
            found[name] = student((values[0] - values[1]).tolist())

    masked, causal = of.get(("masked", "default")), of.get(("causal", "default"))
    add("symmetry, masked less causal", masked, causal, lambda one: one.end("symmetry"))
    add("directionality, masked less causal", masked, causal, lambda one: one.end("directionality"))
    for quantity, objective in (("symmetry", "masked"), ("directionality", "causal")):
        one = of.get((objective, "default"))
        if one is not None:
            ends = late(getattr(one, quantity)[:, -1])
            found[f"{quantity}, late less early layers, {objective}"] = student(ends.tolist())
    for name, one, take in ((MIDDLE, causal, middle), (SETTLING, masked, settling)):
        if one is not None:
            found[name] = student(take(one).tolist())
    symmetric = of.get(("masked", "symmetric"))
    scaled = of.get(("masked", "scaled"))
    add("symmetry at the end, symmetric less scaled", symmetric, scaled, lambda one: one.end("symmetry"))
    for name, start in (("scaled", scaled), ("default", masked)):
        add(f"spread of symmetry over layers, symmetric less {name}", symmetric, start, _spread)
    if symmetric is not None:
        lost = np.median(symmetric.symmetry[:, -1], axis=1) - np.median(symmetric.symmetry[:, 0], axis=1)
        found["symmetry, end less start, symmetric"] = student(lost.tolist())
    return found


def _spread(one: Curves) -> Array:
    return np.ptp(one.symmetry[:, -1], axis=1)


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table.

    The runs of the scale "tiny" were not kept. Its results are computed again from the table beside them:
    `python -m experiments geometry_init --summary --work experiments/geometry_init/results`.
    """
    kept = (folder / RUNS).is_dir() or (folder / LINES).is_file()
    every, choices = read_curves(folder) if kept else (read_table(folder), [])
    if not every:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    best = {(one.objective, one.arm): one.rate for one in choices}
    curves = [one for one in every if best.get((one.objective, one.arm), one.rate) == one.rate]
    compared, contrasted = comparisons(curves), contrasts(curves)
    content = content_of(curves, compared, contrasted)
    more = ""
    if choices:
        content |= {"choices": choices_of(choices), "rates": by_rate(every, best)}
        more = "\n" + said_of(content["choices"], content["rates"])
    write(results / "results.json", content)
    write_table(results / "results.csv", *_rows(every))
    figure(curves).savefig(results / "figure.png", dpi=150)
    return table(curves, compared, contrasted) + more


def content_of(
    every: Sequence[Curves], compared: Sequence[Comparison], contrasted: Mapping[str, Interval]
) -> dict[str, Any]:
    """What `results.json` holds of the arms at their best rates."""
    arms = [
        {
            "objective": one.objective,
            "arm": one.arm,
            "rate": one.rate,
            "seeds": list(one.seeds),
            "seconds": one.seconds,
            **{name: student(one.end(name).tolist()).numbers for name in QUANTITIES},
            "symmetry_by_layer": one.symmetry[:, -1].mean(axis=0).tolist(),
            "directionality_by_layer": one.directionality[:, -1].mean(axis=0).tolist(),
        }
        for one in every
    ]
    return {
        "interval": "mean, and 95 % of Student's t over seeds; S and D are medians over layers",
        "arms": arms,
        "comparisons": [{**asdict(one), "loss": one.loss.numbers} for one in compared],
        "contrasts": {name: value.numbers for name, value in contrasted.items()},
    }


def _rows(every: Sequence[Curves]) -> tuple[list[str], list[list[object]]]:
    """Head and lines of `results.csv`, which `read_table` reads."""
    rows: list[list[object]] = []
    for one in every:
        for number, step in enumerate(one.steps):
            for seed, held_out, s, d in zip(one.seeds, *(getattr(one, q)[:, number] for q in QUANTITIES), strict=True):
                layers = [f"{value:.5f}" for value in (*s, *d)]
                rows.append([one.objective, one.arm, f"{one.rate:g}", seed, step, f"{held_out:.6f}", *layers])
    count = every[0].symmetry.shape[2]
    head = ["objective", "arm", "rate", "seed", "step", "held_out_loss"]
    return [*head, *(f"{letter}_{layer}" for letter in "SD" for layer in range(count))], rows


def table(every: Sequence[Curves], compared: Sequence[Comparison], contrasted: Mapping[str, Interval]) -> str:
    against = {(one.objective, one.arm): one for one in compared}
    lines = [["objective", "arm", "rate", "seeds", "held-out loss", "less control", "speed-up", "null", "S", "D"]]
    for one in every:
        cells = [one.objective, one.arm, f"{one.rate:g}", str(len(one.seeds))]
        cells.append(f"{one.end('held_out').mean():.4f}")
        other = against.get((one.objective, one.arm))
        if other is None:
            cells += ["", "", ""]
        else:
            null = f"{other.null[0]:.0%} [{other.null[1]:.0%}, {other.null[2]:.0%}]"
            cells += [f"{other.loss:.4f} ({other.control}, p {other.p:.3f})", f"{other.speed_up:.0%}", null]
        lines.append([*cells, f"{one.end('symmetry').mean():+.2f}", f"{one.end('directionality').mean():+.2f}"])
    more = [f"{name}: {value:.3f}" for name, value in contrasted.items()]
    return "\n".join([aligned(lines, left=range(len(lines[0]))), *more])


def figure(every: Sequence[Curves]) -> Any:
    """Held-out loss less the default's, paired by seed, S and D (medians over layers) over training, by objective.

    S and D by layer are in results.csv and results.json.
    """
    drawn, panels = canvas(13.0, 12.0, 3, 2)
    titles = {
        "held_out": "held-out loss less default, nats",
        "symmetry": "symmetry S",
        "directionality": "directionality D",
    }
    for column, objective in enumerate(("masked", "causal")):
        mine = [one for one in every if one.objective == objective]
        default = next((one for one in mine if one.arm == "default"), None)
        for axes, (quantity, title) in zip(panels[:, column], titles.items(), strict=True):
            axes.set_title(f"{objective}: {title}", fontsize=SIZE)
            axes.tick_params(labelsize=SIZE)
            axes.set_xlabel("training step", fontsize=SIZE)
            ends: dict[str, tuple[float, float]] = {}
            for one in mine:
                values = _drawn(one, default, quantity)
                if values is not None:
                    bands = [student(row.tolist()) for row in values.T]
                    curve = ([getattr(b, name) for b in bands] for name in ("mean", "low", "high"))
                    plot_band(axes, one.steps, *curve, color=colour(one.arm), marker="", linewidth=2.0)
                    ends[one.arm] = (float(one.steps[-1]), bands[-1].mean)
            label_ends(axes, ends)
    return drawn


def _drawn(one: Curves, default: Curves | None, quantity: str) -> Array | None:
    """[seeds, steps] of a curve; of losses the difference from the default, if that has run."""
    values: Array = getattr(one, quantity)
    if quantity != "held_out":
        return np.median(values, axis=2)
    if default is None:
        return None
    seeds = [seed for seed in one.seeds if seed in default.seeds]
    mine, theirs = (each.of_seeds(seeds, each.held_out) for each in (one, default))
    return mine - theirs
