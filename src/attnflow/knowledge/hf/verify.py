"""What a conversion shows of itself: the same outputs, and others once what it reads is another."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.models.evaluation import evaluating, seed_all

Inputs = Mapping[str, Tensor]
_TOKENS: Final = 6


@torch.no_grad()
def verify(model: nn.Module, opened: nn.Module, base: LayeredKnowledge, inputs: Inputs | None = None) -> None:
    """Compare a converted copy with its model on a few tokens; both are left as they were.

    Outputs may differ by rounding: half of the digits of what the feed-forward layers write, which is measured by
    giving all values the other sign, or one rounding a layer of the largest output, whichever is more.

    Args:
        model: the original.
        opened: the copy.
        base: its entries.
        inputs: named inputs; default a few token ids.

    Raises:
        UnsupportedArchitecture: other outputs, or outputs that do not depend on the base.
        ValueError: the model does not run on the inputs, or says nothing finite.
    """
    named = _tokens(model) if inputs is None else dict(inputs)
    hint = "pass check= named inputs that it takes, or check=False"
    try:
        before = _outputs(model, named)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} does not run on {', '.join(named)} of the check ({words}); {hint}"
        ) from error
    finite = [value.isfinite() for value in before]
    if not any(bool(mask.any()) for mask in finite):
        raise ValueError(f"{type(model).__name__} says nothing finite on the tokens of the check; {hint}")
    after = _outputs(opened, named)
    values = base.entries[:, base.layout.value]
    values.neg_()  # exact, there and back
    try:
        other = _outputs(opened, named)
    finally:
        values.neg_()

    def apart(ones: list[Tensor], others: list[Tensor]) -> float:
        pairs = zip(ones, others, finite, strict=True)
        return max(float((a[m] - b[m]).abs().nan_to_num(nan=torch.inf).amax()) for a, b, m in pairs if m.any())

    rounding = max(torch.finfo(value.dtype).eps for value in (*before, base.entries))
    rounding = max(rounding, torch.finfo(torch.float32).eps)  # many models compute parts of themselves in float32
    largest = max(float(value[mask].abs().amax()) for value, mask in zip(before, finite, strict=True) if mask.any())
    moved, differs = apart(other, after), apart(after, before)
    if moved == 0:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} does not read its feed-forward layers: with values of the other sign the outputs "
            "are the same (layers that write zeros look so, too: check=False)"
        )
    if differs > max(rounding**0.5 * moved, base.num_layers * rounding * largest):
        raise UnsupportedArchitecture(
            f"{type(model).__name__} was not converted exactly: outputs differ by {differs:.2g} where values of the "
            f"other sign move them by {moved:.2g}; check=False returns the copy nevertheless"
        )


def _outputs(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with evaluating(model):
        seed_all(0)
        result = cast(object, model(**inputs))
    return list(_tensors(result))


def _tensors(result: object) -> Iterator[Tensor]:
    """The floating-point tensors at the top of what a model returns."""
    if isinstance(result, Tensor):
        result = (result,)
    elif isinstance(result, Mapping):
        result = tuple(cast("Mapping[str, object]", result).values())
    for value in cast("tuple[object, ...]", result):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value


def _tokens(model: nn.Module) -> dict[str, Tensor]:
    """A few ordinary token ids, and the end of a text where the config names one; for both halves of two stacks."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) else 2 * _TOKENS
    ids = [(size // 2 + 3 * place) % size for place in range(_TOKENS)]
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[-1] = end
    device = next(model.parameters()).device
    named = {"input_ids": torch.tensor([ids], device=device)}
    accepted = inspect.signature(model.forward).parameters
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        named["decoder_input_ids"] = named["input_ids"]
    return named
