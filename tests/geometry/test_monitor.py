"""The monitor in a loop, in a Trainer, through crashes and resumed runs."""

import csv
import types

import pytest
import torch
from transformers import Trainer, TrainingArguments

import attnflow as af
from attnflow.geometry.monitor import RecordFile
from attnflow.geometry.scores import full_scores, head_scores
from attnflow.geometry.table import MatrixScores
from attnflow.models.attention import attention_layers
from tests.models import tiny
from tests.models.table import AUDITED

SCORES = ("symmetry", "directionality")


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def steps_in(path):
    return sorted({int(row["step"]) for row in read(path)})


def disturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


@pytest.fixture
def model():
    return tiny("Bert", torch.float32)


def test_loop_records_the_start_and_every_so_many_steps(model, tmp_path):
    monitor = af.geometry.monitor(model, tmp_path / "geometry.csv", every=3, per_head=True)
    monitor.start()
    found = [monitor.step() for _ in range(7)]
    assert [scores is not None for scores in found] == [False, False, True, False, False, True, False]
    assert steps_in(tmp_path / "geometry.csv") == [0, 3, 6]
    assert len(read(tmp_path / "geometry.csv")) == 3 * 2 * (1 + 4)
    monitor.step(9)
    assert steps_in(tmp_path / "geometry.csv") == [0, 3, 6, 9]


def test_values_are_the_scores_of_the_model_at_that_step(model, tmp_path):
    monitor = af.geometry.monitor(model, tmp_path / "geometry.csv", every=1, per_head=True)
    monitor.start()
    disturb(model)
    monitor.step()
    rows = [row for row in read(tmp_path / "geometry.csv") if row["step"] == "1"]
    expected = []
    for live in attention_layers(model):
        given = (live.query().detach(), live.key().detach(), live.num_heads, live.num_kv_heads)
        full, heads = full_scores(*given), head_scores(*given)
        expected.append((full.symmetry.item(), full.directionality.item(), full.norm.item()))
        expected += list(zip(heads.symmetry.tolist(), heads.directionality.tolist(), heads.norm.tolist(), strict=True))
    got = [tuple(float(row[name]) for name in ("symmetry", "directionality", "norm")) for row in rows]
    assert [row["head"] for row in rows] == ["all", "0", "1", "2", "3"] * 2
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_record_cut_off_by_a_crash_is_made_again(model, tmp_path):
    path = tmp_path / "geometry.csv"
    monitor = af.geometry.monitor(model, path, every=2)
    monitor.start()
    for _ in range(4):
        monitor.step()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        file = RecordFile(path, rows=2, step=4)
        assert set(steps_in(path)) <= {0, 2}  # a record whose last line is not complete is never kept
        assert whole.startswith(path.read_bytes())
        assert file.last == max(steps_in(path), default=None)
    again = af.geometry.monitor(model, path, every=2)
    again.start(step=2)
    again.step()
    again.step()
    assert path.read_bytes() == whole
    assert not list(tmp_path.glob(".*.part"))


def test_resuming_makes_later_records_again_and_keeps_the_old_file(model, tmp_path):
    path = tmp_path / "geometry.csv"
    monitor = af.geometry.monitor(model, path, every=1)
    monitor.start()
    for _ in range(5):
        monitor.step()
    before = path.read_bytes()
    monitor = af.geometry.monitor(model, path, every=1)
    monitor.start(step=2)
    assert steps_in(path) == [0, 1, 2]
    assert (tmp_path / "geometry.csv.old").read_bytes() == before
    monitor.step()
    assert steps_in(path) == [0, 1, 2, 3]


def test_other_files_are_refused_and_stay_as_they_are(model, tmp_path):
    path = tmp_path / "geometry.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is not a record of geometry"):
        af.geometry.monitor(model, path).start()
    assert path.read_text() == "a,b\n1,2\n"

    path.unlink()
    monitor = af.geometry.monitor(model, path, every=1, per_head=True)
    monitor.start()
    monitor.step()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="10 rows for step 0, but this model gives 2"):
        af.geometry.monitor(model, path).start(step=1)
    assert path.read_bytes() == before

    path.write_bytes(before + b"\xff\xfe,damaged\n" + before.splitlines(keepends=True)[-1])
    with pytest.raises(ValueError, match="is damaged"):
        af.geometry.monitor(model, path, per_head=True).start(step=1)


def test_nan_scores_are_written_and_read_back(tmp_path):
    row = MatrixScores(0, "all", "cross", float("nan"), -0.25, 3.0, 1, 2, "decoder")
    RecordFile(tmp_path / "geometry.csv", 1, 0).append(0, [row])
    (found,) = read(tmp_path / "geometry.csv")
    assert list(found.values()) == ["0", "0", "all", "decoder", "cross", "nan", "-0.25", "3"]
    assert RecordFile(tmp_path / "geometry.csv", 1, 0).last == 0


def test_values_for_a_log_have_names_by_tower_and_kind():
    got = {}
    monitor = af.geometry.monitor(tiny("T5"), attention="all", log=lambda values, step: got.update({step: values}))
    monitor.start()
    values = got[0]
    stems = [f"geometry/{tower}/{score}" for tower in ("encoder", "decoder", "decoder/cross") for score in SCORES]
    assert set(values) == {name for stem in stems for name in (stem, f"{stem}/layer_0", f"{stem}/layer_1")}
    for stem in stems:
        assert values[stem] == pytest.approx((values[f"{stem}/layer_0"] + values[f"{stem}/layer_1"]) / 2)


def test_a_block_starts_records_its_end_and_leaves_the_model_alone(model, tmp_path):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with af.geometry.monitor(af.models.loaded.Loaded(model, None), tmp_path / "geometry.csv", every=2) as monitor:
        for _ in range(3):
            monitor.step()
        assert str(monitor) == (
            f"scores 2 attention layers of BertModel every 2 steps, recorded in {tmp_path / 'geometry.csv'}; at step 3"
        )
    assert steps_in(tmp_path / "geometry.csv") == [0, 2, 3]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not monitor.active
    with pytest.raises(RuntimeError, match="was removed"):
        monitor.step()
    monitor.on_step_end(None, types.SimpleNamespace(global_step=4), None)  # a Trainer that still holds it
    assert steps_in(tmp_path / "geometry.csv") == [0, 2, 3]


def test_a_block_that_fails_records_no_end(model, tmp_path):
    monitor = af.geometry.monitor(model, tmp_path / "geometry.csv", every=2)

    def interrupted():
        with monitor:
            monitor.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps_in(tmp_path / "geometry.csv") == [0]


def test_weights_that_have_become_nan_are_named(model, tmp_path):
    monitor = af.geometry.monitor(model, tmp_path / "geometry.csv", every=1)
    monitor.start()
    torch.nn.init.constant_(model.encoder.layer[1].attention.self.key.weight, float("nan"))
    with pytest.raises(
        ValueError, match=r"step 1, encoder\.layer\.1\.attention\.self: the key weights .* 1024 of 1024 are NaN"
    ):
        monitor.step()
    assert steps_in(tmp_path / "geometry.csv") == [0]


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


def test_only_the_first_process_records(model, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monitor = af.geometry.monitor(model, tmp_path / "geometry.csv", every=1)
    monitor.start()
    assert monitor.step() is None
    assert not list(tmp_path.iterdir())


def test_only_events_are_answered_silently(model):
    monitor = af.geometry.monitor(model)
    assert monitor.on_some_event_of_the_future(1, model=2) is None
    with pytest.raises(AttributeError, match="has no attribute 'stepp'"):
        monitor.stepp()


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(1, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def train(folder, options, resume=None, **arguments):
    """A Trainer that has trained, and the monitor that watched it."""
    torch.manual_seed(1)
    model = AUDITED["Bert"].make()
    monitor = af.geometry.monitor(model, **options)
    given = {"max_steps": 7, "save_steps": 4, "report_to": "none"} | arguments
    trainer = Trainer(
        model,
        TrainingArguments(
            str(folder), per_device_train_batch_size=4, disable_tqdm=True, use_cpu=True, logging_steps=100, **given
        ),
        train_dataset=Tokens(),
        callbacks=[monitor],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, monitor


@pytest.mark.slow
def test_trainer_records_and_resumes_where_its_checkpoint_is(tmp_path):
    path = tmp_path / "geometry.csv"
    trainer, _ = train(tmp_path / "out", {"path": path, "every": 3})
    assert steps_in(path) == [0, 3, 6, 7]  # the end too
    whole = path.read_bytes()
    last = [float(row["norm"]) for row in read(path) if row["step"] == "7"]
    expected = af.geometry.monitor(trainer.model, every=1)
    expected.start()
    assert last == pytest.approx([row.norm for row in expected.scores], rel=1e-6)

    train(tmp_path / "out", {"path": path, "every": 3}, resume=str(tmp_path / "out" / "checkpoint-4"))
    assert path.read_bytes() == whole  # the Trainer resumes exactly, so the record is that of one run
    assert (tmp_path / "geometry.csv.old").read_bytes() == whole
