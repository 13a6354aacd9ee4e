"""`MaskedAttention`: the interceptor that puts a mask of ours in the place of the model's, at one attention module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.hf.forms import MaskForms
from attnflow.masks.hf.positions import Positions
from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.mask_request import FLEX, MaskRequest


@dataclass(frozen=True, eq=False)
class MaskedAttention:
    """Attention of one module under a mask.

    Attributes:
        name: the module's path, for messages.
        forms: its mask.
        cross: whether its keys are another sequence's.
        crop: whether keys beyond the sequence may be dropped.
        flex_on_cpu: what computes FlexAttention on the CPU.
    """

    name: str
    forms: MaskForms
    cross: bool
    crop: bool
    flex_on_cpu: Literal["forward", "sdpa"]

    def __call__(self, call: AttentionCall, proceed: Proceed) -> Output:
        """Attention under the mask, by whatever computes it."""
        positions = self._positions(call)
        route = self._route(call, proceed)
        query = call.query
        mask, empty = positions.native(self.forms, self.cross, self.crop, route, query.device, query.dtype)
        output, weights = proceed(call.replace(mask=mask, empty=empty, implementation=route))
        if empty is not None:
            output = output.masked_fill(empty[:, :, None, None], 0.0)
            if weights is not None and route == "eager":
                weights = weights.masked_fill(empty[:, None, :, None], 0.0)
        return output, weights

    def _positions(self, call: AttentionCall) -> Positions:
        """Where the call's tokens lie: shared by the layers that the model gave one mask."""
        batch, _, queries, _ = call.query.shape
        keys, request, mask = call.key.shape[2], call.request, call.mask
        if mask is None and request is None and (queries == keys or self.cross):
            return Positions(MaskRequest(batch, queries, keys))  # vision encoders ask for no mask at all
        if request is None:
            what = "None" if mask is None else f"{type(mask).__name__} of shape {tuple(mask.shape)}"
            raise ValueError(
                f"{self.name} was given the attention mask {what}, which would bypass the mask of attach. Pass a 2D "
                "attention_mask [batch, keys] for padding or none; put everything else into the mask itself. If you "
                "passed no such mask, the model makes its own: then this architecture is not supported."
            )
        if (request.num_queries, request.num_keys) != (queries, keys):
            raise UnsupportedArchitecture(
                f"{self.name} attends from {queries} queries to {keys} keys where transformers asked for a mask of "
                f"{request.num_queries} queries and {request.num_keys} keys: positions of the mask cannot be matched "
                "to tokens"
            )
        if "positions" not in request.derived:
            request.derived["positions"] = Positions(request)
        return request.derived["positions"]

    def _route(self, call: AttentionCall, proceed: Proceed) -> str:
        """The implementation that computes this call; differs from the chosen one only as `flex_on_cpu` says."""
        if call.implementation != FLEX or call.query.device.type != "cpu":
            return call.implementation
        if self.flex_on_cpu == "sdpa":
            lost = [name for name in ("softcap", "s_aux") if call.kwargs.get(name) is not None]
            if lost:
                raise ValueError(
                    f"{self.name} passes {' and '.join(lost)}, which sdpa cannot apply in place of flex_attention; "
                    "use backend='eager'"
                )
            return "sdpa"
        learns = any(tensor.requires_grad for tensor in (call.query, call.key, call.value))
        if torch.is_grad_enabled() and learns and not proceed.following:
            raise RuntimeError(
                "FlexAttention computes no gradients on the CPU. Use backend='sdpa' (the same numbers), "
                "or flex_on_cpu='sdpa' to let SDPA stand in on the CPU only; torch.no_grad() for inference"
            )
        return FLEX
