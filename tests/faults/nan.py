"""NaN and infinity, put into a weight, a gradient or an activation of a training run at a random step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

import attnflow as af
from attnflow.bias.checkpoints import newest, step_of
from attnflow.bias.hf.diverged import Diverged
from attnflow.bias.hf.trainer import trainer
from attnflow.bias.packing import Packed
from tests.faults.checkpoints import biased

PROMISE = (
    "A training run into which NaN or infinity is put stops at that step and names the layer; no file holds either, no "
    "logged loss is made up, and the last checkpoint before that step is there, complete."
)
TRIALS = 300
SHORT = 4
CONFIG = af.bias.TrainingConfig(
    steps=6, batch_size=2, learning_rate=1e-2, log_every=1, save_every=2, evaluate_every=0, seed=3
)
ROWS = Packed([torch.randint(3, 50, (90,), generator=torch.Generator().manual_seed(0)).tolist()], 8)


class Injection(TrainerCallback):
    """What is put where at the beginning of a step."""

    def __init__(self, model: nn.Module, draw: random.Random) -> None:
        self.step, self.value = draw.randint(1, CONFIG.steps), draw.choice((torch.nan, torch.inf, -torch.inf))
        self.kind = draw.choice(("weight", "gradient", "activation"))
        names = [name for name, p in model.named_parameters() if p.requires_grad or self.kind == "weight"]
        if self.kind == "activation":
            paths = (".mlp", ".self_attn.o_proj", "layernorm", ".q_proj", "norm", "embed_tokens")
            modules = (name for name, _ in model.named_modules() if name.endswith(paths))
            names = [name for name in modules if "score_terms" not in name]  # whose parts are not called as modules
        self.name = draw.choice(names)
        self.layer = self.name if self.kind == "activation" else self.name.rpartition(".")[0]
        self.hook: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step + 1 != self.step:
            return
        if self.kind == "weight":
            model.get_parameter(self.name).data.fill_(self.value)
        elif self.kind == "gradient":
            self.hook = model.get_parameter(self.name).register_hook(lambda grad: torch.full_like(grad, self.value))
        else:
            self.hook = model.get_submodule(self.name).register_forward_hook(self.poison)

    def poison(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1, torch.tensor([0]), torch.nan if self.value == -torch.inf else self.value)


def trial(seed: int, folder: Path) -> str | None:
    draw = random.Random(seed)
    model = biased("guidance" if draw.random() < 0.5 else "all")
    fault = Injection(model, draw)
    where = f"{fault.value} in the {fault.kind} of {fault.name} at step {fault.step}"
    made = trainer(model, ROWS, CONFIG, folder, callbacks=[fault], disable_tqdm=True, log_level="error")
    made.remove_callback(PrinterCallback)
    try:
        made.train()
    except Diverged as error:
        if error.step != fault.step:
            return f"{where}: stopped at step {error.step}"
        if error.layer != fault.layer:
            return f"{where}: named {error.layer!r}: {error}"
    else:
        return f"{where}: went on to the end"
    finally:
        if fault.hook is not None:
            fault.hook.remove()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    if len(losses) != fault.step - 1 or not all(loss > 1 for loss in losses):
        return f"{where}: logged {losses}"
    last = newest(folder)
    expected = (fault.step - 1) // 2 * 2
    if (0 if last is None else step_of(last)) != expected:
        return f"{where}: the last checkpoint is {last}, expected step {expected}"
    for path in folder.rglob("*.safetensors"):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values()):
            return f"{where}: {path.name} holds it"
    return None
