"""The page about a model: first the verdict of its audit, last the masks that it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from attnflow import audit, bias, geometry, knowledge
from attnflow._core.errors import AttnflowError
from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from attnflow.geometry.attribution import telling
from attnflow.geometry.table import GeometryScores
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow
from attnflow.report import html
from attnflow.report.attribution import CHOICE, attribution_part
from attnflow.report.audit import audit_part
from attnflow.report.bias import bias_part
from attnflow.report.geometry import scores_part
from attnflow.report.knowledge import trace_part
from attnflow.report.mask import mask_part
from attnflow.report.page import Context, Page, PagePart, Section, build

_ERRORS: Final = (AttnflowError, ImportError, NotImplementedError, TypeError, ValueError)


def model_page(
    model: nn.Module | Loaded,
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Page:
    """Write a page about a model: its audit, geometry, bias if any, the entries that fired, and the declared order.

    It says why one head, two thirds up, looked where it did from the last token: of its layer's heads the one with the
    most weight on a token besides the first and the last.

    Args:
        model: any model, or a result of `af.load_model`.
        inputs: a text, token ids, or the model's inputs by name. The audit reads all sequences, the rest the first one.
        title: heading (default: the model's name).
        details: more rows for the provenance.
        progress: called as progress(done, total, what) before each step.

    Returns:
        The page. Parts that do not work for this model are listed at its end with the reason; the rest is shown.

    Cost: an audit of the model, one pass over its queries and keys, and about seven forward passes.
    """
    subject = Subject.of(model)
    module = subject.model
    name = title or subject.name
    named = subject.read(inputs, ids=True)
    first = {key: value[:1] for key, value in named.items()}
    labels = None
    if subject.tokenizer is not None:  # an encoder's tokens before the decoder's, as in its order
        rows = [ids[0].tolist() for key, ids in named.items() if key in ("input_ids", "decoder_input_ids")]
        labels = tuple(text for row in rows for text in subject.texts(row))
    context = Context(labels=labels)
    scored: list[GeometryScores] = []

    def scores() -> PagePart:
        scored.append(replace(geometry.score(module), model=name))
        return scores_part(scored, context)

    def attribution() -> PagePart:
        rows = [row for one in scored for row in one if row.kind == "self" and row.tower != "encoder"]
        layers = sorted({row.layer for row in rows})
        layer = layers[2 * len(layers) // 3] if layers else -1
        with geometry.reading(module, first, tokenizer=subject.tokenizer) as reading:
            explained = replace(reading.explain(layer, reading.telling_head(layer)), model=name)
        part = attribution_part(explained, context)
        chosen = f" Layer {explained.layer} is two thirds up the model; of its heads, this one {CHOICE}."
        return replace(part, reading=[*part.reading, chosen]) if telling(explained) else part

    def read(verb: Callable[..., Any]) -> Any:
        return replace(verb(module, first, tokenizer=subject.tokenizer), model=name)

    steps: dict[str, Callable[[], PagePart]] = {
        "audit": lambda: audit_part(audit.check(module, named), context),
        "geometry": scores,
        "bias": lambda: bias_part(read(bias.capture), context),
        "attribution": attribution,
        "knowledge": lambda: trace_part(read(knowledge.trace), context),
        "order": lambda: _order(audit.declared_order(module, named), context),
    }
    if not any(layer_biases(module)):
        del steps["bias"]
    details = dict(details or {})
    parts: list[PagePart] = []
    problems: dict[str, str] = {}
    for done, (step, find) in enumerate(steps.items()):
        if progress is not None:
            progress(done, len(steps), step)
        try:
            part = find()
            named_before = {*details, *(kind for other in parts for kind, _ in other.source)}  # the same model
            source = [(kind, value) for kind, value in part.source if kind not in named_before]
            parts.append(replace(part, title="", source=source))
        except _ERRORS as error:
            problems[step] = str(error)
    if problems:
        parts.append(_missing(problems))
    return build(parts, name, details, {})


def _missing(problems: Mapping[str, str]) -> PagePart:
    """Lists what does not work for the model; only a missing audit is bad news."""
    notes = [
        html.note("bad" if step == "audit" else "neutral", html.paragraph(f"{step.capitalize()}: {reason}"))
        for step, reason in problems.items()
    ]
    reading = [f"Not shown: {', '.join(problems)}; the end of the page says why."]
    return PagePart("", [Section("problems", "What could not be shown", html.join(notes))], reading)


def _order(flow: Flow, context: Context) -> PagePart:
    part = mask_part(flow, context)
    head, *rest = part.sections
    sections = [replace(head, body=html.paragraph(*part.reading, kind="lead") + head.body), *rest]
    return replace(part, sections=sections, reading=(), numbers=())
