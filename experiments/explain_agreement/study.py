"""What edges and entries carry, their effects and direct effects, and what an answer loses without each of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any, Final, cast

from torch import Tensor

from attnflow import explain
from attnflow._core.progress import Progress
from attnflow.explain.explanation import Edge, Source
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.reading.trace import trace
from attnflow.models import load_model
from attnflow.models.passes.held import HeldPass
from attnflow.models.subject import Loaded, Subject
from experiments.knowledge_ablation.ablate import direction
from experiments.knowledge_ablation.facts import RELATIONS, known_facts, last_logits, token_of
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

KINDS: Final = ("facts", "indirect objects", "sequences")
READINGS: Final = ("carried", "effect", "direct")
COVERED: Final = (5, 20, 80)  # edges
TOP: Final = 16  # by a reading
_NAMES: Final = (("Mary", "John"), ("Anna", "Paul"), ("Sarah", "David"), ("Emma", "Mark"), ("Lisa", "James"))
_STORIES: Final = (
    *("When {0} and {1} went to the store, {1} gave a drink to", "As {1} and {0} left the office, {1} gave a key to"),
    *("After {0} and {1} came home, {1} handed the keys to", "When {1} and {0} went out, {1} threw the ball to"),
    *("While {0} and {1} had lunch, {1} passed the salt to", "Then {1} and {0} met, and {1} gave the book to"),
)
_WORDS: Final = (
    *("river", "chair", "apple", "stone", "window", "paper", "garden", "horse", "bridge", "music", "winter"),
    *("table", "doctor", "island", "silver", "money", "letter", "mountain", "bread", "ship", "tower", "king"),
)


@dataclass(frozen=True)
class Agreement:
    """What is measured. The defaults are the scale "tiny"."""

    models: tuple[str, ...] = ("smollm2-135m",)  # as `af.load_model` takes them
    prompts: int = 20  # of each kind
    strongest: int = 20  # candidates by the three readings in turn, of edges and of entries
    random: int = 4  # further ones


def small() -> Agreement:
    """Three models of the hub, and every one of the top 16 by each reading; not run yet."""
    models = ("HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B")
    return Agreement(models, strongest=len(READINGS) * TOP, random=16)


def miniature(config: Agreement) -> Agreement:
    return replace(config, models=config.models[:1], prompts=2, strongest=9, random=2)


@dataclass(frozen=True)
class Prompt:
    text: str
    answer: int  # the token that is explained
    against: int  # the token with which it is compared


def asked(loaded: Loaded, kind: str, count: int) -> list[Prompt]:
    """The first prompts of a kind that make the model put the answer above the other token."""
    if kind == "facts":  # that the model puts first of all tokens
        known = known_facts(loaded.model, loaded.tokenizer)
        random.Random(0).shuffle(known)
        written = [(RELATIONS[fact.relation].prompt.format(fact.subject), fact.answer, fact.other) for fact in known]
    elif kind == "indirect objects":
        written = [(story.format(*names), *names) for names, story in product(_NAMES, _STORIES)]
    else:
        lists = [random.Random(seed).sample(_WORDS, 6) for seed in range(2 * count)]
        written = [(" ".join(["Words:", *words, *words[:3]]), words[3], words[5]) for words in lists]
    tried = [Prompt(text, *(token_of(loaded.tokenizer, word) for word in words)) for text, *words in written]
    logits = last_logits(loaded.model, loaded.tokenizer, [prompt.text for prompt in tried])
    return [p for p, row in zip(tried, logits, strict=True) if row[p.answer] > row[p.against]][:count]


def setup(config: Agreement) -> Setup:
    """A job for each prompt, kinds in turn; a job without a prompt of the model measures nothing."""

    @lru_cache(maxsize=1)
    def bench(name: str) -> tuple[Loaded, Loaded, Mapping[str, Sequence[Prompt]]]:
        loaded = load_model(name)
        converted = Loaded(cast(Any, from_ffn(loaded.model)), loaded.tokenizer)
        return loaded, converted, {kind: asked(loaded, kind, config.prompts) for kind in KINDS}

    def run(job: Job, folder: Path, progress: Progress) -> dict[str, object]:
        del folder, progress
        name, _, kind = job.arm.partition(" ")
        loaded, converted, prompts = bench(name)
        mine = prompts[kind][cast(int, job.seed) :][:1]
        return {"model": name, "kind": kind, **(measured(loaded, converted, mine[0], config) if mine else {})}

    each = product(config.models, range(config.prompts), KINDS)
    return Setup(Plan(tuple(Job(f"{name} {kind}", seed=number) for name, number, kind in each)), run)


def measured(loaded: Loaded, converted: Loaded, prompt: Prompt, config: Agreement) -> dict[str, Any]:
    """Everything that is measured of one prompt."""
    with explain.reading(loaded, prompt.text) as reading:
        explained = reading.answer(prompt.answer, prompt.against)
        covered = {count: explained.covered(count) for count in COVERED}
        record = {**asdict(prompt), "value": explained.value, "probability": explained.probability, "covered": covered}
        edges, entries = explained.edges, explained.entries
        sides: dict[str, tuple[Sequence[Edge | Source], list[float]]] = {
            "edges": (edges, direct_edges(loaded, converted, prompt, edges)),
            "entries": (entries, direct_entries(converted, prompt, entries, len(explained.texts) - 1)),
        }
        for what, (items, direct) in sides.items():
            table = {name: [getattr(item, name) for item in items] for name in ("carried", "effect")}
            table["direct"] = direct
            chosen, top = candidates(table, config, prompt.text)
            removal = reading.remove([items[place] for place in chosen])
            record[what] = rows = [{name: amounts[place] for name, amounts in table.items()} for place in chosen]
            for place, row, removed in zip(chosen, rows, removal.alone, strict=True):
                row |= {"name": items[place].name, "removed": removed, "top": [r for r in READINGS if place in top[r]]}
    return record


def candidates(
    table: Mapping[str, Sequence[float]], config: Agreement, seed: str
) -> tuple[list[int], dict[str, list[int]]]:
    """(places of those that are removed, random ones last; places of the top 16 by each reading)"""
    top: dict[str, list[int]] = {}
    for reading, amounts in table.items():
        sizes = {place: abs(amount) for place, amount in enumerate(amounts) if amount}
        top[reading] = sorted(sizes, key=sizes.__getitem__, reverse=True)[:TOP]
    by_rank = ([places[rank] for places in top.values() if rank < len(places)] for rank in range(TOP))
    strongest = list(dict.fromkeys(chain.from_iterable(by_rank)))[: config.strongest]
    others = sorted(set(range(len(table["carried"]))) - set(strongest))
    return [*strongest, *random.Random(seed).sample(others, min(config.random, len(others)))], top


def direct_entries(converted: Loaded, prompt: Prompt, entries: Sequence[Source], last: int) -> list[float]:
    """The direct effects that a trace gives; of entries at other tokens than the last, none."""
    top = int(cast(Any, converted.model).knowledge.counts.max())
    traced = trace(
        converted, prompt.text, position=-1, top=top, by="direct", answer=prompt.answer, against=prompt.against,
        promoted=0,
    )  # fmt: skip
    table: dict[tuple[int | None, int | None, int | None], float] = {}
    for layer in traced:
        effects = cast(Tensor, layer.direct_effects)[0].tolist()
        table |= {(last, layer.layer, n): e for n, e in zip(layer.neurons[0].tolist(), effects, strict=True)}
    return [table.get((entry.position, entry.layer, entry.neuron), 0.0) for entry in entries]


def direct_edges(loaded: Loaded, converted: Loaded, prompt: Prompt, edges: Sequence[Edge]) -> list[float]:
    """weight (v_k W_O) . d of edges to the last token, with d as in a trace; of other edges, none."""
    subject = Subject.of(loaded)
    inputs = subject.read_one(prompt.text)
    ids = inputs["input_ids"][0].tolist()
    towards = direction(converted.model, ids, prompt.against, prompt.answer)
    table: dict[int, Tensor] = {}
    for attention in HeldPass(subject, inputs, {}).attentions:
        heads = (towards @ cast(Any, attention.site.module).o_proj.weight).unflatten(0, (len(attention.weights), -1))
        table[attention.layer] = attention.weights[:, -1] * (attention.values @ heads[..., None])[..., 0]
    return [float(table[e.layer][e.head, e.key].detach()) if e.query == len(ids) - 1 else 0.0 for e in edges]
