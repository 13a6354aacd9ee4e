"""Quick mode finds what full mode finds: every fault of the suite, and says where by going on to full mode."""

import contextlib

import pytest
import torch

import attnflow as af
from attnflow.audit import auditor, check
from tests.audit import test_faults as faults
from tests.audit.common import (
    LENGTH,
    centred,
    convolved,
    inputs,
    open_attention,
    remembering,
    routed,
    tiny,
    to_one_row,
    tokens,
    wrapped,
)
from tests.audit.hybrids import HYBRIDS, hybrid


@contextlib.contextmanager
def _changed(name, module, change):
    model = tiny(name)
    with wrapped(model.get_submodule(module), change):
        yield model


def _pair(name, layer, target, source):
    return open_attention(tiny(name, attn_implementation="eager"), layer, faults.pair(target, source), head=2)


_AHEAD = "model.layers.1.mlp", lambda out, hidden: out + 1e-3 * hidden.roll(-1, 1)
_WIDE = af.masks.sliding_window(LENGTH, 5).dense()
FAULTS = {
    **{f"pair {name}": (lambda name=name: _pair(name, 1, 5, 9), inputs(name)) for name in faults.ATTENTION},
    **{f"neighbours {t}": (lambda t=t: _pair("Llama", 2, t, t + 1), tokens(1)) for t in (0, 5, LENGTH - 2)},
    "window": (lambda: open_attention(tiny("Mistral", attn_implementation="eager"), 1, _WIDE), tokens(1)),
    "normalisation": (lambda: contextlib.nullcontext(centred(1e-5)), tokens()),
    "convolution": (lambda: contextlib.nullcontext(convolved()), tokens()),
    "experts": (lambda: _changed("Qwen3Moe", *_AHEAD), tokens(3)),
    "roll": (lambda: _changed("Llama", *_AHEAD), tokens(1)),
    "batch": (lambda: _changed("GPT2", "transformer.h.1.mlp", lambda o, h: o + 1e-3 * h.mean(0, True)), tokens(3)),
    "two rows": (lambda: _changed("Bert", "bert.encoder.layer.1.intermediate", to_one_row), tokens(5)),
    "decoder": (lambda: _changed("T5", "decoder.block.2.layer.2", lambda o, h: o + 1e-2 * h.roll(-1, 1)), inputs("T5")),
    "discrete": (lambda: _changed("Llama", "model.layers.1.mlp", routed), tokens(1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_the_suite_is_found(fault):
    make, given = FAULTS[fault]
    with make() as model:
        full = check(model, given, both_sides=False)
        quick = check(model, given, mode="quick", both_sides=False)
    assert quick.verdict == full.verdict == "leak"
    assert quick.mode == "perturb"
    assert [(v.module, v.source, v.target) for v in quick.violations] == [
        (v.module, v.source, v.target) for v in full.violations
    ]


def test_a_state_that_outlives_a_call():
    with _changed("Llama", "model.layers.1.mlp", remembering()) as model:
        assert check(model, tokens(), mode="quick").violations[0].kind == "state"


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
    monkeypatch.setattr(auditor, "_CHEAP", 0)
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
