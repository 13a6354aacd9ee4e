"""Facts of a converted model edited one at a time, by several methods, and what else changes.

The methods share what layers must add at the subject (`target`), which is found once for each fact; they differ in
which entries are changed, and under which constraints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.editing import facts as taught
from attnflow.knowledge.editing.edit import Edited, edited_layers, value_changes
from attnflow.knowledge.editing.edit_targets import (
    Method,
    Moments,
    Spot,
    leads_of,
    places_of,
    read_moments,
    targets,
)
from attnflow.models import load_model, sample_text
from attnflow.models.subject import Subject
from experiments.knowledge_ablation.ablate import Chosen, choose, direction, edited, rewritten
from experiments.knowledge_ablation.facts import RELATIONS as FIRST
from experiments.knowledge_ablation.facts import Fact, Relation, known_facts, last_logits, text_losses, token_of
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

CONTINENT: Final = Relation(
    "The country of {} lies on the continent of",
    (
        "The continent on which {} lies is called",
        "On a map of the world, {} is found in",
        "Geographers say that {} is a part of",
    ),
    {
        "France": "Europe", "Japan": "Asia", "Kenya": "Africa", "Germany": "Europe", "China": "Asia", "Egypt": "Africa",
        "Poland": "Europe", "India": "Asia", "Nigeria": "Africa", "Spain": "Europe", "Norway": "Europe",
    },
)  # fmt: skip
RELATIONS: Final[Mapping[str, Relation]] = MappingProxyType({**FIRST, "continent": CONTINENT})
ARMS: Final = ("least change", "with constraints", "few entries, constraints", "direct effect", "one layer")


@dataclass(frozen=True)
class Editing:
    """One experiment. The defaults are the scale "tiny", an hour of one CPU core that is not shared."""

    model: str = "smollm2-135m"  # as `af.models.load_model` takes it
    layers: tuple[int, ...] = (7, 9, 11)  # that are edited; of the arm "one layer", the middle one
    entries: int = 64  # of each layer, in the arm with few
    direct: int = 16  # entries that are changed by direct effect, as in `knowledge_ablation`
    margin: float = 5.0  # of that arm, see there
    steps: int = 20  # of the descent to what layers must add
    rate: float = 0.15  # of it
    ridge: float = 0.2  # see `Method`
    tuned: int = 6  # facts of each of the three first relations, on which the method was tuned
    held_out: int = 30  # other facts
    others: int = 4  # other facts of the relation that are asked for
    constraints: int = 8  # further facts of the relation, at whose prompts nothing may be added
    moment_tokens: int = 4000  # of Shakespeare's sonnets, for second moments
    text_tokens: int = 128  # of Hamlet, for the loss on other text


def tiny() -> Editing:
    """An hour of one CPU core."""
    return Editing()


def small() -> Editing:
    """The same model: every fact that is left, more text for the moments, a longer descent."""
    return Editing(held_out=200, others=8, moment_tokens=100_000, text_tokens=2048, steps=40)


def paper() -> Editing:
    """The paper names no setting: as "small", a model of 1.7 billion parameters, three of its 24 layers."""
    return replace(small(), model="HuggingFaceTB/SmolLM2-1.7B-Instruct", layers=(6, 8, 10))


@dataclass(frozen=True)
class Case:
    fact: Fact  # that is changed
    held_out: bool  # whether the method was not tuned on it
    others: tuple[Fact, ...]  # facts of its relation that are asked for, and must stay
    constraints: tuple[Fact, ...]  # further ones, at whose prompts nothing may be added


def cases(known: Sequence[Fact], config: Editing) -> list[Case]:
    """The held-out facts, relations in turn, then those on which the method was tuned."""
    tuned, rest = list[Case](), dict[str, list[Case]]()
    for name in RELATIONS:
        mine = [fact for fact in known if fact.relation == name]
        for place, fact in enumerate(mine):
            beside = [one for one in mine[place + 1 :] + mine[:place] if one.answer != fact.other]
            others = tuple(beside[: config.others])
            further = tuple(beside[config.others :][: config.constraints])
            first = place < config.tuned and name in FIRST
            (tuned if first else rest.setdefault(name, [])).append(Case(fact, not first, others, further))
    most = max(map(len, rest.values()), default=0)
    turns = [mine[place] for place in range(most) for mine in rest.values() if place < len(mine)]
    return [*turns[: config.held_out], *tuned]


def measured(model: nn.Module, tokenizer: Any, case: Case, text: Tensor) -> dict[str, Any]:
    """What the model says to the fact, its paraphrases and other facts, and its loss on other text."""
    relation = RELATIONS[case.fact.relation]
    asked = [one.format(case.fact.subject) for one in (relation.prompt, *relation.paraphrases)]
    prompts = [*asked, *(relation.prompt.format(one.subject) for one in case.others)]
    best = last_logits(model, tokenizer, prompts).argmax(dim=-1)
    other = token_of(tokenizer, case.fact.other)
    theirs = torch.tensor([token_of(tokenizer, one.answer) for one in case.others])
    return {
        "is_answer": (best[: len(asked)] == token_of(tokenizer, case.fact.answer)).tolist(),
        "is_other": (best[: len(asked)] == other).tolist(),
        "other_facts_kept": (best[len(asked) :] == theirs).tolist(),
        "other_facts_leaked": (best[len(asked) :] == other).tolist(),
        "text": float(text_losses(model, text).mean()),
    }


class Bench:
    """A converted model, and everything that is computed once."""

    def __init__(self, config: Editing) -> None:
        loaded = load_model(config.model, dtype="float32")
        self.model, self.tokenizer = from_ffn(cast(nn.Module, loaded.model)).eval(), cast(Any, loaded.tokenizer)
        self.subject = Subject(self.model, self.tokenizer)
        self.config = config
        self.cases = cases(known_facts(self.model, self.tokenizer, RELATIONS), config)
        self.text = self.tokenizer(
            sample_text("hamlet"), return_tensors="pt", truncation=True, max_length=config.text_tokens
        )["input_ids"]
        sonnets = sample_text()
        self.leads = leads_of(sonnets, 3)
        self.layers = edited_layers(self.model, config.layers)
        self.moments: Moments = read_moments(self.subject, self.layers, sonnets, config.moment_tokens)
        self.method = Method(config.steps, config.rate, config.ridge)

    def together(self, case: Case) -> dict[str, Any]:
        """The arms that share a target, and the direct effect."""
        fact, where = self._fact(case), self._places(case)
        quiet = [self._ids(RELATIONS[one.relation].prompt.format(one.subject)) for one in case.constraints]
        count = min(self.config.entries, *(one.num_entries for one in self.layers.values()))
        wanted = targets(self.subject, self.layers, [fact], [where], self.leads, self.method)
        common = (self.subject, self.layers, wanted)
        changes = [
            *(value_changes(*common, untouched, self.moments, self.method.ridge) for untouched in ([], quiet)),
            value_changes(*common, quiet, self.moments, self.method.ridge, count),
        ]
        before = measured(self.model, self.tokenizer, case, self.text)
        arms = {name: self._applied(change, case) for name, change in zip(ARMS[:3], changes, strict=True)}
        arms["direct effect"] = self._direct(case)
        return {"before": before, "arms": arms}

    def alone(self, case: Case) -> dict[str, Any]:
        """One layer, the mean of the weights, met exactly: a change of rank one, as ROME makes it."""
        layer = self.config.layers[len(self.config.layers) // 2]
        one = {layer: self.layers[layer]}
        method = Method(self.method.steps, self.method.rate, 0.0, mean=True)
        facts, where = [self._fact(case)], [self._places(case)]
        wanted = targets(self.subject, one, facts, where, self.leads, method)
        changes = value_changes(self.subject, one, wanted, [], self.moments, method.ridge)
        return {"arms": {"one layer": self._applied(changes, case)}}

    def _applied(self, changes: Mapping[int, Tensor], case: Case) -> dict[str, Any]:
        with Edited(self.model, changes, self.moments) as handle:
            after = measured(self.model, self.tokenizer, case, self.text)
            return {**after, "relative_change": max(handle.relative_change), "entries": handle.count}

    def _direct(self, case: Case) -> dict[str, Any]:
        base = cast(LayeredKnowledge, self.model.knowledge)
        prompt = RELATIONS[case.fact.relation].prompt.format(case.fact.subject)
        ids = self._ids(prompt)
        answer, other = (token_of(self.tokenizer, word) for word in (case.fact.answer, case.fact.other))
        some: Chosen = choose(self.model, ids, answer, self.config.direct, 0)["effect"]
        gap = float(last_logits(self.model, self.tokenizer, [prompt])[0, [answer, other]].diff().neg())
        towards = direction(self.model, ids, answer, other)
        rows, size = rewritten(base, some, towards, gap + self.config.margin)
        with edited(base, some.ids, rows):
            after = measured(self.model, self.tokenizer, case, self.text)
        return {**after, "relative_change": size, "entries": len(some.ids)}

    def _fact(self, case: Case) -> taught.Fact:
        prompt = RELATIONS[case.fact.relation].prompt.format(case.fact.subject)
        return taught.Fact(prompt, case.fact.other, case.fact.subject)

    def _places(self, case: Case) -> list[Spot]:
        return places_of(self.subject, self._fact(case), self.leads)

    def _ids(self, text: str) -> list[int]:
        return cast("list[int]", self.tokenizer(text)["input_ids"])


def setup(config: Editing) -> Setup:
    """A job for each fact, the held-out ones first; then one more for each with one layer."""
    bench = Bench(config)
    named = {f"{case.fact.relation}-{case.fact.subject}": case for case in bench.cases}
    jobs = {Job(name): (case, bench.together) for name, case in named.items()}
    jobs |= {Job(f"{name}-one-layer"): (case, bench.alone) for name, case in named.items()}

    def run(job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
        del folder, progress  # a fact takes seconds
        case, measure = jobs[job]
        return {"fact": asdict(case.fact), "held_out": case.held_out, **measure(case)}

    return Setup(Plan(tuple(jobs)), run, {"facts": [asdict(case.fact) for case in bench.cases]})
