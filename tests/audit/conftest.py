"""The two modes of an audit, for tests that both must pass."""

import pytest


@pytest.fixture(params=["perturb", "quick"])
def mode(request):
    return request.param
