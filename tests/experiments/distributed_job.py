"""A process of a run that `torchrun` or `accelerate launch` started: trains a line, and writes its log."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.runner.training import Course, Loop, linear, train
from tests.processes import leave


def fit(folder: Path, steps: int = 4) -> Course:
    """Eight rows a step, in four parts."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def losses(now: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + part))
        return {"loss": (now(x)[:, 0] - x.sum(dim=1)).square().mean()}

    loop = Loop(steps, 0.1, linear(8, 0), parts=4, log_every=1, save_every=2)
    optimiser = torch.optim.AdamW(model.parameters())
    measure = lambda now, step: {"weight": now.weight.flatten().tolist()}  # noqa: E731
    return train(model, optimiser, losses, loop, folder, seed=0, identity={}, measure=measure)


if __name__ == "__main__":
    course = fit(Path(sys.argv[1]), int(sys.argv[2]))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1], "course.json").write_text(json.dumps([course.log, course.measured]))
    leave()
