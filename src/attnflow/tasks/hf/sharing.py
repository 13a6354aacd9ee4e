"""`share_prefixes`: runs common prefixes of a batch once, in any trainer; a model whose states change is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.masks.catalogue import causal
from attnflow.masks.hf.attach import attach
from attnflow.models.anatomy.sites import Site
from attnflow.models.passes.evaluation import REFUSALS, refusal
from attnflow.models.passes.interception import (
    AttentionCall,
    Output,
    Proceed,
    base_implementation,
    check_implementation,
    in_force,
)
from attnflow.models.passes.mask_request import MaskRequest
from attnflow.models.passes.trial import DoesNotRun, trial
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.hf.shared_calls import Calls, SharingReport, rounding
from attnflow.tasks.hf.trainers import shuffle_groups
from attnflow.tasks.prefixes import PassCost

_log: Final = logging.getLogger("attnflow.tasks")
_LENGTH: Final = 7
_FAR: Final = (1 << 17) + 77, 3 * (1 << 17) + 5  # queries so far on that every window is shorter
_GROWING: Final = ("dynamic", "longrope")  # rotary embeddings that look at the largest position of a call


class SharedPrefixes(Handle):
    """The handle of `share_prefixes`: its model runs common prefixes once; `report` says what that saved.

    Attributes:
        model: the model.
        no_copies: why calls with labels run their head for every token of the batch; "" if once for each shared token.
    """

    def __init__(self, model: nn.Module, calls: Calls, no_copies: str, restore: Sequence[Callable[[], None]]) -> None:
        super().__init__(model)
        self.no_copies = no_copies
        self._calls = calls
        self._restorers = restore

    @property
    def report(self) -> SharingReport:
        """What the model's calls have shared so far."""
        return self._calls.report

    def results(self) -> Sequence[SharingReport]:
        """The report so far."""
        return (self.report,)

    def _restore(self) -> None:
        for restore in self._restorers:
            restore()

    def _summary(self) -> str:
        head = f" (but its head for every token: {self.no_copies})" if self.no_copies else ""
        return f"{self.kind} runs common prefixes once{head}: {self.report}"


def share_prefixes(model: nn.Module | Loaded | Trainer) -> SharedPrefixes:
    """Let a causal model run the common prefixes of a batch once, with the same outputs and the same gradients.

    The sequences [B, S] of a call become prefix trees: G rollouts of one prompt of P tokens take P tokens for the
    prompt, not G x P. Each token reads its ancestors in the tree, at its position in the call. The states are mapped
    back to [B, S, hidden], and their gradients add up. Trainers of trl (GRPO, RLOO, DPO, KTO, SFT), `Trainer` or your
    own loop stay the same. `share_prefixes(trainer)` shares the model that the trainer calls, and lets GRPO and RLOO
    shuffle whole groups of rollouts, which they would split otherwise.

    - A call with `labels` is replaced as a whole where that is less work, so that its head, too, runs once for a token:
      a token that predicts c labels takes c slots. No label is dropped, not even the first of a completion.
    - Positions are those of the call, by default the column numbers (in OPT, counted over real tokens). So sequences
      padded on the left share only if their prompts are equally long. Outputs at pads are 0.
    - Packed rows, whose `position_ids` start again, share like padded ones. Share before FSDP2's `fully_shard`.
    - A call with a cache (generation) is not shared, nor one whose sequences have no common prefix worth the work. The
      same holds if it has attention weights, input embeddings or a mask that is not 2D, which cannot be mapped back.
      `handle.report` counts these calls by reason, and the log names each reason once.

    Args:
        model: a causal model, also inside PEFT (LoRA) or DistributedDataParallel; what `load_model` returns; or a
            transformers or trl trainer. A reference model is separate: `share_prefixes(trainer.ref_model)`.

    Returns:
        A handle: `.report` has the numbers of tokens before and after, `.remove()` restores the model.

    Raises:
        UnsupportedArchitecture: the model is one that `masks.attach` refuses (recurrent layers), has several stacks,
            has attention that is chunked or not causal, or has other states with shared prefixes than without.
        RuntimeError: the model shares prefixes already.
        ValueError: a trainer of groups that shuffles differently from trl 1.16, or an attached mask; at a call in
            training, dropout or other random numbers.

    Cost: at first a few runs of 4 x 7 tokens, and two more passes at the first call in training. A call takes O(tokens)
    on the CPU for the trees. sdpa and eager also need a dense mask, width x width bytes a tree; flex_attention needs
    only blocks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> batch = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 12], [5, 6, 7, 8, 13, 14]])
    >>> stock = model(batch, use_cache=False).logits
    >>> with share_prefixes(model) as handle:
    ...     shared = model(batch, use_cache=False).logits
    >>> handle.report.last_before, handle.report.last_after, bool(torch.allclose(stock, shared, atol=1e-5))
    (18, 10, True)
    """
    inner = cast(nn.Module, model.model) if isinstance(model, Trainer) else Subject.of(model).model
    outer, backbone, calls, in_force = prepared(inner)
    if in_force:
        raise RuntimeError(f"{type(outer).__name__} shares prefixes already: use that handle, or remove it first")
    no_copies = check_sharing(outer, backbone, calls)
    calls.with_labels = not no_copies
    restore = [shuffle_groups(model)] if isinstance(model, Trainer) else []
    restore += [hook.remove for hook in _hooked(outer, backbone.module, calls)]
    handle = SharedPrefixes(outer, calls, no_copies, restore)
    _log.info("%s", str(handle))
    return handle


def prepared(model: nn.Module) -> tuple[nn.Module, Backbone, Calls, bool]:
    """(the model without wrappers, its backbone, its hooks, whether they are already in place), checked."""
    outer = _unwrapped(model)
    backbone = Backbone.of(outer)
    for hook in backbone.module._forward_pre_hooks.values():
        calls = getattr(hook, "__self__", None)
        if isinstance(calls, Calls):
            return outer, backbone, calls, True
    owner = backbone.module
    name = type(owner).__name__
    if (subject := Subject(outer)).sharded_by != "tensor parallelism":
        subject.require_whole("share_prefixes", "call share_prefixes before fully_shard")
    if any(in_force(site.module, "mask") for site in backbone.sites):
        raise ValueError(f"{name} has a mask from masks.attach: remove it before share_prefixes")
    check_implementation(owner, base_implementation(owner.config), f"the attention of {name}", "mask")
    try:
        attach(owner, causal(_LENGTH)).remove()  # refuses modules beside attention that mix positions
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(str(error).partition("; pass other_mixers")[0]) from error
    head = None if outer is backbone.module else head_of(outer)
    # Whether the rotary embedding of a token depends on the largest position of its batch:
    parts = [getattr(owner.config, name, None) for name in ("rope_parameters", "rope_scaling")]
    long_positions = any(kind in str(part) for part in parts for kind in _GROWING)
    modules = [site.module for site in backbone.sites]
    tables = [m for m in owner.modules() if isinstance(m, nn.Embedding) and "position_ids" in Subject(m).parameters]
    hidden = None if Subject(owner).accepts("position_ids") else tables
    calls = Calls(backbone.windows(), backbone.cost(head), modules, long_positions, head is not None, hidden)
    return outer, backbone, calls, False


def head_of(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", getter()) if callable(getter) else None


def _unwrapped(model: nn.Module) -> nn.Module:
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and not isinstance(model, PreTrainedModel):
            return _unwrapped(inner)
    return model


def check_sharing(model: nn.Module, backbone: Backbone, calls: Calls) -> str:
    """Refuse a model whose states differ; return why calls with labels cannot be replaced, or ""."""
    ids, real = backbone.probe()
    labels = ids.masked_fill((real * real.roll(1, dims=1)) == 0, -100)
    labels[:, 0] = -100
    rows = {"input_ids": ids, "attention_mask": real, **backbone.plain()}
    packed = {
        **backbone.plain(),
        "input_ids": ids.reshape(1, -1),
        "position_ids": torch.arange(ids.shape[1]).repeat(len(ids))[None].to(ids),
    }
    one, every = torch.ones(1, 1), torch.ones(1, ids.numel())

    def states(**call: object) -> list[Tensor]:
        with trial(model):
            return [cast(Any, backbone.module)(**call).last_hidden_state]

    def labelled(**more: object) -> list[Tensor]:
        with trial(model):
            output = cast(Any, model)(**{**rows, "labels": labels, **more})
            balance = getattr(output, "aux_loss", None)
            return [output.logits, output.loss.reshape(1, 1), *([] if balance is None else [balance.reshape(1, 1)])]

    def differs(run: Callable[..., list[Tensor]], read: Tensor, names: Sequence[str], **call: object) -> str:
        try:
            stock = run(**call)
            with _on_trees(model, backbone.module, calls):
                for before, after, name in zip(stock, run(**call), names, strict=False):
                    compare(before, after, read if before.shape[:2] == read.shape else one, name)
        except (UnsupportedArchitecture, *REFUSALS) as error:
            return refusal(error)
        return ""

    run, name = partial(states, **rows), type(backbone.module).__name__
    name += ", which takes no position_ids," if calls.tables == [] else ""
    stock = run()
    calls.counted = bool(differs(states, real, [name], **rows))  # whether pads take no number, as in OPT
    with _on_trees(model, backbone.module, calls):
        backbone.intercepted(lambda call, go_on: backbone.masked_as_meant(call, go_on, calls.masks), run)
        compare(stock[0], run()[0], real, name)
    calls.unsupported = {}
    if differs(states, every, ["a packed row"], **packed):
        calls.unsupported["packed rows"] = "the model computes other states for them than for each sequence alone"
    if not calls.with_labels:
        return "it has no head"
    names = "its head", "its loss", "its loss of the routers"
    if hasattr(backbone.module.config.get_text_config(), "output_router_logits"):
        calls.unsupported["router logits"] = differs(labelled, real, names, output_router_logits=True)
    return differs(labelled, real, names)


@contextmanager
def _on_trees(model: nn.Module, backbone: nn.Module, calls: Calls) -> Generator[None]:
    """Share every call inside, even where nothing is gained, without counting it."""
    hooks = _hooked(model, backbone, calls)
    calls.always = True
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        calls.always, calls.report = False, SharingReport()


def _hooked(model: nn.Module, backbone: nn.Module, calls: Calls) -> list[RemovableHandle]:
    hooks = [
        backbone.register_forward_pre_hook(calls.before_backbone, with_kwargs=True),
        backbone.register_forward_hook(calls.after_backbone, always_call=True),
    ]
    for table in calls.tables or ():
        hooks.append(table.register_forward_pre_hook(calls.before_positions, with_kwargs=True))
        hooks.append(table.register_forward_hook(calls.after_positions))
    prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if model is not backbone and not prompted:
        hooks.append(model.register_forward_pre_hook(calls.before_model, with_kwargs=True))
        hooks.append(model.register_forward_hook(calls.after_model, always_call=True))
    return hooks


@dataclass(frozen=True, eq=False)
class Backbone:
    """The stack of layers that runs on trees: the module from token ids to states, and its attention modules."""

    module: PreTrainedModel
    sites: tuple[Site, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        subject = Subject(model)
        sites = subject.sites
        owners = list({id(site.owner): site.owner for site in sites}.values())
        both = model not in owners and subject.encodes_and_decodes
        if len(owners) != 1 or both:
            names = ", ".join(type(owner).__name__ for owner in owners)
            names = f"the encoder-decoder {subject.kind}" if both else names
            raise UnsupportedArchitecture(
                f"share_prefixes takes a model with one causal stack, got {names}: pass a part that is a single decoder"
            )
        return cls(owners[0], tuple(site for site in sites if site.kind != "cross"))

    def plain(self) -> dict[str, object]:
        """The arguments that make a call return only its states: no cache, and no output that the config requests."""
        asked = ("output_attentions", "output_router_logits")
        config = self.module.config
        extra = {name: False for name in asked if getattr(config.get_text_config(), name, False)}
        return {"use_cache": False, **extra, **({} if config.return_dict else {"return_dict": True})}

    def cost(self, head: nn.Module | None) -> PassCost:
        table = self.module.get_input_embeddings()
        fixed = {id(parameter) for parameter in table.parameters()}
        weights = sum(p.numel() for p in self.module.parameters() if id(p) not in fixed)
        width = int(cast(Any, self.module.config).get_text_config().hidden_size)
        logits = 0 if head is None else sum(p.numel() for p in head.parameters())
        return PassCost(float(weights), 2.0 * width * len(self.sites), float(logits))

    def windows(self) -> dict[str, int | None]:
        """How far back each kind of attention layer reads (`Calls.windows`); refuses all but causal windows."""
        seen: dict[str, MaskRequest] = {}  # the mask that the model requests for each attention module
        names = {site.module: site.name for site in self.sites}

        def record(call: AttentionCall, proceed: Proceed) -> Output:
            if call.request is None or call.narrowed:
                raise UnsupportedArchitecture(f"{names[call.module]} makes its own mask, which cannot be replaced")
            seen[names[call.module]] = call.request
            return proceed(call.replace(mask=call.request.own(call.implementation)))

        ids, _ = self.probe()
        self.intercepted(record, lambda: self.module(input_ids=ids[:1], **self.plain()))
        missing = sorted(set(names.values()) - set(seen))
        if missing:
            raise UnsupportedArchitecture(f"share_prefixes needs attention on text, but {missing[0]} is not called")
        by_request = {id(request): request for request in seen.values()}
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
            window = _window(seen[site.name], site.name)
            if windows.setdefault(str(types[layer]), window) != window:
                raise UnsupportedArchitecture(f"layers of kind {types[layer]!r} differ in their windows")
        return windows

    def intercepted(self, interceptor: Callable[[AttentionCall, Proceed], Output], run: Callable[[], object]) -> None:
        try:
            with trial(self.module, dict.fromkeys(self.sites, interceptor), role="mask", replaces_mask=True):
                run()
        except DoesNotRun as error:
            raise UnsupportedArchitecture(
                f"{type(self.module).__name__} does not run on token ids alone ({error.why})"
            ) from error

    def masked_as_meant(self, call: AttentionCall, proceed: Proceed, masks: Mapping[str, object]) -> Output:
        kind = next(iter(masks)) if len(masks) == 1 else str(self.module.config.layer_types[call.module.layer_idx])
        if call.mask is not masks[kind]:
            name = next(site.name for site in self.sites if site.module is call.module)
            raise UnsupportedArchitecture(f"{name} ignores its model's attention_mask, so prefixes cannot be shared")
        return proceed(call)

    def probe(self) -> tuple[Tensor, Tensor]:
        """(ids, attention_mask) of rows with common prefixes and pads; no row starts with a pad, which may give NaN."""
        subject = Subject(self.module)
        tokens, device = subject.ordinary_tokens(2), subject.device
        a, b = tokens[0], tokens[-1]
        ids = [[a, a, b, b, a, a, b], [a, a, b, a, a, b, a], [a, a, b, a, b, a, a], [a, b, b, b, a, a, a]]
        real = [[1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
        return torch.tensor(ids, device=device), torch.tensor(real, device=device)


def compare(stock: Tensor, shared: Tensor, real: Tensor, name: str) -> None:
    before, after = stock[real.bool()], shared[real.bool()]
    difference = float((before.double() - after.double()).abs().max())
    if not difference <= rounding(before):
        raise UnsupportedArchitecture(
            f"{name} computes other states with shared prefixes than without (they differ by {difference:.2g}; "
            f"rounding explains {rounding(before):.2g}): its tokens depend on more than ids, positions and attention"
        )


def _window(request: MaskRequest, name: str) -> int | None:
    """How many tokens a layer reads, itself included; None for all before it."""
    function = request.arguments.get("mask_function")
    if not callable(function):
        raise UnsupportedArchitecture(f"share_prefixes needs causal attention, but {name} has a mask of unknown kind")
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
            raise UnsupportedArchitecture(f"share_prefixes needs causal attention, not {name}")
        windows.add(None if count == query + 1 else count)
    if len(windows) > 1:
        raise UnsupportedArchitecture(f"{name} attends in chunks of the batch's columns, which sharing would move")
    return windows.pop()
