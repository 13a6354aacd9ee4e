"""What is known of a model as plain data for drawings that can be pointed at: audit, geometry, bias, trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import percent, plural, token_label
from attnflow.audit.report import AuditReport
from attnflow.bias.map import BiasMap
from attnflow.geometry.table import IGNORED, GeometryScores
from attnflow.knowledge.provenance import Trace
from attnflow.report.audit import strips_of
from attnflow.report.knowledge import active_shares, entry_name, entry_words
from attnflow.report.score_chart import chance_bands, head_grid, rows_of

_LISTED: Final = 24  # violations and entries
_DIGITS: Final = 4  # of numbers that are drawn

Reply = dict[str, object]


def audit_view(report: AuditReport, tokens: Sequence[str]) -> Reply:
    """The verdict, the map of the watched modules, and each violation with its layer and module."""
    strips = [
        {"stack": stack, "names": list(names), "rows": [{"name": name, "cells": list(row)} for name, row in rows]}
        for stack, names, rows in strips_of(report.modules)
    ]
    violations = [
        {
            "kind": each.kind,
            "layer": each.layer,
            "module": each.module,
            "source": each.source,
            "target": each.target,
            "change": f"{each.change:.3g}",
            "text": str(each),
        }
        for each in report.violations[:_LISTED]
    ]
    tested = f"{percent(report.coverage)} of {report.forbidden:,}"
    passes = plural(report.forward_passes, "forward pass", "forward passes")
    return {
        "verdict": report.verdict,
        "total": len(report.violations),
        "violations": violations,
        "strips": strips,
        "watched": len(report.modules),
        "tokens": [token_label(token) for token in tokens],
        "facts": [
            ["order", report.order],
            ["inputs", f"{plural(report.batch, 'sequence')}, {plural(report.positions, 'position')}"],
            ["tested", f"{tested} forbidden pairs"],
            ["effort", f"{passes}, {report.seconds:.1f} s"],
            ["noise", f"{report.noise:.2g} between equal runs"],
        ],
        "notes": list(report.notes),
    }


def geometry_view(scores: GeometryScores) -> Reply:
    """Each kind of attention: a point for each layer, quartiles, the band of chance, and a map of its heads."""
    stacks: list[Reply] = []
    for summary in scores.summaries:
        if summary.matrix != "all":
            continue
        rows = rows_of(scores, summary)
        heads = next(
            (s for s in scores.summaries if s.matrix == "head" and (s.tower, s.kind) == (summary.tower, summary.kind)),
            None,
        )
        grids = {} if heads is None else {
            name: _table(head_grid(rows_of(scores, heads), name)) for name in ("symmetry", "directionality")
        }  # fmt: skip
        width = max((row.width for row in rows), default=0)
        stacks.append(
            {
                "what": summary.what,
                "points": [
                    {
                        "layer": row.layer,
                        "symmetry": _number(row.symmetry),
                        "directionality": _number(row.directionality),
                        "norm": _number(row.norm),
                        "flags": list(row.flags),
                    }
                    for row in rows
                ],
                "quartiles": {
                    name: [_number(q.q25), _number(q.median), _number(q.q75)]
                    for name, q in (("symmetry", summary.symmetry), ("directionality", summary.directionality))
                },
                "chance": chance_bands(width, scores.mode) if width else None,
                "width": width,
                "heads": grids,
            }
        )
    reading = f"{scores.mode}, gamma {scores.gamma:g}"
    return {"stacks": stacks, "reading": reading, "ignored": IGNORED, "notes": list(scores.notes)}


def bias_view(bias_map: BiasMap, layer: int | None) -> Reply:
    """The strength of each layer, and a map: of the last query in every layer, or of every query in one.

    Raises:
        ValueError: a layer without a bias.
    """
    if layer is None:
        row = len(bias_map.queries) - 1
        values = np.stack([bias_map.values("bias", one.layer)[row].numpy() for one in bias_map])
        allowed = np.stack([bias_map.allowed(one.layer)[row].numpy() for one in bias_map])
        sides = [f"layer {one.layer}" for one in bias_map]
    else:
        values, allowed = bias_map.values("bias", layer).numpy(), bias_map.allowed(layer).numpy()
        sides = [f"{token_label(bias_map.tokens[query])} ({query})" for query in bias_map.queries]
    energy = bias_map.energy(1)
    return {
        "tokens": [token_label(token) for token in bias_map.tokens],
        "layer": layer,
        "layers": [
            {
                "layer": one.layer,
                "strength": _number(one.strength),
                "moved": _number(one.moved),
                "rank1": _number(energy[one.layer]),
            }
            for one in bias_map
        ],
        "sides": sides,
        "values": _table(np.where(allowed, values, math.nan)),
    }


def trace_view(trace: Trace, position: int) -> Reply:
    """What the entries of each layer did for each token, and the strongest ones of a token.

    Raises:
        ValueError: a position that was not traced.
    """
    row = trace.row(position)
    written = [one.output_norm if one.effect is None else one.effect for one in trace]
    fired = trace.fired(trace.positions[row], count=_LISTED)
    target = token_label(trace.targets[row]) if trace.targets else ""
    return {
        "tokens": [token_label(token) for token in trace.tokens],
        "position": trace.positions[row],
        "target": target,
        "logit": None if trace.logits is None else _number(float(trace.logits[row])),
        "without": trace.without,
        "sides": [f"layer {one.layer}" for one in trace],
        "values": _table(np.stack([np.asarray(each, dtype=np.float64) for each in written])),
        "active": _table(active_shares(trace)),
        "entries": [
            {
                "name": entry_name(one),
                "words": entry_words(one, 60),
                "score": _number(one.score),
                "threshold": _number(one.threshold),
                "weight": _number(one.weight),
                "norm": _number(one.norm),
                "effect": None if one.effect is None else _number(one.effect),
            }
            for one in fired
        ],
    }


def _table(values: npt.NDArray[Any]) -> list[list[float | None]]:
    return [[_number(value) for value in row] for row in values.tolist()]


def _number(value: float) -> float | None:
    """Rounded, since it is drawn; None for what is no number."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
