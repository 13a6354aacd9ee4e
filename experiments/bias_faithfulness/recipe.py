"""The study as the runner takes it, and the rules that judge six claims by it and by bias_comparison's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.bias_faithfulness.study import miniature, setup, tiny
from experiments.bias_faithfulness.summary import FAITHFUL, summarise
from experiments.runner.experiment import ROOT, Experiment, Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, student
from experiments.runner.verdict import LOSS, Decision, Tag, decide, jointly

_SHARE: Final = 0.05  # the smallest effect, of faithfulness and of accuracy
_COMPARISON: Final = ROOT / "bias_comparison" / "results"


def judge(results: Path) -> Sequence[Judgement]:
    """By the rules that stand in the README since before the run."""
    rows = read(results / "results.json")["quantities"]
    values = {(row["task"], row["quantity"]): Interval(*row["t"]) for row in rows}
    return [_faithful(values), *_negative(values), *_compared(), _operand(values)]


def _faithful(values: Mapping[tuple[str, str], Interval]) -> Judgement:
    less = {task: value for (task, quantity), value in values.items() if quantity == FAITHFUL}
    each = "; ".join(
        f"{task} {values[task, 'faithfulness of the bias'].mean:.2f} against "
        f"{values[task, 'faithfulness of the weights'].mean:.2f}, difference {value:.2f}"
        for task, value in less.items()
    )
    said = (
        "Keys are hidden from the last query by the bias, or by the attention weights (0: as by chance, 1: as by what "
        f"hiding each key alone does): {each}. On text the bias hardly matters: the loss without it is "
        f"{values['text', 'clipped: loss, none'].mean - values['text', 'clipped: loss, as trained'].mean:+.3f} nats."
    )
    decision = jointly(*(decide(value, "above", _SHARE) for value in less.values()))
    return Judgement.of("D29", decision, said, "floor")


def _negative(values: Mapping[tuple[str, str], Interval]) -> list[Judgement]:
    """Two sentences of the paper, whose contrasts the README judged as one claim before the run."""
    without, apart = (
        values["recall", f"distracted: loss, positive less {other}"] for other in ("as trained", "negative")
    )
    trained, none = (values["recall", f"distracted: loss, {name}"].mean for name in ("as trained", "none"))
    said = (
        "Loss of recall among distractor sentences where only the positive values of the row-centred bias are kept, "
        f"less as trained: {without:.3f} nats; less only the negative ones: {apart:.3f}. As trained {trained:.2f}, "
        f"without a bias {none:.2f}."
    )
    centre = " Signs depend on the centre: less its maximum any bias is negative, and the same function."
    return [
        _judged("D30", decide(without, "above", LOSS), said + centre, after=True),
        _judged("D34", decide(apart, "none", LOSS), said, after=True),
    ]


def _compared() -> list[Judgement]:
    """D31 and D32, by runs that were there before their rules."""
    text, knobs = (_contrasts(_COMPARISON / part / "results.json") for part in ("text", ""))
    recall = _contrasts(_COMPARISON / "recall" / "results.json")

    def over_plain(contrasts: Mapping[str, Any], name: str) -> Interval:
        """ALiBi less plain, paired by seed."""
        both = (contrasts[f"{name}, guidance less {arm}"]["by_seed"] for arm in ("plain", "alibi"))
        return student([one - other for one, other in zip(*both, strict=True)])

    loss = over_plain(text, "text: loss")
    drop, middle = (
        over_plain(recall, name) for name in ("distractors: loss of accuracy", "depth: accuracy in the middle")
    )
    less = knobs["knobs: loss, width 64 less He init"]["t"]
    end = Interval(-less[0], -less[2], -less[1])
    return [
        _judged(
            "D31",
            decide(loss, "below", LOSS),
            "Held-out loss on text, ALiBi in place of rotary embedding less plain training, both continued from one "
            f"start: {loss:.3f} nats. In recall, trained from scratch: accuracy lost to distractor sentences "
            f"{drop:.3f}, accuracy in the middle of longer sequences {middle:.3f}. By bias comparison.",
            after=True,
        ),
        _judged(
            "D32",
            decide(end, "above", LOSS),
            f"Held-out loss at the end, He's initialisation of the output layer less a zero one: {end:.4f} nats. By "
            "bias comparison.",
            after=True,
        ),
    ]


def _operand(values: Mapping[tuple[str, str], Interval]) -> Judgement:
    first, second = (values["sums", f"lost without the operand, {which}, from ="] for which in ("first", "second"))
    right = values["sums", "right without the operand, none, from ="]
    said = (
        f'With ALiBi {right.mean:.0%} of the sums are right. If "=" cannot attend to the first operand, {first:.2f} of '
        f"the answers are lost, and {second:.2f} without the second, which is nearer."
    )
    return _judged("D33", decide(first, "none", _SHARE), said)


def _contrasts(path: Path) -> Mapping[str, Any]:
    return read(path)["contrasts"]


def _judged(claim: str, decision: Decision, sentence: str, after: bool = False) -> Judgement:
    late: tuple[Tag, ...] = ("rule after",) if after else ()
    return Judgement.of(claim, decision, sentence, *late)


EXPERIMENT: Final = Experiment(
    name="bias_faithfulness",
    question="Does a trained bias say which keys count, do its negative values do it, and what does ALiBi ignore?",
    recipes={"tiny": tiny},
    setup=setup,
    summarise=summarise,
    miniature=miniature,
    judge=judge,
    packages=("torch", "transformers", "tokenizers", "attnflow"),
)
