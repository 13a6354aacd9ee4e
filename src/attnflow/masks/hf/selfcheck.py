"""Whether attention is all that moves information between positions, seen by running the model without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnflow.models.anatomy.sites import Site
from attnflow.models.passes.interception import AttentionCall, Output, Proceed
from attnflow.models.passes.trial import DoesNotRun, read, trial
from attnflow.models.subject import Subject

_LENGTH: Final = 4
_CHANGED: Final = 1  # the position whose token is another one
_VECTORS: Final = ("hidden_states", "inputs_embeds")  # what forwards call one vector for each position


@dataclass(frozen=True)
class Check:
    """`moved` are positions that changed with another one's token; `unchecked` is why nothing is known, else ""."""

    used: bool = True
    moved: tuple[int, ...] = ()
    unchecked: str = ""


_checks: Final[WeakKeyDictionary[nn.Module, Check]] = WeakKeyDictionary()


def check_stack(model: nn.Module, owner: PreTrainedModel, sites: Sequence[Site]) -> Check:
    """Runs a stack on two sequences of 4 tokens, or of vectors if it reads none; all is restored afterwards."""
    if owner not in _checks:
        _checks[owner] = _run(model, owner, [site for site in sites if site.owner is owner])
    return _checks[owner]


def _run(model: nn.Module, owner: PreTrainedModel, sites: Sequence[Site]) -> Check:
    subject = Subject(owner)
    if subject.without_numbers:
        return Check(unchecked="its weights are not loaded")
    if Subject(model).sharded_by == "FSDP2":
        return Check(unchecked="its weights are sharded; it is looked for in a mask that is attached before")
    text = owner.main_input_name == "input_ids"
    entry = None if text else _entry(model, owner, sites[0])
    if not text and entry is None:
        return Check(unchecked=f"it reads {owner.main_input_name}, and no part of it takes a vector for each position")
    called: set[nn.Module] = set()

    def alone(call: AttentionCall, proceed: Proceed) -> Output:
        called.add(call.module)
        if proceed.following:  # a bias or a reader on the module expects to be asked
            Proceed(proceed.following, {"sdpa": _itself})(_diagonal(call))
        return _itself(call.module, call.query, call.key, call.value)

    try:
        with trial(model, dict.fromkeys(sites, alone), role="mask"):
            if entry is None:
                token, other = subject.ordinary_tokens(2)
                changed = [other if place == _CHANGED else token for place in range(_LENGTH)]
                output = read(owner, [[token] * _LENGTH, changed], return_dict=True)
            else:
                output = entry()
    except DoesNotRun as error:  # named by the handle
        return Check(unchecked=f"it does not run on {_LENGTH} positions alone ({error.why})")
    if not called:
        return Check(used=False)
    values = (output,) if isinstance(output, Tensor) else output.values() if isinstance(output, dict) else output
    hidden = next((v for v in values if isinstance(v, Tensor) and v.shape[:2] == (2, _LENGTH)), None)
    if hidden is None or not hidden.is_floating_point():
        return Check(unchecked="it puts out nothing for each position")
    change = (hidden[0].double() - hidden[1].double()).abs().flatten(1).amax(-1)
    # Experts batch their tokens by what is in them, so that rounding moves rows that nothing reaches.
    rounding = min(1e3 * torch.finfo(hidden.dtype).eps, 0.05) * float(hidden.double().abs().max())
    return Check(moved=tuple(i for i in (change > rounding).nonzero().flatten().tolist() if i != _CHANGED))


def _entry(model: nn.Module, owner: PreTrainedModel, site: Site) -> Callable[[], Any] | None:
    parts = site.layers.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    inside = around[next((i for i, part in enumerate(around) if part is owner), 0) :]
    width = getattr(owner.config, "hidden_size", None)
    for part, name in product(inside, _VECTORS):
        subject = Subject(part)
        if isinstance(width, int) and name in subject.parameters:
            vectors = torch.randn(1, _LENGTH, width, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1)
            vectors[1, _CHANGED] *= -1
            return partial(part, **{name: vectors.to(subject.device, owner.dtype)})
    return None


def _itself(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Output:
    """Attention of each position to itself alone; zeros where queries and keys are different positions."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()
    queries = query.shape[2]
    return (value if value.shape[1] == queries else torch.zeros_like(value[:, :1]).repeat(1, queries, 1, 1)), None


def _diagonal(call: AttentionCall) -> AttentionCall:
    """The call with a diagonal mask, for interceptors that compute with it; unchanged if it is not square."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries != keys:
        return call
    itself = torch.eye(queries, dtype=torch.bool, device=call.query.device)[None, None]
    return call.replace(mask=itself, implementation="sdpa")
