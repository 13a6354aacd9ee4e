"""Why a head attended to a token, for a page: one score as a sum of terms, its leading ones named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from attnflow._core.markup import percent, token_label
from attnflow.report.attribution import Array, key_name, query_name, remark, row_of
from attnflow.report.live.numbers import number, numbers, table
from attnflow.report.live.operations import Reply

if TYPE_CHECKING:
    from attnflow.geometry.attribution import ScoreAttribution
    from attnflow.models.recording import ComponentName

_TERMS: Final = 12


def explained(found: ScoreAttribution, head: int, key: int | None, texts: list[str]) -> Reply:
    """Describes the score of one head, query and key.

    Args:
        found: the attribution of all heads of a layer, for one query.
        head: a head of them.
        key: the position of a key; None for the one with the largest weight.
        texts: the text of each token of the sequence.

    Raises:
        ValueError: there is no such head, or the query has no score for this key.
    """
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
        "sides": [_brief(name) for name in found.components],
        "columns": [_brief(name) for name in found.key_components],
        "table": table(centred.terms[at]),
        **_terms(found, raw.terms[at], centred.terms[at]),
        "constants": [
            {"name": name, **numbers(raw=float(raw.constants[name][at]), centred=float(each[at]))}
            for name, each in centred.constants.items()
            if raw.constants[name].any()
        ],
        "sum": numbers(raw=float(raw.scores[at]), centred=above),
        "verdict": f"In head {head} of layer {found.layer}, {query_name(found)} gives {share} of its attention to "
        f"{key_name(found, at)}: the score is {abs(above):.3g} {'above' if above >= 0 else 'below'} the mean of the "
        "row.",
        "remark": remark(found, centred),
        "check": f"The sum differs from the score in the model’s own attention by {found.error:.1g} of the row’s "
        "range. A centred term is the term less its mean over the row, weighted by attention, because softmax ignores "
        "what all keys of a row share.",
    }


def _brief(name: ComponentName) -> str:
    """ "11 ffn" for layer 11 feed-forward: the side of a map has little room."""
    kind = "" if name.layer is None else name.kind.replace("feed-forward", "ffn").replace("attention", "attn")
    return f"{name.place.removeprefix('layer ')} {kind}".strip()


def _terms(found: ScoreAttribution, raw: Array, centred: Array) -> Reply:
    sizes = np.abs(centred if centred.any() else raw)  # of a query with one key all centred terms are zero
    order: list[int] = np.argsort(-sizes, axis=None, kind="stable")[:_TERMS].tolist()
    places = [divmod(each, centred.shape[1]) for each in order]
    kept = {
        name: sum(float(values[place]) for place in places) for name, values in (("raw", raw), ("centred", centred))
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
        "rest": {
            "count": centred.size - len(places),
            "raw": number(float(raw.sum()) - kept["raw"]),
            "centred": number(float(centred.sum()) - kept["centred"]),
        },
    }
