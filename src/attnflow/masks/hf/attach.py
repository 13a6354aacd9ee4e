"""`attach`: run a transformers model under a mask of ours, and undo it exactly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from attnflow._core.checks import boolean, integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.masks.batches import MaskGrid
from attnflow.masks.hf.attention import BatchAttention, FlexOnCpu, MaskedAttention
from attnflow.masks.hf.forms import GridForms
from attnflow.masks.hf.selfcheck import Check, check_stack
from attnflow.masks.mask import Mask, not_a_mask
from attnflow.models.anatomy.sites import Site, mixers_beside, models_around, one_owner
from attnflow.models.passes.interception import FLEX, Interception, base_implementation, check_implementation, intercept
from attnflow.models.subject import Loaded, Subject

AnyMask = Mask | MaskGrid
OtherMixers = Literal["error", "keep"]

_log: Final = logging.getLogger("attnflow.masks")


class MaskHandle(Handle):
    """The handle of `attach`: `remove()`, or leaving the `with` block, restores the model exactly.

    Attributes:
        model: the model.
        backend: the implementation that computes attention: "sdpa", "eager" or "flex_attention".
        masks: path of each masked attention module -> its mask; empty where the masks come with each batch.
        unchecked: the reason if running the model could not show that only attention mixes positions; otherwise "".
    """

    def __init__(
        self, model: nn.Module, backend: str, masks: Mapping[str, AnyMask], interception: Interception, unchecked: str
    ) -> None:
        super().__init__(model)
        self.backend = backend
        self.masks = dict(masks)
        self.unchecked = unchecked
        self._interception = interception

    def results(self) -> Sequence[AnyMask]:
        """The distinct masks, in order of layers."""
        return tuple(dict.fromkeys(self.masks.values()))

    def _restore(self) -> None:
        changed = self._interception.remove()
        if changed:
            self._active = False
            raise RuntimeError(
                f"the model's attention implementation was set to {changed[0]!r} while a mask was in use, which took "
                "the mask out of force; choose it with attach(..., backend=...)"
            )

    def _summary(self) -> str:
        distinct = ", ".join(dict.fromkeys(map(repr, self.masks.values()))) or "the masks of each batch"
        number = self._interception.num_modules
        modules = f"{number} attention module{'' if number == 1 else 's'}"
        doubt = f"; other mixing of positions was not looked for: {self.unchecked}" if self.unchecked else ""
        return f"{distinct} on {modules} of {self.kind}, computed by {self.backend}{doubt}"


def attach(
    model: nn.Module | Loaded,
    mask: AnyMask | Mapping[str, AnyMask] | Literal["batch"] | None = None,
    *,
    per_layer: Sequence[AnyMask] | Mapping[str, Sequence[AnyMask]] | None = None,
    layers: Sequence[int] | None = None,
    backend: str | None = None,
    crop: bool = False,
    flex_on_cpu: FlexOnCpu = "forward",
    other_mixers: OtherMixers = "error",
) -> MaskHandle:
    """Run a transformers model under your mask, in place of its own, until the handle is removed.

    With "batch", the masks come with each batch: its `attention_mask` is `af.masks.batch([...]).row_intervals()` or
    comes from `af.tasks.Collator(..., masks="intervals")`. In any other call, such as `generate`, the model uses its
    own mask. Masks are then built on the model's device, and one compiled model serves all batches of a shape. A batch
    has one mask for all layers: a task with a mask per layer runs under `attach(model, per_layer=task.masks)`, and the
    collator refuses it.

    Position i of the mask is the i-th token of the sequence. With a key-value cache, tokens count since the cache was
    empty. In a padded batch they count after the row's *leading* pads, so that each row gives the same result as alone.
    Padding (a 2D `attention_mask`) removes keys. Nothing of the model's own mask remains: no causality, no sliding
    window, and no packed sequences read from position ids. A query that may attend to nothing gets attention output 0.

    Call it (in force at once, until `.remove()`) or use it in a `with` statement. A later mask replaces an earlier one
    until it is removed; handles may be removed in any order. A copy of the model stays masked, as a reference model
    should. `twin, own = copy.deepcopy((model, handle))` copies the handle as well; `own.remove()` frees the twin.

    Args:
        model: a model that uses the attention interface of transformers, a part of one that is a model itself
            (`model.get_decoder()`, the language model of a vision model), or a result of `load_model`.
        mask: one mask for all layers (or `per_head([...])`); `batch([...])` with one for each sequence of every batch,
            in order and each for its own length; or "batch" for masks that come with each batch. For an
            encoder-decoder model, a dict with any of "encoder", "decoder" (square) and "cross" (decoder x encoder
            positions); missing parts keep the model's own mask.
        per_layer: in place of `mask`, one mask for each attention layer, in order; for an encoder-decoder model a dict
            of such lists.
        layers: numbers of the attention layers that get `mask`; the others keep the model's own mask.
        backend: "sdpa", "eager" or "flex_attention" (default: the model's own).
        crop: allow sequences so short that allowed keys lie beyond their end. Without it such a sequence is an error;
            shorter sequences that lose no allowed key always run under the leading part of the mask.
        flex_on_cpu: on the CPU, FlexAttention has no backward pass. "forward" runs it and raises where a gradient is
            required; "sdpa" lets SDPA compute everything that lies on the CPU.
        other_mixers: what to do about parts that move information between positions without attention (state-space
            layers, convolutions): refuse the model, or "keep" them unmasked.

    Returns:
        A handle with `.remove()`, `.backend` and `.masks`, which is also a context manager.

    Raises:
        TypeError: a mask has the wrong type; the message names the call that makes a mask of it.
        ValueError: a mask is not square (except "cross"), the number of masks or layers is wrong, or the backend takes
            no masks. While the model runs: a sequence is longer than the mask, the attention mask is 4D, or the cache
            has dropped keys.
        UnsupportedArchitecture: the model does not use the attention interface, mixes positions in other ways, or
            (while it runs) makes its own mask.

    Cost: sdpa and eager hold a dense mask of n * n bytes; flex_attention holds only blocks. The first time, each stack
    runs on 2 x 4 tokens with every position attending to itself; a model that still mixes positions is refused (hooks
    on the model's modules see this run).

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> with af.masks.attach(model, af.masks.block_two_stream(3, 2)) as handle:
    ...     output = model(torch.arange(8)[None], position_ids=torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]]))
    >>> handle.backend, handle.active
    ('sdpa', False)
    """
    subject = Subject.of(model)
    crop = boolean("crop", crop)
    options = ("flex_on_cpu", flex_on_cpu, get_args(FlexOnCpu)), ("other_mixers", other_mixers, get_args(OtherMixers))
    for name, value, choices in options:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    model, sites = subject.model, subject.sites
    by_batch = isinstance(mask, str) and mask == "batch" and per_layer is None
    masks = {} if by_batch else _assign(sites, mask, per_layer, layers)
    if by_batch and layers is not None:
        raise ValueError("layers= goes with a mask; the masks of a batch are for all layers")
    if by_batch and any(site.part for site in sites):
        raise ValueError(
            "the masks of a batch are for a model of one stack, whose attention_mask means one sequence; pass one half "
            "of the encoder-decoder model, such as model.get_decoder()"
        )
    masked = [site for site in sites if by_batch or site.module in masks]
    owners = list({id(site.owner): site.owner for site in masked}.values())
    beside = mixers_beside(model, [site for site in sites if any(site.owner is owner for owner in owners)])
    checks = [_refuse_mixing(model, owner, sites, other_mixers == "keep", beside) for owner in owners]
    unchecked = "; ".join(filter(None, checks))
    origin = f"the implementation of {type(model).__name__}" if backend is None else "backend"
    backend = base_implementation(owners[0].config) if backend is None else backend
    for owner in owners:
        check_implementation(owner, backend, origin, "mask of ours")
    forms = {grid: GridForms.of(grid) for grid in set(masks.values())}  # equal masks share theirs
    if backend != FLEX:
        devices = {parameter.device for site in masked for parameter in site.module.parameters()}
        for form in forms.values():
            form.prepare(devices - {torch.device("meta")})
    interceptors = {
        site.module: BatchAttention(site.name, flex_on_cpu)
        if by_batch
        else MaskedAttention(site.name, forms[masks[site.module]], site.kind == "cross", crop, flex_on_cpu)
        for site in masked
    }
    interception = intercept(
        models_around(masked), interceptors, role="mask", implementation=backend, replaces_mask=not by_batch
    )
    masks_by_name = {site.name: masks[site.module] for site in masked if not by_batch}
    handle = MaskHandle(model, backend, masks_by_name, interception, unchecked)
    _log.info("%s", str(handle))
    return handle


def _refuse_mixing(
    model: nn.Module, owner: PreTrainedModel, sites: Sequence[Site], keep: bool, beside: Sequence[str]
) -> str:
    """Raises if something beside attention mixes positions; returns why no run could check it, else ""."""
    mixers = ", ".join(beside[:4]) + (f" and {len(beside) - 4} more" if len(beside) > 4 else "")
    check = Check() if beside and not keep else check_stack(model, owner, sites)
    if not check.used:
        raise UnsupportedArchitecture(
            f"{type(owner).__name__} calls none of its attention modules when it runs: a mask on them would do nothing"
        )
    if check.moved:
        mixers = (
            "while every position attends to itself alone, another input at one position moves "
            f"{len(check.moved)} others (af.audit.check names the module)"
        )
    if mixers and not keep:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} moves information between positions beside its attention, where no mask rules: "
            f"{mixers}; pass other_mixers='keep' to mask its attention alone"
        )
    return check.unchecked


def _assign(
    sites: Sequence[Site], mask: object, per_layer: object, layers: Sequence[int] | None
) -> dict[nn.Module, AnyMask]:
    if (mask is None) == (per_layer is None):
        raise TypeError(
            'attach takes either one mask or per_layer=[...], one mask for each attention layer; "batch" in place of a '
            "mask takes those of each batch"
        )
    if layers is not None and (per_layer is not None or isinstance(mask, Mapping)):
        raise ValueError("layers= goes with one mask on one stack; per_layer= has a place for each layer")
    value = per_layer if mask is None else mask
    by_part: dict[str, list[Site]] = {}
    for site in sites:
        by_part.setdefault("cross" if site.kind == "cross" else site.part, []).append(site)
    masks: dict[nn.Module, AnyMask] = {}
    for part, chosen in _by_part(sites, value).items():
        here = by_part.get(part, [])
        if not here:
            raise UnsupportedArchitecture(f"the model has no {part or 'self'}-attention on the attention interface")
        here = here if part == "cross" else one_owner(here)
        if layers is not None:
            numbers = [integer("layers", layer, 0, len(here) - 1) for layer in layers]
            if not numbers or len(set(numbers)) < len(numbers):
                raise ValueError(f"layers must name at least one attention layer, each once, got {numbers}")
            here = [here[layer] for layer in numbers]
        values = [chosen] * len(here) if per_layer is None else _by_layer(chosen, here)
        masks |= {site.module: _checked(value, part) for site, value in zip(here, values, strict=True)}
    return masks


def _by_part(sites: Sequence[Site], value: object) -> Mapping[str, object]:
    two = any(site.part for site in sites)
    if not isinstance(value, Mapping):
        if two:
            raise ValueError(
                'an encoder-decoder model takes a dict of masks with any of "encoder", "decoder", "cross", got '
                f"{type(value).__name__}; or pass one half of it, such as model.get_decoder()"
            )
        return {"": value}
    if not two:
        raise ValueError("only an encoder-decoder model takes a dict of masks; pass one mask, or per_layer=[...]")
    parts = cast(Mapping[str, object], value)
    unknown = sorted(set(parts) - {"encoder", "decoder", "cross"})
    if unknown or not parts:
        raise ValueError(f'a dict of masks has keys "encoder", "decoder", "cross", got {unknown or "none"}')
    return parts


def _by_layer(values: object, sites: Sequence[Site]) -> list[object]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"per_layer takes a list of masks, one for each attention layer, got {type(values).__name__}")
    masks = list(cast(Sequence[object], values))
    if len(masks) != len(sites):
        layers = getattr(sites[0].owner.config, "num_hidden_layers", len(sites))
        shared = f" (shared by its {layers} layers: give it one mask)" if layers > len(sites) == 1 else ""
        raise ValueError(f"expected one mask per attention module, {len(sites)}{shared}, got {len(masks)}")
    return masks


def _checked(mask: object, part: str) -> AnyMask:
    if isinstance(mask, list | tuple):  # could mean one for each layer, or for each sequence of a batch
        by_name = f'{{"{part}": [...]}}' if part else "[...]"
        raise TypeError(
            f"expected one Mask, got a {type(mask).__name__}: one mask for each layer is per_layer={by_name}, one for "
            "each sequence of a batch af.masks.batch([...]), one for each head af.masks.per_head([...])"
        )
    if not isinstance(mask, Mask | MaskGrid):
        raise not_a_mask(mask)
    if part != "cross" and mask.num_queries != mask.num_keys:
        raise ValueError(
            f"self-attention needs a square mask, got {mask!r} of shape {mask.num_queries, mask.num_keys}; a cache is "
            "handled by taking the rows of the new tokens from a square mask over all tokens"
        )
    return mask
