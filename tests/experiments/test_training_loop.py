"""The loop of all experiments: a process that is killed and started again has the numbers of one that was not."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.runner.saved import by_step
from experiments.runner.sealing import SEAL, seal, sealed, unseal
from experiments.runner.training import Course, Diverged, Loop, train
from tests.experiments.toy import Toy, run_study, run_toy

ROOT = Path(__file__).parents[2]


def runs(folder: Path) -> dict[str, object]:
    found = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))}
    return {name: {k: v for k, v in run.items() if k != "seconds_here"} for name, run in found.items()}


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("whole")
    run_study(folder)
    return runs(folder)


@pytest.mark.parametrize("moment", ["7", "checkpoint"])
@pytest.mark.slow
def test_a_killed_process_goes_on_bit_by_bit(moment: str, whole: dict[str, object], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.experiments.toy", str(tmp_path), moment]
    died = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not list((tmp_path / "runs").glob("*.json"))
    left = [path.name for path in by_step(tmp_path / "work" / "a-0")]
    assert left == (["checkpoint-6", "checkpoint-4"] if moment == "7" else ["checkpoint-4", "checkpoint-2"])
    run_study(tmp_path)
    assert runs(tmp_path) == whole
    assert set(whole) == {"a-0", "a-1", "b-0", "b-1"}


def test_a_group_has_its_factor_of_the_rate(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
    groups = [{"params": [model[0]]}, {"params": [model[1]], "factor": 0.01}]
    losses = lambda now, *_: {"loss": sum((one.sum() for one in now), torch.zeros(()))}  # noqa: E731
    train(model, torch.optim.SGD(groups), losses, Loop(1, 0.5, lambda _: 1.0, 9.0), tmp_path, seed=0, identity={})
    assert torch.allclose(model[0], torch.full((2,), 0.5))
    assert torch.allclose(model[1], torch.full((2,), 0.995))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("parts", [1, 3])
def test_interrupted_at_any_step_the_rest_is_the_same(parts: int, tmp_path: Path) -> None:
    config, ignored = Toy(steps=7, parts=parts), lambda *_: None
    expected = run_toy(config, 3, tmp_path / "whole", ignored, ignored)
    assert [entry["step"] for entry in expected.log] == [2, 4, 6, 7]
    assert [entry["step"] for entry in expected.measured] == [0, 3, 6, 7]
    for at in range(7):

        def stop(step: int, at: int = at) -> None:
            if step == at:
                raise Stopped

        with pytest.raises(Stopped):
            run_toy(config, 3, tmp_path / str(at), stop, ignored)
        found = run_toy(config, 3, tmp_path / str(at), ignored, ignored)
        assert (found.log, found.measured) == (expected.log, expected.measured), at
        assert all(torch.equal(found.tensors[name], expected.tensors[name]) for name in expected.tensors), at


def linear(value: float = 0.0) -> nn.Linear:
    layer = nn.Linear(2, 1)
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)
    return layer


def descend(model: nn.Module, folder: Path, **more: object) -> Course:
    x = torch.tensor([[1.0, 2.0]])
    settings = {"seed": 0, "identity": {"name": "descend"}, **more}
    optimiser = torch.optim.SGD(model.parameters())
    return train(
        model, optimiser, lambda now, step, part: {"loss": (now(x) - 1).square().sum() / (3.0 - step)},
        Loop(3, 0.1, lambda _: 1.0, log_every=1, save_every=1), folder, **settings,
    )  # fmt: skip


def test_only_what_is_trained_is_saved_and_global_chance_is_left_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = linear()
    model.bias.requires_grad_(False)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    descend(model, tmp_path)
    assert torch.equal(torch.rand(3), expected)
    assert set(load_file(tmp_path / "checkpoint-3" / "model.safetensors")) == {"weight"}
    assert [path.name for path in by_step(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    again = linear(9.0)
    again.bias.requires_grad_(False)
    assert descend(again, tmp_path).log[-1]["step"] == 3
    assert torch.equal(again.weight, model.weight)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    descend(linear(), tmp_path)
    with pytest.raises(ValueError, match=r"holds a run with other settings \(name\)"):
        descend(linear(), tmp_path, identity={"name": "other"})
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        descend(linear(), tmp_path, seed=1)
    with pytest.raises(ValueError, match="which this run does not train"):
        descend(nn.Sequential(linear()), tmp_path)


def test_what_is_not_a_number_ends_the_run_unsaved(tmp_path: Path) -> None:
    model = linear(float("inf"))
    with pytest.raises(Diverged, match=r"seed 0, step 1: loss inf, norm of the gradients (inf|nan); not saved"):
        descend(model, tmp_path)
    assert not by_step(tmp_path)


def test_the_gradient_of_a_step_is_the_mean_over_its_parts(tmp_path: Path) -> None:
    model, x = linear(), torch.eye(2)
    seen: list[torch.Tensor] = []
    train(
        model, torch.optim.SGD(model.parameters()),
        lambda now, step, part: {"loss": now(x[part])[0], "more": 2 * now(x[part])[0]},
        Loop(1, 0.1, lambda _: 1.0, clip=float("inf"), parts=2, save_every=0), tmp_path, seed=0, identity={},
        observe=lambda now, step: seen.append(now.weight.grad.clone()),
    )  # fmt: skip
    assert torch.equal(seen[0], torch.tensor([[1.5, 1.5]]))
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.15, -0.15]]))


def test_a_sealed_folder_says_what_is_not_as_it_was(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ValueError, match=f"is not complete: it has no {SEAL}, which is written last"):
        sealed(tmp_path)
    seal(tmp_path, {"step": 3})
    assert sealed(tmp_path) == {"step": 3}
    (tmp_path / "new").write_text("of somebody")
    assert sealed(tmp_path) == {"step": 3}
    good = (tmp_path / SEAL).read_bytes()
    for damaged in (good[:-9], good.replace(b'"step": 3', b'"step": 4'), b"[]", b'{"files": 3}'):
        (tmp_path / SEAL).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"its {SEAL} is damaged"):
            sealed(tmp_path)
    (tmp_path / SEAL).write_bytes(good)
    (tmp_path / "a").write_text("texT")
    assert sealed(tmp_path, contents=False) == {"step": 3}
    with pytest.raises(ValueError, match="is damaged: the content of a has changed"):
        sealed(tmp_path)
    (tmp_path / "a").write_text("tex")
    with pytest.raises(ValueError, match="is damaged: a has 3 bytes, written were 4"):
        sealed(tmp_path, contents=False)
    (tmp_path / "a").unlink()
    with pytest.raises(ValueError, match="is not complete: a is missing"):
        sealed(tmp_path)
    unseal(tmp_path)
    unseal(tmp_path / "none")
    assert not (tmp_path / SEAL).exists()
