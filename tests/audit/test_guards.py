"""A guard audits what a model is really called with, and leaves training as it is."""

import logging

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import attnflow as af
from attnflow.audit import GuardCallback, guard
from tests.audit.common import LENGTH, inputs, tiny, tokens, wrapped
from tests.leaks.alone import ON_THE_LEFT, Rows, reads


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


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # which PEFT asks for
def test_inputs_of_an_adapted_model_without_their_names():
    """PEFT's forward takes anything, and hands it on."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("Llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with guard(model) as watching:
        model(tokens(2, LENGTH))
    assert watching.ok, watching
    with guard(model) as watching:
        model(tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64))
    assert watching.ok, watching


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


class Trained(nn.Module):
    """A causal model with a part that may behave otherwise in training."""

    def __init__(self, part, width=16):
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.part = part
        self.head = nn.Linear(width, 61)

    def forward(self, ids):
        hidden = self.embed(ids).cumsum(1)
        return self.head(self.part(hidden.mT).mT)


class WhenTraining(nn.Module):
    """Changes [batch, width, positions] in training alone."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, hidden):
        return self.change(hidden) if self.training else hidden


class Crowded(nn.Module):
    """An expert with a capacity: of each batch it takes the positions with the largest numbers."""

    def forward(self, hidden):
        scores = hidden.sum(1).flatten()
        taken = scores >= scores.topk(len(scores) // 2).values[-1]
        return hidden * torch.where(taken.view(len(hidden), 1, -1) & self.training, 2.0, 1.0)


class UnevenDropout(nn.Module):
    """Dropout that draws as many numbers as positions are chosen, as experts do."""

    def forward(self, hidden):
        rows = hidden.mT.flatten(0, 1)
        chosen = rows[:, 0] > 0
        out = rows.clone()
        out[chosen] = nn.functional.dropout(rows[chosen], 0.5, self.training)
        out = nn.functional.dropout(out, 0.1, self.training)
        return out.view(len(hidden), -1, hidden.shape[1]).mT


IN_TRAINING = {
    "batch statistics": (lambda: nn.BatchNorm1d(16), True),
    "statistics of each sequence": (lambda: nn.InstanceNorm1d(16, track_running_stats=True), True),
    "a user's own branch": (lambda: WhenTraining(lambda hidden: hidden.flip(-1)), True),
    "a capacity": (Crowded, True),
    "dropout": (lambda: nn.Dropout(0.5), False),
    "dropout of experts": (UnevenDropout, False),
    "channels left out": (lambda: nn.Dropout1d(0.5), False),
    "statistics that are frozen": (lambda: nn.BatchNorm1d(16).eval(), False),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_the_guard_looks_in_the_mode_that_trains(name):
    make, leaks = IN_TRAINING[name]
    model, ids = Trained(make()), torch.randint(61, (2, 12))
    assert af.audit.check(model, ids, af.masks.causal(12)).ok  # in evaluation mode
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(3)
    with guard(model, order=af.masks.causal(12), on_leak="log") as watching:
        guarded = model(ids)
    assert watching.ok != leaks, str(watching)
    assert watching.reports[0].noise == 0.0
    assert any("training mode" in note for note in watching.reports[0].notes)
    if leaks:
        assert watching.reports[0].violations[0].module == "part"
    after = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(before)
    torch.manual_seed(3)
    assert torch.equal(model(ids), guarded)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
    assert model.training


def test_what_each_call_in_training_changes_is_named():
    """Power iteration moves the weights at each call: evaluation is audited, and the report says so."""
    model = Trained(nn.utils.parametrizations.spectral_norm(nn.Conv1d(16, 16, 1)))
    with guard(model, order=af.masks.causal(12)) as watching:
        model(torch.randint(61, (2, 12)))
    assert watching.ok
    assert any("audited in evaluation mode, as in training mode equal calls differ, first in part" in note
               for note in watching.reports[0].notes)  # fmt: skip


def test_a_model_that_needs_its_labels_in_training_is_audited_in_evaluation_mode():
    def needs(hidden):
        raise ValueError("labels are needed in training")

    model = Trained(WhenTraining(needs))
    with guard(model, order=af.masks.causal(12)) as watching, pytest.raises(ValueError, match="labels are needed"):
        model(torch.randint(61, (2, 12)))
    assert watching.ok
    assert any("does not run without a loss (labels are needed" in note for note in watching.reports[0].notes)


def test_a_kernel_that_leaks_under_autocast_alone():
    def ahead_in_bfloat16(out, hidden):
        return out + 0.1 * hidden.roll(-1, 1).to(out) if out.dtype == torch.bfloat16 else out

    model = tiny("Llama").train()
    with wrapped(model.model.layers[1].mlp, ahead_in_bfloat16):
        with guard(model) as watching:
            model(tokens())
        assert watching.ok
        with torch.autocast("cpu", dtype=torch.bfloat16), guard(model), pytest.raises(af.LeakFound, match=r"1\.mlp"):
            model(tokens())


def test_an_audit_inside_autocast_leaves_its_gradients():
    model, plain = tiny("Llama").train(), tiny("Llama").train()
    for each, handles in ((plain, []), (model, [guard(model)])):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            each(tokens(), labels=tokens()).loss.backward()
        assert all(handle.ok for handle in handles)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_nothing_tested_is_not_ok():
    """Of a pooled output alone nothing is known, whatever the layers do."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, num_labels=1,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    with guard(model, every=1) as watching:
        model(tokens())
    assert [report.verdict for report in watching.reports] == ["nothing tested"]
    assert not watching.ok
    assert "NOTHING TESTED" in str(watching)


def test_one_audit_that_tested_nothing_is_not_ok_beside_others():
    model = tiny("Llama")
    with guard(model, every=1) as watching:
        model(tokens())
        model(tokens(2, 1))  # of one position nothing is forbidden
    assert [report.ok for report in watching.reports] == [True, False]
    assert not watching.ok
    assert "NOTHING TESTED" in str(watching)


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


@pytest.mark.parametrize("forgets", [True, False])
def test_a_guard_compares_rows_with_themselves_alone(forgets, monkeypatch):
    """Where the audit has no order that forbids padding, the row alone still shows that it is read."""
    from attnflow.audit import guards
    from attnflow.audit.report import AuditReport

    silent = AuditReport((), "causal", "perturb", 0, 8, 2, 1, 1.0, 56, 0.0, ())
    monkeypatch.setattr(guards, "_in_its_mode", lambda *_: silent)
    model = Rows(reads(not forgets))
    with af.audit.guard(model, on_leak="log") as guard:
        model(**ON_THE_LEFT)
    assert guard.ok != forgets, guard
    if forgets:
        (violation,) = guard.reports[0].violations
        assert (violation.kind, violation.target_row, violation.target) == ("alone", 0, 3)
        assert "reads the padding" in str(violation)
    attached = tiny("Llama")
    af.masks.attach(attached, af.masks.document([4, 4]))
    with af.audit.guard(attached) as guard:
        attached(torch.arange(4, 12).repeat(2, 1), use_cache=False)
    assert guard.ok, guard
