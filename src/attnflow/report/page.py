"""`Page`: one self-contained HTML document whose security policy allows only its own style and script.

Each result contributes a `PagePart`: a summary, key numbers and sections.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from attnflow._core.files import write_atomically
from attnflow._core.markup import escape, shorten
from attnflow._core.version import __version__, installed
from attnflow.order.flow import Flow
from attnflow.report import html
from attnflow.report.html import Content, Html, code, tag

_REPORTED: Final = ("torch", "numpy", "transformers")


@dataclass(frozen=True)
class Section:
    """A heading with the content below it; `name` is its anchor within the page."""

    name: str
    title: str
    body: Html


@dataclass(frozen=True)
class PagePart:
    """The content of a page about one result."""

    title: str
    sections: Sequence[Section]
    reading: Sequence[Content] = ()
    numbers: Sequence[tuple[Content, Content]] = ()  # at the head of the page
    source: Sequence[tuple[str, Content]] = ()  # rows of the provenance
    failed: bool = False  # comes first


@dataclass(frozen=True)
class Context:
    """What a page knows in addition to a result."""

    flow: Flow | None = None  # on which leaks are drawn
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True, repr=False)
class Page:
    """A finished report page, made by `page` and `model_page`.

    Attributes:
        title: heading of the page.
        sections: its sections, in order.
        html: the whole document; it loads no other file and uses no network.
        ok: whether no result on the page reports a failure, such as a leak.
    """

    title: str
    sections: tuple[Section, ...]
    html: str
    ok: bool

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the document to `path`, all of it or nothing, and returns the path.

        Raises:
            FileNotFoundError: the folder of `path` does not exist.
        """
        with write_atomically(path) as file:
            file.write(self.html.encode("utf-8"))
        return Path(path)

    def __repr__(self) -> str:
        names = ", ".join(section.name for section in self.sections)
        return f"Page({self.title!r}: {names}; {len(self.html.encode()) / 1024:.0f} KiB)"


def build(
    parts: Sequence[PagePart], title: str | None, details: Mapping[str, str], problems: Mapping[str, str]
) -> Page:
    heading = title if title is not None else parts[0].title if parts else "Problems"
    ordered = sorted(parts, key=lambda part: not part.failed)  # stable
    sections: list[Section] = []
    if problems:
        lines = [html.paragraph(code(name), f" could not be shown: {reason}") for name, reason in problems.items()]
        notes = html.join([html.note("bad", line) for line in lines])
        sections.append(Section("problems", "What could not be shown", notes))
    names: set[str] = set()
    for part in ordered:
        for index, section in enumerate(part.sections):
            name = section.name
            while name in names:
                stem, _, number = name.partition("-")
                name = f"{stem}-{int(number or 1) + 1}"
            names.add(name)
            titled = len(parts) > 1 and index == 0 and part.title and not section.title.startswith(part.title)
            above = tag("p", part.title, class_="lead") if titled else Html("")
            sections.append(replace(section, name=name, body=above + section.body))
    ok = not any(part.failed for part in parts)
    return Page(heading, tuple(sections), _document(heading, ordered, sections, details), ok)


def _document(title: str, parts: Sequence[PagePart], sections: Sequence[Section], details: Mapping[str, str]) -> str:
    style, script = _asset("report.css"), _asset("report.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta name="generator" content="attnflow {escape(__version__)}">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(shorten(title, 120))}</title><style>{style}</style>"
    )
    main = [tag("section", tag("h2", section.title), section.body, id=section.name) for section in sections]
    body = (_header(title, parts, sections) + tag("main", *main) + _footer(parts, details)).markup
    body += f"<script>{script}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _header(title: str, parts: Sequence[PagePart], sections: Sequence[Section]) -> Html:
    button = tag("button", "Theme", type="button", data_theme_toggle="", hidden="")
    links = (tag("a", section.title, href=f"#{section.name}") for section in sections)
    numbers = [number for part in parts for number in part.numbers]
    return tag(
        "header",
        tag("div", tag("span", "attnflow report"), button, class_="eyebrow"),
        tag("h1", shorten(title, 200), class_="long" if len(title) > 28 else None),
        tag("p", *(content for part in parts for content in (*part.reading, " ")), class_="reading"),
        html.facts(numbers, "key") if numbers else "",
        tag("nav", *links, aria_label="Sections") if sections else "",
    )


def _footer(parts: Sequence[PagePart], details: Mapping[str, str]) -> Html:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    rows: list[tuple[str, Content]] = [
        ("Made", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("By", f"attnflow {__version__}, {system}"),
        *((name, version) for name in _REPORTED if (version := installed(name))),
        *dict.fromkeys(row for part in parts for row in part.source),
        *details.items(),
    ]
    return tag("footer", tag("section", tag("h2", "Provenance"), html.facts(rows), id="provenance"))


@cache
def _asset(name: str) -> str:
    return (files("attnflow.report") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
