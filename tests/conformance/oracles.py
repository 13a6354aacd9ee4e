"""What is true of a miniature, by brute force: nothing here imports attnflow.

`moves` changes one token id after the other in float64; `queries_and_keys` pushes unit vectors through an attention
module and watches the attention interface.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.conformance.inputs import HIGHEST, LOWEST, Inputs
from tests.conformance.miniature import NotBuilt
from tests.geometry import oracle

SEEDS = 2  # other tokens that are put into every position
_WATCHED = "conformance"
_OTHER_MIXER = re.compile(
    r"(Mixer|DeltaNet|DeltaAttention|LightningAttention|LinearAttention|ShortConv|RecurrentBlock)$"
)
MOVED = {torch.float64: 1e-8, torch.float32: 1e-5}  # of the largest output


def stream(inputs: Inputs) -> str:
    """The name of the ids whose positions are those of the output."""
    return "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"


def fitting(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs with numbers such as pixels in the precision of the model."""
    dtype = next(model.parameters()).dtype
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def output(model: nn.Module, inputs: Inputs) -> Tensor:
    """What the model says at every position, [batch, positions, ...]."""
    shape = inputs[stream(inputs)].shape
    with torch.no_grad():
        result = model(**fitting(model, inputs))
    for value in tensors_of(result):
        if value.shape[:2] == shape and value.is_floating_point():
            return value
    raise NotBuilt(f"{type(model).__name__} returns no tensor of [batch, positions]")


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of an output, at any depth, in order."""
    if isinstance(result, Tensor):
        return [result]
    if hasattr(result, "to_tuple"):
        result = result.to_tuple()
    return [tensor for value in result for tensor in tensors_of(value)] if isinstance(result, tuple | list) else []


def rows_mix(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether anything of row 1 moves when all of row 0 is another, of the call's two rows.

    An output whose rows lie behind one another, such as patches of all images, is read in halves. Of [2, 2, ...], an
    entry may be of both rows, or of stacked layers; the last one is of row 1 alone.
    """
    model, dtype = _precise(model, inputs)
    inputs = fitting(model, inputs)
    generator = torch.Generator().manual_seed(1)
    other: Inputs = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or name.endswith(("mask", "sizes", "shapes", "thw", "position_ids", "longer")):
            continue
        half = len(value) // 2 if len(value) > 1 else 0
        first = value[:half] if half else value[:, : value.shape[1] // 2]
        if value.is_floating_point():
            new = torch.randn(first.shape, generator=generator).to(value)
            new = torch.where(first == first.round(), first, new)  # whole numbers are places, or padding
        else:
            new = torch.where(plain(first), (first - LOWEST + 7) % (HIGHEST - LOWEST) + LOWEST, first)
        other[name] = torch.cat([new, value[half:]]) if half else torch.cat([new, value[:, value.shape[1] // 2 :]], 1)
    with torch.no_grad():
        torch.manual_seed(0)
        before = tensors_of(model(**inputs))
        torch.manual_seed(0)
        again = tensors_of(model(**inputs))
        torch.manual_seed(0)
        after = tensors_of(model(**(inputs | other)))
    for one, same, two in zip(before, again, after, strict=True):
        if one.shape != two.shape or one.dim() == 0 or len(one) % 2 or not one.is_floating_point():
            continue
        half = len(one) // 2
        last = (slice(1, None), slice(1, None)) if tuple(one.shape[:2]) == (2, 2) else (slice(half, None),)
        noise = 4 * (one[last] - same[last]).abs().amax().nan_to_num()
        floor = torch.maximum(noise, MOVED[dtype] * one.abs().nan_to_num().amax())
        if bool(((one[last] - two[last]).abs().nan_to_num() > floor).any()):
            return True
    return False


def _precise(model: PreTrainedModel, inputs: Inputs) -> tuple[PreTrainedModel, torch.dtype]:
    double = deepcopy(model).double()
    try:
        with torch.no_grad():
            model_runs = tensors_of(double(**fitting(double, inputs)))
    except Exception:
        return model, torch.float32
    finite = all(bool(value.isfinite().all()) for value in model_runs if value.is_floating_point())
    return (double, torch.float64) if finite else (model, torch.float32)


def early_moves(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether the first quarter of an output moves when the last quarter of a sound, or of a series, is another."""
    model, dtype = _precise(model, inputs)
    inputs = fitting(model, inputs)
    name = max((name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()),
               key=lambda name: inputs[name].numel())  # fmt: skip
    value, generator = inputs[name], torch.Generator().manual_seed(2)
    with torch.no_grad():
        lengths = {one.shape[1] for one in tensors_of(model(**inputs)) if one.dim() > 2 and one.shape[1] > 4}
    timed = [axis for axis in range(1, value.dim()) if any(value.shape[axis] % length == 0 for length in lengths)]
    axis = max(timed or range(1, value.dim()), key=lambda axis: value.shape[axis])
    late = value.shape[axis] * 3 // 4
    noise = torch.randn(value.shape, generator=generator).to(value)
    place = (torch.arange(value.shape[axis]) >= late).view([-1 if a == axis else 1 for a in range(value.dim())])
    with torch.no_grad():
        before = tensors_of(model(**inputs))
        after = tensors_of(model(**(inputs | {name: torch.where(place, noise, value)})))
    for one, two in zip(before, after, strict=True):
        if one.shape == two.shape and one.dim() > 2 and one.shape[1] > 4 and one.is_floating_point():
            quarter = one.shape[1] // 4
            change = (one - two)[:, :quarter].abs().nan_to_num().amax()
            if bool(change > MOVED[dtype] * one.abs().nan_to_num().amax()):
                return True
    return False


def predicts_next(model: PreTrainedModel, inputs: Inputs) -> bool | None:
    """Whether the loss compares a position's output with the next token, or with its own; None if with neither."""
    ids = inputs[stream(inputs)]
    try:
        with torch.no_grad():
            result = model(**inputs, labels=ids)
        logits, loss = result.logits.flatten(2), result.loss
        following = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        own = cross_entropy(logits.flatten(0, 1), ids.flatten())
    except Exception:  # no head, no loss, or labels of another kind
        return None
    return next((answer for answer, value in ((True, following), (False, own)) if torch.isclose(loss, value)), None)


def precise(model: PreTrainedModel, inputs: Inputs) -> tuple[PreTrainedModel, torch.dtype]:
    """A copy in float64; in float32 of a model that does not run in float64, or gives no numbers there."""
    if next(model.parameters()).dtype == torch.float64:
        return model, torch.float64
    double = deepcopy(model).double()
    try:
        out = output(double, inputs)
    except RuntimeError:
        return deepcopy(model), torch.float32
    return (double, torch.float64) if bool(out.isfinite().all()) else (deepcopy(model), torch.float32)


def moves(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """[batch, position, position], bool: whether the output at q moves when the token at k is another one.

    The changed sequences run side by side, as the rows of one batch, where the inputs are [batch, positions] alone;
    the sequences of the call stay beside them, as a model makes another mask where nothing is padded.
    """
    model, dtype = precise(model, inputs)
    name = stream(inputs)
    padding = inputs["attention_mask"] == 0 if "attention_mask" in inputs else torch.zeros_like(inputs[name]).bool()
    rows, size = inputs[name].shape
    moved = torch.zeros(rows, size, size, dtype=torch.bool)
    beside = model.__dict__.get("beside", {})
    side_by_side = all(
        (value.dim() == 2 or name in beside) and value.shape[0] == rows for name, value in inputs.items()
    )
    for row in range(rows):
        for seed in range(SEEDS):
            ids = _changed(inputs[name][row], 7 + 11 * seed)
            if side_by_side:
                rest = {k: v[row].expand(len(ids), *v.shape[1:]) for k, v in inputs.items()} | {name: ids}
                with _other_padding(model, padding[row], seed):
                    out = output(model, {k: torch.cat([v, inputs[k]]) for k, v in rest.items()})[: len(ids)]
            else:
                alone = {k: v[row : row + 1] if len(v) == rows else v for k, v in inputs.items()}
                out = torch.cat([output(model, alone | {name: one[None]}) for one in ids])
            out = out.flatten(2)
            noise = 4 * (out[0] - out[-1]).abs().amax()  # many models compute parts of themselves in float32
            change = (out[1:-1] - out[-1]).abs().amax(-1)
            moved[row] |= torch.maximum(noise, MOVED[dtype] * out[-1].abs().amax()) < change.T
    return moved


def summaries_move(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether an output without positions, such as a pooled vector, moves with what is at padding."""
    model, _ = precise(model, inputs)
    inputs = fitting(model, inputs)
    rows, size = inputs["attention_mask"].shape
    for row in range(rows):
        given = {name: torch.cat([v[row].expand(size + 2, *v.shape[1:]), v]) for name, v in inputs.items()}
        with _other_padding(model, inputs["attention_mask"][row] == 0, 0), torch.no_grad():
            result = model(**given)
        for value in result.to_tuple():
            summary = (
                isinstance(value, Tensor) and value.shape[:1] == (size + 2 + rows,) and value.shape[1:2] != (size,)
            )
            if summary and not torch.allclose(value[: size + 2], value[:1]):
                return True
    return False


def plain(ids: Tensor) -> Tensor:
    """Which ids are ordinary tokens: neither padding nor a placeholder."""
    return (ids >= LOWEST) & (ids < HIGHEST)


def _changed(ids: Tensor, step: int) -> Tensor:
    """[positions + 2, positions]: row k + 1 with another token at k, special tokens excepted; the ends as it is."""
    other = torch.where(plain(ids), (ids - LOWEST + step) % (HIGHEST - LOWEST) + LOWEST, ids)
    rows = ids.repeat(len(ids) + 2, 1)
    rows[1:-1].diagonal().copy_(other)
    return rows


@contextmanager
def _other_padding(model: PreTrainedModel, padding: Tensor, seed: int) -> Iterator[None]:
    """In row k + 1 another vector where position k is padding: its token says where a sequence begins, and stays."""

    def add(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):  # quantised: with its scale
            return (add(module, args, out[0]), *out[1:])
        places = padding.nonzero()[:, 0]
        noise = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(seed)).to(out)
        out = out.clone()
        out[places + 1, places] += noise
        return out

    with ExitStack() as stack:
        if padding.any():
            stack.callback(model.get_input_embeddings().register_forward_hook(add).remove)
        yield


@contextmanager
def silenced(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Recurrent, state-space and convolutional mixers put out zeros: what moves between positions is attention."""

    def zeros(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return torch.zeros_like(out)
        return (torch.zeros_like(out[0]), *out[1:])

    mixers = [module for module in model.modules() if _OTHER_MIXER.search(type(module).__name__)]
    with ExitStack() as stack:
        for module in mixers:
            stack.callback(module.register_forward_hook(zeros).remove)
        yield mixers


def reachable(allow: Tensor, layers: int) -> Tensor:
    """What `layers` layers under one mask let through, the residual stream included."""
    step = allow | torch.eye(len(allow), dtype=torch.bool)
    through = step
    for _ in range(layers - 1):
        through = (through.float() @ step.float()) > 0
    return through


@contextmanager
def recorded() -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """The queries and keys of every call that goes through the attention interface of transformers."""
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((module, query.detach(), key.detach()))
        groups = query.shape[1] // key.shape[1]
        weights = torch.softmax(query @ key.repeat_interleave(groups, 1).mT, dim=-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(_WATCHED, watch)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_WATCHED, sdpa_mask)
    yield seen


def queries_and_keys(model: PreTrainedModel, inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """By name of the attention module: W_q^T [width, heads, dim] and W_k^T [width, key-value heads, dim].

    Each attention module's hidden states are replaced by unit vectors, one sequence of one token for each direction;
    biases are zero and norms of queries and keys the identity. Position 0 leaves rotations without effect.
    """
    model, _ = precise(model, inputs)
    inputs = fitting(model, inputs)
    with recorded() as seen, torch.no_grad():
        model.set_attn_implementation(_WATCHED)
        model(**inputs)
    modules = {id(module): name for name, module in model.named_modules()}
    names = dict.fromkeys(modules[id(module)] for module, _, _ in seen)
    projections: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        module = model.get_submodule(name)
        with ExitStack() as stack:
            _neutralise(module, stack)
            seen = stack.enter_context(recorded())
            stack.callback(module.register_forward_pre_hook(_unit_vectors, with_kwargs=True).remove)
            stack.enter_context(torch.no_grad())
            with suppress(Exception):  # what comes after the module sees another shape
                model(**{key: value[:1, :1] if value.dim() < 4 else value for key, value in inputs.items()})
            for owner, query, key in seen:
                if owner is module and query.shape[0] > 1:
                    projections[name] = query[:, :, 0], key[:, :, 0]
    return projections


def _unit_vectors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def replaced(value: Any) -> Any:
        return torch.eye(value.shape[-1], dtype=value.dtype)[:, None]

    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": replaced(kwargs["hidden_states"])}
    same = [isinstance(value, Tensor) and value.shape == args[0].shape and value.is_floating_point() for value in args]
    return tuple(replaced(value) if one else value for value, one in zip(args, same, strict=True)), kwargs


def _neutralise(module: nn.Module, stack: ExitStack) -> None:
    for name, part in module.named_modules():
        bias = getattr(part, "bias", None)
        if isinstance(bias, nn.Parameter) and hasattr(part, "weight"):  # else it may be a factor of a position
            bias.data.zero_()
        if name and "norm" in name.rsplit(".", 1)[-1].lower():
            stack.callback(part.register_forward_hook(lambda _, args, __: args[0]).remove)


def geometry(query: Tensor, key: Tensor) -> tuple[float, float]:
    """(S, D) of the sum of the heads' forms W_q^T W_k (geometry, def. 3.1 and 3.2), by forming it."""
    product = torch.einsum("ihc,jhc->ij", query, key.repeat_interleave(query.shape[1] // key.shape[1], 1))
    return float(oracle.symmetry(product)), float(oracle.directionality(product))


def scores(model: PreTrainedModel, inputs: Inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """By name of the attention module: scaling * q k^T and the weights, [heads, queries, keys], as the model runs."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def watched(own: Any) -> Any:
        def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            scaling = kwargs.get("scaling")
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            repeated = key[:1].double().repeat_interleave(query.shape[1] // key.shape[1], 1)
            product = query[:1].double() @ repeated.mT * scaling
            unit = torch.eye(key.shape[2], dtype=value.dtype).expand(*key.shape[:2], -1, -1)  # shows the weights
            seen.setdefault(module, (product[0], own(module, query, key, unit, *args, **kwargs)[0][0].transpose(0, 1)))
            return own(module, query, key, value, *args, **kwargs)

        return watch

    files = {sys.modules[type(module).__module__] for module in model.modules()}
    functions = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for file in files:
            if hasattr(file, "eager_attention_forward"):
                patch.setattr(file, "eager_attention_forward", watched(file.eager_attention_forward))
        patch.setitem(functions, "sdpa", watched(functions["sdpa"]))
        model(**fitting(model, inputs))
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: found for module, found in seen.items()}


def attention_calls(model: PreTrainedModel, inputs: Inputs) -> list[str]:
    """Names of the modules that call the attention interface in one forward, in order."""
    model = deepcopy(model)
    with recorded() as seen, torch.no_grad():
        model.set_attn_implementation(_WATCHED)
        model(**fitting(model, inputs))
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module, _, _ in seen]


_FEED_FORWARD = re.compile(r"mlp|ffn|feed_forward|expert|moe|block_sparse|intermediate|fc[12]|dense_h_to|dense_4h")
_BESIDE = re.compile(
    r"norm|gate\.(weight|bias|wg|down_proj|router_mlp)|router|_hc\.|attn|attention|embed|correction|scale|pooler|projector|merger|vision|visual|audio|convolution"
)


def feed_forward_parameters(model: nn.Module) -> set[str]:
    """Names of the matrices of the feed-forward layers: neither attention, norms, nor what routes to experts."""
    return {
        name
        for name, value in model.named_parameters()
        if value.dim() > 1 and _FEED_FORWARD.search(name) and not _BESIDE.search(name)
    }
