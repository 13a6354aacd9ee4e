"""Draw results as pictures and pages; `registry` holds the drawing for each kind of result."""

from importlib import import_module
from typing import TYPE_CHECKING

from attnflow.report.registry import encode as encode
from attnflow.report.registry import figure, page
from attnflow.report.registry import notebook as notebook  # by which, and by `encode`, results show and save themselves

if TYPE_CHECKING:
    from attnflow.report.model import model_page

__all__ = ["figure", "model_page", "page"]


def __getattr__(name: str) -> object:
    """Import the page of a model on first use: drawings of masks need not wait for what reads models."""
    if name == "model_page":
        return import_module("attnflow.report.model").model_page
    raise AttributeError(f"module 'attnflow.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
