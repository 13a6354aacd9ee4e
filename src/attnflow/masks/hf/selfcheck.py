"""Whether attention is all that moves information between positions, seen by running the model without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.loaded import ordinary_tokens
from attnflow.models.sites import Site
from attnflow.models.trial import DoesNotRun, read, trial

_LENGTH: Final = 4
_CHANGED: Final = 1  # the position whose token is another one


@dataclass(frozen=True)
class Check:
    """What a run of a stack showed while each position attended to itself alone.

    `moved` lists positions that changed with another position's token; `unchecked` is why nothing is known, else "".
    """

    used: bool = True
    moved: tuple[int, ...] = ()
    unchecked: str = ""


_checks: Final[WeakKeyDictionary[nn.Module, Check]] = WeakKeyDictionary()


def check_stack(model: nn.Module, owner: PreTrainedModel, sites: Sequence[Site]) -> Check:
    """Runs a stack of `model` on two sequences that differ in one token, 2 x 4 tokens in all.

    The model and all random generators are restored.
    """
    if owner not in _checks:
        _checks[owner] = _run(model, owner, [site for site in sites if site.owner is owner])
    return _checks[owner]


def _run(model: nn.Module, owner: PreTrainedModel, sites: Sequence[Site]) -> Check:
    if owner.main_input_name != "input_ids":
        return Check(unchecked=f"it reads {owner.main_input_name}")
    if any(parameter.is_meta for parameter in owner.parameters()):
        return Check(unchecked="its weights are not loaded")
    called: set[nn.Module] = set()

    def alone(call: AttentionCall, proceed: Proceed) -> Output:
        called.add(call.module)
        output, weights = proceed(_diagonal(call))  # a bias or a reader on the module expects to be asked
        value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1).transpose(1, 2)
        return (value if value.shape == output.shape else torch.zeros_like(output)), weights

    token, other = ordinary_tokens(owner, 2)
    ids = [[token] * _LENGTH, [token] * _LENGTH]
    ids[1][_CHANGED] = other
    try:
        with trial(model, dict.fromkeys(sites, alone), role="mask"):
            output = read(owner, ids, return_dict=True)
    except DoesNotRun as error:  # named by the handle
        return Check(unchecked=f"it does not run on {_LENGTH} tokens alone ({error.why})")
    if not called:
        return Check(used=False)
    hidden = next((v for v in output.values() if isinstance(v, Tensor) and v.shape[:2] == (2, _LENGTH)), None)
    if hidden is None or not hidden.is_floating_point():
        return Check(unchecked="it puts out nothing for each position")
    change = (hidden[0].double() - hidden[1].double()).abs().flatten(1).amax(-1)
    # Experts batch their tokens by what is in them, so that rounding moves rows that nothing reaches.
    rounding = min(1e3 * torch.finfo(hidden.dtype).eps, 0.05) * float(hidden.double().abs().max())
    return Check(moved=tuple(i for i in (change > rounding).nonzero().flatten().tolist() if i != _CHANGED))


def _diagonal(call: AttentionCall) -> AttentionCall:
    """The call with a diagonal mask, for interceptors that compute with it; unchanged if it is not square."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries != keys:
        return call
    itself = torch.eye(queries, dtype=torch.bool, device=call.query.device)[None, None]
    return call.replace(mask=itself, implementation="sdpa")
