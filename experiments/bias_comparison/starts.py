"""The model that all arms of a seed begin from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from attnflow._core.progress import Progress
from attnflow.models import load_model
from experiments.bias_comparison import probes
from experiments.bias_comparison.arms import arm_of, fitted
from experiments.bias_comparison.data import Texts
from experiments.bias_comparison.losses import losses_of, optimiser_of, rows_of
from experiments.bias_comparison.settings import CHANGES, Comparison, Part
from experiments.geometry_init.model import build
from experiments.runner.processes import launched
from experiments.runner.saved import newest_of
from experiments.runner.study import taken
from experiments.runner.training import Loop, cosine, decayed, train

WARMUP = 20


@dataclass(frozen=True)
class Start:
    model: Any  # trained already, or not
    place: Path | None  # of its checkpoint; None if it has had no training here
    added: str  # the arm that it was trained with, whose additions lie in the checkpoint alone; "plain" if it had none
    own: tuple[nn.Parameter, ...]  # its parameters, in the order of its optimiser

    def restore_additions(self, trained: nn.Module) -> None:
        """Give the model, which has the same arm added anew, the trained weights of that arm."""
        if self.place is None or self.added == "plain":
            return
        saved = load_file(newest_of(self.place) / "model.safetensors")
        own = {name: p for name, p in trained.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])

    def carry(self, optimiser: torch.optim.Optimizer) -> None:
        """Give an optimiser the state that the start's had for the model's own parameters.

        What an arm has added begins with a new state. Without this the first steps of AdamW are as long for every
        weight, which raises the loss of a trained model, and a comparison would measure how arms recover from it.
        """
        if self.place is None:
            return
        held = torch.load(newest_of(self.place) / "optimiser.pt", weights_only=True)["optimiser"]["state"]
        if len(held) != len(self.own):
            raise ValueError(f"{self.place} holds the state of {len(held)} parameters, the model has {len(self.own)}")
        for index, parameter in enumerate(self.own):
            moments = cast("dict[str, Tensor]", held[index])
            optimiser.state[parameter] = {key: value.clone() for key, value in moments.items()}


def begin(
    config: Comparison, part: Part, name: str, seed: int, folder: Path, progress: Progress, texts: Texts | None
) -> Start:
    """The start of an arm; it is trained by the first run that asks for it, and read from its checkpoint by others."""
    if isinstance(part.model, str):
        model, _ = load_model(part.model, dtype=config.dtype)
        return Start(cast(Any, model).to(launched().home), None, "plain", ())
    model = _fresh(config, part, seed, texts)
    added = "guidance" if name in CHANGES else name.split()[0] if part.name == "few" else "plain"
    own = tuple(cast(nn.Parameter, p) for group in decayed(model, 0.0) for p in group["params"])
    if not part.start:
        return Start(model, None, added, own)
    place = folder.parent / f"start-{'steady-' * part.steady}{added}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    every, schedule = config.measure_every, _steady if part.steady else cosine(part.start, _warmup(part.start), 0.1)
    loop = Loop(part.start, part.start_rate, schedule, log_every=every, save_every=part.start)
    arm = arm_of(model, added, part.hidden_dim, part.layers)
    with taken(place / "lock", True, launched()), fitted(model, arm, seed, "all") as trained:
        identity: Mapping[str, object] = {
            "model": dict(part.model), "start": part.start, "added": added, "steady": part.steady,
        }  # fmt: skip
        train(
            trained, optimiser_of(trained), losses_of(part, rows_of(part, "", texts), 1000 + seed), loop, place,
            seed=seed, identity=identity, progress=progress,
        )  # fmt: skip
    return Start(model, place, added, own)


def schedule_of(steps: int) -> Callable[[int], float]:
    """Of the learning rate of an arm: a short rise from 0, then a cosine to a tenth."""
    return cosine(steps, _warmup(steps), 0.1)


def _warmup(steps: int) -> int:
    return min(WARMUP, steps // 10)


def _steady(step: int) -> float:
    """A rise, and then the same rate to the end, so that an arm that takes over can keep it."""
    return min(1.0, step / WARMUP)


def _fresh(config: Comparison, part: Part, seed: int, texts: Texts | None) -> Any:
    sizes = dict(cast("Mapping[str, Any]", part.model))
    vocabulary = probes.VOCABULARY if texts is None or part.kind == "probe" else texts.vocabulary
    if part.kind == "masked":
        sizes |= {"vocab_size": vocabulary, "max_position_embeddings": config.length}
        return build(sizes, "default", "masked", seed).to(launched().home)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, use_cache=False, **sizes)
        model: Any = LlamaForCausalLM(made)
        return model.to(launched().home)
