"""Looking at a model without changing it: evaluation mode, random generators and precision are restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnflow._core.threads import alone_with
from attnflow.models.loading.offload import device_of
from attnflow.models.passes.processes import stored_in_shards, stores_shards, world

_examined: Final = ContextVar("_examined", default=False)
_DROPOUTS: Final = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
)

# What a model raises when it refuses a call, a cache or a precision. torch raises RuntimeError and its subclasses, and
# checks of arguments raise TypeError or ValueError. Models that do not check run into an assertion (ProphetNet's
# cache), or a missing attribute or entry (NLLB-MoE's encoder output).
REFUSALS: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def refusal(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def seed_all(seed: int) -> None:
    """Seed all generators, so that models that draw in eval (random attention, hashing) stay comparable."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - it is the legacy generator that models draw from
    torch.manual_seed(seed)


def examined() -> bool:
    """Whether the calls of this thread look at a model, so that handles that regroup its batches stand aside."""
    return _examined.get()


@contextmanager
def examining(model: nn.Module) -> Generator[None]:
    """Look at a model in the mode that it is in; all random generators are restored afterwards."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    before = _examined.set(True)
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            _examined.reset(before)


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Run in eval mode, and restore flags and random generators; if flags change, calls in other threads wait."""
    trains = any(module.training for module in model.modules())
    with alone_with(model.modules()) if trains else nullcontext(), examining(model):
        training = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            yield
        finally:
            for module, flag in training:
                module.training = flag


class WithoutDropout(TorchFunctionMode):
    """Leaves dropout out, of a model in training mode: experts draw as many numbers for it as tokens choose them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention and len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif func is F.scaled_dot_product_attention:
            named["dropout_p"] = 0.0
        return func(*args, **named)


@contextmanager
def unchanged(model: nn.Module) -> Generator[None]:
    """Restore every module's attributes, parameters, buffers, submodules and hooks, and what calls wrote into buffers.

    Passes write counters, rotary tables and load statistics there, and transformers adds hooks in a model's first pass.
    Threads take turns, and those that call the model wait. Compiled parts run eagerly. Costs a copy of the buffers.
    """
    if cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "attnflow cannot look at a model inside a transform of torch.func (vmap, grad, jvp, ...): do it before the "
            "transform, and take a guard off the model for the transform"
        )
    # looks at models seed generators, and record what all models ask for
    with ExitStack() as stack:
        stack.enter_context(
            alone_with([*model.modules(), *(m for f in getattr(model, "held", ()) for m in f.modules())])
        )
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
        if compiled:  # else FlexAttention, which transformers compiles itself, would form all its scores
            stack.enter_context(cast(Any, torch.compiler).set_stance("force_eager"))  # it is set when it is made
        gathered = free_gathered(model)
        parts = (
            cast("dict[str, Any]", part)
            for m in model.modules()
            for part in (vars(m), m._parameters, m._buffers, m._modules, m._forward_hooks, m._forward_pre_hooks)
        )
        before: list[tuple[dict[str, Any], dict[str, Any]]] = [(part, dict(part)) for part in parts]
        buffers = [buffer for buffer in model.buffers() if not buffer.is_inference() and not buffer.is_meta]
        values = [(buffer, buffer.clone()) for buffer in buffers]
        try:
            yield
        finally:
            free_gathered(model)
            for part, content in before:
                now = [*map(id, part), *map(id, part.values())]
                if now != [*map(id, content), *map(id, content.values())]:  # else another thread may be in a call of it
                    part.clear()
                    part.update(content)
            for buffer, value in values:
                # else a graph of the caller may hold it; versions tell nothing, as statistics of batches have none
                if not torch.equal(buffer.to_dense(), value.to_dense()):
                    with torch.no_grad():
                        buffer.copy_(value)
            for module in gathered:  # a guard may look at the model inside a call that goes on
                cast(Any, module).unshard()


def free_gathered(model: nn.Module) -> list[nn.Module]:
    """Let FSDP modules hold their shards; those that held gathered ones, which a running call does not give up."""
    gathered: list[nn.Module] = []
    nested: set[int] = set()
    for module in reversed([*filter(stores_shards, model.modules())]):  # parents come last
        own = [parameter for parameter in module.parameters() if id(parameter) not in nested]
        if not all(hasattr(parameter, "device_mesh") for parameter in own):
            gathered.append(module)
        cast(Any, module).reshard()
        nested.update(map(id, module.parameters()))
    return gathered


@contextmanager
def precision(model: nn.Module, dtype: torch.dtype | None) -> Generator[None]:
    """Hold parameters and buffers in `dtype`; the very same tensors are put back. None changes nothing.

    In float64, conversions to float32 in the model's code (norms, softmax, rotary embeddings) give float64 too; they
    would limit results to about 1e-7. Costs a second copy of the parameters; those that FSDP stores in shards are
    converted for the call of the module that holds them.
    """
    if dtype is None:
        yield
        return
    trains = getattr(model, "held", None)  # of a function, whose optimizer has the parameters themselves
    if trains is not None and world():  # it stays: DDP would lose them
        with _Float64() if dtype == torch.float64 else nullcontext():
            yield
        return
    free_gathered(model)
    stored = stored_in_shards(model)
    owners = [(module._parameters, dict(module._parameters)) for module in model.modules()]  # offload replaces them
    swapped: dict[int, nn.Parameter] = {}
    if trains is None:
        swapped = {id(p): _converted(p, dtype) for p in model.parameters() if _swaps(p, dtype)}
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and id(t) not in swapped)
    saved = [(tensor, tensor.data) for tensor in tensors if not hasattr(tensor, "device_mesh")]
    flat = [(module, module._flat_weights) for module in model.modules() if isinstance(module, nn.RNNBase)]
    with ExitStack() as stack:
        try:
            for tensor, data in saved:
                tensor.data = data.to(dtype)
            for module in model.modules():
                module._parameters |= {n: swapped[id(p)] for n, p in module._parameters.items() if id(p) in swapped}
                _convert_sharded(module, stored, dtype, stack)
            for module, weights in flat:
                module._flat_weights = [swapped.get(id(weight), weight) for weight in weights]
            with _Float64() if dtype == torch.float64 else nullcontext():
                yield
        finally:
            for tensor, data in saved:
                tensor.data = data
            if stored:
                free_gathered(model)
            for parameters, before in owners:
                parameters.update(before)
            for module, weights in flat:
                module._flat_weights = weights


def _swaps(parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether another parameter takes its place: one whose `data` change type loses DDP's hooks on its gradient."""
    here = not (parameter.is_meta or hasattr(parameter, "device_mesh"))
    return here and parameter.is_floating_point() and parameter.dtype != dtype


def _convert_sharded(module: nn.Module, stored: set[int], dtype: torch.dtype, stack: ExitStack) -> None:
    """Convert the sharded parameters of one module: at once, or for each of its calls, when FSDP has gathered them."""
    sharded = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and hasattr(parameter, "device_mesh")
    }
    gathered = [name for name, parameter in sharded.items() if id(parameter) in stored]
    module._parameters |= {n: _converted(p, dtype) for n, p in sharded.items() if n not in gathered}
    held: list[dict[str, Any]] = []

    def before(module: nn.Module, *_: object) -> None:
        held.append({name: module._parameters[name] for name in gathered})
        module._parameters |= {name: _converted(cast(Tensor, module._parameters[name]), dtype) for name in gathered}

    def after(module: nn.Module, *_: object) -> None:
        module._parameters |= held.pop()

    if gathered:
        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after, prepend=True, always_call=True).remove)


def _converted(parameter: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)


@contextmanager
def still(model: nn.Module, *, exact: bool = True) -> Generator[None]:
    """Hold the model in eval mode, eager and without gradients of parameters; everything is restored.

    If `exact`, a model in float64 computes all of itself in float64, its norms and softmax too.
    """
    doubled = exact and next(model.parameters()).dtype == torch.float64
    with (
        unchanged(model),  # threads take turns: what follows must not read another's state
        cast(Any, torch.compiler).set_stance("force_eager"),
        evaluating(model),
        precision(model, torch.float64 if doubled else None),
        torch.autocast(device_of(model).type, enabled=False),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            model.requires_grad_(False)
            yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)


class _Float64(TorchFunctionMode):
    """Turns conversions to float32 into float64, and splits grouped matrix products (experts), which lack it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to or func is Tensor.type:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if args and isinstance(args[0], Tensor) and named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and len(args) >= 2:
            left, right, offsets = cast(Tensor, args[0]), cast(Tensor, args[1]), named.get("offs")
            if left.dtype == torch.float64 and left.ndim == 2 and right.ndim == 3 and offsets is not None:
                ends = cast(Tensor, offsets).tolist()
                rows = [left[a:b] @ expert for a, b, expert in zip([0, *ends], ends, right, strict=False)]
                rest = left.new_zeros(len(left) - ends[-1], right.shape[-1])
                return torch.cat([*rows, rest])
        return func(*args, **named)
