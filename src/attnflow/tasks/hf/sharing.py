"""`share_prefixes`: rows that begin alike run once, in any trainer."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, Trainer

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.models.evaluation import REFUSALS, refusal
from attnflow.models.loaded import Loaded, split
from attnflow.models.trial import trial
from attnflow.tasks.hf.prefix_check import Backbone, compare
from attnflow.tasks.hf.shared_calls import Calls, SharingReport

_log: Final = logging.getLogger("attnflow.tasks")
_SHUFFLE: Final = "shuffle_sequence_dict"  # of trl


class SharedPrefixes(Handle):
    """A model that runs the common beginnings of its rows once; `report` says what that saved.

    Attributes:
        model: the model.
        no_copies: why calls with labels run their head for every token of the rows; "" if once for a token.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Calls,
        no_copies: str,
        hooks: list[RemovableHandle],
        restore_shuffle: Callable[[], None] | None,
    ) -> None:
        super().__init__(model)
        self.no_copies = no_copies
        self._calls = calls
        self._hooks = hooks
        self._restore_shuffle = restore_shuffle

    @property
    def report(self) -> SharingReport:
        """What was shared so far."""
        return self._calls.report

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._restore_shuffle is not None:
            self._restore_shuffle()

    def _summary(self) -> str:
        head = f" (its head for each of them: {self.no_copies})" if self.no_copies else ""
        return f"{type(self.model).__name__} runs common beginnings of rows once{head}: {self.report}"


def share_prefixes(model: nn.Module | Loaded | Trainer) -> SharedPrefixes:
    """Let a causal model run the common prefixes of the sequences of a batch once: same outputs, same gradients.

    The sequences [B, S] of a call become prefix trees (G rollouts of one prompt of P tokens are P + sum of completions
    in place of G x P + sum of completions), which run under the mask of ancestors at the positions of the call; the
    states are read back to [B, S, hidden], and their gradients add up. trl's trainers (GRPO, RLOO, DPO, KTO, SFT),
    `Trainer` or a loop of your own stay the same. `share_prefixes(trainer)` shares the model that the trainer calls,
    and lets GRPO and RLOO shuffle whole groups of rollouts, which they take apart otherwise.

    - A call with `labels` is replaced as a whole where that is less work, so that its head, too, runs once for a token:
      a token that predicts c labels takes c slots. No label is dropped, not even the first of a completion.
    - Positions are those of the call; if it gives none, the numbers of the columns, as in transformers. So sequences
      padded on the left share where their prompts are equally long. Outputs at pads are 0.
    - A call is not shared if it uses a cache (generation), if its sequences do not begin alike, if sharing is more
      work, or if it asks for what cannot be read back (attention weights, input embeddings, masks that are not 2D,
      packed sequences). `handle.report` counts these by reason, and the log names each once.

    Args:
        model: a causal model, one in PEFT's wrapper (LoRA) or in DistributedDataParallel, what `load_model` returns,
            or a transformers or trl trainer of one. A reference model is another: `share_prefixes(trainer.ref_model)`.

    Returns:
        A handle: `.report` has the tokens before and after, `.remove()` restores the model.

    Raises:
        UnsupportedArchitecture: a model that `masks.attach` refuses (layers with a state), one of several stacks, one
            whose attention is not causal or in chunks, or whose states came out different when both forms were run.
        RuntimeError: it shares prefixes already.
        ValueError: a trainer of groups that trl 1.16 does not have; at a call, while dropout is active.

    Cost: when it is put on, a few runs of 4 x 7 tokens. In a call: O(tokens) on the CPU for the trees, and for sdpa
    and eager a dense mask, width x width bytes a tree; for flex_attention blocks, never dense.

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
    trainer = model if isinstance(model, Trainer) else None
    module = cast(nn.Module, model.model) if isinstance(model, Trainer) else split(model)[0]
    outer, backbone, calls, in_force = prepared(module)
    if in_force:
        raise RuntimeError(f"{type(outer).__name__} shares prefixes already: remove that handle first, or use it")
    no_copies = check_sharing(outer, backbone, calls)
    calls.with_labels = not no_copies
    restore = None if trainer is None else _shuffle_groups(trainer)
    handle = SharedPrefixes(outer, calls, no_copies, _hooked(outer, backbone.module, calls), restore)
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
    backbone.check()
    head = None if outer is backbone.module else head_of(outer)
    calls = Calls(backbone.windows(), backbone.cost(head), backbone.long_positions, with_labels=head is not None)
    return outer, backbone, calls, False


def head_of(model: nn.Module) -> nn.Module | None:
    """The module that turns states into logits, if there is one."""
    getter = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", getter()) if callable(getter) else None


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers of `torch.compile` and data parallelism."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and not isinstance(model, PreTrainedModel):
            return _unwrapped(inner)
    return model


def check_sharing(model: nn.Module, backbone: Backbone, calls: Calls) -> str:
    """Compare both forms, refusing a model that differs; returns why calls with labels cannot be replaced, or ""."""
    ids, real = backbone.probe()
    labels = ids.masked_fill((real * real.roll(1, dims=1)) == 0, -100)
    labels[:, 0] = -100
    rows = {"input_ids": ids, "attention_mask": real, "use_cache": False}

    def states() -> Tensor:
        with trial(model):
            return cast(Any, backbone.module)(**rows).last_hidden_state

    def labelled() -> tuple[Tensor, Tensor] | str:
        with trial(model):
            try:
                output = cast(Any, model)(**rows, labels=labels)
                return cast(Tensor, output.loss).reshape(1, 1), cast(Tensor, output.logits)
            except REFUSALS as error:
                return f"it does not take labels [batch, tokens] ({refusal(error)})"

    stock, stock_labelled = states(), labelled() if calls.with_labels else "it has no head"
    hooks = _hooked(model, backbone.module, calls)
    calls.always = True
    try:
        backbone.intercepted(lambda call, proceed: backbone.masked_as_meant(call, proceed, calls.masks), states)
        compare(stock, states(), real, type(backbone.module).__name__)
        if isinstance(stock_labelled, str):
            return stock_labelled
        shared = labelled()
        if isinstance(shared, str):
            return shared
        try:
            compare(stock_labelled[0], shared[0], torch.ones(1, 1), "its loss")
            compare(stock_labelled[1], shared[1], real, "its head")
        except UnsupportedArchitecture as error:
            return str(error)
        return ""
    finally:
        for hook in hooks:
            hook.remove()
        calls.always, calls.report = False, SharingReport()


def _hooked(model: nn.Module, backbone: nn.Module, calls: Calls) -> list[RemovableHandle]:
    hooks = [
        backbone.register_forward_pre_hook(calls.before_backbone, with_kwargs=True),
        backbone.register_forward_hook(calls.after_backbone, always_call=True),
    ]
    prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if model is not backbone and not prompted:
        hooks.append(model.register_forward_pre_hook(calls.before_model, with_kwargs=True))
        hooks.append(model.register_forward_hook(calls.after_model, always_call=True))
    return hooks


def _shuffle_groups(trainer: Trainer) -> Callable[[], None] | None:
    """Let trl's GRPO and RLOO shuffle whole groups of rollouts; returns what restores the trainer, None without groups.

    A step over all of `steps_per_generation` batches keeps its rows. A process with parts of groups shuffles rows. A
    trainer that shuffles groups in another way than trl 1.16 is a `ValueError`.
    """
    groups = getattr(trainer, "num_generations", None)
    if not isinstance(groups, int) or groups < 2:
        return None
    prepare: Any = trainer._prepare_inputs
    home = next((scope for scope in _scopes(trainer) if _SHUFFLE in scope), None)
    if home is None:
        raise ValueError(
            f"{type(trainer).__name__} shuffles its rows in another way than trl 1.16; share its model alone: "
            "tasks.share_prefixes(trainer.model)"
        )
    rows = home[_SHUFFLE]

    def whole(batch: Mapping[str, Sequence[object] | Tensor | None]) -> object:
        size = len(next(value for value in batch.values() if value is not None))
        if size % groups:
            return rows(batch)
        first = torch.randperm(size // groups) * groups
        order = (first[:, None] + torch.arange(groups)).flatten()
        return {name: _ordered(value, order) for name, value in batch.items()}

    def prepared(*args: Any, **kwargs: Any) -> object:
        home[_SHUFFLE] = whole  # for this call alone: other trainers use the same function
        try:
            return prepare(*args, **kwargs)
        finally:
            home[_SHUFFLE] = rows

    def restore() -> None:
        vars(trainer).pop("_prepare_inputs", None)

    cast(Any, trainer)._prepare_inputs = prepared
    return restore


def _scopes(trainer: Trainer) -> list[dict[str, Any]]:
    """The global names that the `_prepare_inputs` of each of the trainer's classes sees."""
    own = [vars(kind)["_prepare_inputs"] for kind in type(trainer).__mro__ if "_prepare_inputs" in vars(kind)]
    return [inspect.unwrap(function).__globals__ for function in own]


def _ordered(value: Sequence[object] | Tensor | None, order: Tensor) -> object:
    if value is None or (isinstance(value, Tensor) and value.ndim == 0):
        return value
    return value[order.to(value.device)] if isinstance(value, Tensor) else [value[row] for row in order.tolist()]
