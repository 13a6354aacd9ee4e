"""What ablating and editing entries did, over facts: a table with intervals, CSV, JSON and the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from attnflow._core.markup import aligned
from experiments.knowledge_ablation.ablate import METHODS
from experiments.runner.figures import canvas, colour, plot_band
from experiments.runner.files import write, write_table
from experiments.runner.statistics import Interval, proportion, student
from experiments.runner.study import read_study

Measured = Mapping[str, Any]

_LABELS: Final = {"effect": "by direct effect", "norm": "by norm", "random": "random, same layers"}

# Of a fact (and of its other wordings) the change in log-probability or loss, of answers the share, over the facts.
_QUANTITIES: Final[Mapping[str, Callable[[Measured, Measured], float]]] = {
    "fact": lambda after, before: after["answer"][0] - before["answer"][0],
    "paraphrases": lambda after, before: float(np.mean(after["answer"][1:]) - np.mean(before["answer"][1:])),
    "other_facts": lambda after, before: float(np.mean(after["other_facts"]) - np.mean(before["other_facts"])),
    "text": lambda after, before: after["text"] - before["text"],
    "fact_kept": lambda after, _: float(after["is_answer"][0]),
    "fact_changed": lambda after, _: float(after["is_other"][0]),
    "paraphrases_kept": lambda after, _: float(np.mean(after["is_answer"][1:])),
    "paraphrases_changed": lambda after, _: float(np.mean(after["is_other"][1:])),
    "other_facts_kept": lambda after, _: float(np.mean(after["other_facts_kept"])),
    "other_facts_leaked": lambda after, _: float(np.mean(after["other_facts_leaked"])),
}
_SHARES: Final = ("_kept", "_changed", "_leaked")  # ends of the names of shares


@dataclass(frozen=True)
class Outcome:
    change: str  # "before", "ablated" or "edited"
    method: str  # how entries were chosen; "" before
    entries: int  # how many
    facts: int  # how many facts
    # what was measured, with a 95 % interval over facts. The first four are changes, in nats, of the log-probability of
    # the answer (to the fact, its paraphrases, other facts) and of the loss on unrelated text; the others are shares of
    # prompts whose most likely answer is the true one ("kept") or the other one ("changed", "leaked").
    quantities: Mapping[str, Interval]


def outcomes(runs: Sequence[Measured]) -> list[Outcome]:
    found = [_outcome("before", "", 0, [(run["before"], run["before"]) for run in runs])]
    for change in ("ablated", "edited"):
        for method in METHODS:
            sizes = sorted({one["entries"] for run in runs for one in run[change] if one["method"] == method})
            for size in sizes:
                pairs = [
                    (one, run["before"])
                    for run in runs
                    for one in run[change]
                    if (one["method"], one["entries"]) == (method, size)
                ]
                found.append(_outcome(change, method, size, pairs))
    return found


def _outcome(change: str, method: str, entries: int, pairs: Sequence[tuple[Measured, Measured]]) -> Outcome:
    values = {name: [take(after, before) for after, before in pairs] for name, take in _QUANTITIES.items()}
    found = {name: share(v) if name.endswith(_SHARES) else student(v) for name, v in values.items()}
    return Outcome(change, method, entries, len(pairs), found)


def share(values: Sequence[float]) -> Interval:
    """Mean share over facts with the interval of Student's t; of facts that have all or nothing, with Wilson's.

    Where all facts agree, the interval of Student's t has no width, however few they are.

    >>> print(share([0.5, 1.0, 1.0]), share([1.0, 1.0, 1.0]).low > 0.4)
    0.8333 True
    """
    if all(one in (0.0, 1.0) for one in values):
        return proportion(round(sum(values)), len(values))
    return student(values)


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and effect.png, and return the table."""
    about, runs = read_study(folder)
    found = outcomes(runs)
    content = {
        "interval": "mean, and 95 % over facts: Student's t; Wilson's for shares that are 0 or 1 for every fact",
        "config": about["config"],
        "facts": [run["fact"] for run in runs],
        "outcomes": [asdict(one) for one in found],
    }
    write(results / "results.json", content)
    rows = [
        [one.change, one.method, one.entries, one.facts, name, *(f"{number:.5f}" for number in v.numbers)]
        for one in found
        for name, v in one.quantities.items()
    ]
    head = ["change", "method", "entries", "facts", "quantity", "mean", "low", "high"]
    write_table(results / "results.csv", head, rows)
    figure(found).savefig(results / "effect.png", dpi=150)
    return table(found)


def table(found: Sequence[Outcome]) -> str:
    head = ["change", "entries", "fact", "paraphrases", "other facts", "text", "kept", "changed", "leaked"]
    lines = [head]
    for one in found:
        q = one.quantities
        nats = [str(q[name]) for name in ("fact", "paraphrases", "other_facts", "text")]
        kept = f"{q['fact_kept'].mean:.0%} / {q['paraphrases_kept'].mean:.0%} / {q['other_facts_kept'].mean:.0%}"
        changed = f"{q['fact_changed'].mean:.0%} / {q['paraphrases_changed'].mean:.0%}"
        what = f"{one.change} {one.method}".strip()
        lines.append([what, str(one.entries), *nats, kept, changed, f"{q['other_facts_leaked'].mean:.0%}"])
    notes = [
        f"{found[0].facts} facts; changes of log-probability and of loss in nats, with 95 % intervals over facts",
        "kept: fact / paraphrases / other facts still answered; changed: fact / paraphrases given the other answer;",
        "leaked: other facts given that answer",
    ]
    return "\n".join([aligned(lines, left=range(len(head))), *notes])


def figure(found: Sequence[Outcome]) -> Any:
    """Ablation: change against the number of entries, for the fact, paraphrases, other facts, text; and the edits."""
    drawn, panels = canvas(12.5, 6.2, 2, 4)
    titles = {"fact": "the fact", "paraphrases": "paraphrases", "other_facts": "other facts", "text": "unrelated text"}
    for axes, (name, title) in zip(panels[0], titles.items(), strict=True):
        for method in METHODS:
            some = [one for one in found if (one.change, one.method) == ("ablated", method)]
            curve = zip(*(one.quantities[name].numbers for one in some), strict=True)
            sizes = [one.entries for one in some]
            plot_band(axes, sizes, *curve, color=colour(method), label=_LABELS[method])
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("entries ablated")
        axes.set_title(title, fontsize=10)
    panels[0][0].set_ylabel("change of log p(answer), nats")
    panels[0][3].set_ylabel("change of loss, nats")
    panels[0][0].legend(frameon=False, fontsize=8)
    shares = {
        "fact_changed": "edited: the fact changed",
        "paraphrases_changed": "paraphrases changed",
        "other_facts_kept": "other facts kept",
        "text": "loss on text, nats",
    }
    for axes, (name, title) in zip(panels[1], shares.items(), strict=True):
        edits = [one for one in found if one.change == "edited"]
        for place, one in enumerate(edits):
            value = one.quantities[name]
            reach = [[value.mean - value.low], [value.high - value.mean]]
            axes.bar(place, value.mean, color=colour(one.method), width=0.7, yerr=reach, capsize=3)
        axes.set_xticks(range(len(edits)), [f"{one.method}\n{one.entries}" for one in edits], fontsize=8)
        axes.set_title(title, fontsize=10)
        if name != "text":
            axes.set_ylim(0, 1.02)
    return drawn
