"""Draw results as pictures and pages; `registry` holds the drawing for each kind of result."""

from attnflow.report.model import model_page
from attnflow.report.registry import encode as encode
from attnflow.report.registry import figure, page
from attnflow.report.registry import notebook as notebook  # by which, and by `encode`, results show and save themselves

__all__ = ["figure", "model_page", "page"]


def __dir__() -> list[str]:
    return __all__
