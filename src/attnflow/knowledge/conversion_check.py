"""When a feed-forward layer can be written as cross-attention of given widths, and whether a conversion was exact.

The copy must give the model's outputs, and other outputs once all values are negated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.layered import ExpertEntries, LayerReader
from attnflow.models.passes.evaluation import seed_all
from attnflow.models.passes.trial import DoesNotRun, trial
from attnflow.models.passes.watching import Arguments, Call, Watch
from attnflow.models.subject import Subject

_TOKENS: Final = 6


@dataclass(frozen=True)
class Conditions:
    key_rank: int  # rank(W_1), or rank([W_gate | W_up]), which d_k must reach
    entry_rank: int  # rank([W_1^T | W_2]), or rank([W_gate^T | W_up^T | W_2]): coordinates for keys and values
    threshold_rank: int  # further coordinates for thresholds, at most one for each key
    key_dim: int  # the requested d_k
    entry_dim: int  # the requested d_E
    gated: bool  # whether the layer has a gate
    # relative Frobenius error of keys and values at the best entries that leave room for the thresholds
    residual: float

    @property
    def ok(self) -> bool:
        """Whether these weights can be written exactly; if not, other weights of the same function still may."""
        return self.key_rank <= self.key_dim and self.entry_rank + self.threshold_rank <= self.entry_dim

    def __str__(self) -> str:
        if self.ok:
            return (
                f"exact: keys need {self.key_rank} of d_k = {self.key_dim} coordinates, "
                f"entries {self.entry_rank} + {self.threshold_rank} of d_E = {self.entry_dim}"
            )
        more = ["", ", and thresholds need one more coordinate", ", and thresholds need two more"][self.threshold_rank]
        reasons: list[str] = []
        if self.key_rank > self.key_dim:
            keys = "[W_gate | W_up]" if self.gated else "W_1"
            reasons.append(f"{keys} has rank {self.key_rank}, but keys have width d_k = {self.key_dim}")
        if self.entry_rank + self.threshold_rank > self.entry_dim:
            joined = "[W_gate^T | W_up^T | W_2]" if self.gated else "[W_1^T | W_2]"
            width = f"d_E = {self.entry_dim} (residual {self.residual:.2g} at best)"
            reasons.append(f"{joined} has rank {self.entry_rank}{more}, but entries have width {width}")
        return "not exact with these weights: " + "; ".join(reasons)


def conditions(
    keys: Sequence[Float[Tensor, "model_dim entries"]],
    values: Float[Tensor, "entries model_dim"],
    thresholds: Sequence[Float[Tensor, " entries"]],
    key_dim: int,
    entry_dim: int,
) -> Conditions:
    """Check whether the weights of act(h W_1 + b_1) W_2 fit cross-attention of given widths (knowledge, sec. 5).

    `keys` and `values` are [W_1] and W_2; `thresholds` is [b_1], or empty without biases.

    Entry i folds into neuron i, with the same key, threshold and value. B1 is affine in the entry, as "coordinate" and
    "mlp" thresholds can be. This is possible if and only if rank(W_1) <= d_k and rank([W_1^T | W_2]) <= d_E, less a
    coordinate if b_1 needs one: not if it lies in the span of the columns of [W_1^T | W_2] and of the constant. A gated
    layer, our extension with two keys and one query, needs the same of [W_gate | W_up], [W_gate^T | W_up^T | W_2] and
    both thresholds; then `keys` is [W_gate, W_up]. Other weights may compute the same function at lower ranks: a ReLU
    neuron does not change if (w, b, v) become (c w, c b, v / c) with c > 0.
    """
    joined = torch.cat([*(key.T for key in keys), values], dim=1)
    constant = torch.ones_like(joined[:, :1])
    free = torch.cat([joined, constant], dim=1)  # what an affine function of the entries can be without more room
    more = _rank(torch.cat([free, *(bias[:, None] for bias in thresholds)], dim=1)) - _rank(free)
    spectrum = torch.linalg.svdvals(joined.double())
    rest = spectrum[max(entry_dim - more, 0) :]
    residual = float(rest.norm() / spectrum.norm()) if bool(spectrum.any()) else 0.0
    key_rank = _rank(torch.cat([*keys], dim=1))
    return Conditions(key_rank, _rank(joined), more, key_dim, entry_dim, len(keys) == 2, residual)


def _rank(matrix: Tensor) -> int:
    tolerance = max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return int(torch.linalg.matrix_rank(matrix.double(), rtol=tolerance))


@torch.no_grad()
def verify(
    subject: Subject,
    opened: nn.Module,
    base: LayeredKnowledge,
    paths: Sequence[str],
    inputs: Mapping[str, Tensor] | None = None,
) -> None:
    """Compare a converted copy with its model on `inputs`, or on a few tokens or an image; neither model is changed.

    Layers that these inputs do not reach are compared alone, on random tokens. The copy's experts get the model's
    routing, which rounding could otherwise flip.
    """
    model, kind = subject.model, subject.kind
    named = _tokens(subject) if inputs is None else dict(inputs)
    main = getattr(model, "main_input_name", "input_ids")
    hint = f"pass check= named inputs that it takes{'' if main in named else f', such as {main}'}, or check=False"
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
        raise ValueError(f"{kind} does not run on the check's {', '.join(named)} ({error.why}): {hint}") from error
    if not any(bool(value.isfinite().any()) for value in before):
        raise ValueError(f"{kind} gives NaN or infinity on the check's tokens: {hint}")
    values = [base.entries[base.rows(layer), layout.value] for layer, layout in enumerate(base.layouts)]
    layers = {reader.layer: cast(nn.Module, reader) for reader in opened.modules() if isinstance(reader, LayerReader)}
    ran: set[int] = set()
    with Watch(layers, lambda call: ran.add(call.name)):
        _compare(kind, before, repeated, values, base)
    for layer, path in enumerate(paths):
        if layer not in ran:
            draw = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, _TOKENS, base.layouts[layer].model_dim, generator=draw).to(base.entries)
            try:
                before = _outputs(model.get_submodule(path), hidden)
            except DoesNotRun:  # it takes more than tokens
                continue
            run = partial(_outputs, opened.get_submodule(path), hidden)
            _compare(f"{kind}, {path},", before, run, values, base)


def _compare(
    name: str, before: list[Tensor], run: Callable[[], list[Tensor]], values: Sequence[Tensor], base: LayeredKnowledge
) -> None:
    """Compare outputs with those of `run`, which must move when all values are negated.

    They may differ by sqrt(eps) times that move, or by one rounding of the largest output per layer.
    """
    finite = [value.isfinite() for value in before]
    after = run()
    for value in values:
        value.neg_()  # exact, there and back
    try:
        negated = run()
    finally:
        for value in values:
            value.neg_()

    def apart(outputs: list[Tensor], others: list[Tensor]) -> float:
        pairs = zip(outputs, others, finite, strict=True)
        return max(float((a[m] - b[m]).abs().nan_to_num(nan=torch.inf).amax()) for a, b, m in pairs if m.any())

    rounding = max(torch.finfo(value.dtype).eps for value in (*before, base.entries))
    rounding = max(rounding, torch.finfo(torch.float32).eps)  # many models compute parts of themselves in float32
    largest = max(float(value[mask].abs().amax()) for value, mask in zip(before, finite, strict=True) if mask.any())
    moved, differs = apart(negated, after), apart(after, before)
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
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]


def _tokens(subject: Subject) -> dict[str, Tensor]:
    config, side = subject.config, getattr(subject.config, "image_size", None)
    if getattr(subject.model, "main_input_name", "") == "pixel_values" and side:
        draw, frames = torch.Generator().manual_seed(0), getattr(config, "num_frames", None)
        sizes = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
        pixels = torch.rand(1, *([] if frames is None else [frames]), *sizes, generator=draw)
        return {"pixel_values": pixels.to(subject.device, getattr(subject.model, "dtype", None))}
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) else 2 * _TOKENS
    ids = [(size // 2 + 3 * place) % size for place in range(_TOKENS)]
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[-1] = end
    named = {"input_ids": torch.tensor([ids], device=subject.device)}
    if subject.encodes_and_decodes and subject.accepts("decoder_input_ids"):
        named["decoder_input_ids"] = named["input_ids"]
    return named
