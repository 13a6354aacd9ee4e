"""HTML building blocks that escape their text, so that names and tokens cannot inject markup."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attnflow._core.markup import element, escape, grouped, token_label


@dataclass(frozen=True)
class Html:
    """Markup that is safe in a page; functions that accept it escape plain strings."""

    markup: str

    def __add__(self, other: Html) -> Html:
        return Html(self.markup + other.markup)


Content = Html | str | int


def raw(content: Content) -> str:
    return content.markup if isinstance(content, Html) else escape(content)


def tag(name: str, *content: Content, **attributes: object) -> Html:
    """Builds an element, escaping its content unless it is `Html`."""
    return Html(element(name, "".join(raw(part) for part in content), **attributes))


def join(parts: Iterable[Content], separator: str = "") -> Html:
    return Html(escape(separator).join(raw(part) for part in parts))


def code(text: object) -> Html:
    return tag("code", str(text))


def paragraph(*content: Content, kind: str | None = None) -> Html:
    return tag("p", *content, class_=kind)


def tokens(texts: Iterable[str], traced: Collection[int], first: int = 0) -> Html:
    kinds = ("token", "token traced")
    return join((tag("span", token_label(t, 40), class_=kinds[at in traced]) for at, t in enumerate(texts, first)), " ")


def rest(count: int) -> Html:
    """Says how many items a list leaves out; empty if `count` is not positive."""
    return paragraph(f"… and {grouped(count)} more.", kind="lead") if count > 0 else Html("")


def facts(rows: Sequence[tuple[Content, Content]], kind: str = "facts") -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows), class_=kind)


def table(
    head: Sequence[str], rows: Iterable[Sequence[Content]], *, text_columns: int = 1, marked: Iterable[int] = ()
) -> Html:
    """Builds a scrolling table; columns after the first `text_columns` are numbers, `marked` rows stand out."""
    emphasised = set(marked)

    def cell(kind: str, index: int, content: Content) -> Html:
        return tag(kind, content, class_=None if index < text_columns else "n", scope="col" if kind == "th" else None)

    top = tag("tr", *(cell("th", i, name) for i, name in enumerate(head)))
    body: list[Html] = []
    for index, row in enumerate(rows):
        cells = (cell("td", i, content) for i, content in enumerate(row))
        body.append(tag("tr", *cells, class_="marked" if index in emphasised else None))
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="scroll", tabindex=0, role="region")


def columns(values: Mapping[str, Iterable[Content]], text_columns: int = 1) -> Html:
    return table(list(values), zip(*values.values(), strict=True), text_columns=text_columns)


def figure(picture: str | Html, caption: Content | None = None, *, read_out: bool = False, kind: str = "") -> Html:
    """Builds a picture with its caption; `read_out` adds a line that the script fills under the pointer."""
    parts: list[Html] = [tag("div", Html(picture) if isinstance(picture, str) else picture, class_="scroll")]
    if read_out:
        parts.append(tag("output", class_="readout", aria_live="off"))
    if caption is not None:
        parts.append(tag("figcaption", caption))
    return tag("figure", *parts, class_=kind or None)


def note(kind: str, *content: Content) -> Html:
    """Builds a framed remark; `kind` is "good", "bad" or "neutral", which also sets its sign."""
    sign = {"good": "✓", "bad": "!", "neutral": "–"}[kind]
    return tag("div", tag("span", sign, class_="sign", aria_hidden="true"), tag("div", *content), class_=f"note {kind}")


def numbers(values: Sequence[float], *, signed: bool = False) -> list[str]:
    """Formats a column with equal decimals, three digits of the largest value, and a dash for NaN.

    >>> numbers([12.5, -0.25, float("nan")])
    ['12.5', '\u22120.2', '\u2013']
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    decimals = min(6, max(0, 2 - math.floor(math.log10(largest)))) if largest else 0
    form = f"+.{decimals}f" if signed else f".{decimals}f"
    return ["–" if math.isnan(value) else format(value, form).replace("-", "−") for value in values]
