"""The flow of one answer, for a page: what each line carries, why its head looked there, what is lost without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from attnflow import audit, explain, geometry
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import part_name, token_label
from attnflow._core.plain import as_integer, as_list, as_object, as_text
from attnflow._core.progress import Progress
from attnflow.explain.answering import AnswerReading
from attnflow.explain.explanation import Edge, Explanation, Source
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow
from attnflow.report.live.entries import labels, number, numbers, table
from attnflow.report.live.operations import Message, Reply
from attnflow.report.live.tiles import tile

_LIKELY: Final = 6  # answers that are named
_KEPT: Final = 2  # prompts whose pass is kept: two are compared
_ENTRIES: Final = 120  # that are listed
_COVERED: Final = (5, 20, 30, 80, 200)
_LEADING: Final = 8  # sources of an entry, and components of a score

Asked = tuple[int | str | None, int | str | None, int | None]  # answer, against, position


class Given(NamedTuple):
    """The token ids of a text; for an encoder-decoder also those that its decoder has, first that which begins it."""

    ids: tuple[int, ...]
    said: tuple[int, ...] = ()

    @property
    def inputs(self) -> Any:
        if not self.said:
            return self.ids
        return {"input_ids": torch.tensor([self.ids]), "decoder_input_ids": torch.tensor([self.said])}


def kept(count: int, verb: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the last results of a verb that reads a text."""

    @lru_cache(count)
    def called(loaded: Loaded, given: Given, **options: Any) -> Any:
        return verb(loaded, given.inputs, **options)

    return called


@dataclass
class _Prompt:
    """A pass of one text, and what was explained of it last."""

    handle: AnswerReading
    asked: Asked | None = None
    explained: Explanation | None = None


class Prompts:
    """Answers about prompts of one model; `given` reads the text of a message.

    - `next` of a "text": the most likely tokens at a "position";
    - `explain`: the flow of the "answer" (a token's number or text; by default the likeliest) less "against";
    - `edge`: a line of it by "layer", "head", "query", "key" and "half": weights, order, why not an "other" key;
    - `take_out` of "items", lines or entries: what the value loses without each, and without all;
    - `flow_report` of it, and of a line: a page that needs no studio;
    - `fired` of an entry by "layer", "entry", "position" and "half": what made it fire.
    """

    def __init__(self, given: Callable[[Loaded, Message], Given]) -> None:
        self._given = given
        self._prompt = lru_cache(_KEPT)(_read)
        self._scores = kept(_KEPT, geometry.reading)
        self._order = lru_cache(_KEPT)(_declared)

    @property
    def questions(self) -> Mapping[str, Callable[[Loaded, Message, Progress], Reply]]:
        return {
            "next": self._next,
            "explain": lambda loaded, message, progress: _described(self._explained(loaded, message, progress)[1]),
            "edge": self._edge,
            "take_out": self._take_out,
            "fired": self._fired,
            "flow_report": self._report,
        }

    def _prompt_of(self, loaded: Loaded, message: Message) -> _Prompt:
        return self._prompt(loaded, self._given(loaded, message))

    def _next(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        progress(0, 0, "a forward pass")
        given = self._given(loaded, message)
        likely = self._prompt_of(loaded, message).handle.likely(_LIKELY, _optional(message, "position"))
        return {
            "tokens": [token_label(text) for text in Subject.of(loaded).texts_in_sequence(given.said or given.ids)],
            "likely": [{"id": token, "token": text, "chance": number(chance)} for token, text, chance in likely],
        }

    def _explained(self, loaded: Loaded, message: Message, progress: Progress) -> tuple[AnswerReading, Explanation]:
        prompt = self._prompt_of(loaded, message)
        subject = Subject.of(loaded)
        answer, against = (_token(subject, message, name) for name in ("answer", "against"))
        asked: Asked = (answer, against, _optional(message, "position"))
        found = prompt.explained if prompt.asked == asked else None
        if found is None:
            progress(0, 0, "a forward pass and two backward passes")
            prompt.explained = None
            found = prompt.handle.answer(*asked)
            prompt.explained, prompt.asked = found, asked
        return prompt.handle, found

    def _edge(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        handle, found = self._explained(loaded, message, progress)
        edge = _edge_of(found, message)
        given = self._given(loaded, message)
        reply: Reply = {"edge": _line(edge), **self._allowed(loaded, given, edge)}
        progress(0, 0, f"the scores of layer {edge.layer}")
        if edge.half == "encoder":
            return {**reply, "why": None, "note": "The scores of an encoder's own attention are not taken apart here."}
        try:
            row = self._scores(loaded, given).explain(
                edge.layer, query=edge.query, attention="cross" if edge.half else "self"
            )
            reply |= {"keys": list(row.keys), "weights": table(row.weights)}
        except (UnsupportedArchitecture, ValueError) as error:
            reply["note"] = f"{error}"
        try:
            return {**reply, "why": _why(handle.why(edge, _optional(message, "other")))}
        except (UnsupportedArchitecture, ValueError) as error:
            return {**reply, "why": None, "note": f"{error}"}

    def _allowed(self, loaded: Loaded, given: Given, edge: Edge) -> Reply:
        flow = None if given.said else self._order(loaded, given.ids)
        if flow is None:
            return {"tile": None, "depth": None}
        mask = flow.masks[min(edge.layer, len(flow.masks) - 1)]
        return {"tile": tile(mask, None, 0, 0, flow.size, flow.size), "depth": flow.depth}

    def _take_out(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        handle, found = self._explained(loaded, message, progress)
        items = [as_object(item, "items") for item in as_list(message.get("items"), "items")]
        parts = [_entry_of(found, item) if item.get("entry") is not None else _edge_of(found, item) for item in items]
        removal = handle.remove(parts, progress)
        assert removal is not None
        return {
            "names": removal.names,
            "alone": [number(value) for value in removal.alone],
            **numbers(together=removal.together, value=removal.value),
        }

    def _report(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        from attnflow.report.registry import page  # which draws every kind of result

        handle, found = self._explained(loaded, message, progress)
        shown: list[object] = [found]
        if message.get("head") is not None:
            edge = _edge_of(found, message)
            with suppress(UnsupportedArchitecture, ValueError):
                shown.append(handle.why(edge))
        return {"html": page(*shown).html}

    def _fired(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        handle, found = self._explained(loaded, message, progress)
        source = _entry_of(found, message)
        progress(0, 0, "two backward passes from the entry")
        made = handle.entry(source)
        givers = sorted((s for s in made.sources if s.kind != "constant"), key=lambda s: -abs(s.carried))[:_LEADING]
        return {
            "entry": _entry(found, source),
            **numbers(score=made.value),
            "sources": [
                {"name": giver.name, "token": _token_at(made, giver), "carried": number(giver.carried)}
                for giver in givers
            ],
        }


def _read(loaded: Loaded, given: Given) -> _Prompt:
    return _Prompt(explain.reading(loaded, given.inputs))


def _declared(loaded: Loaded, ids: tuple[int, ...]) -> Flow | None:
    subject = Subject.of(loaded)
    try:
        flow = audit.declared_order(subject.inside.model, subject.read_one(ids))
    except (UnsupportedArchitecture, ValueError, TypeError):
        return None
    return flow if flow.size == len(ids) else None


def _optional(message: Message, name: str) -> int | None:
    return None if message.get(name) is None else as_integer(message[name], name)


def _token(subject: Subject, message: Message, name: str) -> int | str | None:
    """A token by its number, or by its text, which within a text begins with a space that nobody types."""
    asked = message.get(name)
    if asked is None or asked == "":
        return None
    if isinstance(asked, int):
        return as_integer(asked, name)
    text = as_text(asked, name)
    if subject.tokenizer is None and text.isdecimal():
        return int(text)
    try:
        return subject.token(f" {text}") if not text[0].isspace() else text
    except ValueError:
        return text


def _edge_of(found: Explanation, message: Message) -> Edge:
    place = tuple(as_integer(message.get(name), name) for name in ("layer", "head", "query", "key"))
    half = as_text(message.get("half", ""), "half")
    for edge in (*found.edges, *found.leaks):
        if (edge.layer, edge.head, edge.query, edge.key) == place and edge.half == half:
            return edge
    layer, head, query, key = place
    texts = found.encoder_texts if half == "encoder" else found.texts
    if not (0 <= query < len(texts) and 0 <= key < len(found.encoder_texts if half else texts)):
        raise ValueError(f"query and key must be positions of the text, got {query} and {key}")
    return Edge(layer, head, query, key, half, float("nan"), float("nan"), float("nan"))


def _entry_of(found: Explanation, message: Message) -> Source:
    place = tuple(as_integer(message.get(name), name) for name in ("layer", "entry", "position"))
    half = as_text(message.get("half", ""), "half")
    for source in found.entries:
        if (source.layer, source.neuron, source.position) == place and source.half == half:
            return source
    name = part_name(place[0], "neuron", place[1])
    raise ValueError(f"{name} at token {place[2]} is not among the strongest entries of this answer")


def _token_at(found: Explanation, source: Source) -> str:
    return "" if source.position is None else token_label(found.token(source.position, source.half))


def _line(edge: Edge) -> Reply:
    values = numbers(weight=edge.weight, carried=edge.carried, effect=edge.effect, bias=edge.bias)
    place = {name: getattr(edge, name) for name in ("name", "layer", "head", "query", "key", "half")}
    return {**place, **values}


def _entry(found: Explanation, source: Source) -> Reply:
    values = numbers(activation=source.activation, carried=source.carried, effect=source.effect)
    place = {name: getattr(source, name) for name in ("name", "layer", "neuron", "position", "half", "text")}
    place["entry"] = source.neuron  # as the page asks for it
    return {**place, **values, "token": _token_at(found, source), "promotes": labels(source.promotes)}


def _described(found: Explanation) -> Reply:
    return {
        "model": found.model,
        "tokens": [token_label(text) for text in found.texts],
        "encoder_tokens": [token_label(text) for text in found.encoder_texts],
        "position": found.position,
        "answer": found.answer,
        "answer_id": found.answer_id,
        "against": list(found.against),
        **numbers(value=found.value, chance=found.probability, error=found.error),
        "edges": [_line(edge) for edge in found.edges],
        "leaks": [_line(edge) for edge in found.leaks],
        "entries": [_entry(found, source) for source in found.entries[:_ENTRIES]],
        "sources": [
            {"position": source.position, "half": source.half, "carried": number(source.carried)}
            for source in found.tokens
        ],
        "arrived": table(found.arrived),
        "covered": {count: number(found.covered(count)) for count in _COVERED},
        "reach": list(found.reach),
        "agreement": numbers(**found.agreement),
    }


def _why(found: ScoreAttribution) -> Reply:
    """Why the first key and not the other: terms of both scores less each other, summed by what was written there."""
    terms = (found.raw[0] - found.raw[1]).sum(0)
    order = terms.abs().argsort(descending=True)[:_LEADING].tolist()
    shown = [{"name": str(found.key_components[at]), **numbers(value=float(terms[at]))} for at in order]
    constant = found.contrast_constant
    return {
        "key": found.keys[0],
        "other": found.keys[1],
        "texts": [token_label(text) for text in found.tokens],
        "weights": [number(float(weight)) for weight in found.weights],
        "written": shown,
        "rest": {
            "count": len(terms) - len(order),
            **numbers(value=float(terms.sum()) - sum(float(terms[at]) for at in order)),
        },
        **numbers(constant=constant, total=float(terms.sum()) + constant),
        "pairs": [
            {"query": str(term.query_component), "key": str(term.key_component), **numbers(value=term.value)}
            for term in found.contrast(_LEADING)
        ],
    }
