"""Verdicts follow from figures by the rules that were written before the runs; figures are paired right."""

import argparse
import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.daa_cost.recipe import judge as judge_cost
from experiments.daa_cost.summary import costs
from experiments.daa_evaluation.recipe import judge as judge_evaluation
from experiments.daa_evaluation.summary import values_of
from experiments.editing.recipe import judge as judge_editing
from experiments.editing.study import ARMS
from experiments.editing.summary import lasted, outcomes, table
from experiments.evaluation import command
from experiments.evaluation.measure import Score
from experiments.facts import summary as facts
from experiments.facts.world import GROUPS
from experiments.geometry_checkpoints.checkpoints import fairseq
from experiments.geometry_checkpoints.published import in_order, is_decoder, sound
from experiments.geometry_checkpoints.recipe import judge as judge_checkpoints
from experiments.geometry_corpus.recipe import judge as judge_corpus
from experiments.geometry_theory.recipe import judge as judge_theory
from experiments.knowledge_answers.recipe import judge as judge_answers
from experiments.knowledge_answers.study import AGAIN, SUPERVISED
from experiments.knowledge_scaling.recipe import judge as judge_scaling
from experiments.knowledge_scaling.summary import gains, name
from experiments.knowledge_twins.recipe import judge as judge_twins
from experiments.knowledge_twins.summary import KINDS, MATCHED, PAIRS, Curve
from experiments.reader.recipe import judge as judge_reader
from experiments.runner.experiment import find, names
from experiments.runner.files import write
from experiments.runner.jobs import Record
from experiments.runner.statistics import Interval
from experiments.runner.study import LINES, RUNS, read_study


def test_costs_are_those_of_table_5() -> None:
    seconds = {"base": {"training": 1.0, "decoding": 2.0}, "arm": {"training": 1.25, "decoding": 2.5}}
    rounds = [{"seconds": seconds}, {"seconds": {**seconds, "base": {"training": 2.0, "decoding": 4.0}}}]
    rounds[1]["seconds"]["arm"] = {"training": 2.5, "decoding": 5.0}
    assert costs(rounds, "arm", "training") == pytest.approx([0.2, 0.2, 0.2])
    assert costs(rounds, "arm", "decoding") == pytest.approx([0.25, 0.25, 0.25])


def scored(name: str, values: list[float], total: int = 100) -> dict[str, Any]:
    score = Score(name, "accuracy", tuple(values), total)
    return json.loads(json.dumps(command.plain(score)))


def judged(tmp_path: Any, runs: dict[str, dict[str, list[float]]], **more: Any) -> dict[str, Any]:
    rows = values_of(
        [
            {"job": {"arm": arm, "seed": 0}, "scores": {name: scored(name, values) for name, values in scores.items()}}
            for arm, scores in runs.items()
        ]
    )
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows, "not_run": {"quality": "no data"}, **more}))
    return {one.claim: one for one in judge_evaluation(tmp_path)}


def some(right: int, items: int = 50) -> list[float]:
    return [1.0] * right + [0.0] * (items - right)


@pytest.mark.parametrize(
    ("base", "guidance", "verdict"),
    [
        (0, 4, "not testable here"),
        (2, 20, "confirmed"),
        (20, 2, "refuted"),
        (10, 11, "not confirmed"),
        (10, 10, "no effect"),
    ],
)
def test_claims_are_judged_by_the_paired_interval(tmp_path, base, guidance, verdict):
    runs = {
        name: {"humaneval": some(right), "gsm8k zero-shot": some(right)}
        for name, right in (("base", base), ("guidance", guidance))
    }
    found = judged(tmp_path, runs)
    assert found["D8"].verdict == found["D9"].verdict == verdict
    assert found["D10"].verdict == "not testable here"
    assert "no data" in found["D10"].sentence


@pytest.mark.parametrize(
    ("own", "thought", "consistent", "verdict"),
    [(40, 10, 1, "confirmed"), (10, 40, 1, "refuted"), (20, 20, 2, "no effect"), (1, 1, 0, "not testable here")],
)
def test_prompting_is_beaten_or_not(tmp_path, own, thought, consistent, verdict):
    """Self-consistency has a fifth of the items, which are some of the others."""
    zero = {"humaneval": some(0), "gsm8k zero-shot": some(0)}
    prompted = {"gsm8k chain of thought": some(thought), "gsm8k self-consistency": some(consistent, 10)}
    found = judged(tmp_path, {"base": {**zero, **prompted}, "guidance": {**zero, "gsm8k zero-shot": some(own)}})
    assert found["D11"].verdict == verdict


def test_nothing_is_judged_before_the_arm_has_run(tmp_path):
    assert judged(tmp_path, {"base": {"humaneval": some(9)}}) == {}


def test_gains_are_paired_by_seed() -> None:
    losses = {(32, 8): (3.0, 3.2, 9.0), (32, 24): (2.5, 2.6), (64, 8): (2.4, 2.5), (64, 24): (2.2, 2.4)}
    curves: dict[str, Curve] = {}
    for place, ends in losses.items():
        runs: dict[int, Record] = {seed: {} for seed in range(len(ends))}
        curves[name(*place)] = Curve(name(*place), 1e-3, (1e-3,), runs, (0, 1), np.array([[9.0, end] for end in ends]))
    found = {one["name"]: one["each"] for one in gains(curves, (32, 64), (8, 24))}
    assert list(found) == [
        "24 entries for 8, width 32", "24 entries for 8, width 64", "width 64 for 32, 8 entries",
        "width 64 for 32, 24 entries", "interaction", "width 32 with 24 less width 64 with 8",
    ]  # fmt: skip
    assert found["24 entries for 8, width 32"] == pytest.approx([0.5, 0.6])
    assert found["width 64 for 32, 8 entries"] == pytest.approx([0.6, 0.7])
    assert found["interaction"] == pytest.approx([0.3, 0.5])
    assert found["width 32 with 24 less width 64 with 8"] == pytest.approx([0.1, 0.1])


def cost(training: float, decoding: float, device: str = "cuda") -> dict[str, object]:
    arm, shape = "guidance, every other", {"operations of the base": 100}
    shape["operations of g in a layer"] = {"concatenated": 16, "separated": 1}
    shares = {"training": around(training), "decoding": around(decoding)}
    shapes = {"LLaMA-2-7B": {**shape, "arms": {arm: {"layers": 16}}}}
    return {
        "shape": "LLaMA-2-7B",
        "layers": 4,
        "device": device,
        "length": 2048,
        "cost": {arm: shares},
        "shapes": shapes,
    }


def around(value: float, half: float = 0.01) -> list[float]:
    return [value, value - half, value + half]


def scaling(stores: float, both: float | None) -> dict[str, object]:
    found = {f"24 entries for 8, width {width}": stores for width in (32, 64)}
    found |= {} if both is None else {"interaction": both}
    rows = [{"name": key, "nats": around(value)} for key, value in found.items()]
    return {"widths": [32, 64], "entries": [8, 24], "gains": rows}


def answers(soft: float | None, half: float, again: float | None = None) -> dict[str, object]:
    shares = {AGAIN: again, "softmax grown": soft, "best grown": 0.1, SUPERVISED: 0.5}
    arms = [
        {"arm": name, "right_by_seed": {"8": x}, "sizes": {"64": {"right": around(x, half)}}}
        for name, x in shares.items()
        if x is not None
    ]
    return {"pool": 64, "arms": arms}


def twins(*losses: float, half: float = 0.01, arms: Sequence[object] = ()) -> dict[str, object]:
    names = [f"{form}shared less {form}{kind}" for form in ("", "gated ") for kind in KINDS[1:]]
    found = [{"name": name, "loss": around(x, half)} for name, x in zip(names, losses, strict=False)]
    return {"start": MATCHED, "differences": found, "arms": arms}


def edits(changed: float, subject: float = 0.95, text: float = 0.0, width: float = 0.02) -> dict[str, object]:
    shares = {"fact": changed, "paraphrases understood": 0.95, "same subject": subject, "same relation": 0.98}
    quantities = {
        name: dict(zip(("mean", "low", "high"), around(value, width), strict=True)) for name, value in shares.items()
    }
    quantities["text"] = dict(zip(("mean", "low", "high"), around(text, 0.001), strict=True))
    one = {"arm": "guarded", "count": 9, "quantities": quantities, "relations": {"fact": {"capital": 1.0}}}
    return {"outcomes": [one]}


def plugged(*shares: float) -> dict[str, object]:
    """Whole answers by a store, for made-up and public facts; one fact in the context gives 40 %, five give 20 %."""
    rows = [
        {"kind": kind, "ask": share, "told": told, "whole": around(share - told)}
        for kind, share in zip(("made up", "public"), shares, strict=False)
        for told in (0.4, 0.2)
    ]
    return {"ask_less_context": rows}


def forms(*losses: float) -> dict[str, object]:
    names = [f"{one} less {other}" for pairs in PAIRS.values() for one, other in pairs]
    found = [{"name": name, "loss": around(x)} for name, x in zip(names, losses, strict=False)]
    return {"start": MATCHED, "differences": found, "arms": []}


def selecting(*shares: float) -> dict[str, object]:
    arms = [{"arm": "shared", "activity": list(map(around, shares))}, {"arm": "gated shared", "activity": [[0.5] * 3]}]
    return twins(0.0, 0.0, 0.0, 0.0, arms=arms)


def best(*costs: float) -> dict[str, object]:
    read = dict(zip(("128", "32"), map(around, costs), strict=True))
    return {
        "start": MATCHED,
        "differences": [],
        "arms": [{"arm": "shared", "activity": [around(0.2)], "best_less_all": read}],
    }


def checkpoints(encoders: Sequence[float], decoders: Sequence[float]) -> dict[str, object]:
    sides = [("encoder", value) for value in encoders] + [("decoder", value) for value in decoders]
    about = {"model": "m", "modality": "audio", "tower": ""}
    return {"parts": [{**about, "side": side, "symmetry": x, "directionality": x} for side, x in sides]}


def updates(down: float, apart: float, up: float, more: float, *agreements: float) -> dict[str, object]:
    def said(value: float) -> dict[str, float]:
        return dict(zip(("mean", "low", "high"), around(value), strict=True))

    rows = [("causal", 0.0, down), ("bidirectional", up, 0.0), ("difference", more, apart)]
    found = [
        {"objective": one, "stage": stage, "symmetry": said(s), "directionality": said(d)}
        for one, s, d in rows for stage in ("gradient", "training")
    ]  # fmt: skip
    stages = zip(("gradient", "late gradient"), agreements, strict=True)
    pairs = {stage: {name: said(x) for name in ("agreement", "share", "unmasked")} for stage, x in stages}
    return {"rows": found, "pairs": pairs}


def model(**changes: float) -> dict[str, object]:
    row = {"negative weights": 0, "largest error of a sum": 1e-6, "largest error of a head": 1e-6}
    means = {"order, the model's own scores": 1.0, "order, form of a head": 1.0, "within the hull of tokens": 1.0}
    means["distance to the hull of tokens"] = 0.0
    return {"model": "m", **row, **{name: [changes.get(name, value)] * 3 for name, value in means.items()}}


def text(objective: str, cut: str, apart: int, above: int = 50) -> dict[str, object]:
    exact = 0.0 if objective == "causal" else None
    row = {"objective": objective, "cut": cut, "tokens": 100, "apart": apart, "above": above}
    return {**row, "from the formula": exact}


def combinations(**changes: float) -> dict[str, object]:
    return {"models": [model(), model(**changes)], "texts": counts(40, 70, 90, 5)["texts"]}


def counts(packed: int, above: int, beginnings: int, masked: int) -> dict[str, object]:
    rows = [text("causal", "packed", packed, above), text("causal", "beginnings", beginnings)]
    rows += [text("causal", "shuffled", 5), text("masked", "packed", masked)]
    return {"models": [model()], "texts": rows}


UNTESTABLE, NO, NONE = "not testable here", "not confirmed", "no effect"
SENTENCE = "256 % as algorithm 1 prints it and 16.0 % separated"
RULES = [
    (judge_cost, cost(0.08, 0.12), ["confirmed"], SENTENCE),
    (judge_cost, cost(0.02, 0.03), ["refuted"], SENTENCE),
    (judge_cost, cost(0.065, 0.12), [NO], SENTENCE),
    (judge_cost, cost(0.02, 0.30), ["refuted"], "4 layers of LLaMA-2-7B"),
    (judge_cost, cost(0.08, 0.12, "cpu"), [UNTESTABLE], ""),
    (judge_scaling, scaling(0.1, 0.0), ["confirmed"], ""),
    (judge_scaling, scaling(0.0, 0.0), [NO], ""),
    (judge_scaling, scaling(-0.1, 0.0), ["refuted"], ""),
    (judge_scaling, scaling(0.1, 0.1), ["refuted"], ""),
    (judge_scaling, scaling(0.1, -0.1), ["refuted"], ""),
    (judge_scaling, scaling(0.015, 0.0), [NO], ""),
    (judge_scaling, scaling(0.1, 0.015), [NO], ""),
    (judge_scaling, scaling(0.1, None), [], ""),
    (judge_answers, answers(0.95, 0.03), ["confirmed"], "with supervised reading 50.0%"),
    (judge_answers, answers(0.3, 0.05), [NO], "with supervised reading 50.0%"),
    (judge_answers, answers(0.8, 0.15), [NO], "with supervised reading 50.0%"),
    (judge_answers, answers(None, 0.1), [], ""),
    (judge_answers, answers(0.95, 0.03, again=0.92), [NO], "1 new seeds"),
    (judge_answers, answers(0.3, 0.03, again=0.94), ["confirmed"], ""),
    (judge_twins, twins(0.0, 0.0, 0.0, 0.0), ["confirmed"], ""),
    (judge_twins, twins(0.1, 0.1, 0.0, 0.0), ["refuted"], ""),
    (judge_twins, twins(0.0, 0.0, -0.1, 0.1), ["refuted"], ""),
    (judge_twins, twins(0.0, 0.0, 0.0, 0.015), [NO], ""),
    (judge_twins, twins(0.0, 0.0, 0.0, 0.0, half=math.inf), [NO], ""),
    (judge_twins, twins(), [], ""),
    (judge_twins, best(0.0, 0.1), ["corrected", "corrected"], "the 128 best +0.000 [-0.010, +0.010]"),
    (judge_twins, best(0.0, 0.0), ["corrected", "confirmed"], ""),
    (judge_twins, best(0.1, 0.1), ["corrected", "refuted"], ""),
    (judge_editing, edits(0.98), ["confirmed"], "of 9 facts of 1 relations"),
    (judge_editing, edits(0.94), [NO], ""),
    (judge_editing, edits(0.98, width=0.2), [NO], ""),
    (judge_editing, edits(0.98, text=0.02), ["corrected"], ""),
    (judge_editing, edits(0.98, 0.7), ["corrected"], ""),
    (judge_editing, edits(0.98, 0.84), [NO], ""),
    (judge_editing, edits(0.5, 0.7), [NO], ""),
    (judge_editing, {"rows": []}, [], ""),
    (judge_reader, plugged(0.7, 0.5), ["confirmed"], "made up facts 70 % against 20 to 40 %"),
    (judge_reader, plugged(0.7, 0.3), [NO], "store less context -0.100 [-0.110, -0.090] to 0.500"),
    (judge_reader, plugged(0.1, 0.1), [NO], ""),
    (judge_reader, plugged(), [], ""),
    (judge_twins, twins(0.1, 0.1), ["refuted", "refuted"], ""),
    (judge_twins, twins(0.0, 0.0), [NO, NONE], ""),
    (judge_twins, forms(-0.1, 0.0, -0.025, -0.1, -0.1), [NO, NONE, "confirmed", "confirmed"], ""),
    (judge_twins, forms(-0.1, -0.1, -0.015, -0.1, 0.0), [NO, "confirmed", NO, NO], ""),
    (judge_twins, forms(0.1, -0.1, -0.1, -0.1), ["refuted", "confirmed", "confirmed"], ""),
    (judge_twins, {**selecting(0.3, 0.1), "start": "other"}, ["corrected"], ""),
    (judge_twins, selecting(0.3, 0.1), ["confirmed", "corrected"], ""),
    (judge_twins, selecting(0.3, 0.5), ["confirmed", NO], ""),
    (judge_checkpoints, checkpoints((0.5, 0.4), (0.1, 0.2)), ["confirmed", "confirmed", NO, "confirmed"], "S 97%"),
    (judge_checkpoints, checkpoints((0.1,), ()), ["confirmed", "confirmed"], "Ours at tiny have not both sides"),
    (judge_checkpoints, checkpoints([0.1] * 9, [0.5] * 9), [NO, NO], "Ours at tiny, of all modalities: 0%"),
    (judge_theory, updates(-0.4, 0.4, 0.5, 0.4, 0.1, 0.1), ["confirmed"] * 4, "D = -0.40 [-0.41, -0.39]"),
    (judge_theory, updates(-0.4, 0.0, 0.5, 0.0, 0.1, 0.0), ["confirmed", NO, NONE, NO], ""),
    (judge_theory, updates(0.4, -0.4, -0.5, 0.4, -0.1, -0.1), ["refuted"] * 4, ""),
    (judge_theory, updates(0.0, 0.4, 0.5, -0.4, 0.0, 0.0), [NONE, "refuted", "confirmed", NONE], ""),
    (judge_corpus, combinations(), ["confirmed"], ""),
    (judge_corpus, combinations(**{"order, form of a head": 0.8}), ["corrected"], ""),
    (judge_corpus, combinations(**{"within the hull of tokens": 0.5}), ["corrected"], ""),
    (judge_corpus, combinations(**{"order, the model's own scores": 0.9}), ["refuted"], "Weights are not convex"),
    (judge_corpus, counts(40, 70, 90, 5), ["confirmed", "confirmed"], ""),
    (judge_corpus, counts(40, 50, 90, 5), ["confirmed", "corrected"], ""),
    (judge_corpus, counts(5, 70, 90, 5), ["confirmed", "corrected"], ""),
    (judge_corpus, counts(5, 50, 6, 5), ["confirmed", NO], ""),
    (judge_corpus, counts(40, 70, 90, 20), ["confirmed", "refuted"], ""),
]


@pytest.mark.parametrize(("judge", "content", "verdicts", "said"), RULES)
def test_the_rule_of_an_experiment(judge, content, verdicts, said, tmp_path) -> None:
    write(tmp_path / "results.json", content)
    found = judge(tmp_path)
    assert [one.verdict for one in found][: len(verdicts) or None] == verdicts
    assert not said or any(said in one.sentence for one in found)


def test_published_records_count_once_and_pairs_of_relatives_say_less():
    found = sound()
    assert not any(one.fault or one.kind != "self" for one in found)
    assert len({(is_decoder(one), one.symmetry.median, one.directionality.median) for one in found}) == len(found)
    values, others = [3.0] * 10 + [0.5] * 2, [1.0] * 10
    alone = in_order({str(i): [value] for i, value in enumerate(values)}, {str(i): [1.0] for i in range(10)})
    related = in_order({"a": values[:10], "b": values[10:]}, {"c": others})
    assert alone.mean == related.mean == 10 / 12 - 0.5
    assert related.low == -0.5 < 0 < alone.low < alone.mean < alone.high <= related.high
    assert in_order({"a": [1.0] * 40}, {"b": [2.0] * 40}) == Interval(-0.5, -0.5, pytest.approx(-0.5 + 0.127, abs=1e-3))


def edited(subject, before, after, kept, relation="capital"):
    common = {"is_other": [False] * 3, "relation_kept": [True], "relation_leaked": [False], "subject_facts": []}
    state = {**common, "is_answer": before, "statements": {"a": 1, "b": 2}, "text": 3.0}
    new = {**state, "is_other": after, "relation_kept": kept, "statements": {"a": 1, "b": 3}, "text": 3.5}
    arms = {arm: {**new, "change": 0.1, "ok": True} for arm in ARMS}
    return {"fact": {"relation": relation, "subject": subject}, "before": state, "arms": arms}


def test_shares_are_of_prompts_and_intervals_are_over_relations():
    runs = [
        edited("Norway", [True, True, False], [True, True, False], [True]),
        edited("Sweden", [True, False, False], [True, False, True], [False]),
        edited("hot", [True, False, False], [False, False, False], [False], "opposite"),
    ]
    before, after, *_ = outcomes(runs)
    assert (before.arm, after.arm, after.count) == ("before", "guarded", 3)
    means = {name: value.mean for name, value in after.quantities.items()}
    # Of Norway alone the model understood a paraphrase. A relation counts once, however many facts it has.
    assert means["paraphrases understood"] == 1
    assert (means["fact"], means["paraphrases"], means["understood"]) == (0.5, 0.25, 0.125)
    assert (means["same relation"], means["same subject"], means["text"]) == (0.25, 0.5, 0.5)
    assert after.relations["same relation"] == {"capital": 0.5, "opposite": 0.0}
    assert after.quantities["same relation"].low < 0, "two relations say little"
    assert "subject's facts" not in after.quantities
    assert "25 %" in table([before, after])


def test_what_lasts_is_averaged_over_the_facts_of_a_seed():
    def taught(seed, *said):
        cases = [edited("Norway", [True, True], [True, now], [True])["arms"]["guarded"] for now in said]
        before = {"cases": [{"is_answer": [True, True]}] * len(said), "text": 3.0}
        return {"way": "edit", "before": before, "measured": [{"step": 0, "cases": cases, "text": 3.25 + seed}]}

    rows = {row["quantity"]: row for row in lasted([taught(0, True, False), taught(1, True, True)])}
    assert rows["paraphrases understood"]["by_seed"] == [0.5, 1.0]
    assert (rows["paraphrases understood"]["mean"], rows["text"]["mean"]) == (0.75, 0.75)
    assert {row["way"] for row in rows.values()} == {"edit"}


def write_run(folder: Path, seed: int, said: str) -> None:
    names = ("entries", "best entries", "context", "context, 1 fact", "context or unknown", "shuffled entries")
    told = [
        {"size": size, "way": way, "phase": phase, "group": group, "wording": wording, "said": said}
        for size in (64, 256)
        for way in names
        for phase in ("before", "after")
        for group in GROUPS
        for wording in ("trained", "paraphrased")
    ]
    times = {"recall": {"trained": {"1": 0.5 + seed / 2}}, "milliseconds": dict.fromkeys(names, 2.0 + seed)}
    run = {"arm": "main", "seed": seed, "told": told, "sizes": [{"size": size, **times} for size in (64, 256)]}
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "study.json").write_text("{}", encoding="utf-8")
    (folder / "runs" / f"main-{seed}.json").write_text(json.dumps(run), encoding="utf-8")


def test_shares_are_over_seeds_and_questions(tmp_path: Path) -> None:
    write_run(tmp_path, 0, "rrrr")
    write_run(tmp_path, 1, "roux")
    runs = read_study(tmp_path)[1]
    share = facts.shares(runs)[0]
    assert (share.seeds, share.questions) == (2, 4)
    assert share.right.mean == 0.625
    assert share.right.low < 0.625 < share.right.high
    assert share.right_by_seed == [1.0, 0.25]
    assert (share.old, share.unknown, share.other) == (0.125, 0.125, 0.125)
    spent = facts.costs(runs)["main"][64]
    assert spent["recall"]["trained"]["1"] == 0.75
    assert spent["milliseconds"]["entries"] == 2.5


KEPT = [
    (name, scale)
    for name in names()
    for scale in find(name).recipes
    if (find(name).results(scale) / LINES).is_file() or (find(name).results(scale) / RUNS).is_dir()
]


@pytest.mark.slow  # figures are drawn again
@pytest.mark.parametrize(("name", "scale"), KEPT)
def test_committed_results_are_those_of_the_committed_runs(name, scale, tmp_path):
    experiment = find(name)
    committed = experiment.results(scale)
    experiment.summarise(committed, tmp_path)
    for file in ("results.csv", "results.json"):
        assert (tmp_path / file).read_text() == (committed / file).read_text()


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("run",))


def test_a_checkpoint_of_fairseq_is_read_and_a_pickle_refused(tmp_path: Path, capsys: Any) -> None:
    names = [f"decoder.sentence_encoder.layers.0.self_attn.{what}_proj.weight" for what in "qk"]
    tensors = {name: torch.randn(16, 16) for name in names}
    held = {"args": argparse.Namespace(encoder_attention_heads=4), "model": {**tensors, "embed": torch.zeros(2)}}
    path = tmp_path / "model.pt"
    torch.save(held, path, _use_new_zipfile_serialization=False)
    found, config = fairseq(path)
    assert config == {"num_attention_heads": 4}
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], tensors[names[0]])
    torch.save({**held, "more": Harmful()}, path)
    with pytest.raises(ValueError, match="not a checkpoint of fairseq that holds tensors and settings alone"):
        fairseq(path)
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="not a checkpoint of fairseq"):
        fairseq(path)
    assert capsys.readouterr().out == "", "nothing of it has run"
