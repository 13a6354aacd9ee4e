"""What layers must add at a subject so that the model says an answer: found by gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow.knowledge.answers import answers_in, batch
from attnflow.knowledge.hf.edit_places import Layers, Place, adding

_ABOUT: Final = " is a"  # after a subject: what the model says of it otherwise shall stay
_ENOUGH: Final = 0.95  # probability of the answer, the least over all prompts, at which the descent ends


@dataclass(frozen=True)
class Descent:
    """How targets are looked for.

    Attributes:
        steps: of Adam, at most.
        rate: its step, in units of the norm of what a layer adds at the place.
        decay: weight of the squared norm of what is added, in the same units.
        keep: weight of the divergence from what the model says of the subject otherwise (ROME's essence drift).
    """

    steps: int = 20
    rate: float = 0.15
    decay: float = 0.02
    keep: float = 0.1


@torch.enable_grad()
def target(
    model: nn.Module, layers: Layers, places: Sequence[Place], about: Place | None, descent: Descent
) -> dict[int, Tensor]:
    """What each layer must add at the places, [model_dim], so that the answers follow; for all layers together.

    Minimises the mean of -log p(answer | prompt) over the prompts, plus a divergence and the size of what is added.
    Parameters get no gradient.

    Raises:
        ValueError: a loss that is not finite.

    Cost: `steps` passes forward and backward over the places.
    """
    asked = [place for place in places if place.answer]
    rows, answers = [place.ids for place in asked], [place.answer for place in asked]
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        norms = _output_norms(model, layers, places[0])
        free = {layer: torch.zeros(one.weight.shape[0], requires_grad=True) for layer, one in layers.items()}
        optimiser = torch.optim.Adam(free.values(), lr=descent.rate)
        with torch.no_grad():
            before = None if about is None else _next(model, about)
        together = [[*row, *answer] for row, answer in zip(rows, answers, strict=True)]
        inputs = batch(model, together if about is None else [*together, about.ids])
        for _ in range(descent.steps):
            # A coordinate of a vector of norm 1 is d^-1/2 large: so Adam's step is `rate` norms long.
            added = {layer: norms[layer] * unit.numel() ** -0.5 * unit for layer, unit in free.items()}
            with adding(layers, added, [*asked, *([] if about is None else [about])]):
                logits: Tensor = cast(Any, model)(**inputs).logits
            said = answers_in(logits[: len(asked)], rows, answers)
            loss = -said.scores.mean()
            if before is not None and about is not None:
                now = logits[-1, len(about.ids) - 1].float().log_softmax(dim=-1)
                loss = loss + descent.keep * functional.kl_div(now, before, log_target=True, reduction="sum")
            loss = loss + descent.decay * torch.stack([unit.square().mean() for unit in free.values()]).sum()
            if not bool(torch.isfinite(loss)):
                raise ValueError("the loss is NaN or infinite: check the weights of the model")
            if float(said.scores.detach().min().exp()) > _ENOUGH and bool(said.first.all()):
                break
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return {layer: (norms[layer] * unit.numel() ** -0.5 * unit).detach() for layer, unit in free.items()}


def about(tokenizer: Any, lead: str, subject: str) -> Place:
    """A prompt that lets the model say something of the subject."""
    text = f"{lead}{subject}{_ABOUT}"
    encoded = tokenizer(text, return_offsets_mapping=True)
    last = len(lead) + len(subject) - 1
    position = next(index for index, (first, end) in enumerate(encoded["offset_mapping"]) if first <= last < end)
    return Place(tuple(encoded["input_ids"]), position)


def _next(model: nn.Module, place: Place) -> Tensor:
    logits: Tensor = cast(Any, model)(**batch(model, [place.ids])).logits
    return logits[0, -1].float().log_softmax(dim=-1)


@torch.no_grad()
def _output_norms(model: nn.Module, layers: Layers, place: Place) -> dict[int, float]:
    """The norm of what each layer adds at a place."""
    seen: dict[int, float] = {}

    def hook(layer: int) -> Any:
        def see(module: nn.Module, args: object, output: Tensor) -> None:
            seen[layer] = float(output[0, place.position].double().norm())

        return see

    hooks = [one.register_forward_hook(hook(layer)) for layer, one in layers.items()]
    try:
        cast(Any, model)(**batch(model, [place.ids]))
    finally:
        for one in hooks:
            one.remove()
    return seen
