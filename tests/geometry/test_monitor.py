"""The monitor in a loop, in a Trainer, and in a run that is resumed."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import attnflow as af
from attnflow.geometry.scores import full_scores, head_scores
from attnflow.models.weights.attention import attention_layers
from tests.models import tiny
from tests.models.table import AUDITED

SCORES = ("symmetry", "directionality")


def disturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pytest.fixture
def model():
    return tiny("Bert", torch.float32)


def test_loop_records_the_start_and_every_so_many_steps(model):
    monitor = af.geometry.monitor(model, every=3, per_head=True)
    monitor.start()
    found = [monitor.step() for _ in range(7)]
    assert [scores is not None for scores in found] == [False, False, True, False, False, True, False]
    assert list(monitor.history) == [0, 3, 6]
    assert len(monitor.scores) == 2 * (1 + 4)
    monitor.step(9)
    assert list(monitor.history) == [0, 3, 6, 9]
    monitor.start(6)
    assert list(monitor.history) == [0, 3, 6]


def test_values_are_the_scores_of_the_model_at_that_step(model):
    monitor = af.geometry.monitor(model, every=1, per_head=True)
    monitor.start()
    disturb(model)
    rows = list(monitor.step())
    expected = []
    for live in attention_layers(model):
        given = (live.query().detach(), live.key().detach(), live.num_heads, live.num_kv_heads)
        full, heads = full_scores(*given), head_scores(*given)
        expected.append((full.symmetry.item(), full.directionality.item(), full.norm.item()))
        expected += list(zip(heads.symmetry.tolist(), heads.directionality.tolist(), heads.norm.tolist(), strict=True))
    assert [row.head for row in rows] == ["all", 0, 1, 2, 3] * 2
    assert [(row.symmetry, row.directionality, row.norm) for row in rows] == expected
    assert monitor.history[1]["geometry/symmetry/layer_1"] == expected[5][0]


def test_values_for_a_log_have_names_by_tower_and_kind():
    got = {}
    monitor = af.geometry.monitor(tiny("T5"), attention="all", log=lambda values, step: got.update({step: values}))
    monitor.start()
    values = got[0]
    stems = [f"geometry/{tower}/{score}" for tower in ("encoder", "decoder", "decoder/cross") for score in SCORES]
    assert set(values) == {name for stem in stems for name in (stem, f"{stem}/layer_0", f"{stem}/layer_1")}
    for stem in stems:
        assert values[stem] == pytest.approx((values[f"{stem}/layer_0"] + values[f"{stem}/layer_1"]) / 2)


def test_a_block_starts_records_its_end_and_leaves_the_model_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with af.geometry.monitor(af.models.subject.Loaded(model, None), every=2) as monitor:
        for _ in range(3):
            monitor.step()
        assert str(monitor) == "scores 2 attention layers of BertModel every 2 steps; at step 3"
    assert list(monitor.history) == [0, 2, 3]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not monitor.active
    with pytest.raises(RuntimeError, match="was removed"):
        monitor.step()


def test_a_block_that_fails_records_no_end(model):
    monitor = af.geometry.monitor(model, every=2)

    def interrupted():
        with monitor:
            monitor.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(monitor.history) == [0]


def test_weights_that_have_become_nan_are_named(model):
    monitor = af.geometry.monitor(model, every=1)
    monitor.start()
    torch.nn.init.constant_(model.encoder.layer[1].attention.self.key.weight, float("nan"))
    with pytest.raises(
        ValueError, match=r"step 1, encoder\.layer\.1\.attention\.self: the key weights .* 1024 of 1024 are NaN"
    ):
        monitor.step()
    assert list(monitor.history) == [0]


class Unknown(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"num_attention_heads": 2}
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.q_proj, layer.k_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)


def test_models_found_by_names_and_shapes_are_said_to_be_so_once(caplog):
    for _ in range(2):
        af.geometry.monitor(Unknown())
        af.geometry.penalty(Unknown())
    said = [record.message for record in caplog.records if record.name == "attnflow.geometry"]
    assert said == ["Unknown is not in the registry: queries and keys were found by their names and shapes"]


def test_only_the_first_process_records(model, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monitor = af.geometry.monitor(model, every=1)
    monitor.start()
    assert monitor.step() is None
    assert not monitor.history


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train(folder, resume=None):
    """A Trainer that has trained, and the monitor that watched it."""
    torch.manual_seed(1)
    model = AUDITED["Bert"].make()
    monitor = af.geometry.monitor(model, every=3)
    options = {"per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True, "report_to": "none"}
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), max_steps=7, save_steps=4, logging_steps=100, **options),
        train_dataset=Tokens(),
        callbacks=[monitor.callback()],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, monitor


@pytest.mark.slow
def test_trainer_records_in_its_log_and_resumes_where_its_checkpoint_is(tmp_path):
    trainer, monitor = train(tmp_path)
    assert list(monitor.history) == [0, 3, 6, 7]  # the end too
    logged = [entry for entry in trainer.state.log_history if "geometry/symmetry" in entry]
    assert [entry["step"] for entry in logged] == [0, 3, 6, 7]
    assert all(monitor.history[entry["step"]].items() <= entry.items() for entry in logged)
    expected = af.geometry.monitor(trainer.model, every=1)
    expected.start()
    assert monitor.history[7] == expected.history[0]

    again, resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert resumed.history == monitor.history  # the Trainer resumes exactly, so the record is that of one run
    assert [entry for entry in again.state.log_history if "geometry/symmetry" in entry] == logged
    monitor.remove()
    trainer.train()  # the Trainer still has the callback
    assert list(monitor.history) == [0, 3, 6, 7]
