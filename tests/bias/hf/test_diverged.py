"""A training run ends where a loss, a gradient or a weight is NaN or infinite: step and layer are named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import attnflow as af
from attnflow.bias.checkpoints import by_step
from attnflow.bias.hf.diverged import Diverged, origin
from attnflow.bias.packing import Packed
from attnflow.bias.run import TrainingConfig
from tests.bias.hf.test_training import SHORT, documents, model, quiet
from tests.faults.checkpoints import TEXTS, letters

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

OFTEN = TrainingConfig(steps=6, batch_size=2, learning_rate=1e-2, log_every=1, save_every=2, evaluate_every=2, seed=3)
ROWS, HELD = Packed(documents(90), 8), Packed(documents(40), 8)


class Poison(TrainerCallback):
    """A bad value in a weight, written by the update of a step."""

    def __init__(self, step: int, name: str, value: float = torch.nan) -> None:
        self.step, self.name, self.value = step, name, value

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            model.get_parameter(self.name).data.view(-1)[-1] = self.value


def steps(folder: Path) -> list[int]:
    return [int(path.name[11:]) for path in by_step(folder)]


@pytest.mark.parametrize(("step", "last"), [(4, [2]), (5, [4, 2]), (6, [4, 2])])
def test_what_an_update_spoils_is_not_saved(step: int, last: list[int], tmp_path: Path) -> None:
    """At a step with a checkpoint, without one, and at the last."""
    name = "model.layers.1.self_attn.score_terms.kinds.0.query.weight"
    made = quiet(model(), ROWS, OFTEN, tmp_path, callbacks=[Poison(step, name, torch.inf)])
    with pytest.raises(Diverged, match="Nothing of it is saved; the last checkpoint is of step") as raised:
        made.train()
    assert raised.value.layer == name.removesuffix(".weight")
    assert raised.value.step == (6 if step == 5 else step)  # it is in the loss of the next step
    assert steps(tmp_path) == last


def test_the_state_of_the_optimiser_counts(tmp_path: Path) -> None:
    class Spoil(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                next(iter(made.optimizer.state.values()))["exp_avg"].fill_(torch.nan)

    made = quiet(model(), ROWS, OFTEN, tmp_path, callbacks=[Spoil()])
    with pytest.raises(Diverged, match=r"step 4: .*or what the optimiser keeps for it, is NaN or infinite"):
        made.train()
    assert steps(tmp_path) == [2]


def test_a_held_out_loss_that_is_none_stops_it(tmp_path: Path) -> None:
    held = Packed(documents(40), 8)
    held.labels = torch.full_like(held.labels, -100)
    made = quiet(model(), ROWS, OFTEN, tmp_path, held_out=held)
    with pytest.raises(Diverged, match="step 2: the held-out loss is nan, because no token of the batch has a label"):
        made.train()


def test_a_base_that_is_broken_is_named_before_the_first_step(tmp_path: Path) -> None:
    broken = model()
    broken.model.layers[0].self_attn.o_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(
        Diverged, match=r"step 0: .*because model\.layers\.0\.self_attn\.o_proj\.weight holds NaN.*no checkpoint was"
    ) as raised:
        af.bias.train(broken, TEXTS, tmp_path, SHORT, length=16, tokenizer=letters(), log_level="error")
    assert (raised.value.step, raised.value.layer) == (0, "model.layers.0.self_attn.o_proj")
    assert not (tmp_path / "bias.safetensors").exists()


def test_gradients_of_accumulated_batches_are_looked_at_together(tmp_path: Path) -> None:
    config = TrainingConfig(steps=2, batch_size=2, accumulation=3, log_every=1, save_every=0, evaluate_every=0)
    biased, calls = model(train="all"), []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return gradient * (torch.nan if len(calls) == 4 else 1)

    biased.model.layers[1].mlp.up_proj.weight.register_hook(spoil)
    with pytest.raises(Diverged, match=r"step 2: the norm of the gradients is nan, first seen in the gradient of") as r:
        quiet(biased, ROWS, config, tmp_path).train()
    assert r.value.layer == "model.layers.1.mlp.up_proj"
    assert len(calls) == 6


class Between(nn.Module):
    """Two maps with a function between them that is no module, as attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.mask = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask(torch.full((3,), -torch.inf))  # is no sign of anything
        return self.second(self.first(x) / 0)


def test_what_comes_up_between_modules_is_seen_where_it_arrives() -> None:
    module = Between()
    assert origin(module, None, lambda: module(torch.ones(3))) == ("first seen in the input of second", "second")
    where, layer = origin(module, None, lambda: None)
    assert (where, layer) == ("but not if the same batch is run again", "")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
