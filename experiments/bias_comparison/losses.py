"""The data of a part, its losses, and the optimiser of all runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from experiments.bias_comparison import probes
from experiments.bias_comparison.data import Rows, Texts
from experiments.bias_comparison.probes import IGNORED, PROBES
from experiments.bias_comparison.settings import Part
from experiments.geometry_init.model import token_losses
from experiments.runner.training import decayed

_PAIRS = 1 << 17  # of query and key in a pass that measures: memory of a bias that holds each of them


def rows_of(part: Part, name: str, texts: Texts | None) -> Rows | None:
    """The text that an arm is trained on; with "" as its name, the text of the start. A probe has None."""
    if part.kind == "probe" or texts is None:
        return None
    return texts.new if name == "new text" or (part.name in ("tuned", "few") and name) else texts.old


def some_of(rows: Rows, count: int, seed: int) -> Rows:
    """The same held-out rows, and only so many rows to train on, drawn by the seed."""
    order = torch.randperm(len(rows.training), generator=torch.Generator().manual_seed(seed))
    return Rows(Subset(rows.training, order[:count].tolist()), rows.choosing, rows.test, rows.mask_token)


def losses_of(part: Part, rows: Rows | None, seed: int) -> Callable[[nn.Module, int, int], Mapping[str, Tensor]]:
    """(model, step, pass) -> loss of a batch that follows from the seed, the step and the pass alone."""

    def losses(now: nn.Module, step: int, number: int) -> dict[str, Tensor]:
        place = step * part.passes + number
        if rows is None:
            drawn = PROBES[part.name](part.batch_size, torch.Generator().manual_seed(seed * 2**20 + place))
            logits, labels = _answers(now, drawn.tokens, drawn.labels)
            return {"loss": functional.cross_entropy(logits, labels)}
        batch = rows.batch(seed, place, part.batch_size)
        chance = torch.Generator().manual_seed(seed * 2**32 + place)
        return {"loss": text_losses(now, part, rows, batch, chance).mean()}

    return losses


def text_losses(now: nn.Module, part: Part, rows: Rows, tokens: Tensor, chance: torch.Generator) -> Tensor:
    if part.kind == "masked":
        return token_losses(now, tokens, "masked", rows.mask_token, chance)
    tokens = tokens.to(next(now.parameters()).device)
    logits = cast(Any, now)(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")


def pieces(tokens: Tensor) -> int:
    """How many sequences of this length a pass that measures may have."""
    return max(1, min(64, _PAIRS // tokens.shape[1] ** 2))


@torch.no_grad()
def scores(now: nn.Module, drawn: probes.Sequences) -> dict[str, float]:
    """Loss of a probe's answers, and the share that is right."""
    size = pieces(drawn.tokens)
    parts = [_answers(now, *some) for some in zip(drawn.tokens.split(size), drawn.labels.split(size), strict=True)]
    logits, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    right = (logits.argmax(dim=-1) == labels).float().mean()
    return {"loss": float(functional.cross_entropy(logits, labels)), "accuracy": float(right)}


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; one call for all parameters, since a model this small would spend its time on calls."""
    return torch.optim.AdamW(decayed(model, 0.01), betas=(0.9, 0.98), fused=True)


def _answers(now: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, labels) where the model has to answer."""
    device = next(now.parameters()).device
    logits = cast(Any, now)(input_ids=tokens.to(device), use_cache=False).logits[:, :-1]
    following = labels[:, 1:].to(device)
    asked = following != IGNORED
    return logits[asked], following[asked]
