"""Reading what was drawn: SVG as XML, HTML as a browser's parser would see it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "!doctype"}


def parse_svg(text):
    """The root element, with names free of their namespace; fails on anything that is not well-formed XML."""
    root = ElementTree.fromstring(text)
    for node in root.iter():
        node.tag = node.tag.removeprefix("{http://www.w3.org/2000/svg}")
    return root


def texts(root):
    """What can be read in the picture, tooltips left out."""
    return ["".join(node.itertext()) for node in root.iter("text")]


def with_class(root, name):
    return [node for node in root.iter() if name in node.get("class", "").split()]


@dataclass
class Page(HTMLParser):
    """All tags with their attributes, the text, and the contents of style and script; fails on unbalanced tags."""

    tags: list = field(default_factory=list)
    words: list = field(default_factory=list)
    inline: dict = field(default_factory=dict)
    open: list = field(default_factory=list)

    def __post_init__(self):
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            self.inline[self.open[-1]] = self.inline.get(self.open[-1], "") + data
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def parse_page(text):
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page
