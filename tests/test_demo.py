"""The demo's steps on a tiny model: right things come out as claimed, wrong ones do not."""

from dataclasses import replace

import pytest
import torch
from examples import demo
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # repeated ids: real text repeats
SIZES = {"blocks": 3, "block": 3, "butterfly": 5, "audited": 8}


def tiny() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=12, initializer_range=0.3, **sizes)).eval()


def butterfly() -> demo.Objective:
    return demo.Objective.of("butterfly", af.tasks.butterfly(IDS[:5]), "butterfly(5)", af.masks.butterfly(5))


def failed(work: object) -> bool:
    return not demo.step("", work, [])


def test_all_comes_out_as_claimed_and_the_model_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ok, shown = demo.run("tiny", model, IDS, **SIZES)
    out = capsys.readouterr().out
    assert ok, out
    assert (out.count("ok   "), out.count("FAIL")) == (7, 0)
    assert "not embedded: subtasks 0-3 of 5, whose centres lack a neighbour" in out
    assert "control, causal mask removed: model.layers.0.self_attn leaks" in out
    assert [type(each).__name__ for each in shown] == [
        *["Flow", "LeakReport"] * 2,
        "AuditReport",
        *["Verification"] * 2,
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_called_right_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = butterfly()
    printed, full = demo.butterfly_as_printed(5), af.masks.full(right.merged.task.size)
    assert failed(demo.prove(replace(right, closed_form=printed)))
    leaking = replace(right.merged, task=right.under(full))
    assert failed(demo.prove(replace(right, merged=leaking, closed_form=full))), "it leaks"
    wrong = replace(right.merged, task=right.under(printed))
    assert failed(demo.verify(tiny().double(), replace(right, merged=wrong)))
    model = tiny()
    with af.masks.attach(model, af.masks.full(8)):
        assert failed(demo.audit(model, IDS[:8]))
    with monkeypatch.context() as patch:
        patch.setattr(af.masks, "full", lambda n: right.merged.task.mask)
        assert failed(demo.prove(right)), "a control that finds no leak proves nothing"
    monkeypatch.setattr(demo, "butterfly_as_printed", af.masks.butterfly)
    assert failed(demo.disprove(right))
    assert failed(demo.verify_printed(tiny().double(), right))
