"""Quick mode finds what full mode finds: every fault of the suite, and says where by going on to full mode."""

import pytest
import torch

from attnflow.audit import audit, check
from tests.audit.common import (
    LENGTH,
    tiny,
    tokens,
    wrapped,
)
from tests.audit.hybrids import HYBRIDS, hybrid


@pytest.mark.parametrize("name", HYBRIDS)
def test_documents_that_mix_in_released_hybrids(name):
    positions = torch.tensor([[*range(5), *range(7)]])
    given = {"input_ids": tokens(1, 12), "position_ids": positions, "use_cache": False}
    report = check(hybrid(name), given, mode="quick", both_sides=False)
    assert report.verdict == "leak"


def test_clean_is_quick():
    report = check(tiny("Llama"), tokens(1), mode="quick")
    assert (report.verdict, report.mode, report.coverage) == ("clean", "quick", 1.0)
    assert report.forward_passes == LENGTH


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_large_models_take_three_forwards(monkeypatch, batch):
    """What crosses a cut or the batch everywhere, as real bugs do, shows in two perturbations."""
    monkeypatch.setattr(audit, "_CHEAP", 0)
    model = tiny("Llama")
    clean = check(model, tokens(batch), mode="quick")
    assert (clean.verdict, clean.mode, clean.forward_passes) == ("clean", "quick", 3)
    assert 0 < clean.coverage < 1
    changes = [
        lambda out, hidden: out + 1e-3 * hidden.roll(-1, 1),
        lambda out, hidden: out + 1e-3 * hidden.mean(1, True),
    ]
    if batch > 1:
        changes.append(lambda out, hidden: out + 1e-3 * hidden.mean(0, True))
    for change in changes:
        with wrapped(model.model.layers[1].mlp, change):
            assert check(model, tokens(batch), mode="quick").verdict == "leak"
