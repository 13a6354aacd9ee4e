"""Checks whether rows with a common prefix have the same states in a model, and how far back its layers read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.catalogue import causal
from attnflow.masks.hf.attach import attach
from attnflow.models.evaluation import REFUSALS
from attnflow.models.interception import (
    AttentionCall,
    Output,
    Proceed,
    base_implementation,
    check_implementation,
)
from attnflow.models.loaded import ordinary_tokens
from attnflow.models.mask_request import MaskRequest
from attnflow.models.sites import Site, find_sites
from attnflow.models.trial import DoesNotRun, trial
from attnflow.tasks.prefixes import Cost

_LENGTH: Final = 7
_FAR: Final = (1 << 17) + 77, 3 * (1 << 17) + 5  # queries so far on that every window is shorter
_GROWING: Final = ("dynamic", "longrope")  # rotary embeddings that look at the largest position of a call


@dataclass(frozen=True, eq=False)
class Backbone:
    """The stack of layers that runs on trees: the module from token ids to states, and its attention modules."""

    module: PreTrainedModel
    sites: tuple[Site, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        """The one stack of a model; refuses several stacks, and stacks without the attention interface."""
        sites = find_sites(model)
        owners = list({id(site.owner): site.owner for site in sites}.values())
        if len(owners) != 1 or any(site.kind == "cross" for site in sites):
            names = ", ".join(type(owner).__name__ for owner in owners)
            raise UnsupportedArchitecture(
                f"share_prefixes takes a model of one causal stack, got {names}; pass the part that reads token ids"
            )
        return cls(owners[0], sites)

    def check(self) -> None:
        """Refuse modules beside attention that mix positions, and attention that takes no mask."""
        owner = self.module
        check_implementation(
            owner, base_implementation(owner.config), f"the attention of {type(owner).__name__}", "mask"
        )
        attach(owner, causal(_LENGTH)).remove()

    @property
    def long_positions(self) -> bool:
        """Whether the rotary embedding of a token depends on the largest position of its batch."""
        parts = [getattr(self.module.config, name, None) for name in ("rope_parameters", "rope_scaling")]
        return any(kind in str(part) for part in parts for kind in _GROWING)

    def cost(self, head: nn.Module | None) -> Cost:
        """The multiplications for a token, a query-key pair and a row of logits."""
        table = self.module.get_input_embeddings()
        fixed = {id(parameter) for parameter in table.parameters()}
        weights = sum(p.numel() for p in self.module.parameters() if id(p) not in fixed)
        width = int(cast(Any, self.module.config).get_text_config().hidden_size)
        logits = 0 if head is None else sum(p.numel() for p in head.parameters())
        return Cost(float(weights), 2.0 * width * len(self.sites), float(logits))

    def windows(self) -> dict[str, int | None]:
        """How far back each kind of attention layer reads (`Calls.windows`); refuses all but causal windows."""
        requests = self._requests()
        by_request = {id(request): request for request in requests.values()}
        if len(by_request) == 1:
            return {"": _window(next(iter(by_request.values())), self.sites[0].name)}
        types = getattr(self.module.config, "layer_types", None)
        windows: dict[str, int | None] = {}
        for number, site in enumerate(self.sites):
            layer = getattr(site.module, "layer_idx", number)
            if not isinstance(types, Sequence) or not isinstance(layer, int) or layer >= len(types):
                raise UnsupportedArchitecture(
                    f"{type(self.module).__name__} has attention layers of several kinds without layer_types in its "
                    "config, so that they cannot be given their masks"
                )
            window = _window(requests[site.name], site.name)
            if windows.setdefault(str(types[layer]), window) != window:
                raise UnsupportedArchitecture(f"layers of the kind {types[layer]!r} read differently far back")
        return windows

    def _requests(self) -> dict[str, MaskRequest]:
        """The mask that the model requests for each attention module."""
        seen: dict[str, MaskRequest] = {}
        names = {site.module: site.name for site in self.sites}

        def record(call: AttentionCall, proceed: Proceed) -> Output:
            if call.request is None:
                raise UnsupportedArchitecture(f"{names[call.module]} makes its own mask, which cannot be replaced")
            seen[names[call.module]] = call.request
            return proceed(call.replace(mask=call.request.own(call.implementation)))

        ids, _ = self.probe()
        self.intercepted(record, lambda: self.module(input_ids=ids[:1], use_cache=False))
        missing = sorted(set(names.values()) - set(seen))
        if missing:
            raise UnsupportedArchitecture(f"{missing[0]} is not called when the model reads text")
        return seen

    def intercepted(self, interceptor: Callable[[AttentionCall, Proceed], Output], run: Callable[[], object]) -> None:
        """Run with an interceptor at every attention module, each of which then gets a mask."""
        try:
            with trial(self.module, dict.fromkeys(self.sites, interceptor), role="mask", replaces_mask=True):
                run()
        except DoesNotRun as error:
            raise UnsupportedArchitecture(
                f"{type(self.module).__name__} does not run on token ids alone ({error.why})"
            ) from error

    def masked_as_meant(self, call: AttentionCall, proceed: Proceed, masks: Mapping[str, object]) -> Output:
        """An interceptor that refuses a layer whose mask is not the one meant for its kind."""
        kind = next(iter(masks)) if len(masks) == 1 else str(self.module.config.layer_types[call.module.layer_idx])
        if call.mask is not masks[kind]:
            name = next(site.name for site in self.sites if site.module is call.module)
            raise UnsupportedArchitecture(f"{name} does not take the mask that its model is given as attention_mask")
        return proceed(call)

    def probe(self) -> tuple[Tensor, Tensor]:
        """(ids, attention_mask) of rows with common prefixes and pads. None leads a row: some models give NaN there."""
        tokens = ordinary_tokens(self.module, 2)
        device = next(self.module.parameters()).device
        a, b = tokens[0], tokens[-1]
        ids = [[a, a, b, b, a, a, b], [a, a, b, a, a, b, a], [a, a, b, a, b, a, a], [a, b, b, b, a, a, a]]
        real = [[1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
        return torch.tensor(ids, device=device), torch.tensor(real, device=device)


def compare(stock: Tensor, shared: Tensor, real: Tensor, name: str) -> None:
    """Refuse a model whose states on trees differ from its own by more than rounding."""
    before, after = stock[real.bool()].double(), shared[real.bool()].double()
    rounding = min(1e3 * torch.finfo(stock.dtype).eps, 0.05) * max(float(before.abs().max()), 1.0)
    difference = float((before - after).abs().max())
    if not difference <= rounding:
        raise UnsupportedArchitecture(
            f"{name} gives rows that begin alike other states than their shared prefixes have (they differ by "
            f"{difference:.2g}, rounding is {rounding:.2g}): its tokens depend on more than their ids, their positions "
            "and their attention"
        )


def _window(request: MaskRequest, name: str) -> int | None:
    """How many tokens a layer reads, itself included; None for all before it."""
    function = request.arguments.get("mask_function")
    if not callable(function):
        raise UnsupportedArchitecture(f"{name} has a mask of unknown kind")
    zero, windows = torch.zeros((), dtype=torch.int64), set[int | None]()
    for query in _FAR:
        key = torch.arange(query + 3)
        try:
            answer = cast(Tensor, function(zero, zero, torch.tensor(query), key))
            allowed = answer.expand(len(key)).numpy()
        except REFUSALS as error:
            raise UnsupportedArchitecture(f"{name} has a mask that depends on more than positions") from error
        count = int(allowed.sum())
        if not allowed[query] or allowed[query + 1 :].any() or not allowed[query + 1 - count : query + 1].all():
            raise UnsupportedArchitecture(f"{name} is not causal, so that a token depends on those after it")
        windows.add(None if count == query + 1 else count)
    if len(windows) > 1:
        raise UnsupportedArchitecture(
            f"{name} attends in chunks of the sequence, whose borders are at columns of the batch"
        )
    return windows.pop()
