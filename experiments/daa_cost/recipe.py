"""The cost of a bias, as the runner takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.daa_cost.study import PUBLISHED, miniature, paper, setup, small, tiny
from experiments.daa_cost.summary import PRINTED, WHAT, summarise
from experiments.runner.experiment import Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval
from experiments.runner.verdict import decide, jointly

_ARM: Final = "guidance, every other"
OTHER: Final = 0.03  # of the base's time: by which another GPU than the paper's may differ


def judge(results: Path) -> Sequence[Judgement]:
    content: Mapping[str, Any] = read(results / "results.json")
    found = {what: content["cost"][_ARM][what] for what in WHAT}
    seven = content["shapes"].get("LLaMA-2-7B")
    where = "one GPU" if content["device"] == "cuda" else "a CPU"
    said = (
        f"{content['layers']} layers of {content['shape']} on {where}, rows of {content['length']}, attention with a "
        f"bias in plain PyTorch: g on every other layer takes {_percent(found['training'])} of the throughput of "
        f"training and adds {_percent(found['decoding'])} to the latency of decoding."
    )
    if seven:
        base = seven["operations of the base"]
        layers = seven["arms"][_ARM]["layers"]
        printed, ours = (
            100 * layers * seven["operations of g in a layer"][name] / base for name in ("concatenated", "separated")
        )
        said += (
            f" At the paper's shape g has, of the operations of the base, {printed:.0f} % as algorithm 1 prints it and "
            f"{ours:.1f} % separated."
        )
    if content["shape"] != "LLaMA-2-7B" or content["device"] != "cuda" or content["length"] != PUBLISHED:
        return [Judgement("D19", "not testable here", said)]
    decision = jointly(*(decide(Interval(*found[what]).less(PRINTED[what]), "none", OTHER) for what in WHAT))
    return [Judgement.of("D19", decision, f"{said} This is our implementation; the paper's is not published.")]


def _percent(numbers: Sequence[float]) -> str:
    return "{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * value for value in numbers))


EXPERIMENT: Final = Experiment(
    name="daa_cost",
    question="What does a learned bias cost in parameters, operations, training throughput and decoding latency?",
    recipes={"tiny": tiny, "small": small, "paper": paper},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "attnflow"),
)
