"""Safe text for SVG, HTML and terminals: escaping, control characters, widths, tables."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Final

# Control characters are illegal in XML, and a bidirectional override would reorder the text around it.
_VISIBLE: Final = {**{code: chr(0x2400 + code) for code in range(32)}, 0x7F: "␡", 0x0A: "↵", 0x09: "⇥"}
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: object) -> str:
    hidden = {c: _VISIBLE.get(ord(c), "\ufffd") for c in set(str(text)) if unicodedata.category(c) in _HIDDEN}
    return "".join(hidden.get(character, character) for character in str(text))


def escape(text: object) -> str:
    return html.escape(visible(text), quote=True)


def shorten(text: object, limit: int) -> str:
    shown = visible(text)
    return shown if len(shown) <= limit else shown[: max(limit - 1, 0)].rstrip() + "…"


# What the letters of an entry's name stand for.
KINDS: Final = {"N": "neuron", "F": "feature", "S": "store entry", "T": "table row", "P": "table column"}
_LETTERS: Final = {"head": "H", **{kind: letter for letter, kind in KINDS.items()}}


def part_name(layer: int, what: str, number: int | None = None, half: str = "", *, brief: bool = False) -> str:
    """Name a part of a layer, everywhere alike; `brief` is for tables, figures, and names that are typed.

    >>> part_name(23, "attention"), part_name(23, "head", 4), part_name(24, "neuron", 1005, "encoder")
    ('layer 23 attention', 'layer 23 head 4', 'encoder layer 24 neuron 1005')
    >>> [part_name(23, *part, brief=True) for part in (("attention",), ("head", 4), ("neuron", 1005))]
    ['L23 attention', 'L23H4', 'L23N1005']
    """
    if brief:
        return f"{half} L{layer}{f' {what}' if number is None else f'{_LETTERS[what]}{number}'}".strip()
    return f"{half} layer {layer} {what}{'' if number is None else f' {number}'}".strip()


def kinds_of(letters: Iterable[str]) -> str:
    """Head a column of numbers of entries: "neuron", or "neuron or feature" of several kinds."""
    return " or ".join(dict.fromkeys(KINDS[letter] for letter in letters)) or KINDS["N"]


def token_place(token: str, position: int) -> str:
    """Name a token and its position: "Mary (1)"."""
    return f"{token_label(token)} ({position})"


def token_label(token: str, limit: int = 12) -> str:
    """Show a token on one line, without surrounding spaces, cut to `limit` characters.

    >>> token_label(" apples"), token_label(" "), token_label(chr(10)), token_label("")
    ('apples', '␣', '↵', '∅')
    """
    return shorten(token.strip(" ") or token.replace(" ", "␣"), limit) or "∅"


def element(tag: str, content: str = "", /, **attributes: object) -> str:
    """Return `<tag a="...">content</tag>`; attribute values are escaped, `content` is already markup.

    Underscores in attribute names become hyphens, a trailing one is dropped (`class_`), and None omits the attribute.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            shown = number(value) if isinstance(value, float) else value
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    return f"<{' '.join(parts)}>{content}</{tag}>"


def number(value: float) -> str:
    return _trim(f"{value:.2f}") if abs(value) >= 0.005 else "0"


def grouped(value: int) -> str:
    """Format an integer with narrow no-break spaces between thousands.

    >>> grouped(16384).split(chr(0x202F))
    ['16', '384']
    """
    return f"{value:,}".replace(",", "\u202f")


def percent(share: float) -> str:
    """Format a share in [0, 1] as a percentage; only exact values read 0 % or 100 %.

    >>> percent(0.5), percent(1.0), percent(0.99999), percent(0.00001)
    ('50\xa0%', '100\xa0%', '>\xa099.9\xa0%', '<\xa00.1\xa0%')
    """
    if 0 < share < 0.001:
        text = "< 0.1 %"
    elif 0.999 < share < 1:
        text = "> 99.9 %"
    else:
        text = f"{_trim(f'{100 * share:.1f}')} %"
    return text.replace(" ", "\xa0")


def plural(count: int, noun: str, many: str | None = None) -> str:
    """`count` with its noun.

    >>> plural(1, "class", "classes"), plural(2, "layer")
    ('1 class', '2 layers')
    """
    return f"{grouped(count)} {noun if count == 1 else many or noun + 's'}"


def runs(positions: Sequence[int]) -> str:
    """Ascending positions as text, consecutive ones joined.

    >>> runs([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7, 8'
    """
    steps = {b - a for a, b in pairwise(positions)} if len(positions) > 4 else set[int]()
    if len(steps) == 1 and steps != {1}:
        return f"{positions[0]}, {positions[1]}, …, {positions[-1]}"
    parts: list[str] = []
    for _, run in groupby(enumerate(positions), lambda item: item[1] - item[0]):
        numbers = [position for _, position in run]
        parts += [f"{numbers[0]}–{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
        if len(parts) > 200:
            return ", ".join(parts) + ", …"
    return ", ".join(parts)


def columns(text: str) -> float:
    """Return the width of `text` in monospaced columns; wide characters (East Asian, emoji) take two."""
    width = 0.0
    for character in text:
        wide = unicodedata.east_asian_width(character) in "WF" or ord(character) >= 0x1F000
        if not unicodedata.combining(character):  # a fallback font may be wider than the grid
            width += 2.0 if wide else 1.0 if ord(character) < 0x250 else 1.25
    return width


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Align rows of cells in columns: to the right, or to the left for the columns in `left`.

    >>> print(aligned([["id", "text"], ["7", "a cat"], ["12", "a mat"]], left=[1]))
    id  text
     7  a cat
    12  a mat
    """
    sizes = [[round(columns(cell)) for cell in row] for row in rows]
    widths = [max(column) for column in zip(*sizes, strict=True)]
    lines: list[str] = []
    for row, size in zip(rows, sizes, strict=True):
        room = [" " * (width - taken) for width, taken in zip(widths, size, strict=True)]
        cells = [cell + room[i] if i in left else room[i] + cell for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _trim(text: str) -> str:
    return text.rstrip("0").rstrip(".")
