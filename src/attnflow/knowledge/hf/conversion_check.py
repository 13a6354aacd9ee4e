"""Checks a conversion: the copy must give the model's outputs, and other outputs once all values are negated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.layered import ExpertEntries, LayerReader
from attnflow.models.evaluation import seed_all
from attnflow.models.loaded import accepts
from attnflow.models.offload import device_of
from attnflow.models.trial import DoesNotRun, trial
from attnflow.models.watching import Arguments, Call, Watch

_TOKENS: Final = 6


@torch.no_grad()
def verify(
    model: nn.Module,
    opened: nn.Module,
    base: LayeredKnowledge,
    paths: Sequence[str],
    inputs: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare a converted copy with its model on `inputs`, or on a few tokens or an image; neither model is changed.

    The tolerance is the larger of two: sqrt(eps) times the change from negating all values, or one rounding of the
    largest output per layer. Layers that these inputs do not reach are compared alone, on random tokens. The copy's
    experts get the model's routing, which rounding could otherwise flip.
    """
    named = _tokens(model) if inputs is None else dict(inputs)
    main = getattr(model, "main_input_name", "input_ids")
    such = "" if main in named else f", such as {main}"
    hint = f"pass check= named inputs that it takes{such}, or check=False"
    experts = {path: reader for path in paths if isinstance(reader := opened.get_submodule(path), ExpertEntries)}
    given: dict[tuple[str, int], tuple[Any, ...]] = {}

    def note(call: Call) -> None:
        given[call.name, call.number] = tuple(call.arguments().values())

    def give(call: Call) -> Arguments | None:
        noted = given.get((call.name, call.number), ())
        if not noted or noted[0].shape != call.first.shape:
            return None
        return (noted if len(noted) == 1 else (call.first, *noted[1:])), {}

    def repeated() -> list[Tensor]:
        with Watch(experts, give):
            return _outputs(opened, named)

    try:
        with Watch({path: model.get_submodule(path) for path in experts}, note):
            before = _outputs(model, named)
    except DoesNotRun as error:
        raise ValueError(
            f"{type(model).__name__} does not run on the check's {', '.join(named)} ({error.why}): {hint}"
        ) from error
    if not any(bool(value.isfinite().any()) for value in before):
        raise ValueError(f"{type(model).__name__} gives NaN or infinity on the check's tokens: {hint}")
    values = [base.entries[base.rows(layer), layout.value] for layer, layout in enumerate(base.layouts)]
    layers = {reader.layer: cast(nn.Module, reader) for reader in opened.modules() if isinstance(reader, LayerReader)}
    ran: set[int] = set()
    with Watch(layers, lambda call: ran.add(call.name)):
        _compare(type(model).__name__, before, repeated, values, base)
    for layer, path in enumerate(paths):
        if layer not in ran:
            draw = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, _TOKENS, base.layouts[layer].model_dim, generator=draw).to(base.entries)
            try:
                before = _outputs(model.get_submodule(path), hidden)
            except DoesNotRun:  # it takes more than tokens
                continue
            run = partial(_outputs, opened.get_submodule(path), hidden)
            _compare(f"{type(model).__name__}, {path},", before, run, values, base)


def _compare(
    name: str,
    before: list[Tensor],
    run: Callable[[], list[Tensor]],
    values: Sequence[Tensor],
    base: LayeredKnowledge,
) -> None:
    """Compare outputs with those of `run`; `run` must also change them once all values are negated."""
    finite = [value.isfinite() for value in before]
    after = run()
    for one in values:
        one.neg_()  # exact, there and back
    try:
        other = run()
    finally:
        for one in values:
            one.neg_()

    def apart(ones: list[Tensor], others: list[Tensor]) -> float:
        pairs = zip(ones, others, finite, strict=True)
        return max(float((a[m] - b[m]).abs().nan_to_num(nan=torch.inf).amax()) for a, b, m in pairs if m.any())

    rounding = max(torch.finfo(value.dtype).eps for value in (*before, base.entries))
    rounding = max(rounding, torch.finfo(torch.float32).eps)  # many models compute parts of themselves in float32
    largest = max(float(value[mask].abs().amax()) for value, mask in zip(before, finite, strict=True) if mask.any())
    moved, differs = apart(other, after), apart(after, before)
    if moved == 0:
        raise UnsupportedArchitecture(
            f"{name} does not use its feed-forward layers: negating their values does not change the outputs "
            "(layers that write zeros look the same; pass check=False for them)"
        )
    if differs > max(rounding**0.5 * moved, base.num_layers * rounding * largest):
        raise UnsupportedArchitecture(
            f"{name} was not converted exactly: outputs differ by {differs:.2g}, and negating the values moves "
            f"them by {moved:.2g}. Pass check=False to get the copy anyway"
        )


def _outputs(model: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> list[Tensor]:
    with trial(model):
        seed_all(0)
        result: Any = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    values = (result,) if isinstance(result, Tensor) else result.values() if isinstance(result, Mapping) else result
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point() and one.numel()]


def _tokens(model: nn.Module) -> dict[str, Tensor]:
    """Choose ordinary token ids that end with the end-of-text token, for encoder and decoder; or noise as an image."""
    config: Any = getattr(model, "config", None)
    side = getattr(config, "image_size", None)
    if getattr(model, "main_input_name", "") == "pixel_values" and side:
        draw, frames = torch.Generator().manual_seed(0), getattr(config, "num_frames", None)
        sizes = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
        pixels = torch.rand(1, *([] if frames is None else [frames]), *sizes, generator=draw)
        return {"pixel_values": pixels.to(device_of(model), getattr(model, "dtype", None))}
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) else 2 * _TOKENS
    ids = [(size // 2 + 3 * place) % size for place in range(_TOKENS)]
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[-1] = end
    device = device_of(model)
    named = {"input_ids": torch.tensor([ids], device=device)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and accepts(model, "decoder_input_ids"):
        named["decoder_input_ids"] = named["input_ids"]
    return named
