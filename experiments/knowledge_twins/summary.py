"""What the runs say: losses, differences paired by seed with their power, and what reading fewer entries costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.knowledge_twins.models import Kind
from experiments.runner.figures import canvas, colour, enlarge, label_ends, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Job, Record, choosing_loss, chosen
from experiments.runner.statistics import Array, detectable, said, student
from experiments.runner.study import read_study

KINDS: Final[tuple[Kind, ...]] = ("shared", "equal parameters", "equal compute")
_GATED: Final = "gated "
MATCHED: Final = "matched"  # how models start; results of before this was so do not say it
FORMS: Final = ("softmax", "relu", "relu + B1", "relu + B1 + b2", "common view", "larger common view")
PAIRS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {  # by claim: with a part, and without
    "K16": ((FORMS[1], FORMS[0]),),
    "K17": ((FORMS[2], FORMS[1]),),
    "K18": ((FORMS[3], FORMS[2]),),
    "K19": ((FORMS[3], FORMS[4]), (FORMS[3], FORMS[5])),
}


@dataclass(frozen=True)
class Curve:
    arm: str  # its name
    rate: float  # chosen by the first seeds
    tried: tuple[float, ...]  # rates that were tried
    runs: Mapping[int, Record]  # finished ones, by seed
    steps: tuple[int, ...]  # of the measurements
    held_out: Array  # nats per token, [seeds, steps]

    def less(self, other: Curve) -> list[float]:
        """Loss at the end less that of another arm, on the seeds that both have."""
        ends, others = (dict(zip(one.runs, one.held_out[:, -1].tolist(), strict=True)) for one in (self, other))
        return [ends[seed] - others[seed] for seed in ends if seed in others]


def read_curves(folder: Path) -> tuple[Mapping[str, Any], dict[str, Curve]]:
    """(settings, every arm whose learning rates have all been tried)."""
    about, finished = read_study(folder)
    runs, config = {Job(**run["job"]): run for run in finished}, about["config"]
    plan, curves = config["schedule"], dict[str, Curve]()
    for arm in about["sizes"]:
        best = chosen(arm, plan["rates"], config["seeds"], runs, choosing_loss, plan["choosing"])
        if best is not None and best.runs:
            of_arm = best.runs
            steps = tuple(entry["step"] for entry in next(iter(of_arm.values()))["measured"])
            held = np.array([[entry["held_out"] for entry in run["measured"]] for run in of_arm.values()])
            curves[arm] = Curve(arm, best.rate, best.tried, of_arm, steps, held)
    if not curves:
        raise FileNotFoundError(f"no arm in {folder} has run with all its learning rates")
    return about, curves


def arms(about: Mapping[str, Any], curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Of each arm its sizes, its loss at the end, and what its base is used for."""
    found: list[dict[str, Any]] = []
    for arm, one in curves.items():
        runs = list(one.runs.values())
        row: dict[str, Any] = {"arm": arm, "rate": one.rate, "tried": one.tried, "seeds": list(one.runs)}
        row.update(about["sizes"][arm])
        row["held_out"] = student(one.held_out[:, -1].tolist()).numbers
        row["seconds"] = float(np.mean([run["seconds"] for run in runs]))
        if "read" in runs[0]:
            row["read"] = {count: student([run["read"][count] for run in runs]).numbers for count in runs[0]["read"]}
            row["best_less_all"] = {
                count: student([run["read"][count] - run["read"]["all"] for run in runs]).numbers
                for count in runs[0]["read"]
                if count != "all"
            }
            row["active"] = np.mean([run["active"] for run in runs], axis=0).tolist()
            row["activity"] = [student(list(layer)).numbers for layer in zip(*(r["active"] for r in runs), strict=True)]
            row["dead"] = float(np.mean([run["dead"] for run in runs]))
        found.append(row)
    return found


def differences(curves: Mapping[str, Curve], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Loss of one arm less that of another, with the interval of Student's t over seeds, and its power."""
    found: list[dict[str, Any]] = []
    for one, other in pairs:
        if one in curves and other in curves:
            each = curves[one].less(curves[other])
            if len(each) > 1:
                row = {"name": f"{one} less {other}", "each": each, "loss": student(each).numbers}
                found.append({**row, "detectable": detectable(each)})
    return found


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and figure.png, and return the table."""
    about, curves = read_curves(folder)
    forms = about["config"]["forms"]
    twins = [(f"{form}shared", f"{form}{kind}") for form in ("", _GATED) for kind in KINDS[1:]]
    content: dict[str, Any] = {
        "interval": "mean, and 95 % of Student's t over seeds",
        "start": MATCHED,
        "arms": arms(about, curves),
        "differences": differences(curves, [pair for some in PAIRS.values() for pair in some] if forms else twins),
    }
    write(results / "results.json", content)
    write_curves(results / "results.csv", curves)
    drawn = figure_of_forms(content) if forms else figure(content, curves)
    drawn.savefig(results / "figure.png", dpi=110)
    return table(content)


def write_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    rows = [
        [arm, f"{one.rate:g}", seed, step, f"{loss:.6f}"]
        for arm, one in curves.items()
        for seed, held in zip(one.runs, one.held_out, strict=True)
        for step, loss in zip(one.steps, held, strict=True)
    ]
    write_table(path, ["arm", "rate", "seed", "step", "held_out_loss"], rows)


def figure(content: Mapping[str, Any], curves: Mapping[str, Curve]) -> Any:
    """Loss over steps, ungated and gated; differences to the twins; loss by how many entries are read."""
    drawn, panels = canvas(15.0, 11.0, 2, 2)
    for axes, form, title in zip(panels[0], ("", _GATED), ("ReLU", "gated SiLU"), strict=True):
        shown = {name: one for name, one in curves.items() if name.startswith(_GATED) == bool(form)}
        axes.set(title=f"held-out loss, {title}, nats per token", xlabel="steps", visible=bool(shown))
        ends: dict[str, tuple[float, float]] = {}
        for name, one in shown.items():
            ends[name.removeprefix(form)] = draw_curve(axes, one, name.removeprefix(form))
        label_ends(axes, ends)
    _differences(panels[1, 0], content["differences"])
    _read(panels[1, 1], content["arms"])
    for axes in panels.flatten():
        enlarge(axes)
    return drawn


def draw_curve(axes: Any, one: Curve, name: str) -> tuple[float, float]:
    """Loss over steps from the second measurement on, which the first one would hide; returns its end."""
    bands = [student(row.tolist()) for row in one.held_out.T[1:]]
    curve = ([getattr(band, part) for band in bands] for part in ("mean", "low", "high"))
    plot_band(axes, one.steps[1:], *curve, color=colour(name), marker="", linewidth=2.2)
    return one.steps[-1], bands[-1].mean


def _differences(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set(title="loss less that of the other, nats (band: 0.02)", xlabel="nats per token")
    axes.axvspan(-0.02, 0.02, color="0.92")
    axes.axvline(0, color="0.4", linewidth=0.8)
    for place, one in enumerate(reversed(rows)):
        mean, low, high = one["loss"]
        other = one["name"].split(" less ")[1].removeprefix(_GATED)
        line = colour(other) if other in KINDS else "0.2"
        axes.plot([low, high], [place, place], color=line, linewidth=2.5)
        axes.plot(mean, place, "o", color=line, markersize=9)
    axes.set_yticks(range(len(rows)), [one["name"].replace(" less ", "\nless ") for one in reversed(rows)])


def figure_of_forms(content: Mapping[str, Any]) -> Any:
    """Held-out loss of each form of the shared model, and what each part changes."""
    drawn, panels = canvas(15.0, 5.5, 1, 2)
    losses, rows = panels
    losses.set(title="held-out loss, nats per token", xlabel="nats per token")
    for place, one in enumerate(reversed(content["arms"])):
        mean, low, high = one["held_out"]
        losses.plot([low, high], [place, place], color="0.2", linewidth=2.5)
        losses.plot(mean, place, "o", color="0.2", markersize=9)
    losses.set_yticks(range(len(content["arms"])), [one["arm"] for one in reversed(content["arms"])])
    _differences(rows, content["differences"])
    for axes in panels:
        enlarge(axes)
    return drawn


def _read(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.set(title="held-out loss by entries read of each layer, nats", xlabel="entries read by a token")
    axes.set_xscale("log", base=2)
    ends: dict[str, tuple[float, float]] = {}
    for one in rows:
        counts = [count for count in one.get("read", ()) if count != "all"]
        if counts and not one["arm"].startswith(_GATED):
            places, last = [int(count) for count in counts], 4 * int(counts[-1])
            bands = zip(*(one["read"][count] for count in (*counts, "all")), strict=True)
            plot_band(axes, [*places, last], *bands, color=colour(one["arm"]), linewidth=2.2)
            axes.set_xticks([*places, last], [*counts, "all"])
            ends[one["arm"]] = last, one["read"]["all"][0]
    label_ends(axes, ends)


def table(content: Mapping[str, Any]) -> str:
    lines = [["arm", "rate", "seeds", "parameters", "of these between", "multiply-adds", "held-out loss"]]
    for one in content["arms"]:
        numbers = [f"{one[name]:,}" for name in ("parameters", "between", "operations")]
        lines.append([one["arm"], f"{one['rate']:g}", str(len(one["seeds"])), *numbers, said(one["held_out"])])
    more = [
        f"{one['name']}: {said(one['loss'])}; {one['detectable']:.3f} would be seen in 4 of 5 studies"
        for one in content["differences"]
    ]
    for one in content["arms"]:
        if "read" in one:
            each = ", ".join(f"{count} {value[0]:.3f}" for count, value in one["read"].items())
            active = " ".join(f"{share:.0%}" for share in one["active"])
            more.append(f"{one['arm']}, entries read: {each}; active by layer {active}, dead {one['dead']:.0%}")
    return "\n".join([aligned(lines, left=range(len(lines[0]))), *more])
