"""Oracles and tolerances for tests of code that uses attnflow: slow, small and obviously correct."""

from attnflow.testing.oracles import classes, closure, covers, depth, path_exists, power, product, product_depth
from attnflow.testing.tolerance import assert_as_accurate, tolerance

__all__ = [
    "assert_as_accurate",
    "classes",
    "closure",
    "covers",
    "depth",
    "path_exists",
    "power",
    "product",
    "product_depth",
    "tolerance",
]
