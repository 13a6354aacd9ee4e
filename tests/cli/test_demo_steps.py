"""The steps of the demo: right things come out as claimed, wrong ones do not."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.cli import _demo
from attnflow.cli._demo import Demo, Sizes, Step

SMALL = Sizes(block_tokens=9, block=3, butterfly_tokens=5, audit_tokens=8, passes=4)
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # repeated ids: real text repeats


def tiny() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", name="job")
def _job() -> tuple[Demo, list[Step]]:
    told: list[Step] = []
    demo, _ = _demo.run("tiny", tiny(), IDS, SMALL, tell=told.append)
    return demo, told


def test_both_objectives_are_derived() -> None:
    block, butterfly = _demo._objectives(IDS, SMALL)
    assert block.merged.task.mask == af.masks.block_two_stream(3, 3)
    assert butterfly.merged.task.mask == af.masks.butterfly(5)
    step = _demo._prove(block)
    assert step.ok
    names = ("num_subtasks", "subtask_positions", "merged_positions", "leaks")
    assert [step.numbers[name] for name in names] == [2, 6 + 9, 12, 0]
    assert step.numbers["leaks_of_control"] == 3, "of 6 labels, those of block 1: block 2 is no input"


def test_the_printed_mask_loses_all_but_the_last_task() -> None:
    _, butterfly = _demo._objectives(IDS, replace(SMALL, butterfly_tokens=6))
    step = _demo._disprove(butterfly)
    assert step.ok
    assert step.numbers["missing_pairs"] == [[10 + s, 5 + s] for s in range(5)]
    assert step.numbers["tasks_not_embedded"] == [0, 1, 2, 3, 4]


def test_nothing_is_called_right_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    _, butterfly = _demo._objectives(IDS, SMALL)
    assert not _demo._prove(replace(butterfly, closed_form=af.tasks.families.butterfly_as_printed(5))).ok
    assert not _demo._prove(replace(butterfly, merged=replace(butterfly.merged, is_minimal=False))).ok
    open_mask = replace(butterfly.merged, task=butterfly.under(af.masks.full(butterfly.merged.task.size)))
    assert not _demo._prove(replace(butterfly, merged=open_mask, closed_form=open_mask.task.mask)).ok, "it leaks"
    with monkeypatch.context() as patch:
        patch.setattr(af.masks, "full", lambda n: butterfly.merged.task.mask)
        assert not _demo._prove(butterfly).ok, "a control that finds no leak proves nothing"
    with monkeypatch.context() as patch:
        patch.setattr(_demo, "butterfly_as_printed", af.masks.butterfly)
        assert not _demo._disprove(butterfly).ok
        assert not _demo._verify_printed(tiny().double(), butterfly).ok
    wrong = replace(butterfly.merged, task=butterfly.under(af.tasks.families.butterfly_as_printed(5)))
    assert not _demo._verify(tiny().double(), replace(butterfly, merged=wrong)).ok


def test_the_whole_job(job: tuple[Demo, list[Step]]) -> None:
    demo, told = job
    assert demo.ok
    assert told == list(demo.steps)
    assert Demo.from_json(demo.to_json()) == demo
    numbers = {step.name: step.numbers for step in demo.steps}
    for name in ("verify_block_two_stream", "verify_butterfly"):
        assert numbers[name]["output_difference"] < 1e-12
        assert numbers[name]["gradient_difference"] < 1e-12
    wrong = [difference > 1e-3 for difference, _ in numbers["verify_printed"]["subtasks"]]
    assert wrong == [True] * 4 + [False]
    assert numbers["audit"]["leaks"] == 0
    audited = next(step for step in demo.steps if step.name == "audit")
    assert "control, causal mask removed: model.layers.0.self_attn leaks" in audited.lines[-1]


def test_a_job_with_one_wrong_step_is_not_ok(job: tuple[Demo, list[Step]]) -> None:
    demo, _ = job
    for place, step in enumerate(demo.steps):
        steps = (*demo.steps[:place], replace(step, ok=False), *demo.steps[place + 1 :])
        assert not replace(demo, steps=steps).ok


def test_a_model_that_sees_the_future_is_not_ok() -> None:
    model = tiny()
    af.masks.attach(model, af.masks.full(8))
    assert not _demo._audit(model, IDS[:8], 4).ok


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _demo.run("tiny", model, IDS, SMALL)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 9 tokens of text, got 4"):
        _demo.run("tiny", tiny(), IDS[:4], SMALL)
