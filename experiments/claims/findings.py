"""The findings that open `docs/claims.md`: each takes its numbers from committed results, or quotes a settled claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from experiments.claims.claim import Claim, Settled
from experiments.daa_cost.summary import PRINTED
from experiments.editing.recipe import CLEAR
from experiments.encoder_probe.recipe import ASYMMETRIC
from experiments.runner.experiment import ROOT
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import LOSS, SCORE, decide


@dataclass(frozen=True)
class Finding:
    title: str  # in one sentence
    text: str  # the numbers
    claims: tuple[str, ...]  # numbers of the claims that it bears on
    holds: bool = True  # whether the results, as they are now, still say what the title says
    experiment: str = ""  # name; "" where a proof or a test settles it
    picture: tuple[str, str] | None = None  # file in the results of the experiment, and what it shows; or None


def results_of(name: str, part: str = "") -> Any:
    """The committed `results.json` of an experiment, or of a part of it; None if there is none."""
    path = ROOT / name / "results" / part / "results.json"
    return read(path) if path.is_file() else None


def _of(rows: Sequence[Mapping[str, Any]], **wanted: object) -> Mapping[str, Any]:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows have {wanted}")
    return found[0]


def network_instead(claims: Mapping[str, Claim]) -> Finding | None:
    """Of a bias: a feed-forward layer in front of attention, on a task that is made for a bias of pairs."""
    content = results_of("pairwise_control")
    if content is None:
        return None
    rows = {(row["rung"], row["arm"]): row for row in content["rows"]}
    right = {name: Interval(*row["accuracy"]) for name, row in rows.items()}
    alone = {arm: value for (rung, arm), value in right.items() if rung == "nothing"}
    others = max(value.mean for arm, value in alone.items() if arm != "guidance")
    behind, block = right["network", "plain"], right["block", "plain"]
    return Finding(
        "One feed-forward layer in front of attention does what a learned pairwise bias does",
        "The task is to find the candidate whose number lies at a given distance from the query's. With nothing in "
        f"front of attention, plain training is right in {alone['plain'].mean:.0%}, a low-rank bias in "
        f"{alone['lowrank'].mean:.0%}, a bias of the key alone in {alone['key'].mean:.0%}, and the guidance network "
        f"in {alone['guidance'].mean:.0%}. Behind one feed-forward layer plain training is right in {behind.mean:.0%}, "
        f"behind a whole transformer block in {block.mean:.0%} ({len(rows['network', 'plain']['by seed'])} seeds).",
        ("D23", "D7"),
        min(alone["guidance"].low, behind.low) > 0.95 and others < 0.8,
        "pairwise_control",
        ("figure.png", "Right answers of five arms, by what stands in front of attention"),
    )


def no_gain(claims: Mapping[str, Claim]) -> Finding | None:
    """On text, of the guidance network over plain training."""
    content = results_of("bias_comparison", "text") or results_of("bias_comparison")
    name = "text: loss, guidance less plain"
    if name not in content["contrasts"]:
        return None
    less, seen = Interval(*content["contrasts"][name]["t"]), content["seen_with_80_%"][name]
    return Finding(
        "On text, the guidance network gains nothing over plain training",
        f"Held-out loss of guidance less that of plain training, at equal tokens: {less:.4f} nats. The "
        f"study was fine enough: it would have seen a true difference of {seen:.4f} nats four times out of five.",
        ("D7", "D17"),
        decide(less, "none", LOSS).holds and seen < LOSS,
        "bias_comparison",
    )


def cost_as_printed(claims: Mapping[str, Claim]) -> Finding:
    """Of the guidance network on LLaMA-2-7B."""
    shape = results_of("daa_cost")["shapes"]["LLaMA-2-7B"]
    layers = shape["arms"]["guidance, every other"]["layers"]
    printed, separated = (
        layers * shape["operations of g in a layer"][name] / shape["operations of the base"]
        for name in ("concatenated", "separated")
    )
    return Finding(
        f"As printed, the bias costs {printed:.1f} times as much as the whole model",
        f"On {layers} layers of LLaMA-2-7B, at {shape['length']:,} tokens, algorithm 1 takes {printed:.0%} of the "
        f"operations of the base. The paper reports training that is {PRINTED['training']:.0%} slower. The first layer "
        f"separates into a part of the query and a part of the key: the same values then take {separated:.1%}.",
        ("D4", "D19"),
        printed > 1 and separated < 0.01,
        "daa_cost",
    )


def depth_is_not_enough(claims: Mapping[str, Claim]) -> Finding:
    """Of a sparse mask, where far tokens have to be read."""
    first, second = results_of("hasse"), results_of("hasse", "tiny-pairs")  # the second has some arms with more seeds
    arms = {one["arm"]: one for study in (first, second) if study for one in study["arms"] if len(one["seeds"]) > 2}
    dense, deep, wide = (arms[name] for name in ("repeats", "repeats depth 4", "repeats depth 2"))
    return Finding(
        "A sparse mask that reaches far enough may still not learn",
        f"The second half of each row repeats the first. With {deep['layers']} layers, a sparse mask of depth "
        f"{deep['depth']} lets every letter reach its copy, yet training ends at {deep['held_out'][0]:.2f} nats. The "
        f"dense mask ends at {dense['held_out'][0]:.2f}, a wider one of depth {wide['depth']} at "
        f"{wide['held_out'][0]:.2f}. Depth is necessary, and it does not suffice.",
        ("H7", "H18"),
        deep["depth"] <= deep["layers"] and all(deep["held_out"][1] > one["held_out"][2] + 1 for one in (dense, wide)),
        "hasse",
    )


def off_by_one(claims: Mapping[str, Claim]) -> Finding:
    printed = _settled(claims, "H10")
    return Finding(
        "The printed Butterfly mask trains one of its n tasks",
        printed.sentence,
        ("H10",),
        printed.verdict == "corrected",
    )


def symmetric_without_its_reason(claims: Mapping[str, Claim]) -> Finding:
    content = results_of("geometry_theory")

    def symmetry(objective: str, stage: str) -> Interval:
        value = _of(content["rows"], objective=objective, stage=stage)["symmetry"]
        return Interval(value["mean"], value["low"], value["high"])

    masked, following = (symmetry(name, "training") for name in ("bidirectional", "causal"))
    first, after = (symmetry("difference", stage) for stage in ("gradient", "training"))
    return Finding(
        "Training on masked tokens makes M symmetric, and not for the reason that the proof gives",
        f"Training moves M by an update of symmetry S = {masked:.2f} with masked tokens, and {following:.2f} with the "
        f"next token. The proof is about the gradient of one batch. In the first batch the order is the opposite one: "
        f"masked less next is {first:.2f}.",
        ("G4", "G27"),
        decide(first, "below", SCORE).holds and all(decide(one, "above", SCORE).holds for one in (masked, after)),
        "geometry_theory",
        ("figure.png", "Symmetry, directionality and strong columns: of gradients, of steps, and of training"),
    )


def counts_by_place(claims: Mapping[str, Claim]) -> Finding:
    """How often a token is context, and how often it is predicted."""
    rows = results_of("geometry_corpus")["texts"]

    def share(cut: str) -> float:
        some = [row for row in rows if row["objective"] == "causal" and row["cut"] == cut]
        return sum(row["apart"] for row in some) / sum(row["tokens"] for row in some)

    starts, packed, shuffled = (share(cut) for cut in ("beginnings", "packed", "shuffled"))
    return Finding(
        "How often a token is context depends on where rows begin, and not on the text",
        "With the next token as target, the counts as context and as target differ for "
        f"{starts:.0%} of the frequent tokens, if rows begin where speeches do. In packed rows of the same text they "
        f"differ for {packed:.0%}, and with all tokens shuffled for {shuffled:.0%}; 5% is chance. The paper derives "
        "the difference from correlations in the text.",
        ("G19",),
        starts > 0.5 and max(packed, shuffled) < 0.1,
        "geometry_corpus",
    )


def wrong_heads(claims: Mapping[str, Claim]) -> Finding:
    """Published scores of models whose query heads share key heads."""
    parts = results_of("geometry_checkpoints")["parts"]
    (shared,) = [row for row in parts if row["shared_keys"]]
    ours, theirs = shared["symmetry"], shared["published_way_symmetry"]
    return Finding(
        "Grouped heads were scored with the keys of other heads",
        f"Where heads share keys, the published code pairs query heads with the wrong key heads. {shared['model']} "
        f"then has a median S of {theirs:.3f}. With the right pairs it has {ours:.3f}, {ours / theirs:.1f} times as "
        "much.",
        ("G21",),
        ours > 2 * theirs,
        "geometry_checkpoints",
    )


def facts_edited(claims: Mapping[str, Claim]) -> Finding | None:
    content = results_of("editing")
    if content is None:
        return None
    made = {one["arm"]: one for one in content["outcomes"]}
    plain, free, few = (made[arm] for arm in ("guarded", "no guard", "64 entries"))

    def share(one: Mapping[str, Any], name: str) -> Interval:
        return Interval(*(one["quantities"][name][key] for key in ("mean", "low", "high")))

    def shown(one: Mapping[str, Any], name: str) -> str:
        return said(share(one, name).numbers, ".0%")

    changes, pays = share(plain, "fact").less(0.5), share(plain, "same subject").less(1.0)
    return Finding(
        "Most facts can be changed in the entries, and other facts about their subjects suffer",
        f"The feed-forward layers of SmolLM2-135M become entries, and {plain['count']} facts of "
        f"{len(plain['relations']['fact'])} relations are edited one at a time; none of them tuned the method. "
        f"Of the facts {shown(plain, 'fact')} change. {shown(plain, 'paraphrases understood')} of the paraphrases that "
        f"the model understood follow, and {shown(plain, 'same relation')} of other facts of the relation stay. Of "
        f"what the model said of the subject {shown(plain, 'same subject')} stays, {shown(free, 'same subject')} "
        f"without the guard, and {shown(few, 'same subject')} if 64 entries of each layer may change.",
        ("K20", "K12"),
        decide(changes, "above", 0.0).holds and decide(pays, "below", CLEAR).holds,
        "editing",
        ("figure.png", "Shares of prompts by kind of edit: the fact, paraphrases, the same subject, the same relation"),
    )


def gated_never(claims: Mapping[str, Claim]) -> Finding:
    verdicts = {_settled(claims, number).verdict for number in ("K2", "K3")}
    return Finding(
        "Most feed-forward layers of today are not cross-attention to entries",
        "LLaMA, Mistral, Qwen and Gemma are gated. With a gate of SiLU, GELU or ReLU, no finite number of entries with "
        "one key each is the layer, whatever their activation; with two keys each it is. Without a gate, given weights "
        "have the form of cross-attention if and only if the widths of entries and keys reach their ranks.",
        ("K3", "K2"),
        verdicts == {"corrected"},
    )


def not_symmetric(claims: Mapping[str, Claim]) -> Finding | None:
    content = results_of("encoder_probe")
    if content is None or content["symmetry"] is None:
        return None
    heads = content["symmetry"]["heads"]
    real, random = (heads[name]["words"] for name in ("real", "random"))
    scores, chance = real["double-centred"], random["double-centred"]
    return Finding(
        "Attention of an encoder is far from symmetric",
        f"An antisymmetric share of 0 means symmetric, and random weights have {chance[0]:.2f}. With rows and columns "
        f"centred, the kindest reading, scores of MiniLM's median head have {scores[0]:.2f}; its attention weights "
        f'have {real["weights"][0]:.2f}. The paper calls the attention of BERT "fundamentally symmetric".',
        ("D27",),
        decide(Interval(*content["symmetry"]["layers"]["words"]["double-centred"]), "above", ASYMMETRIC).holds,
        "encoder_probe",
    )


def faster_than_itself(claims: Mapping[str, Claim]) -> Finding:
    """What a symmetric initialisation saves, beside what one seed saves over another."""
    one = _of(results_of("geometry_init")["comparisons"], objective="masked", arm="symmetric")
    own, (mean, low, high) = one["speed_up"], one["null"]
    return Finding(
        "A run may be faster than another seed of itself by a quarter",
        f"A symmetric start reaches the final loss of a start of equal scale after {own:.0%} fewer steps. Measured in "
        f"the same way, the control reaches its own after {mean:.0%} fewer, and 95% of its pairs of seeds lie between "
        f"{low:.0%} and {high:.0%}. The paper reports up to 73%, of one seed each.",
        ("G13", "G14"),
        not decide(Interval(own - mean, own - high, own - low), "above", 0.0).holds and high > 0.2,
        "geometry_init",
    )


def half_active(claims: Mapping[str, Claim]) -> Finding:
    shares: Sequence[float] = _of(results_of("knowledge_twins")["arms"], arm="shared")["active"]
    by_layer = ", ".join(f"{share:.0%}" for share in shares)
    return Finding(
        "ReLU does not select entries; training does",
        "Before training half of the entries are active, as scores are as often above zero as below. After it, by "
        f"layer: {by_layer}.",
        ("K6",),
        max(shares) < 0.25,
        "knowledge_twins",
    )


def _settled(claims: Mapping[str, Claim], number: str) -> Settled:
    by = claims[number].by
    if not isinstance(by, Settled):
        raise ValueError(f"{number} is not settled by a proof or a test")
    return by


# In the order of the page. An experiment without results, or with others than the title says, yields to the next.
FINDINGS: Final[tuple[Callable[[Mapping[str, Claim]], Finding | None], ...]] = (
    network_instead,
    no_gain,
    depth_is_not_enough,
    symmetric_without_its_reason,
    off_by_one,
    cost_as_printed,
    facts_edited,
    counts_by_place,
    wrong_heads,
    gated_never,
    not_symmetric,
    faster_than_itself,
    half_active,
)
_SHOWN: Final = 10


def findings(claims: Sequence[Claim]) -> list[Finding]:
    """The first ten that the present results bear out."""
    by_number = {claim.number: claim for claim in claims}
    every = [finding(by_number) for finding in FINDINGS]
    return [one for one in every if one is not None and one.holds][:_SHOWN]
