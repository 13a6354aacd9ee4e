"""A guard audits what a model is really called with, and leaves training as it is."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import attnflow as af
from attnflow.audit import GuardCallback, guard
from tests.audit.common import LENGTH, inputs, tiny, tokens, wrapped


class Samples(Dataset):
    """Token ids with labels, as a `Trainer` wants them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 40, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer(model, tmp_path, callbacks=(), **more):
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, seed=3, logging_steps=1, **more,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=Samples(), callbacks=list(callbacks))


class Plain(nn.Module):
    """A module that declares no order."""

    def forward(self, ids):
        return torch.nn.functional.one_hot(ids, 16).float()


def ahead(out, hidden):
    """The fault: each position also gets the state of the next one."""
    return out + hidden.roll(-1, dims=1)


def test_a_training_run_with_a_leak_stops_before_its_first_step(tmp_path):
    model = tiny("Llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with wrapped(model.model.layers[1].mlp, ahead), pytest.raises(af.LeakFound, match=r"model.layers.1.mlp") as leak:
        trainer(model, tmp_path, [GuardCallback()]).train()
    source, target = leak.value.witness
    assert source == target + 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("every", [None, 2])
def test_a_clean_training_run_is_the_same_with_a_guard(tmp_path, every):
    losses = []
    for callbacks in ([], [GuardCallback(every)]):
        torch.manual_seed(0)
        model = tiny("GPT2")  # has dropout: random generators must be left alone
        run = trainer(model, tmp_path, callbacks)
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    watching = callbacks[0].guard
    assert watching.ok
    assert {report.batch for report in watching.reports} == {2}
    assert not watching.active
    assert len(watching.reports) == (1 if every is None else 2)
    assert not model._forward_pre_hooks
    assert "no leak" in str(watching)
    assert f"{watching.seconds:.1f} s" in str(watching)


def test_a_leak_in_a_log(caplog):
    model = tiny("Llama")
    with (
        wrapped(model.model.layers[1].mlp, ahead),
        guard(model, on_leak="log") as watching,
        caplog.at_level(logging.WARNING, logger="attnflow.audit"),
    ):
        model(tokens())
    assert not watching.ok
    assert "call 0 leaks" in caplog.text
    assert "model.layers.1.mlp" in caplog.text
    assert "LEAK" in str(watching)


def test_a_leak_that_begins_later():
    """Every second call is audited: the third call leaks and is caught, the second is not looked at."""
    model = tiny("Llama")
    with guard(model, every=2) as watching:
        model(tokens())
        with wrapped(model.model.layers[1].mlp, ahead):
            model(tokens())
            with pytest.raises(af.LeakFound):
                model(input_ids=tokens())
    assert [report.ok for report in watching.reports] == [True, False]


def test_packed_documents_and_an_order_of_ones_own():
    """The batch's own position_ids say what may flow; a stated order replaces that."""
    model = tiny("Llama")
    positions = torch.tensor([[*range(5), *range(8)]])
    with guard(model) as watching:
        model(tokens(batch=1), position_ids=positions, use_cache=False)  # a cache switches packing off
    assert "2 packed documents, 5 + 8 tokens" in watching.reports[0].order
    with guard(model, order=af.masks.document([5, 8])), pytest.raises(af.LeakFound):
        model(tokens(batch=1))


def test_a_model_with_an_encoder_is_audited_from_its_labels():
    model, call = tiny("T5"), inputs("T5")
    with guard(model) as watching:
        model(input_ids=call["input_ids"], labels=call["decoder_input_ids"])
    assert watching.ok
    assert watching.reports[0].order.startswith("encoder-decoder")


def test_under_autocast():
    model = tiny("Llama")
    with torch.autocast("cpu", dtype=torch.bfloat16), guard(model) as watching:
        model(tokens())
    assert watching.ok


def test_a_model_that_declares_nothing_says_what_to_do():
    model, ids = Plain(), torch.arange(6)[None]
    with guard(model), pytest.raises(af.UnsupportedArchitecture, match="Pass order="):
        model(ids)
    with guard(model, order=af.masks.causal(6)) as watching:
        model(ids)
    assert watching.ok


def test_who_wants_a_log_gets_a_log_of_what_cannot_be_audited(caplog):
    """A run goes on; the guard does not call what it has not seen clean."""
    model, ids = Plain(), torch.arange(6)[None]
    with guard(model, on_leak="log") as watching:
        assert not watching.ok
        assert "no call yet" in str(watching)
        assert model(ids).shape == (1, 6, 16)
    assert "call 0 could not be audited: declared order of Plain: unknown" in caplog.text
    assert "Pass order=" in watching.refusals[0]
    assert not watching.ok
    assert "NOTHING AUDITED; 1 call could not be audited" in str(watching)
