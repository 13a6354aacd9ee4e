"""`ModelSession`: the model that a server was started with, and the answers about it as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow import bias, knowledge
from attnflow._core.markup import token_label
from attnflow._core.plain import as_integer, as_text
from attnflow._core.progress import Progress
from attnflow.audit.audit import check
from attnflow.audit.report import AuditReport
from attnflow.bias.kind import layer_biases
from attnflow.bias.map import BiasMap
from attnflow.geometry.score import score
from attnflow.geometry.table import IGNORED, GeometryScores
from attnflow.knowledge.provenance import Trace
from attnflow.models import load_model, sample_text
from attnflow.models.loaded import Loaded, text_inputs
from attnflow.report.audit import effort, strips_of
from attnflow.report.geometry import SCORES, chance_bands, head_grid, rows_of
from attnflow.report.knowledge import active_shares, entry_name, entry_words
from attnflow.report.live.actions import Message
from attnflow.report.live.answers import Reply, answered

MAX_CHARACTERS: Final = 4000
MAX_TOKENS: Final = 64
_SAMPLE: Final = 160  # characters of the text to begin with
_RESULTS: Final = 4  # that are kept, so that another layer or token of them is shown at once

_LISTED: Final = 24  # violations and entries
_DIGITS: Final = 4  # of numbers that are drawn


class ModelSession:
    """Answers a page about one model, which only the server's command line names, never a page.

    Operations of `handle`, each with plain data in and out:

    - `model`: loads it, and returns its name and a sample text;
    - `audit` of a "text": whether information flows against the declared order;
    - `geometry`: symmetry and directionality of layers and heads;
    - `bias` of a "text": strengths, and the map of a "layer" or of the last query;
    - `trace` of a "text": which feed-forward entries fired, by name for a "position".
    """

    def __init__(self, name: str, bias_folder: str | None = None) -> None:
        self._name, self._bias = name, bias_folder
        self._loaded: Loaded | None = None
        self._scores: GeometryScores | None = None
        self._map = lru_cache(_RESULTS)(bias.capture)
        self._trace = lru_cache(_RESULTS)(knowledge.trace)
        self._questions: Mapping[str, Callable[[Message, Progress], Reply]] = {
            "model": self._model,
            "audit": self._audit,
            "geometry": self._geometry,
            "bias": self._bias_of,
            "trace": self._trace_of,
        }

    def handle(self, message: Message, progress: Progress) -> Reply:
        """Replies to one message, with its `id`, and reports progress; errors become replies."""
        return answered(message, lambda: self._answer(message, progress))

    def _answer(self, message: Message, progress: Progress) -> Reply:
        name = message.get("op")
        if not isinstance(name, str) or name not in self._questions:
            raise ValueError(f"unknown operation {str(name)[:40]!r}")
        return self._questions[name](message, progress)

    def _model(self, _: Message, progress: Progress) -> Reply:
        model, tokenizer = self._load(progress)
        config = model.config
        reads = tokenizer is not None
        text = " ".join(sample_text(characters=_SAMPLE).split()).rpartition(" ")[0] if reads else "5 6 7 8 9 10 11 12"
        return {
            "model": self._name,
            "kind": type(model).__name__,
            "parameters": sum(each.numel() for each in model.parameters()),
            "layers": getattr(config, "num_hidden_layers", None),
            "heads": getattr(config, "num_attention_heads", None),
            "key_heads": getattr(config, "num_key_value_heads", None),
            "width": getattr(config, "hidden_size", None),
            "bias": any(layer_biases(model)),
            "reads": reads,
            "text": text,
            "max_tokens": MAX_TOKENS,
            "max_characters": MAX_CHARACTERS,
        }

    def _load(self, progress: Progress) -> Loaded:
        if self._loaded is None:
            progress(0, 0, f"reading {self._name}")
            try:
                loaded = load_model(self._name)
            except ValueError as error:
                if "tokenizer=False" not in str(error):
                    raise
                loaded = load_model(self._name, tokenizer=False)  # token ids are typed in place of a text
            if self._bias is not None:
                progress(0, 0, f"attaching the bias {self._bias}")
                bias.load(loaded, self._bias)
            self._loaded = loaded
        return self._loaded

    def _ids(self, message: Message, progress: Progress) -> tuple[int, ...]:
        """Tokenizes the typed text, up to `MAX_TOKENS` tokens."""
        text = as_text(message.get("text"), "text")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a text has at most {MAX_CHARACTERS:,} characters here, got {len(text):,}")
        loaded = self._load(progress)
        if loaded.tokenizer is not None:
            return tuple(text_inputs(loaded, text, MAX_TOKENS)["input_ids"][0].tolist())
        words = text.replace(",", " ").split()
        if not all(word.isdecimal() and len(word) < 10 for word in words):
            raise ValueError("this model has no tokenizer: type token ids, such as 5 6 7")
        return tuple(text_inputs(loaded, [int(word) for word in words], MAX_TOKENS)["input_ids"][0].tolist())

    def _texts(self, ids: tuple[int, ...]) -> list[str]:
        assert self._loaded is not None
        tokenizer: Any = self._loaded.tokenizer
        return [str(each) for each in ids] if tokenizer is None else tokenizer.batch_decode([[each] for each in ids])

    def _audit(self, message: Message, progress: Progress) -> Reply:
        ids = self._ids(message, progress)
        assert self._loaded is not None
        report = check(self._loaded, text_inputs(self._loaded, ids), progress=progress)
        return audit_view(report, self._texts(ids))

    def _geometry(self, _: Message, progress: Progress) -> Reply:
        if self._scores is None:
            self._scores = score(self._load(progress).model, progress=progress)
        return geometry_view(self._scores)

    def _bias_of(self, message: Message, progress: Progress) -> Reply:
        ids = self._ids(message, progress)
        progress(0, 0, "two forward passes")
        layer = None if message.get("layer") is None else as_integer(message["layer"], "layer")
        return bias_view(self._map(self._loaded, ids), layer)

    def _trace_of(self, message: Message, progress: Progress) -> Reply:
        ids = self._ids(message, progress)
        progress(0, 0, "opening the feed-forward layers, two forward passes")
        position = as_integer(message.get("position", -1), "position")
        return trace_view(self._trace(self._loaded, ids), position)


def audit_view(report: AuditReport, tokens: Sequence[str]) -> Reply:
    """Returns the verdict, the map of the watched modules, and each violation by layer and module."""
    strips = [
        {"stack": stack, "names": list(names), "rows": [{"name": name, "cells": list(row)} for name, row in rows]}
        for stack, names, rows in strips_of(report.modules)
    ]
    violations = [
        {**asdict(each), "change": f"{each.change:.3g}", "text": str(each)} for each in report.violations[:_LISTED]
    ]
    return {
        "verdict": report.verdict,
        "total": len(report.violations),
        "violations": violations,
        "strips": strips,
        "watched": len(report.modules),
        "tokens": [token_label(token) for token in tokens],
        "facts": [list(fact) for fact in effort(report)],
        "notes": list(report.notes),
    }


def geometry_view(scores: GeometryScores) -> Reply:
    """Returns for each attention a point per layer, quartiles, the chance band and a head map."""
    stacks: list[Reply] = []
    heads = {(each.tower, each.kind): each for each in scores.summaries if each.matrix == "head"}
    for summary in (each for each in scores.summaries if each.matrix == "all"):
        rows, per_head = rows_of(scores, summary), heads.get((summary.tower, summary.kind))
        width = max((row.width for row in rows), default=0)
        quartiles = {name: getattr(summary, name) for name in SCORES}
        stacks.append(
            {
                "what": summary.what,
                "points": [
                    {"layer": row.layer, **{name: _number(getattr(row, name)) for name in SCORES}} for row in rows
                ],
                "quartiles": {n: [_number(q.q25), _number(q.median), _number(q.q75)] for n, q in quartiles.items()},
                "chance": chance_bands(width, scores.mode) if width else None,
                "width": width,
                "heads": {name: _table(head_grid(rows_of(scores, per_head), name)) for name in SCORES if per_head},
            }
        )
    reading = f"{scores.mode}, gamma {scores.gamma:g}"
    return {"stacks": stacks, "reading": reading, "ignored": IGNORED, "notes": list(scores.notes)}


def bias_view(bias_map: BiasMap, layer: int | None) -> Reply:
    """Returns strengths, and a map of one layer or of the last query; raises ValueError for a layer without bias."""
    if layer is None:
        row = len(bias_map.queries) - 1
        values = np.stack([bias_map.values("bias", one.layer)[row].numpy() for one in bias_map])
        allowed = np.stack([bias_map.allowed(one.layer)[row].numpy() for one in bias_map])
        sides = [f"layer {one.layer}" for one in bias_map]
    else:
        values, allowed = bias_map.values("bias", layer).numpy(), bias_map.allowed(layer).numpy()
        sides = [f"{token_label(bias_map.tokens[query])} ({query})" for query in bias_map.queries]
    rank = bias_map.energy(1)
    layers = [(one.layer, *map(_number, (one.strength, one.moved, rank[one.layer]))) for one in bias_map]
    return {
        "tokens": [token_label(token) for token in bias_map.tokens],
        "layer": layer,
        "layers": [dict(zip(("layer", "strength", "moved", "rank1"), each, strict=True)) for each in layers],
        "sides": sides,
        "values": _table(np.where(allowed, values, math.nan)),
    }


def trace_view(trace: Trace, position: int) -> Reply:
    """Returns the entries' work by layer and token; raises ValueError for a position that was not traced."""
    row = trace.row(position)
    written = [one.output_norm if one.effect is None else one.effect for one in trace]
    entries = [
        {
            "name": entry_name(one),
            "words": entry_words(one, 60),
            **{name: _number(getattr(one, name)) for name in ("score", "weight", "norm")},
            "effect": None if one.effect is None else _number(one.effect),
        }
        for one in trace.fired(trace.positions[row], count=_LISTED)
    ]
    return {
        "tokens": [token_label(token) for token in trace.tokens],
        "position": trace.positions[row],
        "target": token_label(trace.targets[row]) if trace.targets else "",
        "logit": None if trace.logits is None else _number(float(trace.logits[row])),
        "without": trace.without,
        "sides": [f"layer {one.layer}" for one in trace],
        "values": _table(np.stack([np.asarray(each, dtype=np.float64) for each in written])),
        "active": _table(active_shares(trace)),
        "entries": entries,
    }


def _table(values: npt.NDArray[Any]) -> list[list[float | None]]:
    return [[_number(value) for value in row] for row in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
