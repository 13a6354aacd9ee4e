"""What several tests of checkpoints start from."""

from __future__ import annotations

import pytest

from tests.models import ZOO


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama and the folder that it is saved in."""
    model = ZOO["Llama"].build().float()
    folder = tmp_path / "llama"
    model.save_pretrained(folder)
    return model, folder
