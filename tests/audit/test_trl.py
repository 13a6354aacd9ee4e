"""Guards in TRL's SFTTrainer: its packed batches, its forward without logits, leaks injected and none."""

import pytest
import torch

import attnflow as af
from tests.audit.batches import COMPLETIONS, FLAT, LENGTHS, PADDED
from tests.audit.common import wrapped
from tests.audit.packing import texts, tokenizer
from tests.tasks.hf.test_trl import QUIET, model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),  # what TRL itself sets
]


def trainer(model, folder, strategy="bfd", callbacks=(), completions=False, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = {"max_length": 24, "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    packing = {"packing": strategy is not None, "packing_strategy": strategy or "bfd"}
    arguments = SFTConfig(str(folder), **packing, **{**QUIET, **options, **more})
    columns = (
        {"prompt": texts(64, 1), "completion": [f" {t}" for t in texts(64)]} if completions else {"text": texts(64)}
    )
    data = Dataset.from_dict(columns)
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), callbacks=list(callbacks))


def future(out, hidden):
    """The fault: each position also gets the state of the next one."""
    return out + hidden.roll(-1, dims=1)


def past(out, hidden):
    """The fault of a state that runs on: the first token of a document gets the last one of the document before it."""
    return out + torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_a_clean_run_is_the_same_with_a_guard(tmp_path, strategy, capsys):
    losses = []
    for callbacks in ([], [af.audit.GuardCallback()]):
        run = trainer(model(), tmp_path, strategy, callbacks)
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    guard = callbacks[0].guard
    assert losses[0] == losses[1]
    assert guard.ok
    assert ("documents" in guard.reports[0].order) == (strategy == "bfd")
    assert guard.reports[0].forbidden > 0
    assert f"1 of 2 calls audited in {guard.reports[0].forward_passes} forward passes" in capsys.readouterr().out


@pytest.mark.parametrize(("strategy", "fault"), [("bfd", future), ("bfd", past), ("wrapped", future)])
def test_a_leak_stops_the_run_before_its_first_step(tmp_path, strategy, fault):
    leaky = model()
    before = {name: tensor.clone() for name, tensor in leaky.state_dict().items()}
    run = trainer(leaky, tmp_path, strategy, [af.audit.GuardCallback()])
    with wrapped(leaky.model.layers[1].mlp, fault), pytest.raises(af.LeakFound, match=r"model.layers.1.mlp") as leak:
        run.train()
    source, target = leak.value.witness
    assert source - target == (1 if fault is future else -1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in leaky.state_dict().items())


def test_documents_that_are_not_declared_are_not_kept_apart(tmp_path):
    """Wrapped packing tells no boundaries: the same fault is within the causal order, and no finding."""
    leaky = model()
    with wrapped(leaky.model.layers[1].mlp, past):
        callback = af.audit.GuardCallback()
        trainer(leaky, tmp_path, "wrapped", [callback]).train()
    assert callback.guard.ok


WRAPPED = ["shifted twice", "shifted the wrong way", "a full mask of pairs", "no label", "labels of another batch"]
BATCHES = {
    "packed": ({"strategy": "bfd"}, {**FLAT, **LENGTHS}),
    "packed to a multiple": ({"strategy": "bfd", "pad_to_multiple_of": 50}, FLAT),
    "wrapped": ({"strategy": "wrapped"}, {name: FLAT[name] for name in WRAPPED}),
    "completions": ({"strategy": None, "completions": True}, {**PADDED}),
    "packed completions": ({"strategy": "bfd", "completions": True, "max_length": 48}, {**COMPLETIONS, **LENGTHS}),
}


def batch_of(folder, options):
    return next(iter(trainer(model(), folder, **options).get_train_dataloader()))


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_clean_and_their_mistakes_are_found(name, tmp_path):
    options, mistakes = BATCHES[name]
    batch = batch_of(tmp_path, options)
    documents = "rows" if name == "wrapped" else None  # texts are joined, and no entry says where one ends
    if documents:
        assert [what for what, _ in af.audit.check_batch(batch, model()).untested] == ["documents"]
    report = af.audit.check_batch(batch, model(), documents=documents)
    assert report.ok, report
    assert report.labels > 0
    assert af.audit.check_batch(batch, documents=documents).ok
    assert any(line.startswith("labels: none can be read") for line in report.checked)
    assert (report.documents > report.sequences) == (name.startswith("packed"))
    for mistake, (kind, change) in mistakes.items():
        wrong = af.audit.check_batch(change(batch), model())
        assert kind in {m.kind for m in wrong.mistakes}, f"{mistake}: {wrong}"
