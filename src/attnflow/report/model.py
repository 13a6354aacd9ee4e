"""The page about a model: the verdict and the flow of one answer first, last the masks that it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from attnflow import audit, bias, explain, geometry, knowledge
from attnflow._core.errors import AttnflowError
from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from attnflow.explain.explanation import Edge, Explanation
from attnflow.geometry.attribution import ScoreAttribution, telling
from attnflow.geometry.table import GeometryScores
from attnflow.models.subject import Loaded, Subject
from attnflow.order.flow import Flow
from attnflow.report import html
from attnflow.report.attribution import CHOICE, attribution_part, why
from attnflow.report.audit import audit_part
from attnflow.report.bias import bias_part
from attnflow.report.charts import signed
from attnflow.report.explain import explanation_part
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
    """Write a page about a model: the flow of its answer to a text, then its audit, geometry, bias, entries and order.

    It opens with the audit's verdict, the text, who told the answer, and a line for each of the four questions: who may
    send, how strongly, in which geometry, from which store. Then it says why the head that told most looked there.
    Where no answer can be explained, it takes the head two thirds up with the most weight on a token besides the first
    and the last.

    Args:
        model: any model, or a result of `af.load_model`.
        inputs: a text, token ids, or the model's inputs by name. The audit reads all sequences, the rest the first one.
        title: heading (default: the model's name).
        details: more rows for the provenance.
        progress: called as progress(done, total, what) before each step.

    Returns:
        The page. Parts that do not work for this model are listed at its end with the reason; the rest is shown.

    Cost: an audit of the model, one pass over its queries and keys, and about ten forward passes.
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

    explained: list[Explanation] = []
    reasons: list[ScoreAttribution] = []

    def explanation() -> PagePart:
        with explain.reading(module, first, tokenizer=subject.tokenizer) as reading:
            result = replace(reading.answer(), model=name)
            explained.append(result)
            edge = next((edge for edge in result.edges if edge.half != "encoder"), None)
            if edge is not None:
                with suppress(*_ERRORS):  # the head is then chosen as without an answer
                    reasons.append(replace(reading.why(edge), model=name))
        return explanation_part(result, context, geometry=_geometry(edge, scored, reasons))

    def attribution() -> PagePart:
        if reasons:
            return attribution_part(reasons[0], context)
        rows = [row for one in scored for row in one if row.kind == "self" and row.tower != "encoder"]
        layers = sorted({row.layer for row in rows})
        layer = layers[2 * len(layers) // 3] if layers else -1
        with geometry.reading(module, first, tokenizer=subject.tokenizer) as reading:
            result = replace(reading.explain(layer, reading.telling_head(layer)), model=name)
        part = attribution_part(result, context)
        chosen = f" Layer {result.layer} is two thirds up the model; of its heads, this one {CHOICE}."
        return replace(part, reading=[*part.reading, chosen]) if telling(result) else part

    def read(verb: Callable[..., Any]) -> Any:
        return replace(verb(module, first, tokenizer=subject.tokenizer), model=name)

    steps: dict[str, Callable[[], PagePart]] = {
        "audit": lambda: audit_part(audit.check(module, named), context),
        "geometry": scores,
        "answer": explanation,
        "bias": lambda: bias_part(read(bias.capture), context),
        "attribution": attribution,
        "knowledge": lambda: trace_part(read(knowledge.trace), context),
        "order": lambda: _order(audit.declared_order(module, named), context),
    }
    if not any(layer_biases(module)):
        del steps["bias"]
    details = dict(details or {})
    parts: dict[str, PagePart] = {}
    problems: dict[str, str] = {}
    for done, (step, find) in enumerate(steps.items()):
        if progress is not None:
            progress(done, len(steps), step)
        try:
            parts[step] = find()
        except _ERRORS as error:
            problems[step] = str(error)
    return build(_opened(parts, problems, details), name, details, {})


def _opened(parts: Mapping[str, PagePart], problems: Mapping[str, str], details: Mapping[str, str]) -> list[PagePart]:
    """The verdict and the answer open the page; what else each part says of itself stands in its first section."""
    shown: list[PagePart] = []
    opening = [content for step in ("audit", "answer") if step in parts for content in (*parts[step].reading, " ")]
    if problems:
        opening.append(f"Not shown: {', '.join(problems)}; the end of the page says why.")
    named = set(details)
    for step in sorted(parts, key=lambda step: step != "answer"):  # stable
        part = parts[step]
        source = [(kind, value) for kind, value in part.source if kind not in named]  # the same model
        named |= {kind for kind, _ in source}
        sections = part.sections if step in ("answer", "order") else _led(part, step != "audit")
        shown.append(replace(part, title="", reading=(), numbers=(), sections=sections, source=source))
    failed = any(part.failed for part in shown)
    first = [PagePart("", [], opening, failed=failed)]
    return [*first, *(replace(part, failed=failed) for part in shown), *([_missing(problems)] if problems else [])]


def _led(part: PagePart, read: bool) -> Sequence[Section]:
    """The sections of a part; the first opens with what it says, and with its numbers."""
    head, *rest = part.sections
    lead = html.paragraph(*part.reading, kind="lead") if read else html.Html("")
    return [replace(head, body=lead + html.facts(part.numbers) + head.body), *rest]


def _geometry(edge: Edge | None, scored: Sequence[GeometryScores], reasons: Sequence[ScoreAttribution]) -> str | None:
    """Say which geometry a head has, and why it looked at one token and not at another."""
    words: list[str] = []
    rows = [row for scores in scored for row in scores.matrices]
    row = next((row for row in rows if edge is not None and (row.layer, row.head) == (edge.layer, edge.head)), None)
    if edge is not None and row is not None:
        words.append(
            f"{edge.name} has symmetry {signed(row.symmetry)} and directionality {signed(row.directionality)}."
        )
    return " ".join([*words, *(why(reason) for reason in reasons)]) or None


def _missing(problems: Mapping[str, str]) -> PagePart:
    """Lists what does not work for the model; only a missing audit is bad news."""
    notes = [
        html.note("bad" if step == "audit" else "neutral", html.paragraph(f"{step.capitalize()}: {reason}"))
        for step, reason in problems.items()
    ]
    return PagePart("", [Section("problems", "What could not be shown", html.join(notes))])


def _order(flow: Flow, context: Context) -> PagePart:
    part = mask_part(flow, context)
    head, *rest = part.sections
    sections = [replace(head, body=html.paragraph(*part.reading, kind="lead") + head.body), *rest]
    return replace(part, sections=sections, reading=(), numbers=())
