from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.cli import demo_job as main_job
from attnflow.cli.demo_job import MainJob, Settings
from attnflow.cli.demo_report import main_report
from attnflow.cli.demo_run import Steps, Told, run_main_job

SMALL = Settings(block_tokens=9, block=3, butterfly_tokens=5, audit_tokens=8, audit_passes=4)
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


@pytest.fixture(scope="module", name="done")
def _done() -> tuple[MainJob, list[Told]]:
    told: list[Told] = []
    return run_main_job("tiny", tiny(), IDS, [f" w{i}" for i in IDS], Steps(lambda _: None, told.append), SMALL), told


def test_block_two_stream_is_derived() -> None:
    derived = main_job.derive_block_two_stream(IDS, 3)
    assert derived.ok
    assert derived.merged.task.mask == af.masks.block_two_stream(3, 3)
    assert (len(derived.family), derived.one_by_one, derived.merged.task.size) == (2, 6 + 9, 12)
    assert derived.check.ok
    assert len(derived.control.leaks) == 3, "of 6 labels, those of block 1: block 2 is no input"


def test_butterfly_is_derived_and_the_printed_mask_loses_all_but_the_last_task() -> None:
    derived = main_job.derive_butterfly(IDS[:6])
    assert derived.ok
    assert derived.merged.task.mask == af.masks.butterfly(6)
    printed = main_job.disprove_printed(derived)
    assert printed.ok
    assert printed.missing_pairs == tuple((10 + s, 5 + s) for s in range(5))
    assert printed.lost_tasks == (0, 1, 2, 3, 4)


def test_nothing_is_called_right_that_is_wrong() -> None:
    derived = main_job.derive_butterfly(IDS[:5])
    assert not replace(derived, closed_form=af.tasks.butterfly_as_printed(5)).ok
    assert not replace(derived, check=derived.control).ok
    assert not replace(derived, control=derived.check).ok
    assert not replace(derived, merged=replace(derived.merged, is_minimal=False)).ok
    printed = main_job.disprove_printed(derived)
    right = replace(printed, embedding=af.tasks.embedded(derived.merged.task, derived.family))
    assert not right.ok


def test_the_whole_job(done: tuple[MainJob, list[Told]]) -> None:
    job, told = done
    assert job.ok
    assert all(each.ok for each in told)
    assert [each.name for each in told] == list(job.seconds)
    for agreement in job.agreements:
        assert agreement.verification.output_difference < 1e-12
        assert agreement.verification.gradient_difference is not None
        assert agreement.verification.gradient_difference < 1e-12
    wrong = [each.output_difference > 1e-3 for each in job.printed_verification.tasks]
    assert wrong == [True] * 4 + [False]
    assert job.audited.report.ok
    assert job.audited.control.violations[0].module == "model.layers.0.self_attn"


def test_a_job_with_one_wrong_part_is_not_ok(done: tuple[MainJob, list[Told]]) -> None:
    job, _ = done
    leaking = replace(job.audited, report=job.audited.control)
    blind = replace(job.audited, control=job.audited.report)
    far = replace(job.agreements[0], verification=job.printed_verification)
    assert not replace(job, audited=leaking).ok
    assert not replace(job, audited=blind).ok
    assert not replace(job, agreements=(far, job.agreements[1])).ok
    assert not replace(job, printed_verification=job.agreements[1].verification).ok


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run_main_job("tiny", model, IDS, [str(i) for i in IDS], Steps(lambda _: None, lambda _: None), SMALL)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 9 tokens of text, got 4"):
        run_main_job("tiny", tiny(), IDS[:4], ["a"] * 4, Steps(lambda _: None, lambda _: None), SMALL)


def test_the_report_shows_every_result(done: tuple[MainJob, list[Told]]) -> None:
    job, _ = done
    report = main_report(job, {"Command": "attnflow demo"})
    names = [section.name for section in report.sections]
    assert names[0] == "summary"
    assert {"mask", "order", "leaks", "verification", "audit", "butterfly", "eq58"} <= set(names)
    assert "[MASK]" in report.html
    assert "attnflow demo" in report.html
    assert "Of 5 subtasks 4 are not embedded" in report.html
    assert len(report.html) < 2_000_000
    wrong = replace(job.agreements[0], verification=job.printed_verification)
    assert "do NOT give" in main_report(replace(job, agreements=(wrong, job.agreements[1]))).html
