"""The rivals that change the model's own entries: `knowledge.edit`, and a change of rank one for each fact."""

from __future__ import annotations

from typing import Any, Final, cast

from torch import nn

from attnflow._core.progress import Progress
from attnflow.knowledge import edit, from_ffn
from attnflow.knowledge.editing.edit import Edited, edited_layers, value_changes
from attnflow.knowledge.editing.edit_targets import Method, leads_of, places_of, read_moments, targets
from attnflow.knowledge.editing.facts import Fact
from attnflow.models import sample_text
from attnflow.models.subject import Subject
from experiments.reader.asking import said, scored
from experiments.reader.bench import Bench
from experiments.reader.world import KINDS, WORDINGS, Asked

EDITED: Final = ("corrected", "inserted")  # nothing can be deleted from a model's own entries by what it shall say
_LEADS: Final = 3


def edited(bench: Bench, progress: Progress) -> list[dict[str, object]]:
    """A few facts edited together, by all entries of three layers, and by rank one a fact in one layer (ROME's way)."""
    model = cast(nn.Module, from_ffn(cast(Any, bench.model))).cpu().eval()
    subject, asked = Subject(model, bench.tokenizer), _some(bench)
    facts = [Fact(one.prompt, str(one.item.after), one.item.subject) for one in asked if one.wording == WORDINGS[0]]
    _ = bench.known, bench.text  # of the model as it is
    layers = edited_layers(model)
    moments = read_moments(subject, layers, sample_text(), bench.config.moment_tokens)
    ways = list[dict[str, object]]()
    with edit(model, facts, text=moments, tokenizer=bench.tokenizer, progress=progress):
        ways.append(_measured(bench, model, "edit", asked, len(facts)))
    middle = sorted(layers)[len(layers) // 2]
    one, method = {middle: layers[middle]}, Method(ridge=0.0, mean=True)
    leads = leads_of(sample_text(), _LEADS)
    places = [places_of(subject, fact, leads) for fact in facts]
    wanted = targets(subject, one, facts, places, leads, method, progress)
    with Edited(model, value_changes(subject, one, wanted, [], moments, method.ridge), moments):
        ways.append(_measured(bench, model, "rank one", asked, len(facts)))
    return ways


def _some(bench: Bench) -> list[Asked]:
    """The questions about the first facts of each kind that are corrected or inserted."""
    chosen = [
        item
        for kind in KINDS
        for group in EDITED
        for item in [i for i in bench.world.items if (i.kind, i.group) == (kind, group)][: bench.config.edited]
    ]
    return [one for one in bench.world.questions({}) if one.item in chosen]


def _measured(bench: Bench, model: nn.Module, name: str, asked: list[Asked], count: int) -> dict[str, object]:
    answers = said(model, bench.tokenizer, [one.prompt for one in asked], bench.config.tokens, [])
    rows = scored(bench.tokenizer, asked, answers, None, [False] * len(asked))
    return bench.way(name, count, rows, asked, lambda _: 0, model=model)
