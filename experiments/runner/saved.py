"""Checkpoints of the training loop: whole weights, whichever processes trained them, so that any others can go on."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experiments.runner.processes import Launch
from experiments.runner.sealing import seal, sealed, unseal
from experiments.runner.sharding import like, whole

_KEPT: Final = 2  # checkpoints of a run
_LOG: Final = logging.getLogger(__name__)
_NAME: Final = re.compile(r"checkpoint-(\d+)")


@dataclass
class Course:
    log: list[dict[str, float]] = field(default_factory=list[dict[str, float]])  # mean losses, every so many steps
    # what was measured, each with its "step"
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # what `measure` and `observe` have put there
    seconds: float = 0.0  # of training and measuring, pauses not counted


@dataclass(frozen=True)
class Checkpoints:
    folder: Path  # where they lie
    identity: Mapping[str, object]  # settings of the run; a checkpoint of another run is refused
    model: nn.Module  # whose trained parameters and buffers are saved
    optimiser: torch.optim.Optimizer  # of these parameters
    course: Course  # how the run goes
    generator: torch.Generator | None  # whose state is saved, too
    launch: Launch  # whose first process writes; a sharded tensor is gathered there, in its host's memory

    def save(self, step: int, pending: Sequence[Mapping[str, float]]) -> None:
        first = self.launch.rank == 0
        weights = {name: _here(tensor, first) for name, tensor in _state(self.model).items()}
        state = self.optimiser.state_dict()
        state["state"] = {
            index: {key: _here(value, first) if isinstance(value, Tensor) else value for key, value in moments.items()}
            for index, moments in state["state"].items()
        }
        self.launch.once(lambda: self._write(step, pending, weights, state))

    def restore(self) -> tuple[int, list[dict[str, float]]]:
        """(steps done, losses since the last entry of the log), after the newest complete checkpoint, if any."""
        place = self.launch.once(lambda: newest(self.folder))
        if place is None:
            return 0, []
        said = sealed(place, contents=False)
        if said["identity"] != self.identity:
            keys = sorted({*self.identity, *said["identity"]})
            differ = [key for key in keys if self.identity.get(key) != said["identity"].get(key)]
            raise ValueError(f"{place} holds a run with other settings ({', '.join(differ)}): choose another folder")
        restore_weights(self.model, place)
        held: dict[str, Any] = torch.load(
            place / "optimiser.pt", weights_only=True, map_location="cpu", mmap=self.launch.sharded
        )
        self.optimiser.load_state_dict(_as_sharded(held["optimiser"], self.optimiser))
        if self.generator is not None:
            self.generator.set_state(held["generator"])
        course = json.loads((place / "course.json").read_text(encoding="utf-8"))
        self.course.log, self.course.measured = course["log"], course["measured"]
        self.course.seconds = course["seconds"]
        if (place / "kept.safetensors").is_file():
            self.course.tensors.update(load_file(place / "kept.safetensors"))
        return int(said["step"]), course["pending"]

    def _write(
        self,
        step: int,
        pending: Sequence[Mapping[str, float]],
        weights: Mapping[str, Tensor],
        state: Mapping[str, object],
    ) -> None:
        place, course = self.folder / f"checkpoint-{step}", self.course
        unseal(place)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        save_file(dict(weights), place / "model.safetensors")
        if course.tensors:
            save_file({name: t.contiguous() for name, t in course.tensors.items()}, place / "kept.safetensors")
        chance = None if self.generator is None else self.generator.get_state()
        torch.save({"optimiser": state, "generator": chance}, place / "optimiser.pt")
        held = {"log": course.log, "measured": course.measured, "seconds": course.seconds, "pending": list(pending)}
        (place / "course.json").write_text(json.dumps(held), encoding="utf-8")
        seal(place, {"resumable": True, "step": step, "identity": self.identity})
        _rotate(self.folder)


def by_step(folder: Path) -> list[Path]:
    """All checkpoints of a folder, complete or not, the newest first."""
    steps = {path: _NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())}
    found = [path for path, match in steps.items() if match and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint; those after it are named in the log, with the reason."""
    for path in by_step(folder):
        try:
            sealed(path)
        except ValueError as error:
            _LOG.warning("%s; an earlier one is looked for", error)
        else:
            return path
    return None


def newest_of(folder: Path) -> Path:
    place = newest(folder)
    if place is None:
        raise FileNotFoundError(f"{folder} holds no complete checkpoint: run the training again")
    return place


def restore_weights(model: nn.Module, place: Path) -> None:
    """The trained parameters and buffers of a checkpoint, put into a model that may be sharded, or not be any more."""
    now = _state(model)
    with safe_open(place / "model.safetensors", "pt") as saved, torch.no_grad():
        differ = sorted({*saved.keys()} ^ now.keys())
        if differ:
            raise ValueError(f"{place} holds {differ[:3]}, which this run does not train")
        for name, tensor in now.items():
            tensor.copy_(like(saved.get_tensor(name), tensor))


def _here(tensor: Tensor, first: bool) -> Tensor:
    """As a whole, on the first process; empty on others, which have sent their parts."""
    gathered = whole(tensor)
    return gathered.detach().cpu().contiguous() if first else gathered.new_empty(0)


def _as_sharded(state: dict[str, Any], optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """A whole state of an optimiser, cut as its parameters are."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for index, moments in state["state"].items():
        parameter = parameters[index]
        for key, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step":
                moments[key] = like(value, parameter)
    return state


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: trained parameters, each once, and buffers that are saved."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    saved = cast("dict[str, object]", model.state_dict(keep_vars=True))
    return trained | {name: b for name, b in model.named_buffers() if name in saved}


def _rotate(folder: Path) -> None:
    """Keep the newest complete checkpoints; what kills have left of others goes, too."""
    complete: list[Path] = []
    for path in by_step(folder):
        with suppress(ValueError):
            sealed(path, contents=False)
            complete.append(path)
    for path in set(by_step(folder)) - set(complete[:_KEPT]):
        unseal(path)  # first: a kill meanwhile leaves none that is complete in part
        shutil.rmtree(path, ignore_errors=True)
