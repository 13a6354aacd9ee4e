"""For tests of code that uses attnflow: asserts of one line, correct oracles, tolerances."""

from attnflow.testing.assertions import assert_as_accurate, assert_no_leak, assert_same_mask, tolerance
from attnflow.testing.oracles import classes, closure, covers, depth, path_exists, power, product, product_depth

__all__ = [
    "assert_as_accurate",
    "assert_no_leak",
    "assert_same_mask",
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


def __dir__() -> list[str]:
    return __all__
