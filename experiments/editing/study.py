"""Facts of a converted model edited one at a time by the library's own call, and what else that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.knowledge import edit, from_ffn
from attnflow.knowledge.editing import facts as taught
from attnflow.knowledge.editing.edit_targets import answers_of, token_ids
from attnflow.knowledge.editing.guard import guard_of, likely
from attnflow.models import load_model, sample_text
from attnflow.models.subject import Subject
from experiments.editing.facts import KINDS, RELATIONS, STATEMENTS, Case, cases, prompt_of
from experiments.knowledge_ablation.facts import Fact, known_facts, text_losses
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

ARMS: Final[Mapping[str, Mapping[str, Any]]] = {  # what `knowledge.edit` is given beside the model and the fact
    "guarded": {},
    "no guard": {"guard": False},
    "64 entries": {"entries": 64},
}
_SURE: Final = 0.15  # probability of a next token from which the model is taken to say it, as the library has it
_COMPARED: Final = 3  # other subjects, of which the fewer half may say the same


@dataclass(frozen=True)
class Editing:
    """One experiment. The defaults are the scale "tiny"."""

    model: str = "smollm2-135m"  # as `af.models.load_model` takes it
    facts: int = 2  # of each relation, none of which any setting was tuned on
    others: int = 4  # other facts of the relation that are asked for
    tokens: int = 4096  # of the model's own text, which edits preserve
    text_tokens: int = 128  # of Hamlet, for the loss on other text


def tiny() -> Editing:
    """Twenty facts, twenty minutes of one CPU core."""
    return Editing()


def small() -> Editing:
    """The same model: every fact that is left, and more text."""
    return Editing(facts=100, others=8, text_tokens=2048)


def paper() -> Editing:
    """The paper names no setting: as "small", a model of 1.7 billion parameters."""
    return replace(small(), model="HuggingFaceTB/SmolLM2-1.7B-Instruct")


class Bench:
    """A converted model, and everything that is computed once."""

    def __init__(self, config: Editing) -> None:
        loaded = load_model(config.model, dtype="float32")
        self.model = from_ffn(cast(nn.Module, loaded.model)).eval()
        self.config, self.tokenizer = config, cast(Any, loaded.tokenizer)
        self.subject = Subject(self.model, self.tokenizer)
        self.cases = cases(known_facts(self.model, self.tokenizer, RELATIONS), config.facts)
        self.text = hamlet(self.tokenizer, config.text_tokens)
        first = as_taught(self.cases[0].fact)
        with edit(self.model, first, guard=False, tokens=config.tokens, tokenizer=self.tokenizer) as handle:
            self.moments = handle.moments

    def run(self, case: Case) -> dict[str, Any]:
        """The model before, and after each arm's edit of the one fact."""
        fact, statements = as_taught(case.fact), self._told(case)
        held = guard_of(self.subject, fact, [fact]).beside
        beside = [one for one in case.relation if prompt_of(one) not in held]
        case = replace(case, relation=tuple(beside[: self.config.others]))
        before, arms = self._measured(case, statements), dict[str, Any]()
        for name, settings in ARMS.items():
            with edit(self.model, fact, text=self.moments, tokenizer=self.tokenizer, **settings) as handle:
                report = handle.report
                about = {"change": max(report.relative_change), "entries": report.entries, "ok": not report.problems}
                arms[name] = {**self._measured(case, statements), **about}
        return {"before": before, "arms": arms}

    def _told(self, case: Case) -> list[str]:
        """Those statements on the subject after which the model says what tells of it, and is not the fact's answer.

        It is sure of the next token, and does not say the same of most of a few other subjects.
        """
        patterns, fact = STATEMENTS[KINDS[case.fact.relation]], case.fact
        best = likely(self.subject, [one.format(fact.subject) for one in patterns]).max(dim=-1)
        names = [one.subject for one in case.relation][:_COMPARED]
        theirs = [likely(self.subject, [one.format(name) for one in patterns]).argmax(dim=-1) for name in names]
        same = torch.stack([best.indices == one for one in theirs]).sum(dim=0)
        answer = token_ids(self.tokenizer, fact.answer, answer=True)[0]
        told = (best.values >= _SURE) & (best.indices != answer) & (2 * same <= len(theirs))
        return [one.format(fact.subject) for one, chosen in zip(patterns, told.tolist(), strict=True) if chosen]

    def _measured(self, case: Case, statements: Sequence[str]) -> dict[str, Any]:
        best = likely(self.subject, statements).argmax(dim=-1).tolist() if statements else []
        return {
            **answers(self.subject, case),
            "statements": dict(zip(statements, best, strict=True)),
            "text": float(text_losses(self.model, self.text).mean()),
        }


@torch.no_grad()
def answers(subject: Subject, case: Case) -> dict[str, list[bool]]:
    """Which whole answers the model gives: the old and the new one to the fact and its paraphrases, and other facts."""
    fact, prompts = case.fact, [prompt_of(case.fact), *case.paraphrases]
    pairs = {
        "is_answer": [(prompt, fact.answer) for prompt in prompts],
        "is_other": [(prompt, fact.other) for prompt in prompts],
        "relation_kept": [(prompt_of(one), one.answer) for one in case.relation],
        "relation_leaked": [(prompt_of(one), fact.other) for one in case.relation],
        "subject_facts": [(prompt_of(one), one.answer) for one in case.subject],
    }
    every = [pair for some in pairs.values() for pair in some]
    prompt_ids = [token_ids(subject.tokenizer, prompt) for prompt, _ in every]
    answer_ids = [token_ids(subject.tokenizer, answer, answer=True) for _, answer in every]
    parts = answers_of(subject, prompt_ids, answer_ids).first.split([len(some) for some in pairs.values()])
    return {name: part.tolist() for name, part in zip(pairs, parts, strict=True)}


def hamlet(tokenizer: Any, tokens: int) -> Tensor:
    return tokenizer(sample_text("hamlet"), return_tensors="pt", truncation=True, max_length=tokens)["input_ids"]


def as_taught(fact: Fact) -> taught.Fact:
    return taught.Fact(prompt_of(fact), fact.other, fact.subject)


def setup(config: Editing) -> Setup:
    """A job for each fact, relations in turn."""
    bench = Bench(config)
    jobs = {Job(f"{case.fact.relation}-{case.fact.subject}"): case for case in bench.cases}

    def run(job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
        del folder, progress  # a fact takes a minute
        return {"fact": asdict(jobs[job].fact), **bench.run(jobs[job])}

    return Setup(Plan(tuple(jobs)), run, {"facts": [asdict(case.fact) for case in bench.cases]})
