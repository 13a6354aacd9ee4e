"""Verdicts on the claims, by the rules that the README has since before the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from experiments.runner.experiment import Judgement
from experiments.runner.files import read
from experiments.runner.statistics import Interval, said
from experiments.runner.verdict import LOSS, decide, exactly, jointly, no_more

ROUNDING: Final = 1e-3  # between the two best logits, in float32: either may come out first
SEEDS: Final = 5  # of the second study, from which on its numbers stand for those of the first
READABLE: Final = 0.5  # of the share of real words that the text itself has: what is written below that is at the floor
_PAIRS: Final = "tiny-pairs"
_TO_CAUSAL: Final = ("less_causal", "less_causal_at_equal_compute")  # of an arm and causal, on the same seeds


def judge(results: Path) -> Sequence[Judgement]:
    """Of one study; of the second one, which has some of the arms, together with the first."""
    content = read(results / "results.json")
    if results.name == _PAIRS:
        content = combined(read(results.parent / "results.json"), content)
    arms = {one["arm"]: one for one in content["arms"]}
    found = [*_decoding(content), *_training(content, arms), *_sparse(content, arms)]
    renewed = [f"{arm} ({count})" for arm, count in content.get("renewed", {}).items()]
    said_so = f" Of a second study with other seeds (how many): {', '.join(renewed)}." if renewed else ""
    return [replace(one, sentence=one.sentence + said_so) for one in found]


def combined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The first study, with the numbers of the second where that has enough seeds of an arm, or of both of a pair."""
    seeds = {one["arm"]: set(one["seeds"]) for one in second["arms"]}

    def enough(*names: str) -> bool:
        return len(set.intersection(*(seeds.get(name, set()) for name in names))) >= SEEDS

    def merged(what: str, key: str, arms: Mapping[Any, tuple[str, ...]]) -> list[Mapping[str, Any]]:
        rows = {one[key]: one for one in first[what]}
        rows |= {one[key]: one for one in second[what] if enough(*arms.get(one[key], (one[key],)))}
        return list(rows.values())

    arms = {one["arm"]: one for one in first["arms"]}
    for one in second["arms"]:
        if enough(one["arm"]):
            old = arms[one["arm"]]
            kept = {} if enough(one["arm"], "causal") else {key: old[key] for key in _TO_CAUSAL if key in old}
            arms[one["arm"]] = {**old, **one, **kept}
    controls = {
        (one["layers"], one["depth"])
        for one in second["depths"]
        if enough("causal", f"depth {one['depth']} of {one['layers']} layers")
    }
    pairs = {name: value for name, value in second["sparse_less_dense"].items() if enough(name, f"sparse {name}")}
    of_depth = {one["depth"]: (f"repeats depth {one['depth']}",) for one in second["repeats"]} | {1: ("repeats",)}
    return {
        **first,
        "arms": list(arms.values()),
        "renewed": {arm: len(one) for arm, one in seeds.items() if enough(arm)},
        "written": merged("written", "arm", {}),
        "repeats": merged("repeats", "depth", of_depth),
        "sparse_less_dense": {**first["sparse_less_dense"], **pairs},
        "sparse_less_dense_at_equal_rates": second["sparse_less_dense_at_equal_rates"] if enough("block 1") else {},
        "depths": [
            *(one for one in first["depths"] if (one["layers"], one["depth"]) not in controls),
            *(one for one in second["depths"] if (one["layers"], one["depth"]) in controls),
        ],
    }


def _decoding(content: Mapping[str, Any]) -> list[Judgement]:
    rows = [one for one in content["written"] if "compared" in one]
    if not rows:
        return []
    compared, differ = (sum(one[key] for one in rows) for key in ("compared", "differ"))
    margin = max(one["margin"] for one in rows)
    sentence = (
        f"{compared} tokens decoded after held-out text by models so trained, {differ} of them not those of the merged "
        f"task (two best logits at most {margin:.1g} apart there)."
    )
    return [
        Judgement.of(
            "H16",
            exactly(sum(one["margin"] > ROUNDING for one in rows), compared),
            f"{sentence} {_words(content)}".strip(),
        )
    ]


def _words(content: Mapping[str, Any]) -> str:
    words = {one["arm"]: one["real_words"] for one in content["written"]}
    most = f"block {content['blocks'][-1]}"
    if not {"causal", most} <= words.keys():
        return ""
    shares = (
        f"causal {words['causal'][0]:.0%}, {most} {words[most][0]:.0%}, the text itself {content['real_words']:.0%}"
    )
    return f"Letters in real words: {shares}."


def _training(content: Mapping[str, Any], arms: Mapping[str, Any]) -> list[Judgement]:
    tables, names = content["tables"]["by_block"], [f"block {block}" for block in content["blocks"]]
    if not {"causal", "butterfly", *names} <= arms.keys():
        return []
    bars = {name: tables[str(block)] for name, block in zip(names, content["blocks"], strict=True)}
    ways = {name: [way for way in (name, name.replace("block", "warm")) if way in arms] for name in names}
    better = {name: min((arms[way] for way in ways[name]), key=lambda one: one["held_out"][0]) for name in names}
    bars["butterfly"], better["butterfly"] = tables["1"], arms["butterfly"]
    parts = {name: decide(Interval(*better[name]["held_out"]).less(bar), "below", LOSS) for name, bar in bars.items()}

    def each(name: str) -> str:
        shown = " or warm ".join(f"{arms[way]['held_out'][0]:.2f}" for way in ways.get(name, [name]))
        return f"{name} {shown} (table {bars[name]:.2f})"

    spent = ", ".join(f"{name} {arms[name]['less_causal_at_equal_compute'][0]:+.2f}" for name in bars)
    words = {one["arm"]: one["real_words"][0] for one in content["written"]}
    weak = words.get(names[-1], 1.0) < READABLE * content["real_words"]
    start = "At best better than a table, and no useful text yet. " if weak else ""
    close = [f"{better[name]['arm']} {said(better[name]['held_out'])}" for name in bars if not parts[name].holds]
    told = f" Not clear of its table: {', '.join(close)}." if close else ""
    sentence = (
        f"{start}Held-out nats per token, beside a table of the last token read: {', '.join(map(each, bars))}; causal "
        f"{arms['causal']['held_out'][0]:.2f}.{told} {_words(content)} "
        f"From scratch at equal compute, less causal: {spent}."
    )
    return [Judgement.of("H17", jointly(*parts.values()), sentence, *(("floor",) if weak else ()))]


def _sparse(content: Mapping[str, Any], arms: Mapping[str, Any]) -> list[Judgement]:
    excess: Mapping[str, Sequence[float]] = content["sparse_less_dense"]
    wanted = {"causal", "butterfly", *(f"block {block}" for block in content["blocks"])}
    if set(excess) != wanted:
        return []
    parts = [no_more(Interval(*value), LOSS) for value in excess.values()]
    far = {one["depth"]: one["held_out"] for one in content["repeats"] if one["reached"]}
    beyond = {depth: _beyond(one, far[1]) for depth, one in far.items() if 1 in far and depth > 1}
    parts += [no_more(one, LOSS) for one in beyond.values()]

    def each(name: str) -> str:
        rates = [arms[one]["rate"] for one in (f"sparse {name}", name)]
        other = "" if rates[0] == rates[1] else " at rates of {:g} and {:g}".format(*rates)
        return f"{name} {said(excess[name])}{other}"

    sentence = f"Held-out loss of sparse less dense, margin {LOSS} nats: {', '.join(map(each, excess))}."
    for name, by_rate in content["sparse_less_dense_at_equal_rates"].items():
        sentence += f" At equal rates, {name}: {', '.join(f'{said(one)} at {rate}' for rate, one in by_rate.items())}."
    shallow = [one for one in content["depths"] if not one["reached"] and no_more(Interval(*one["excess"]), LOSS).holds]
    if shallow:
        one = max(shallow, key=lambda one: (one["layers"], one["depth"]))
        sentence += (
            f" On this text depth says nothing: a mask of depth {one['depth']}, which {one['layers']} layers do not "
            f"reach, is as good, {said(one['excess'])}."
        )
    worse = [depth for depth, one in beyond.items() if decide(one.less(LOSS), "above", 0.0).holds]
    if worse:
        sentence += (
            f" Counterexample: where far letters are needed (rows that repeat), the mask of depth {worse[0]} reaches "
            f"its depth and ends at {far[worse[0]][0]:.3f} nats, the dense one at {far[1][0]:.3f}."
        )
    tags = ("empty",) if shallow and not worse else ()
    return [Judgement.of("H18", jointly(*parts), sentence, *tags, "rule after")]


def _beyond(one: Sequence[float], other: Sequence[float]) -> Interval:
    """The difference of two means by the far ends of their intervals, which is wider than 95 %."""
    return Interval(one[0] - other[0], one[1] - other[2], one[2] - other[1])
