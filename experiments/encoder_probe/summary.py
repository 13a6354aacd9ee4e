"""What the runs say: differences paired by seed with Student's t, CSV, JSON and the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from attnflow._core.markup import aligned
from experiments.encoder_probe.figure import draw_figure
from experiments.encoder_probe.grammar import KINDS
from experiments.encoder_probe.study import REAL, UNTRAINED
from experiments.encoder_probe.symmetry import middle
from experiments.runner.files import write, write_table
from experiments.runner.jobs import Chosen, Job, Record, choosing_loss, chosen
from experiments.runner.statistics import detectable, student
from experiments.runner.study import read_study

HEADS: Final = {"verb": "subject", "pronoun": "antecedent", "effect": "cause"}
BySeed = dict[int, float]


def summarise(folder: Path, results: Path) -> str:
    """Write results.json, results.csv and the figure, and return the table."""
    about, finished = read_study(folder)
    config, runs = about["config"], {Job(**run["job"]): run for run in finished}
    arms: dict[str, Chosen] = {}
    for name in config["arms"]:
        one = chosen(name, config["rates"], config["seeds"], runs, choosing_loss, config["choosing"])
        if one is not None:
            arms[name] = one
    if not arms:
        raise FileNotFoundError(f"no arm in {folder} has run at all its rates")
    found = {name: values for name, values in quantities(arms, runs, config["seeds"]).items() if values}
    compared = {**found, **contrasts(found)}
    real = runs.get(Job(REAL))
    content: dict[str, Any] = {
        "interval": "mean, and 95 % of Student's t over seeds; differences are paired by seed",
        "arms": {
            name: {
                "parameters": next(iter(one.runs.values()))["parameters"],
                "rate": one.rate,
                "tried": list(one.tried),
                "at_end": one.at_end,
                "seeds": list(one.runs),
            }
            for name, one in arms.items()
        },
        "quantities": {
            name: {"t": student(list(values.values())).numbers, "by_seed": values} for name, values in compared.items()
        },
        "seen_with_80_%": {
            name: detectable(list(values.values()))
            for name, values in compared.items()
            if len(set(values.values())) > 1
        },
        "symmetry": None if real is None else symmetry(real),
    }
    write(results / "results.json", content)
    rows = [[name, seed, f"{value:.6f}"] for name, values in compared.items() for seed, value in values.items()]
    write_table(results / "results.csv", ["quantity", "seed", "value"], rows)
    draw_figure(content).savefig(results / "figure.png", dpi=110)
    lines = [[name, *(f"{number:+.3f}" for number in one["t"])] for name, one in content["quantities"].items()]
    return aligned([["quantity", "mean", "low", "high"], *lines], left=[0])


def quantities(arms: Mapping[str, Chosen], runs: Mapping[Job, Record], seeds: list[int]) -> dict[str, BySeed]:
    """Everything that is measured of one network, by name and seed."""
    found: dict[str, BySeed] = {}

    def add(name: str, records: Mapping[int, Record], take: Callable[[Any], float]) -> None:
        found[name] = {seed: take(record) for seed, record in records.items()}

    for arm, one in arms.items():
        add(f"{arm}: loss", one.runs, choosing_loss)
        for length in ("near", "far"):
            for kind in KINDS:
                add(
                    f"{arm}: right, {kind}, {length}",
                    one.runs,
                    lambda run, kind=kind, length=length: run["measured"][-1]["accuracy"][kind][length],
                )
            add(
                f"{arm}: right, {length}",
                one.runs,
                lambda run, length=length: fmean(run["measured"][-1]["accuracy"][kind][length] for kind in KINDS),
            )
    networks = {arm: ({seed: run["links"] for seed, run in one.runs.items()}) for arm, one in arms.items()}
    blank = {seed: runs[Job(UNTRAINED, seed=seed)] for seed in seeds if Job(UNTRAINED, seed=seed) in runs}
    networks["random"] = {seed: run["links"] for seed, run in blank.items()}
    if "plain" in arms:
        networks["random on trained"] = {seed: run["random links"] for seed, run in arms["plain"].runs.items()}
    for network, links in networks.items():
        for kind in KINDS:
            for table in dict.fromkeys(table for of_seed in links.values() for table in of_seed[kind]):
                for what in ("points", "by", "one way", "one way by"):
                    layers = len(next(iter(links.values()))[kind][table][what])
                    for layer in range(layers):
                        place = "last layer" if layer == layers - 1 else f"layer {layer + 1}"
                        name = f"{network}: {table}, {place}, {kind} {what}"
                        add(name, links, lambda of, k=kind, t=table, w=what, i=layer: of[k][t][w][i])
    return found


def contrasts(found: Mapping[str, BySeed]) -> dict[str, BySeed]:
    """What the claim is judged by; shares are given less the half that no preference would have."""
    made: dict[str, BySeed] = {}

    def less(name: str, one: BySeed | None, other: BySeed | None) -> None:
        if one and other and one.keys() & other.keys():
            made[name] = {seed: value - other[seed] for seed, value in one.items() if seed in other}

    for kind in KINDS:
        for what, said in (("points", f"{kind} to {HEADS[kind]}"), ("one way", f"{kind} and {HEADS[kind]}, one way")):

            def of(network: str, table: str, kind: str = kind, what: str = what) -> BySeed | None:
                return found.get(f"{network}: masked {table}, last layer, {kind} {what}")

            own, half = of("guidance", "bias"), dict.fromkeys(of("guidance", "bias") or (), 0.5)
            less(f"B, {said}: less half", own, half)
            for network in ("random", "random on trained", "key"):
                less(f"B, {said}: less {network}", own, of(network, "bias"))
            scores = of("plain", "scores")
            less(f"scores of plain, {said}: less half", scores, dict.fromkeys(scores or (), 0.5))
            less(f"B, {said}: less scores of plain", own, scores)
    for length in ("near", "far"):
        for arm in ("plain", "key", "dense"):
            less(
                f"right, {length}: guidance less {arm}",
                found.get(f"guidance: right, {length}"),
                found.get(f"{arm}: right, {length}"),
            )
    for arm in ("plain", "key", "dense"):
        less(f"loss: guidance less {arm}", found.get("guidance: loss"), found.get(f"{arm}: loss"))
    return made


def symmetry(real: Record) -> dict[str, Any]:
    """Over heads: median, quartiles and least of the antisymmetric share, reading by reading."""
    return {
        "encoder": real["encoder"],
        "sentences": len(real["tokens"]),
        "tokens": fmean(real["tokens"]),
        "form": real["form"],
        "heads": {
            model: {
                tokens: {name: middle(heads) for name, heads in readings.items()} for tokens, readings in every.items()
            }
            for model, every in real["shares"].items()
        },
        "layers": {  # mean over layers, with Student's t
            tokens: {name: student([fmean(layer) for layer in heads]).numbers for name, heads in readings.items()}
            for tokens, readings in real["shares"]["real"].items()
        },
    }
