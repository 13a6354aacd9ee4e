"""For your own tests: one-line asserts, brute-force oracles, tolerances, and a pytest plugin with fixtures."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand

if TYPE_CHECKING:
    from attnflow.testing.assertions import (
        assert_as_accurate,
        assert_batch,
        assert_no_leak,
        assert_packing_equals_alone,
        assert_same_mask,
        tolerance,
    )
    from attnflow.testing.oracles import classes, closure, covers, depth, path_exists, power, product, product_depth

__all__ = [
    "assert_as_accurate",
    "assert_batch",
    "assert_no_leak",
    "assert_packing_equals_alone",
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


def _home(name: str) -> object:
    """Import the file of a name on first use: pytest loads this room's plugin even in runs that audit nothing."""
    from attnflow.testing import assertions, oracles

    return assertions if name.startswith("assert") or name == "tolerance" else oracles


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
