"""A process of a run that shares its model with others: trains a Llama with a bias, and writes what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import attnflow as af
from attnflow.bias.kind import layer_biases
from experiments.runner.processes import launched
from experiments.runner.sharding import whole
from experiments.runner.training import Course, Loop, decayed, linear, train
from tests.models import CAUSAL
from tests.processes import leave

STEPS, PARTS, CLIP = 6, 4, 0.05


def made(frozen: bool) -> Any:
    """In float64, all of it trained; or with a frozen base in bfloat16 and a bias in float32."""
    torch.manual_seed(0)
    model = CAUSAL["Llama"].make(attention_dropout=0.1).to(torch.bfloat16 if frozen else torch.float64)
    af.bias.attach(model, af.bias.GuidanceConfig(layers="every", hidden_dim=8), train="guidance" if frozen else "all")
    with torch.no_grad():
        for _, bias in layer_biases(model):
            for parameter in bias.parameters():
                parameter.data = parameter.data.to(torch.float32 if frozen else torch.float64)
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def rows(seed: int) -> Tensor:
    return torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(seed))


def loss(now: Any, ids: Tensor) -> Tensor:
    """In the dtype of the model, or float32; that of transformers is in float32."""
    logits = now(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, ids[:, 1:].flatten())


def fit(
    folder: Path, frozen: bool = False, before: Callable[[int], None] = lambda _: None, steps: int = STEPS
) -> tuple[Any, Course]:
    """Train; `before` is called with each step before its losses."""
    model, course = made(frozen), Course()

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        before(step)
        return {"loss": loss(now, rows(100 * step + part))}

    @torch.no_grad()
    def measure(now: Any, step: int) -> dict[str, object]:
        """A pass, a whole weight, and a tensor that is saved."""
        weight = whole(now.model.layers[0].self_attn.q_proj.weight)
        course.tensors[f"after {step}"] = weight.clone()
        return {"loss": loss(now, rows(10**6)).item(), "norm": weight.norm().item()}

    def observe(now: nn.Module, step: int) -> None:
        """Squared norms of the gradients, clipped, of all and of a bias, before the update."""
        _, bias = next(layer_biases(now))
        squares = [
            sum(whole(p.grad).double().square().sum().item() for p in some.parameters() if p.grad is not None)
            for some in (now, bias)
        ]
        course.measured.append({"step": step, "clipped": squares[0], "bias": squares[1]})

    loop = Loop(steps, 3e-2, linear(10, 1), clip=CLIP, parts=PARTS, log_every=1, measure_every=2, save_every=2)
    optimiser = torch.optim.AdamW(decayed(model, 0.1))
    train(
        model, optimiser, losses, loop, folder, seed=0, identity={"frozen": frozen}, measure=measure, observe=observe,
        course=course,
    )  # fmt: skip
    return model, course


def seen(model: Any, course: Course) -> dict[str, Any]:
    """What tests compare; every process must ask."""
    parameters = dict(model.named_parameters())
    return {
        "log": course.log,
        "measured": course.measured,
        "tensors": {name: tensor.float().tolist() for name, tensor in sorted(course.tensors.items())},
        "weights": {name: whole(p.detach()).double().flatten().tolist() for name, p in parameters.items()},
        "whole": [name for name, p in parameters.items() if not isinstance(p, DTensor)],
        "types": {name: str(p.dtype) for name, p in parameters.items()},
        "own": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters.values()),
    }


def main(place: Path, at: int) -> None:
    """Both kinds; the first process writes what it saw. A process dies before step `at`, if there is one."""

    def die(step: int) -> None:
        """All processes of the run, as when a machine is gone."""
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    found: dict[str, Any] = {"all": seen(*fit(place / "all", before=die))}
    if at < 0:
        found |= {"frozen": seen(*fit(place / "frozen", frozen=True))}
    if launched().rank == 0:
        (place / "seen.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    leave()
