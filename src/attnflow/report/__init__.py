"""Draw results as pictures and pages; `registry` holds the drawing for each kind of result."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.report.mask_picture import mask_text as mask_text  # which print shows
from attnflow.report.registry import encode as encode
from attnflow.report.registry import figure, page
from attnflow.report.registry import notebook as notebook  # by which, and by `encode`, results show and save themselves

if TYPE_CHECKING:
    from attnflow.report.model import model_page

__all__ = ["figure", "model_page", "page"]


def _home(_: str) -> object:
    from attnflow.report import model  # drawings of masks need not wait for what reads models

    return model


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
