"""Files with a picture of a mask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnflow.masks import Mask

SUFFIXES: Final = (".svg", ".png", ".html")


def write(mask: Mask, path: Path) -> None:
    """Write the picture, or for `.html` the report, that the suffix of `path` asks for; whole or not at all."""
    from attnflow._core.files import write_atomically
    from attnflow.report import mask_png, mask_report, mask_svg

    suffix = path.suffix.lower()
    if suffix == ".png":
        mask_png(mask, path)
    elif suffix == ".html":
        mask_report(mask).save(path)
    else:
        with write_atomically(path) as file:
            file.write(mask_svg(mask).encode())
