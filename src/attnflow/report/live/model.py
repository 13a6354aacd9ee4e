"""`ModelSession`: the model that a server was started with, and the answers about it as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

import numpy as np

from attnflow import audit, bias, geometry, knowledge
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import percent, token_label
from attnflow._core.plain import as_integer, as_text
from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.published import Summary
from attnflow.geometry.table import GeometryScores
from attnflow.knowledge.layered import reads_entries
from attnflow.knowledge.reading.entry import removal
from attnflow.knowledge.reading.provenance import Trace
from attnflow.knowledge.reading.results import layer_labels
from attnflow.models import load_model
from attnflow.models.subject import Loaded, Subject
from attnflow.report.attribution_rows import head_name, key_name, query_name, remark, row_of, short
from attnflow.report.audit import LISTED, effort, strips_of
from attnflow.report.bias import table_of
from attnflow.report.charts import Array
from attnflow.report.geometry import SCORES, chance_bands, head_grid, reading_words, rows_of
from attnflow.report.knowledge import ABLATED, active_shares, written
from attnflow.report.live import entries
from attnflow.report.live.entries import number, numbers, table
from attnflow.report.live.operations import Message, Reply
from attnflow.report.live.prompts import Given, Prompts, kept
from attnflow.report.live.session import answered

MAX_CHARACTERS: Final = 4000
MAX_TOKENS: Final = 200
_TEXT: Final = "When Mary and John went to the store, John gave a drink to"  # to begin with
_IDS: Final = "5 6 7 8 9 10 11 12"  # in its place for a model without a tokenizer
_TERMS: Final = 12  # of a score, listed
_RESULTS: Final = 4  # that are kept, so that another layer or token of them is shown at once


class ModelSession:
    """Answers a page about one model, which only the server's command line names, never a page."""

    def __init__(self, name: str, bias_folder: str | None = None) -> None:
        self._name, self._bias = name, bias_folder
        self._loaded: Loaded | None = None
        self._map = kept(_RESULTS, bias.capture)
        self._trace = kept(_RESULTS, knowledge.trace)
        self._report = lru_cache(_RESULTS)(knowledge.entry)
        self._reading = kept(1, geometry.reading)  # its pass is large
        self._with_entries: Loaded | None = None  # the model, converted once
        # Each with plain data in and out; all but the first and "geometry" are about a "text".
        self._questions: Mapping[str, Callable[[Loaded, Message, Progress], Reply]] = {
            "model": self._about,
            "audit": self._audited,
            "geometry": lambda loaded, _, progress: _geometry(geometry.score(loaded.model, progress=progress)),
            "bias": self._biased,  # strengths, and the map of a "layer" or of the last query
            "trace": self._traced,  # the entries at a "position"; the first "ablate" are also taken out, one by one
            "entry": self._entry,  # the page of an "entry", by default the one with the largest effect at a "position"
            "passages": self._passages,  # where in the text, and in the sonnets, that "entry" has the largest weights
            "without": self._without,  # the next token after a "position" with that "entry" and without it
            "why": self._why,  # why a "head" of a "layer" (by default the telling one) looks from a "query" to a "key"
            **Prompts(_given).questions,  # the flow of one answer
        }

    def handle(self, message: Message, progress: Progress) -> Reply:
        return answered(message, lambda: self._answer(message, progress))

    def _answer(self, message: Message, progress: Progress) -> Reply:
        name = message.get("op")
        if not isinstance(name, str) or name not in self._questions:
            raise ValueError(f"unknown operation {str(name)[:40]!r}")
        if self._loaded is None:
            self._loaded = _load(self._name, self._bias, progress)
        return self._questions[name](self._loaded, message, progress)

    def _about(self, loaded: Loaded, _: Message, __: Progress) -> Reply:
        model, reads = loaded.model, loaded.tokenizer is not None
        return {
            "model": self._name,
            "kind": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": getattr(model.config, "num_hidden_layers", None),
            "heads": getattr(model.config, "num_attention_heads", None),
            "key_heads": getattr(model.config, "num_key_value_heads", None),
            "width": getattr(model.config, "hidden_size", None),
            "bias": any(layer_biases(model)),
            "reads": reads,
            "text": _TEXT if reads else _IDS,
            "halves": Subject.of(loaded).encodes_and_decodes,
            "max_characters": MAX_CHARACTERS,
        }

    def _audited(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        subject = Subject.of(loaded)
        inputs = subject.sample(_given(loaded, message).ids)
        report = audit.check(loaded, inputs, progress=progress)
        return {
            "verdict": report.verdict,
            "total": len(report.violations),
            "violations": [
                {**asdict(each), "change": f"{each.change:.3g}", "text": str(each)}
                for each in report.violations[:LISTED]
            ],
            "strips": [
                {"stack": stack, "names": names, "rows": [{"name": name, "cells": cells} for name, cells in rows]}
                for stack, names, rows in strips_of(report.modules)
            ],
            "watched": len(report.modules),
            "tokens": [token_label(text) for ids in inputs.values() for text in subject.texts(ids[0].tolist())],
            "facts": effort(report),
            "notes": report.notes,
        }

    def _biased(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        progress(0, 0, "two forward passes")
        layer = _optional(message, "layer")
        bias_map = self._map(loaded, _given(loaded, message))
        values, allowed = table_of(bias_map, layer)
        tokens, rank = [token_label(token) for token in bias_map.tokens], bias_map.energy(1)
        sides = [f"layer {one.layer}" for one in bias_map]
        return {
            "tokens": tokens,
            "layer": layer,
            "layers": [
                {"layer": one.layer, **numbers(strength=one.strength, moved=one.moved, rank1=rank[one.layer])}
                for one in bias_map
            ],
            "sides": sides if layer is None else [f"{tokens[query]} ({query})" for query in bias_map.queries],
            "values": table(np.where(allowed, values, math.nan)),
        }

    def _traced(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        ablate = as_integer(message.get("ablate", 0), "ablate")
        trace = here = self._fired(loaded, message, progress)
        position = trace.positions[trace.row(as_integer(message.get("position", -1), "position"))]
        note = ABLATED if ablate else ""
        if ablate or position != trace.positions[-1]:  # of the last token alone `trace` names what all entries push
            try:
                here = self._fired(loaded, message, progress, position=(position,), ablate=ablate)
            except UnsupportedArchitecture as error:
                note = f"No entry is taken out: {error}."
        return {
            "tokens": [token_label(token) for token in trace.tokens],
            "without": trace.without,
            "note": note,
            "sides": [f"layer {label}" for label in layer_labels(trace.layers)],
            "values": table(written(trace)),
            "active": table(active_shares(trace)),
            **entries.traced(here, position),
        }

    def _entry(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        trace = self._fired(loaded, message, progress)
        position = trace.positions[trace.row(as_integer(message.get("position", -1), "position"))]
        strongest = trace.fired(position, count=1)
        if "entry" not in message and strongest:
            one = strongest[0]
            message = {**message, "entry": one.entry, "layer": one.layer, "head": one.head}
        model, one, place = self._place(loaded, message, progress)
        return entries.described(self._report(model, one, **place), trace, position)

    def _passages(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        model, one, place = self._place(loaded, message, progress)
        given = _given(loaded, message)
        texts = (given.ids,) if loaded.tokenizer is None else (str(message["text"]), *entries.sonnets())
        return entries.fires(knowledge.entry(model, one, texts=texts, progress=progress, **place))

    def _without(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        model, one, place = self._place(loaded, message, progress)
        position = as_integer(message.get("position", -1), "position")
        return entries.removed(removal(model, one, _given(loaded, message).inputs, position=position, **place))

    def _why(self, loaded: Loaded, message: Message, progress: Progress) -> Reply:
        layer = as_integer(message.get("layer"), "layer")
        head, query, key = (_optional(message, name) for name in ("head", "query", "key"))
        given = _given(loaded, message)
        progress(0, 0, "a forward pass, and the components of the residual stream")
        handle, at = self._reading(loaded, given), -1 if query is None else query
        found = handle.explain(layer, query=at)
        telling = handle.telling_head(layer, at) if head is None else head
        return explained(found, telling, key, Subject.of(loaded).texts(given.said or given.ids))

    def _opened(self, loaded: Loaded, progress: Progress) -> Loaded:
        if self._with_entries is None:
            progress(0, 0, "opening the feed-forward layers")
            model = loaded.model
            self._with_entries = loaded._replace(model=model if reads_entries(model) else knowledge.from_ffn(model))
        return self._with_entries

    def _fired(self, loaded: Loaded, message: Message, progress: Progress, ablate: int = 0, **options: Any) -> Trace:
        given = _given(loaded, message)
        opened = self._opened(loaded, progress)
        copies = f", and one of {ablate + 1} copies of the text" if ablate else ""
        progress(0, 0, f"two forward passes{copies}")
        return self._trace(opened, given, ablate=ablate, **options)

    def _place(self, loaded: Loaded, message: Message, progress: Progress) -> tuple[Loaded, int, dict[str, Any]]:
        one, head = as_integer(message.get("entry"), "entry"), as_integer(message.get("head", 0), "head")
        model = self._opened(loaded, progress)
        progress(0, 0, f"looking at entry {one}")
        return model, one, {"layer": _optional(message, "layer"), "head": head}


def _optional(message: Message, name: str) -> int | None:
    return None if message.get(name) is None else as_integer(message[name], name)


def _load(name: str, folder: str | None, progress: Progress) -> Loaded:
    progress(0, 0, f"reading {name}")
    try:
        loaded = load_model(name)
    except ValueError as error:
        if "tokenizer=False" not in str(error):
            raise
        loaded = load_model(name, tokenizer=False)  # token ids are typed in place of a text
    if folder is not None:
        progress(0, 0, f"attaching the bias {folder}")
        bias.load(loaded, folder)
    return loaded


def _given(loaded: Loaded, message: Message) -> Given:
    subject, tokenizer = Subject.of(loaded), loaded.tokenizer
    text, said = (as_text(message.get(name, empty), name) for name, empty in (("text", None), ("said", "")))
    if len(text) + len(said) > MAX_CHARACTERS:
        raise ValueError(f"a text has at most {MAX_CHARACTERS:,} characters here, got {len(text) + len(said):,}")
    if tokenizer is None:
        ids, more = _numbers(text), _numbers(said)
    else:
        ids, more = text, tokenizer(said, add_special_tokens=False)["input_ids"] if said else ()
    read = subject.sample(ids)["input_ids"][0].tolist()
    if len(read) + len(more) > MAX_TOKENS:
        raise ValueError(f"a text has at most {MAX_TOKENS} tokens here, got {len(read) + len(more)}: shorten it")
    if not subject.encodes_and_decodes:
        return Given(tuple(read))
    start = getattr(subject.config, "decoder_start_token_id", None)
    if start is None:
        raise ValueError("the model's config has no decoder_start_token_id: its decoder has no token to begin with")
    return Given(tuple(read), (start, *more))


def _numbers(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise ValueError("this model has no tokenizer: type token ids, such as 5 6 7")
    return [int(word) for word in words]


def _geometry(scores: GeometryScores) -> Reply:
    heads = {(each.tower, each.kind): each for each in scores.summaries if each.matrix == "head"}
    full = [each for each in scores.summaries if each.matrix == "all"]
    return {
        "stacks": [_stack(scores, each, heads.get((each.tower, each.kind))) for each in full],
        "reading": reading_words((scores.gamma, scores.mode)),
        "ignored": scores.ignored,
        "notes": scores.notes,
    }


def _stack(scores: GeometryScores, summary: Summary, per_head: Summary | None) -> Reply:
    rows = rows_of(scores, summary)
    width = max((row.width for row in rows), default=0)
    quartiles = {name: getattr(summary, name) for name in SCORES}
    return {
        "what": summary.what,
        "points": [{"layer": row.layer, **numbers(**{name: getattr(row, name) for name in SCORES})} for row in rows],
        "quartiles": {name: [*map(number, (q.q25, q.median, q.q75))] for name, q in quartiles.items()},
        "chance": chance_bands(width, scores.mode) if width else None,
        "width": width,
        "heads": {name: table(head_grid(rows_of(scores, per_head), name)) for name in SCORES if per_head},
    }


def explained(found: ScoreAttribution, head: int, key: int | None, texts: list[str]) -> Reply:
    """Describes the score of one head, query and key; the key is by default that of the largest weight."""
    if head not in found.heads:
        raise ValueError(f"layer {found.layer} has heads 0 to {max(found.heads)}, got head {head}")
    if key is not None and key not in found.keys:
        raise ValueError(f"the query at position {found.query} has keys {found.keys[0]} to {found.keys[-1]}, got {key}")
    raw, centred = (row_of(found, head, key, raw) for raw in (True, False))
    at = centred.index
    above = float(centred.totals[at])
    share = percent(float(centred.weights[at]))
    return {
        "tokens": [token_label(text) for text in texts],
        "layer": found.layer,
        "heads": list(found.heads),
        "head": head,
        "query": found.query,
        "keys": list(found.keys),
        "key": found.keys[at],
        "weights": table(found.weights),
        "sides": [short(name) for name in found.components],
        "columns": [short(name) for name in found.key_components],
        "table": table(centred.terms[at]),
        **_terms(found, raw.terms[at], centred.terms[at]),
        "constants": [
            {"name": name, **numbers(raw=float(raw.constants[name][at]), centred=float(each[at]))}
            for name, each in centred.constants.items()
            if raw.constants[name].any()
        ],
        "sum": numbers(raw=float(raw.scores[at]), centred=above),
        "verdict": f"In {head_name(found, head)}, {query_name(found)} gives {share} of its attention to "
        f"{key_name(found, at)}: the score is {abs(above):.3g} {'above' if above >= 0 else 'below'} the mean of the "
        "row.",
        "remark": remark(found, centred),
        "check": f"The sum differs from the score in the model’s own attention by {found.error:.1g} of the row’s "
        "range. A centred term is the term less its mean over the row, weighted by attention, because softmax ignores "
        "what all keys of a row share.",
    }


def _terms(found: ScoreAttribution, raw: Array, centred: Array) -> Reply:
    sizes = np.abs(centred if centred.any() else raw)  # of a query with one key all centred terms are zero
    order: list[int] = np.argsort(-sizes, axis=None, kind="stable")[:_TERMS].tolist()
    places = [divmod(each, centred.shape[1]) for each in order]
    left = {
        name: number(float(values.sum()) - sum(float(values[place]) for place in places))
        for name, values in (("raw", raw), ("centred", centred))
    }
    return {
        "terms": [
            {
                "query": str(found.components[one]),
                "key": str(found.key_components[other]),
                **numbers(raw=float(raw[one, other]), centred=float(centred[one, other])),
            }
            for one, other in places
        ],
        "rest": {"count": centred.size - len(places), **left},
    }
