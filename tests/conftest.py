"""What every test runs under: no network, fixed seeds, one thread per process, hypothesis without timings."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import older

settings.register_profile(
    "attnflow",
    deadline=None,  # timings are never asserted
    derandomize=True,  # the same examples on every machine; `--hypothesis-profile=explore` draws new ones
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", parent=settings.get_profile("attnflow"), derandomize=False, max_examples=2000)
settings.load_profile("attnflow")


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that failed because of what an older transformers lacks, refuses or gets wrong."""
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if expected := older.reason(getattr(item, "originalname", item.name), item.name, error):
            pytest.skip(expected)
        raise


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
