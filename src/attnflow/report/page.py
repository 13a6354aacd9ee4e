"""The page around the sections: heading, reading, key numbers, provenance, style and script under a strict policy."""

from __future__ import annotations

import base64
import hashlib
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Final

from attnflow._core.markup import escape, grouped, percent, plural, shorten
from attnflow._core.version import __version__
from attnflow.order.flow import Flow
from attnflow.report import html
from attnflow.report.html import Content, Html, code, tag
from attnflow.report.sections.bias import bias_numbers, bias_reading
from attnflow.report.sections.geometry import geometry_numbers, geometry_reading
from attnflow.report.sections.knowledge import trace_numbers, trace_reading
from attnflow.report.subject import Section, Subject

_REPORTED: Final = ("torch", "numpy", "transformers")


def render(subject: Subject, sections: Sequence[Section]) -> str:
    """The whole HTML document; nothing in it is fetched, and nothing but its own style and script may run."""
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta name="generator" content="attnflow {escape(__version__)}">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(shorten(subject.title, 120))}</title><style>{style}</style>"
    )
    body = _header(subject, sections).markup
    body += tag("main", *(_section(section) for section in sections)).markup
    body += _footer(subject).markup
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}<script>{script}</script></body></html>\n'
    )


def reading(subject: Subject) -> list[Content]:
    """The result in one paragraph."""
    sentences: list[Content] = []
    if subject.masks:
        sentences += _about_masks(subject)
    check, audit = subject.check, subject.audit
    if check is not None:
        if check.leaks:
            leak = check.leaks[0]
            sentences.append(
                f" {plural(len(check.leaks), 'label')} can be read by the position that must predict it; the first "
                f"comes to position {leak.position} from {leak.carrier} in {plural(len(leak.witness) - 1, 'layer')}."
            )
        else:
            sentences.append(f" No label can leak: this is proved for all {grouped(check.num_labels)}.")
        if check.dead:
            verb = "reaches" if len(check.dead) == 1 else "reach"
            sentences.append(f" {plural(len(check.dead), 'position')} {verb} no label and could be dropped.")
    if audit is not None:
        name = subject.model or "the model"
        if audit.ok:
            tested = percent(audit.coverage)
            sentences += [
                " The audit of ",
                code(name),
                f" found no flow against its order ({tested} of the forbidden pairs tested).",
            ]
        else:
            first = audit.violations[0]
            sentences += [
                " The audit of ",
                code(name),
                " found flow against its order, first in ",
                code(first.module),
                ".",
            ]
    if subject.geometry:
        sentences += geometry_reading(subject.geometry)
    if subject.bias is not None:
        sentences += bias_reading(subject.bias)
    if subject.trace is not None:
        sentences += trace_reading(subject.trace)
    return sentences


def _about_masks(subject: Subject) -> list[Content]:
    mask, flow = subject.masks[0], subject.flow
    queries, keys = mask.shape
    if 0 in mask.shape:
        return [
            f"The mask has {plural(queries, 'query', 'queries')} and {plural(keys, 'key')}: there is nothing to allow."
        ]
    different = len(subject.layers_of)
    if different > 1:
        layers = plural(len(subject.masks), "layer")
        first = f"A stack of {layers} with {different} different masks over {plural(queries, 'position')}."
    else:
        first = (
            f"Each of {plural(queries, 'query', 'queries')} may attend to {mask.nnz / queries:.4g} of "
            f"{plural(keys, 'key')} on average, {percent(mask.density)} of all pairs."
        )
    second = f" There is no order to report: {subject.no_order}." if flow is None else _about_order(flow)
    return [first, second]


def _about_order(flow: Flow) -> str:
    count, size = len(flow.classes), flow.size
    if size == 1:
        return " The only position reads itself."
    if count == 1:
        shape = "Every position can read every other, so that the order is a single class"
    elif not flow.hasse.edges:
        shape = f"Its {plural(count, 'class', 'classes')} read nothing of each other"
    elif max(flow.hasse.levels) == count - 1:
        shape = f"Its {grouped(count)} classes form a chain, in which each reads all below it"
    else:
        shape = f"Its {grouped(count)} classes form an order of {plural(max(flow.hasse.levels) + 1, 'level')}"
    if flow.depth == 1:
        return f" {shape}; one layer lets everything flow that ever will."
    return f" {shape}; it takes {plural(flow.depth, 'layer')} until everything has flowed."


def _header(subject: Subject, sections: Sequence[Section]) -> Html:
    button = tag("button", "Theme", type="button", data_theme_toggle="", hidden="")
    eyebrow = tag("div", tag("span", "attnflow report"), button, class_="eyebrow")
    links = tag(
        "nav", *(tag("a", section.title, href=f"#{section.name}") for section in sections), aria_label="Sections"
    )
    numbers = _key_numbers(subject)
    key = html.facts(numbers, "key") if numbers else Html("")
    text = tag("p", *reading(subject), class_="reading")
    return tag(
        "header",
        eyebrow,
        tag("h1", shorten(subject.title, 200), class_="long" if len(subject.title) > 28 else None),
        text,
        key,
        links if sections else "",
    )


def _key_numbers(subject: Subject) -> list[tuple[str, Content]]:
    rows: list[tuple[str, Content]] = []
    if subject.masks:
        mask = subject.masks[0]
        square = mask.num_queries == mask.num_keys
        size = grouped(mask.num_queries) if square else f"{grouped(mask.num_queries)} × {grouped(mask.num_keys)}"
        rows.append(("Positions" if square else "Queries × keys", size))
        if len(subject.layers_of) == 1:
            rows.append(("Allowed pairs", percent(mask.density)))
        else:
            rows.append(
                ("Layers", tag("span", str(len(subject.masks)), tag("small", f"{len(subject.layers_of)} different")))
            )
    if subject.flow is not None and subject.flow.size:
        rows.append(
            (
                "Depth",
                tag("span", grouped(subject.flow.depth), tag("small", "dense" if subject.flow.is_dense else "layers")),
            )
        )
        classes, levels = len(subject.flow.classes), max(subject.flow.hasse.levels) + 1
        rows.append(("Classes", tag("span", grouped(classes), tag("small", f"on {plural(levels, 'level')}"))))
    if subject.check is not None:
        leaks = len(subject.check.leaks)
        rows.append(
            ("Leaks", tag("span", grouped(leaks) if leaks else "none", class_="bad-ink" if leaks else "good-ink"))
        )
        dead = len(subject.check.dead)
        rows.append(
            ("Dead positions", tag("span", grouped(dead) if dead else "none", class_="bad-ink" if dead else None))
        )
    if subject.audit is not None:
        found = len(subject.audit.violations)
        text, kind = (plural(found, "violation"), "bad-ink") if found else ("clean", "good-ink")
        rows.append(("Audit", tag("span", text, class_=kind)))
    if len(subject.geometry) == 1:
        rows += geometry_numbers(subject.geometry[0])
    if subject.bias is not None:
        rows += bias_numbers(subject.bias)
    if subject.trace is not None:
        rows += trace_numbers(subject.trace)
    return rows


def _section(section: Section) -> Html:
    return tag("section", tag("h2", section.title), section.body, id=section.name)


def _footer(subject: Subject) -> Html:
    rows: list[tuple[str, Content]] = [("Made", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))]
    rows.append(
        ("By", f"attnflow {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    )
    rows += [(name, found) for name in _REPORTED if (found := _version(name))]
    rows += [
        ("Mask" if len(subject.layers_of) == 1 else "Masks", code(shorten(repr(mask), 300)))
        for mask, _ in subject.layers_of[:4]
    ]
    if subject.model:
        rows.append(("Model", code(subject.model)))
    rows += [(name, text) for name, text in subject.details.items()]
    return tag("footer", tag("section", tag("h2", "Provenance"), html.facts(rows), id="provenance"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def _asset(name: str) -> str:
    return (files("attnflow.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The policy's name for exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
