"""The settings of the measurement, the texts that it learns, and what it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attnflow._core.progress import Progress
from attnflow.models import sample_text
from experiments.geometry_theory.language_model import Objective, draw_tokens
from experiments.geometry_theory.theory import OBJECTIVES, PAIRS, STAGES, UpdateStudy, run_updates, study_of
from experiments.runner.experiment import Experiment, Judgement, Setup
from experiments.runner.figures import canvas, colour
from experiments.runner.files import read, write, write_table
from experiments.runner.jobs import Job, repeated
from experiments.runner.statistics import Interval
from experiments.runner.study import read_study
from experiments.runner.text import stream
from experiments.runner.verdict import SCORE, decide, jointly

WORKS: Final = ("sonnets", "hamlet", "midsummer_nights_dream")
_GRADIENTS: Final = ("gradient", "late gradient")
_QUANTITIES: Final = {
    "symmetry": "S",
    "directionality": "D",
    "more_columns": "share of strong columns less rows",
}


@dataclass(frozen=True)
class Measurement:
    """What is trained. The defaults are the scale "tiny"."""

    # "letters" of Shakespeare, "chain": a Markov chain of 48 tokens, drawn anew for each seed, or a data set of the
    # hub, of which the first letters are streamed
    text: str = "letters"
    seeds: tuple[int, ...] = tuple(range(40))  # of the models of each objective
    steps: int = 600  # of the optimiser
    width: int = 64  # of the models
    letters: int = 0  # of a data set


def tiny() -> Measurement:
    """Eleven minutes of one CPU core."""
    return Measurement()


def small() -> Measurement:
    """Wider and longer; not run yet."""
    return Measurement(seeds=tuple(range(8)), steps=10_000, width=256)


def paper() -> Measurement:
    """A hundred million letters of Wikipedia, the paper's number of steps; its models are those of `geometry_init`."""
    source = "wikimedia/wikipedia:20231101.en:train"
    return Measurement(source, tuple(range(8)), steps=200_000, width=256, letters=100_000_000)


def streamed(source: str, count: int) -> Tensor:
    """The first bytes of a data set, as numbers."""
    found = bytearray()
    for text in stream(source):
        found += text.encode() + b"\n"
        if len(found) >= count:
            break
    return torch.tensor(np.frombuffer(bytes(found[:count]), np.uint8).astype(np.int64))


def letters() -> Tensor:
    """The characters of three works of Shakespeare as numbers from 0."""
    text = "".join(sample_text(work) for work in WORKS)
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    return torch.tensor([numbers[character] for character in text])


def miniature(config: Measurement) -> Measurement:
    """Two steps of a narrow model, on a Markov chain in place of Shakespeare's letters."""
    text = "chain" if config.text == "letters" else config.text
    return replace(config, text=text, seeds=config.seeds[:2], steps=2, width=16, letters=min(config.letters, 2000))


def setup(settings: Measurement) -> Setup:
    tokens = None
    if settings.text != "chain":
        tokens = letters() if settings.text == "letters" else streamed(settings.text, settings.letters)

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        objective: Objective = "causal" if job.arm == "causal" else "bidirectional"
        seed = job.seed or 0
        text = draw_tokens(seed) if tokens is None else tokens
        return run_updates(text, objective, seed, folder, steps=settings.steps, width=settings.width, progress=progress)

    return Setup(repeated(OBJECTIVES, settings.seeds), run)


def read_updates(folder: Path) -> UpdateStudy:
    """What the finished runs of a folder say; seeds that have run with one objective only are left out."""
    settings, runs = read_study(folder)
    by_seed = {
        objective: {r["job"]["seed"]: r for r in runs if r["job"]["arm"] == objective} for objective in OBJECTIVES
    }
    seeds = sorted(set.intersection(*(set(each) for each in by_seed.values())))
    if not seeds:
        raise FileNotFoundError(f"no seed in {folder} has run with both objectives")
    return study_of({o: [by_seed[o][seed] for seed in seeds] for o in OBJECTIVES}, settings["config"]["steps"])


def summarise(folder: Path, results: Path) -> str:
    """Write results.csv, results.json and figure.png, and return the table."""
    study = read_updates(folder)
    content: dict[str, Any] = asdict(study)
    rows = [
        [row["stage"], row["objective"], quantity, *(f"{row[quantity][end]:.5f}" for end in ("mean", "low", "high"))]
        for row in content["rows"]
        for quantity in _QUANTITIES
    ]
    rows += [
        [stage, "bidirectional", PAIRS[name], *(f"{value[end]:.5f}" for end in ("mean", "low", "high"))]
        for stage, found in content["pairs"].items()
        for name, value in found.items()
    ]
    write(results / "results.json", content)
    write_table(results / "results.csv", ["stage", "objective", "quantity", "mean", "low", "high"], rows)
    figure(content).savefig(results / "figure.png", dpi=130)
    losses = ", ".join(f"{name} {value.mean:.2f}" for name, value in study.losses.items())
    return f"{study}\nlosses: {losses}, by frequencies alone {study.unigram_loss:.2f}"


def figure(study: Mapping[str, Any]) -> Any:
    """Symmetry, directionality and strong columns of each kind of update, with 95 % intervals over seeds."""
    drawn, panels = canvas(11.0, 3.4, 1, len(_QUANTITIES))
    for axes, (quantity, title) in zip(panels, _QUANTITIES.items(), strict=True):
        axes.axhline(0, color="0.4", linewidth=0.8)
        for shift, objective in enumerate((*OBJECTIVES, "difference")):
            values = [row[quantity] for row in study["rows"] if row["objective"] == objective]
            middle = [value["mean"] for value in values]
            reach = [[abs(value["mean"] - value[end]) for value in values] for end in ("low", "high")]
            places = [place + 0.2 * (shift - 1) for place in range(len(STAGES))]
            style = {"color": colour(objective), "fmt": "o", "markersize": 4.5, "capsize": 3, "label": objective}
            axes.errorbar(places, middle, reach, **style)
        axes.set_xticks(range(len(STAGES)), [stage.replace(" ", "\n") for stage in STAGES], fontsize=8)
        axes.set_title(title, fontsize=10)
    panels[0].legend(frameon=False, fontsize=8)
    return drawn


def judge(results: Path) -> Sequence[Judgement]:
    """The theorems on training, by intervals over seeds; the smallest effect was chosen after the run."""
    after: Final = "rule after"
    study = read(results / "results.json")

    def of(objective: str, stage: str, quantity: str) -> Interval:
        found = next(r[quantity] for r in study["rows"] if (r["objective"], r["stage"]) == (objective, stage))
        return Interval(**found)

    down, apart = of("causal", "training", "directionality"), of("difference", "training", "directionality")
    up, more = of("bidirectional", "training", "symmetry"), of("difference", "training", "symmetry")
    first = of("difference", "gradient", "symmetry")
    pairs = [{name: Interval(**value) for name, value in study["pairs"][stage].items()} for stage in _GRADIENTS]
    said = [f"{each['agreement']:.3f}" for each in pairs]
    return [
        Judgement.of(
            "G3",
            decide(down, "below", SCORE),
            f"Training on the next token moves M by an update of D = {down:.2f}.",
            after,
        ),
        Judgement.of(
            "G4",
            jointly(*(decide(one, "above", SCORE) for one in (up, more))),
            f"Training on masked tokens moves M by an update of S = {up:.2f}; masked less next: {more:.2f}. Not so in "
            f"the gradients of the proof: masked less next {first:.2f} in the first one.",
            after,
        ),
        Judgement.of(
            "G24", decide(apart, "above", SCORE), f"D of what training adds to M, masked less next: {apart:.2f}.", after
        ),
        Judgement.of(
            "G27",
            jointly(*(decide(each["agreement"], "above", SCORE) for each in pairs)),
            f"Where both tokens are masked, beta_ij and beta_ji agree by {said[0]} in the first gradient and {said[1]} "
            f"in the last (1: equal, 0: unrelated). Such pairs are {pairs[0]['share'].mean:.0%} of the sum, and below "
            f"the last layer queries that are not masked hold {pairs[0]['unmasked'].mean:.0%} of its energy.",
            after,
        ),
    ]


EXPERIMENT: Final = Experiment(
    name="geometry_theory",
    question="Do updates of W_q^T W_k become symmetric or directional, as theorems 2.3 and 2.4 say?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
)
