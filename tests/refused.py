"""`pytest.raises` for arguments that the checker of types may refuse first."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
from jaxtyping import TypeCheckError


@contextlib.contextmanager
def refused(error: type[Exception], message: str) -> Iterator[None]:
    """As `pytest.raises`; where annotations are checked at run time, a wrong type may be refused before our check."""
    with pytest.raises((error, TypeCheckError)) as caught:
        yield
    assert isinstance(caught.value, TypeCheckError) or re.search(message, str(caught.value)), caught.value
