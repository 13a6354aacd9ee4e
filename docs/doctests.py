"""Docstrings as the site shows them: an extension of griffe, the reader of mkdocstrings."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)
SOURCES = re.compile(r"\n\nRead `.*?(?=\n\n|\Z)", re.DOTALL)


class Doctests(griffe.Extension):
    """Fences examples, which Markdown would read as quotations; leaves out in which order to read a room's files."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring before it is parsed."""
        if obj.docstring is not None:
            text = SOURCES.sub("", obj.docstring.value) if obj.is_module else obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", text)
