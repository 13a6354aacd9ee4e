"""A saved bias, and a folder that is replaced, under two saves in a row that die at any change of the disk."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import attnflow as af
from attnflow._core.files import write_folder
from attnflow.bias.hf.attach import BiasHandle
from tests.faults.dying import Died, dying
from tests.models import tiny

PROMISE = (
    "After two saves in a row that die at any change of the disk, the folder holds one of the saved states, whole; "
    "the next save leaves nothing else behind."
)
TRIALS = 2000
SHORT = 8
POINTS = 12  # more than a save has changes: some saves come to their end

CONFIGS = (
    af.bias.GuidanceConfig(layers="every", hidden_dim=4),
    af.bias.GuidanceConfig(layers="every", hidden_dim=4, reference="rotated"),  # of the same shapes
    af.bias.GuidanceConfig(layers=[1], hidden_dim=4),
    af.bias.DotConfig(layers="every"),
)


@cache
def _base() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny("Llama", torch.float32)


def _attach(draw: random.Random) -> BiasHandle:
    handle = af.bias.attach(_base(), draw.choice(CONFIGS))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(draw.randrange(1 << 30))
        for parameter in handle.parameters() if draw.random() < 0.8 else []:  # the others are all zeros alike
            parameter.normal_()
    return handle


@dataclass
class _State:
    configs: list[object]
    values: list[torch.Tensor]

    @classmethod
    def now(cls) -> _State:
        handle = af.bias.handle(_base())
        return cls([config.to_dict() for config in handle.configs], [p.detach().clone() for p in handle.parameters()])

    def is_one_of(self, states: Iterable[_State]) -> bool:
        return any(self.configs == one.configs and all(map(torch.equal, self.values, one.values)) for one in states)


def trial(seed: int, folder: Path) -> str | None:
    draw = random.Random(seed)
    return _folder(draw, folder / "x") if seed % 4 == 3 else _bias(draw, folder / "x")


def _bias(draw: random.Random, place: Path) -> str | None:
    states: list[_State] = []  # that may lie there
    acknowledged = False  # by a save that returned
    for turn in range(3):
        if turn == 0 and draw.random() < 0.3:
            continue  # the first save in a new folder dies, too
        handle = _attach(draw)
        try:
            with dying(place.parent, draw.randrange(POINTS) if turn else None, draw.randrange(1 << 30)):
                af.bias.save(_base(), place)
            states, acknowledged = [_State.now()], True
        except Died:
            states.append(_State.now())
        handle.remove()
    try:
        handle = af.bias.load(_base(), place)
    except FileNotFoundError as error:
        if acknowledged or (place / "bias.safetensors").exists():
            return f"nothing is left: {error}"
    except ValueError as error:
        return f"not loaded: {error}"
    else:
        loaded = _State.now()
        handle.remove()
        if not loaded.is_one_of(states):
            return "what was loaded is none of the saved states"
    handle = _attach(draw)
    af.bias.save(_base(), place)
    handle.remove()
    left = sorted(path.name for path in place.iterdir())
    return None if left == ["bias.safetensors", "bias_config.json"] else f"left behind: {left}"


def _folder(draw: random.Random, place: Path) -> str | None:
    names = ("a", "below/b", "below/c")
    states: list[dict[str, int]] = [{}]
    for turn in range(3):
        state = {name: draw.randrange(1 << 60) for name in draw.sample(names, draw.randint(1, 3))}
        try:
            with (
                dying(place.parent, draw.randrange(POINTS) if turn else None, draw.randrange(1 << 30)),
                write_folder(place) as new,
            ):
                (new / "below").mkdir()
                for name, value in state.items():
                    (new / name).write_text(str(value))
            states = [state]
        except Died:
            states.append(state)
    files = {path.relative_to(place).as_posix(): int(path.read_text()) for path in place.rglob("*") if path.is_file()}
    if files not in states:
        return "the folder holds none of the states"
    with write_folder(place):
        pass
    left = [path.name for path in place.parent.iterdir()]
    return None if left == [place.name] else f"left behind: {left}"
