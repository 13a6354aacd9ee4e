"""A run goes on from its newest complete checkpoint, of its own base model, and never from anything else."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import attnflow as af
from attnflow._core.files import SEAL
from attnflow.bias.checkpoints import by_step, newest, rotate
from attnflow.bias.hf.base import fingerprint
from attnflow.bias.packing import Packed
from attnflow.bias.run import TrainingConfig, last_checkpoint
from tests.bias.hf.test_training import SHORT, Stop, curve, documents, model, quiet
from tests.faults.checkpoints import CONFIG, TEXTS, biased, letters, outcome
from tests.faults.dying import Died, changes, dying
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

OFTEN = TrainingConfig(steps=6, batch_size=2, learning_rate=1e-2, log_every=1, save_every=2, evaluate_every=0, seed=3)
ROWS = Packed(documents(90), 8)


@pytest.fixture(scope="module", params=["guidance", "all"])
def runs(request, tmp_path_factory) -> tuple[str, Any, Path]:
    """(what is trained, a run to its end, the folder of one that was interrupted after checkpoints 2 and 4)."""
    whole = quiet(model(train=request.param), ROWS, OFTEN, tmp_path_factory.mktemp("whole"))
    whole.train()
    cut = tmp_path_factory.mktemp("cut")
    with pytest.raises(KeyboardInterrupt):
        quiet(model(train=request.param), ROWS, OFTEN, cut, callbacks=[Stop(5)]).train()
    return request.param, whole, cut


def resumed(train: str, folder: Path, **more: Any) -> Any:
    """A run that goes on, from another start than that of the first."""
    torch.manual_seed(99)
    made = quiet(model(train=train, seed=42), ROWS, OFTEN, folder)
    made.train(**{"resume_from_checkpoint": True} | more)
    return made


def same(one: Any, other: Any) -> bool:
    tensors = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return curve(one) == curve(other) and all(torch.equal(left, right) for left, right in tensors)


def test_what_is_not_complete_is_passed_over(runs, tmp_path: Path, caplog) -> None:
    """Whatever file is missing or cut off: an older checkpoint is taken, and the end is the same."""
    train, whole, cut = runs
    names = sorted(path.name for path in (cut / "checkpoint-4").iterdir())
    weights = "bias.safetensors" if train == "guidance" else "model.safetensors"
    assert {weights, "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", SEAL} <= set(names)
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        shutil.copytree(cut, folder)
        file = folder / "checkpoint-4" / name
        for damage in ("cut", "flipped", "gone"):
            content = (cut / "checkpoint-4" / name).read_bytes()
            if damage == "gone":
                file.unlink()
            else:
                middle = len(content) // 2
                file.write_bytes(content[:middle] + (b"" if damage == "cut" else bytes([content[middle] ^ 64])))
                if damage == "flipped":
                    file.write_bytes(file.read_bytes() + content[middle + 1 :])
            caplog.clear()
            assert newest(folder) == folder / "checkpoint-2", (name, damage)
            assert name in caplog.text
            with pytest.raises(ValueError, match=r"checkpoint-4 is (not complete|damaged)"):
                quiet(model(train=train), ROWS, OFTEN, folder).train(str(folder / "checkpoint-4"))
    assert same(resumed(train, tmp_path / str(names.index("optimizer.pt"))), whole)


@pytest.mark.slow
def test_a_checkpoint_is_complete_wherever_the_process_dies_or_it_is_not_there(runs, tmp_path: Path) -> None:
    """Every change of the disk, that of the older checkpoints that go included; nothing unsynced survives."""
    train, whole, cut = runs
    saved: list[list[str]] = []

    class Scan(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step != 4:
                return
            saved.append(changes(copy("count"), lambda: save("count")))
            for at in range(len(saved[0])):
                with pytest.raises(Died), dying(copy(str(at)), at, at):
                    save(str(at))
            raise KeyboardInterrupt

    def copy(name: str) -> Path:
        shutil.copytree(cut / "checkpoint-2", tmp_path / name / "checkpoint-2")
        return tmp_path / name

    def save(name: str) -> None:
        made.args.output_dir = str(tmp_path / name)
        made._save_checkpoint(made.model, None)

    made = quiet(model(train=train), ROWS, OFTEN, tmp_path / "run", callbacks=[Scan()], save_total_limit=1)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert len(saved[0]) > 20
    good = {cut / "checkpoint-2": 0, cut / "checkpoint-4": 0}
    for at in range(len(saved[0])):
        path = newest(tmp_path / str(at))
        assert path is not None, saved[0][at]
        good[cut / path.name] += 1
        for file in ("optimizer.pt", "scheduler.pt"):
            left, right = (torch.load(place / file) for place in (path, cut / path.name))
            assert str(left) == str(right), saved[0][at]
    assert min(good.values()) > 2
    assert same(resumed(train, tmp_path / "9"), whole)


def test_checkpoints_that_are_kept(tmp_path: Path) -> None:
    made = quiet(model(), ROWS, OFTEN, tmp_path / "run", save_total_limit=1)
    made.train()
    assert [path.name for path in by_step(tmp_path / "run")] == ["checkpoint-6"]
    assert made.args.save_total_limit == 1
    for step in (2, 4, 5, 10):
        shutil.copytree(tmp_path / "run" / "checkpoint-6", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5" / SEAL).unlink()
    (tmp_path / "checkpoint-x").mkdir()

    def left(limit: int | None, best: str | None) -> list[str]:
        rotate(tmp_path, limit, best and str(tmp_path / best))
        return [path.name for path in by_step(tmp_path)]

    assert left(None, None) == ["checkpoint-10", "checkpoint-5", "checkpoint-4", "checkpoint-2"]
    assert left(2, "checkpoint-2") == ["checkpoint-10", "checkpoint-2"]
    assert left(1, "checkpoint-10") == ["checkpoint-10"]
    assert (tmp_path / "checkpoint-x").is_dir()


def test_a_model_alone_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    quiet(model(), ROWS, OFTEN, tmp_path, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"checkpoint-6 holds the model alone \(save_only_model=True\)"):
        quiet(model(), ROWS, OFTEN, tmp_path).train(str(tmp_path / "checkpoint-6"))
    with pytest.raises(ValueError, match=r"no complete checkpoint in .* to resume from"):
        quiet(model(), ROWS, OFTEN, tmp_path).train(resume_from_checkpoint=True)


def test_another_base_of_the_same_shapes_is_refused(runs, tmp_path: Path) -> None:
    train, _, cut = runs
    if train == "all":
        return  # its checkpoints hold the base
    other = biased("guidance", base=5)
    ours, theirs = fingerprint(model(), frozen=True), fingerprint(other, frozen=True)
    with pytest.raises(ValueError, match="belongs to another base model") as raised:
        quiet(other, ROWS, OFTEN, cut).train(resume_from_checkpoint=True)
    assert ours["sha256"][:12] in str(raised.value)
    assert theirs["sha256"][:12] in str(raised.value)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = tiny("Llama", torch.float32)
    af.bias.attach(plain, af.bias.GuidanceConfig(hidden_dim=8, layers="every", reference="rotated"), train="guidance")
    with pytest.raises(ValueError, match=r"checkpoint-4 holds another bias: .*'unrotated'.* attached is .*'rotated'"):
        quiet(plain, ROWS, OFTEN, cut).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("train", ["guidance", "all"])
def test_a_training_folder_belongs_to_its_base(train: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"length": 16, "log_level": "error", "tokenizer": letters()}
    first = biased(train)
    first.config._name_or_path = "first"
    done = af.bias.train(first, TEXTS, tmp_path, SHORT, **arguments)
    assert done.settings["base"]["name"] == "first"
    other = biased(train, base=5)
    other.config._name_or_path = "second"
    with pytest.raises(ValueError, match=r"base.name was first and is second; base.sha256 was [0-9a-f]{64} and is"):
        af.bias.train(other, TEXTS, tmp_path, SHORT, **arguments)
    moved = biased(train)
    moved.config._name_or_path = "elsewhere"
    assert af.bias.train(moved, TEXTS, tmp_path, SHORT, **arguments).after == done.after
    with pytest.raises(ValueError, match=r"arguments\.optim was not set and is sgd"):
        af.bias.train(biased(train), TEXTS, tmp_path, SHORT, optim="sgd", **arguments)


@pytest.mark.parametrize("train", ["guidance", "all"])
@pytest.mark.slow
def test_a_run_interrupted_in_a_notebook_goes_on_with_the_same_model(train: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"length": 16, "log_level": "error", "tokenizer": letters()}
    whole = af.bias.train(biased(train), TEXTS, tmp_path / "whole", SHORT, **arguments)

    def stop(at: int) -> Any:
        def progress(step: int, *_: Any) -> None:
            if step >= at:
                raise KeyboardInterrupt

        return progress

    same_model = biased(train)
    with pytest.raises(KeyboardInterrupt):
        af.bias.train(same_model, TEXTS, tmp_path / "cut", SHORT, progress=stop(6), **arguments)
    done = af.bias.train(same_model, TEXTS, tmp_path / "cut", SHORT, **arguments)
    assert (done.curve, done.before, done.after) == (whole.curve, whole.before, whole.after)
    moved = biased(train)
    with pytest.raises(KeyboardInterrupt):
        af.bias.train(moved, TEXTS, tmp_path / "early", SHORT, progress=stop(2), **arguments)
    with pytest.raises(ValueError, match="no checkpoint there has what it was then: load it and attach"):
        af.bias.train(moved, TEXTS, tmp_path / "early", SHORT, **arguments)
    fresh = af.bias.train(biased(train), TEXTS, tmp_path / "early", SHORT, **arguments)
    assert fresh.curve == whole.curve


COMMAND = """
import sys
from pathlib import Path
from tests.faults.checkpoints import train
train(Path(sys.argv[1]), "guidance")
"""


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_a_checkpoint(tmp_path: Path) -> None:
    """Real processes and kill -9: five in a row, each at another moment of the writing."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def start(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", COMMAND, str(tmp_path / name)]
        return subprocess.Popen(command, env=environment)

    assert start("whole").wait(timeout=300) == 0
    draw, kills = random.Random(0), 0
    for _ in range(5):
        process, held = start("cut"), last_checkpoint(tmp_path / "cut") or 0
        while process.poll() is None:
            steps = [int(path.name.rpartition("-")[2]) for path in by_step(tmp_path / "cut" / "checkpoints")]
            if steps and max(steps) > held:
                time.sleep(draw.uniform(0, 0.02))
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.0005)
        if held == CONFIG.steps:
            break
    assert kills >= 2
    assert start("cut").wait(timeout=300) == 0
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
