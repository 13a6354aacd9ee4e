"""Verdicts on the claims, by the rules that the README has since before the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.hasse.summary import said
from experiments.runner.experiment import Judgement, Verdict
from experiments.runner.files import read

MARGIN: Final = 0.02  # nats per token: the smallest difference of interest
ROUNDING: Final = 1e-3  # between the two best logits, in float32: either may come out first


def judge(results: Path) -> Sequence[Judgement]:
    """By the rules that the README has since before the run."""
    content = read(results / "results.json")
    arms = {one["arm"]: one for one in content["arms"]}
    return [*_decoding(content), *_training(content, arms), *_sparse(content)]


def _decoding(content: Mapping[str, Any]) -> list[Judgement]:
    rows = [one for one in content["written"] if "compared" in one]
    if not rows:
        return []
    compared, differ = (sum(one[key] for one in rows) for key in ("compared", "differ"))
    margin = max(one["margin"] for one in rows)
    verdict: Verdict = "confirmed" if margin <= ROUNDING else "refuted"
    words = {one["arm"]: one["real_words"] for one in content["written"]}
    most = f"block {content['blocks'][-1]}"
    quality = f" Letters in real words: causal {words['causal'][0]:.0%}, {most} {words[most][0]:.0%}."
    sentence = (
        f"{compared} tokens decoded after held-out text by models so trained, {differ} of them not those of the merged "
        f"task (two best logits at most {margin:.1g} apart there)."
    )
    return [Judgement("H16", verdict, sentence + (quality if {"causal", most} <= words.keys() else ""))]


def _training(content: Mapping[str, Any], arms: Mapping[str, Any]) -> list[Judgement]:
    tables, names = content["tables"]["by_block"], [f"block {block}" for block in content["blocks"]]
    if not {"causal", "butterfly", *names} <= arms.keys():
        return []
    bars = {name: tables[str(block)] for name, block in zip(names, content["blocks"], strict=True)}
    ways = {name: [way for way in (name, name.replace("block", "warm")) if way in arms] for name in names}
    better = {name: min((arms[way] for way in ways[name]), key=lambda one: one["held_out"][0]) for name in names}
    bars["butterfly"], better["butterfly"] = tables["1"], arms["butterfly"]
    below = [better[name]["held_out"][2] < bar for name, bar in bars.items()]
    above = [better[name]["held_out"][1] > bar for name, bar in bars.items()]
    verdict: Verdict = "confirmed" if all(below) else "refuted" if any(above) else "not confirmed"

    def each(name: str) -> str:
        shown = " or warm ".join(f"{arms[way]['held_out'][0]:.2f}" for way in ways.get(name, [name]))
        return f"{name} {shown} (table {bars[name]:.2f})"

    spent = ", ".join(f"{name} {arms[name]['less_causal_at_equal_compute'][0]:+.2f}" for name in bars)
    sentence = (
        f"Held-out nats per token, beside a table of the last token read: {', '.join(map(each, bars))}; causal "
        f"{arms['causal']['held_out'][0]:.2f}. From scratch at equal compute, less causal: {spent}."
    )
    return [Judgement("H17", verdict, sentence)]


def _sparse(content: Mapping[str, Any]) -> list[Judgement]:
    excess: Mapping[str, Sequence[float]] = content["sparse_less_dense"]
    wanted = {"causal", "butterfly", *(f"block {block}" for block in content["blocks"])}
    if excess.keys() != wanted:
        return []
    within = all(value[2] < MARGIN for value in excess.values())
    worse = any(value[1] > MARGIN for value in excess.values())
    verdict: Verdict = "confirmed" if within else "refuted" if worse else "not confirmed"
    each = ", ".join(f"{name} {said(value)}" for name, value in excess.items())
    return [Judgement("H18", verdict, f"Held-out loss of sparse less dense, margin {MARGIN} nats: {each}.")]
