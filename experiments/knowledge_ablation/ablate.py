"""Facts in a converted model ablated and edited, entry by entry.

Which feed-forward entries carry a fact? For each fact that the model knows, entries are chosen at the last token of its
prompt. The choice is by direct effect on the logit of the answer, by the norm of the contribution, or at random from
the layers of the first choice. Entries are ablated (their values set to zero), or edited so that they write another
answer. Measured are the fact, other wordings of it, other facts of its relation, and unrelated text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.reading.direct_effect import Directions, Stream, directions
from attnflow.knowledge.reading.trace import trace
from attnflow.models import load_model, sample_text
from experiments.knowledge_ablation.facts import RELATIONS, Fact, known_facts, last_logits, text_losses, token_of
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

METHODS: Final = ("effect", "norm", "random")


@dataclass(frozen=True)
class Ablation:
    """One experiment. The defaults are the scale "tiny", minutes of one CPU core."""

    model: str = "smollm2-135m"  # as `af.models.load_model` takes it
    dtype: str = "bfloat16"  # of the model
    facts: int = 6  # at most so many of each relation
    others: int = 4  # other facts of the relation that are asked for
    ablated: tuple[int, ...] = (1, 4, 16, 64)  # how many entries are ablated
    edited: tuple[int, ...] = (16,)  # how many entries are edited
    # by how many logits an edit shall put the other answer above the true one, by its direct effect alone
    margin: float = 5.0
    text_tokens: int = 128  # of the unrelated text
    seed: int = 0  # of the random entries


def tiny() -> Ablation:
    """Minutes of one CPU core."""
    return Ablation()


def small() -> Ablation:
    """All known facts, more sizes, more text; not run yet."""
    return Ablation(
        dtype="float32", facts=24, others=12, ablated=(1, 2, 4, 8, 16, 32, 64), edited=(1, 4, 16, 64), text_tokens=1024
    )


def paper() -> Ablation:
    """The same of a model twelve times as large, which is loaded from the hub; the paper gives no setting."""
    return replace(small(), model="HuggingFaceTB/SmolLM2-1.7B-Instruct")


@dataclass(frozen=True, eq=False)
class Chosen:
    """Entries in order of choice, with what an edit needs to know of them."""

    ids: Tensor  # of entries
    weights: Tensor  # of them at the last token of the prompt


def run_fact(model: nn.Module, tokenizer: Any, fact: Fact, config: Ablation, others: Sequence[Fact]) -> dict[str, Any]:
    """Everything that is measured of one fact: {"before": ..., "ablated": [...], "edited": [...]}."""
    base = cast(LayeredKnowledge, model.knowledge)
    prompt = RELATIONS[fact.relation].prompt.format(fact.subject)
    ids = cast("list[int]", tokenizer(prompt)["input_ids"])
    answer, other = (token_of(tokenizer, word) for word in (fact.answer, fact.other))
    most = max(*config.ablated, *config.edited)
    chosen = choose(model, ids, answer, most, config.seed)
    measure = partial(measured, model, tokenizer, fact, config, others)
    record: dict[str, Any] = {"fact": asdict(fact), "before": measure()}
    record["entries"] = {
        name: {"ids": one.ids.tolist(), "layers": base.layer_of(one.ids)} for name, one in chosen.items()
    }
    record["ablated"], record["edited"] = [], []
    towards = direction(model, ids, answer, other)
    gap = float(last_logits(model, tokenizer, [prompt])[0, [answer, other]].diff().neg())
    for name, entries in chosen.items():
        for count in config.ablated:
            with edited(base, entries.ids[:count], _without_values(base, entries.ids[:count])):
                record["ablated"].append({"method": name, "entries": count, **measure()})
        for count in config.edited:
            some = Chosen(entries.ids[:count], entries.weights[:count])
            rows, size = rewritten(base, some, towards, gap + config.margin)
            with edited(base, some.ids, rows):
                record["edited"].append({"method": name, "entries": count, "relative_change": size, **measure()})
    return record


def choose(model: nn.Module, ids: Sequence[int], answer: int, count: int, seed: int) -> dict[str, Chosen]:
    """The entries to change: by direct effect on the answer (those that raise it most), by norm, and at random.

    The random ones are as many of each layer as the first, in an order that goes through the layers likewise.
    """
    everything = trace(model, ids, position=-1, top=_largest_layer(model), answer=answer, promoted=0)
    table = {
        name: torch.cat([cast(Tensor, getattr(one, name))[0] for one in everything])
        for name in ("ids", "weights", "norms", "effects")
    }
    found: dict[str, Chosen] = {}
    for name, size in (("effect", table["effects"]), ("norm", table["norms"])):
        order = size.masked_fill(table["ids"] < 0, -torch.inf).topk(count).indices
        found[name] = Chosen(table["ids"][order], table["weights"][order])
    base = cast(LayeredKnowledge, model.knowledge)
    draw, taken = torch.Generator().manual_seed(seed), set(found["effect"].ids.tolist())
    places: list[int] = []
    layer_ids = [set(one.ids[0][one.ids[0] >= 0].tolist()) - taken for one in everything]
    for layer in base.layer_of(found["effect"].ids):
        pool = sorted(layer_ids[layer])
        pick = pool[int(torch.randint(len(pool), (1,), generator=draw))]
        layer_ids[layer].discard(pick)
        places.append(int((table["ids"] == pick).nonzero()[0]))
    found["random"] = Chosen(table["ids"][places], table["weights"][places])
    return found


@contextmanager
def edited(base: LayeredKnowledge, ids: Tensor, rows: Tensor) -> Generator[None]:
    """Entries with other rows for a while; then they return bit for bit."""
    before = base.get(ids)
    base.update(ids, rows)
    try:
        yield
    finally:
        base.update(ids, before)


def measured(model: nn.Module, tokenizer: Any, fact: Fact, config: Ablation, others: Sequence[Fact]) -> dict[str, Any]:
    """What the model now answers to the fact, to paraphrases and to other facts, and its loss on unrelated text."""
    relation = RELATIONS[fact.relation]
    asked = [relation.prompt, *relation.paraphrases]
    prompts = [each.format(fact.subject) for each in asked] + [relation.prompt.format(one.subject) for one in others]
    logits = last_logits(model, tokenizer, prompts)
    chances, best = logits.log_softmax(dim=-1), logits.argmax(dim=-1)
    answer, other = (token_of(tokenizer, word) for word in (fact.answer, fact.other))
    count = len(asked)
    theirs = [token_of(tokenizer, one.answer) for one in others]
    own = chances[count:][torch.arange(len(others)), theirs]
    text = tokenizer(sample_text(), return_tensors="pt", truncation=True, max_length=config.text_tokens)["input_ids"]
    return {
        "answer": chances[:count, answer].tolist(),
        "other": chances[:count, other].tolist(),
        "is_answer": (best[:count] == answer).tolist(),
        "is_other": (best[:count] == other).tolist(),
        "other_facts": own.tolist(),
        "other_facts_kept": (best[count:] == torch.tensor(theirs)).tolist(),
        "other_facts_leaked": (best[count:] == other).tolist(),
        "text": float(text_losses(model, text).mean()),
    }


def _without_values(base: LayeredKnowledge, ids: Tensor) -> Tensor:
    rows = base.get(ids)
    rows[:, base.layout.value] = 0
    return rows


def rewritten(base: LayeredKnowledge, some: Chosen, towards: Tensor, wanted: float) -> tuple[Tensor, float]:
    """(rows whose values write so many more logits for the other answer, relative change of the values).

    Each value moves the same way along `towards`, with the sign of its weight; the length is such that the direct
    effects sum to what is wanted.
    """
    rows = base.get(some.ids).float()
    unit = towards / towards.norm()
    length = wanted / float(some.weights.abs().sum() * towards.norm())
    before = rows[:, base.layout.value].norm()
    change = length * some.weights.sign()[:, None] * unit
    rows[:, base.layout.value] += change
    return rows, float(change.norm() / before)


def direction(model: nn.Module, ids: Sequence[int], answer: int, other: int) -> Tensor:
    """What a contribution is multiplied by to have its direct effect on logit(other) - logit(answer)."""
    tokens = torch.tensor([list(ids)])
    run = partial(cast(Any, model), input_ids=tokens, use_cache=False)
    stream = Stream(model, [len(ids) - 1])
    with torch.no_grad():
        found = [directions(stream, run, lambda _, token=token: [token]) for token in (other, answer)]
    rows = [cast(Directions, one).rows[0] for one in found]
    return rows[0] - rows[1]


def _largest_layer(model: nn.Module) -> int:
    return int(cast(LayeredKnowledge, model.knowledge).counts.max())


def setup(config: Ablation) -> Setup:
    """A job for each fact; relations in turn, so that a study that is cut short has some facts of each."""
    loaded = load_model(config.model, dtype=config.dtype)
    model, tokenizer = from_ffn(cast(nn.Module, loaded.model)), loaded.tokenizer
    known = known_facts(model, tokenizer)
    grouped = {name: [fact for fact in known if fact.relation == name] for name in RELATIONS}
    chosen: dict[Job, tuple[Fact, list[Fact]]] = {}
    for place, mine in ((place, mine) for place in range(config.facts) for mine in grouped.values()):
        if place < len(mine):
            fact = mine[place]
            beside = [one for one in mine[place + 1 :] + mine[:place] if one.answer != fact.other]
            chosen[Job(f"{fact.relation}-{fact.subject}")] = fact, beside[: config.others]

    def run(job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
        del folder, progress  # a fact takes seconds
        fact, others = chosen[job]
        return run_fact(model, tokenizer, fact, config, others)

    return Setup(Plan(tuple(chosen)), run, {"known": [asdict(fact) for fact in known]})
