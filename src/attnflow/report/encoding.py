"""Figures of matplotlib as bytes, equal for equal figures."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SANS: Final = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif"


def written(figure: Figure, kind: str, *, rc: Mapping[str, str] | None = None, **options: Any) -> bytes:
    """Encodes a figure deterministically; characters that its font lacks are left to the reader."""
    from matplotlib import rc_context

    content = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with (
        rc_context(cast(Any, {"svg.hashsalt": "attnflow", "pdf.fonttype": 42, **(rc or {})})),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(content, format=kind, metadata=undated, **options)
    return content.getvalue()
