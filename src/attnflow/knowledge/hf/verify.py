"""What a conversion shows of itself: the same outputs, and others once what it reads is another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.experts import ExpertEntries
from attnflow.knowledge.layered import LayerReader
from attnflow.models.evaluation import evaluating, seed_all
from attnflow.models.watching import Arguments, Call, Watch

Inputs = Mapping[str, Tensor]
_TOKENS: Final = 6


@torch.no_grad()
def verify(
    model: nn.Module,
    opened: nn.Module,
    base: LayeredKnowledge,
    paths: Sequence[str],
    inputs: Inputs | None = None,
) -> None:
    """Compare a converted copy with its model on a few tokens; both are left as they were.

    Outputs may differ by rounding: half of the digits of what the feed-forward layers write, which is measured by
    giving all values the other sign, or one rounding a layer of the largest output, whichever is more. A layer that
    does not run on these inputs (of an image tower) is compared by itself, on random tokens, where it takes these
    alone. Experts of the copy are given what the routers of the model chose: rounding may turn a choice.

    Args:
        model: the original.
        opened: the copy.
        base: its entries.
        paths: of the modules in which its layers lie.
        inputs: named inputs; default a few token ids.

    Raises:
        UnsupportedArchitecture: other outputs, or outputs that do not depend on the base.
        ValueError: the model does not run on the inputs, or says nothing finite.
    """
    named = _tokens(model) if inputs is None else dict(inputs)
    hint = "pass check= named inputs that it takes, or check=False"
    choices = _Choices(model, opened, [path for path in paths if isinstance(opened.get_submodule(path), ExpertEntries)])
    try:
        with choices.noted():
            before = _outputs(model, named)
    except Exception as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} does not run on {', '.join(named)} of the check ({words}); {hint}"
        ) from error
    if not any(bool(value.isfinite().any()) for value in before):
        raise ValueError(f"{type(model).__name__} says nothing finite on the tokens of the check; {hint}")
    values = [base.entries[base.rows(layer), layout.value] for layer, layout in enumerate(base.layouts)]
    layers = {reader.layer: cast(nn.Module, reader) for reader in opened.modules() if isinstance(reader, LayerReader)}
    ran: set[int] = set()
    with Watch(layers, lambda call: ran.add(call.name)):
        _compare(type(model).__name__, before, partial(choices.repeated, opened, named), values, base)
    for layer, path in enumerate(paths):
        if layer not in ran:
            draw = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, _TOKENS, base.layouts[layer].model_dim, generator=draw).to(base.entries)
            try:
                before = _outputs(model.get_submodule(path), hidden)
            except Exception:  # it takes more than tokens
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
    """Outputs before against those that `run` gives, with the entries as they are and with values of the other sign."""
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
            f"{name} does not read its feed-forward layers: with values of the other sign the outputs "
            "are the same (layers that write zeros look so, too: check=False)"
        )
    if differs > max(rounding**0.5 * moved, base.num_layers * rounding * largest):
        raise UnsupportedArchitecture(
            f"{name} was not converted exactly: outputs differ by {differs:.2g} where values of the "
            f"other sign move them by {moved:.2g}; check=False returns the copy nevertheless"
        )


class _Choices:
    """What each module of experts was given in a pass of the model, for the passes of its copy."""

    def __init__(self, model: nn.Module, opened: nn.Module, paths: Sequence[str]) -> None:
        self._own = {path: model.get_submodule(path) for path in paths}
        self._copies = {path: opened.get_submodule(path) for path in paths}
        self._given: dict[tuple[str, int], tuple[Any, ...]] = {}

    def noted(self) -> Watch:
        """What the model's modules are given inside is noted."""

        def note(call: Call) -> None:
            self._given[call.name, call.number] = tuple(call.arguments().values())

        return Watch(self._own, note)

    def repeated(self, opened: nn.Module, inputs: Inputs) -> list[Tensor]:
        """Outputs of the copy with those choices: indices and weights, or tokens that were multiplied by weights."""

        def give(call: Call) -> Arguments | None:
            noted = self._given.get((call.name, call.number), ())
            if not noted or noted[0].shape != call.first.shape:
                return None
            return (noted if len(noted) == 1 else (call.first, *noted[1:])), {}

        with Watch(self._copies, give):
            return _outputs(opened, inputs)


def _outputs(model: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> list[Tensor]:
    with evaluating(model):
        seed_all(0)
        result = cast(object, model(inputs) if isinstance(inputs, Tensor) else model(**inputs))
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
