"""Random attention calls with every kind of term, and the comparison with the reference in float64.

`check_against_float64(case, run)` is what each implementation is tested with. The tolerance follows from the data:
twice the error of plain attention in the same precision, whose weights and score gradients enter their matrix products
in the type of the inputs, as in every fused kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from attnflow import masks
from attnflow.bias.attention import bias_of, compute, reference, refusal
from attnflow.bias.call import BiasedCall, make_call
from attnflow.bias.config import KINDS as REGISTERED
from attnflow.bias.config import BiasConfig
from attnflow.bias.terms import Additive, Dense, Guidance, Offset, Product, Term, wide
from attnflow.testing import tolerance

TERMS = ("guidance", "product", "additive", "additive with rows", "offset", "dense", "user")
MASKS = ("everything", "causal", "window", "document", "padding", "holes", "heads")
Run = Callable[[BiasedCall], Tensor]
KINDS = {kind: config for kind, config in REGISTERED.items() if config.is_ours()}


def config_of(kind: str, start: bool = False, **options: object) -> BiasConfig:
    """The config of a kind with those of the options that it has; with `start`, its values begin away from zero."""
    names = {field.name for field in fields(KINDS[kind])}
    began = {"init": "kaiming", "gain": 1.0, "std": 0.02} if start else {"gain": 0.0}
    chosen = {"layers": "every_other", "rope": "keep", **began, **options}
    return KINDS[kind](**{name: value for name, value in chosen.items() if name in names})


@dataclass(frozen=True, eq=False)
class Ripple:
    """A user's term, with the least that an implementation may ask for: B = strength * cos(phase_i + phase_j)."""

    strength: Tensor
    phase_of_rows: Tensor
    phase_of_columns: Tensor

    @property
    def groups(self) -> int:
        return self.strength.shape[0]

    def tile(self, rows: slice, columns: slice) -> Tensor:
        phase = wide(self.phase_of_rows)[:, None, rows, None] + wide(self.phase_of_columns)[:, None, None, columns]
        return wide(self.strength)[:, None, None] * torch.cos(phase)

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def with_tensors(self, tensors) -> Ripple:
        return Ripple(*tensors)


@dataclass(frozen=True)
class Case:
    """One call, as sizes and names; `build` makes the same tensors every time.

    `terms` holds (kind, maps) with maps "one", "kv" or "heads"; `mask` is one of MASKS. Queries are the last ones of
    the keys.
    """

    terms: tuple[tuple[str, str], ...] = (("guidance", "one"),)
    mask: str = "causal"
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    queries: int = 37
    keys: int = 37
    hidden: int = 16
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    seed: int = 0

    def build(self) -> BiasedCall:
        """The call in `dtype`, its terms in float32 or float64, as the kinds make them; nothing requires a gradient."""
        draw = _Draw(self)
        query = draw(self.batch, self.num_heads, self.queries, self.head_dim)
        key = draw(self.batch, self.num_kv_heads, self.keys, self.head_dim)
        value = draw(self.batch, self.num_kv_heads, self.keys, self.value_dim or self.head_dim)
        sinks = draw(self.num_heads) if self.sinks else None
        terms = [draw.term(kind, draw.groups(maps)) for kind, maps in self.terms]
        query, key, value = (tensor.to(self.dtype) for tensor in (query, key, value))
        return make_call(query, key, value, terms, draw.mask(), self.scale, self.softcap, sinks, 0.0)

    def __str__(self) -> str:
        parts = ["+".join(f"{kind} {maps}" for kind, maps in self.terms) or "no term", self.mask]
        parts += [f"{self.batch}x{self.num_heads}:{self.num_kv_heads}x{self.queries}:{self.keys}x{self.head_dim}"]
        parts += [str(self.dtype).removeprefix("torch.")]
        return ", ".join(parts + ["softcap"] * (self.softcap is not None) + ["sinks"] * self.sinks)


class _Draw:
    def __init__(self, case: Case) -> None:
        self.case, self.generator = case, torch.Generator().manual_seed(case.seed)

    def __call__(self, *shape: int) -> Tensor:
        double = torch.float64 if self.case.dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=self.generator).to(self.case.device, double)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.case.device)

    def groups(self, maps: str) -> int:
        return {"one": 1, "kv": self.case.num_kv_heads, "heads": self.case.num_heads}[maps]

    def term(self, kind: str, groups: int) -> Term:
        case = self.case
        batch, queries, keys, hidden = case.batch, case.queries, case.keys, case.hidden
        if kind == "guidance":
            rows, columns = self(batch, groups, queries, hidden), self(batch, groups, keys, hidden)
            scale, shift, weight = 1 + 0.3 * self(groups, hidden), self(groups, hidden), self(groups, hidden)
            return Guidance(rows, columns, scale, shift, weight / hidden**0.5, self(groups))
        if kind == "product":
            return Product(self(batch, groups, queries, 5), self(batch, groups, keys, 5))
        if kind == "additive":
            return Additive(self(batch, groups, keys))
        if kind == "additive with rows":
            return Additive(self(batch, groups, keys), self(batch, groups, queries))
        if kind == "offset":
            where = torch.arange(keys, device=case.device)
            shifted = where[None, keys - queries :] + self.integers(3, batch, 1)
            return Offset(self(groups, 6), self.integers(6, 2 * keys // 3), shifted, where[None], keys // 3)
        if kind == "dense":
            return Dense(self(1 if groups == 1 else batch, groups, queries, keys))
        assert kind == "user", kind
        return Ripple(self(groups), self(batch, queries), self(batch, keys))

    def mask(self) -> masks.Mask | Tensor | None:
        case = self.case
        rows = slice(case.keys - case.queries, case.keys)
        if case.mask == "everything":
            return None
        if case.mask == "causal":
            return masks.causal(case.keys)[rows, :]
        if case.mask == "window":
            return masks.sliding_window(case.keys, max(1, case.keys // 4))[rows, :]
        if case.mask == "document":
            third = case.keys // 3
            return masks.document([n for n in (third, 1, case.keys - third - 1) if n > 0])[rows, :]
        if case.mask == "padding":  # on the left, as in a batch for generation: the first rows see nothing
            hidden = self.integers(1 + case.keys // 3, case.batch, 1, 1, 1)
            where = torch.arange(case.keys, device=case.device)
            return (where[None, None, rows, None] >= where) & (where >= hidden)
        heads = case.num_heads if case.mask == "heads" else 1
        allow = self.integers(3, case.batch, heads, case.queries, case.keys) > 0
        allow[:, :, :: max(2, case.queries // 3)] = False  # rows with nothing allowed
        allow[..., case.keys // 2] = False  # a key that nobody sees
        return allow


@dataclass(frozen=True)
class Outcome:
    """Output and gradients of one run, by name: "output", "query", "key", "value", "sinks", "terms[0].rows"..."""

    found: dict[str, Tensor]

    def scale(self, name: str) -> float:
        """The largest number beside `name`: of the output, of a term's gradients, or of the other inputs'."""
        prefix = name.split(".", maxsplit=1)[0]
        return max(float(t.abs().max()) for key, t in self.found.items() if key.startswith(prefix) and t.numel())


def cast(
    call: BiasedCall, dtype: torch.dtype | None = None, requires_grad: bool = True
) -> tuple[BiasedCall, dict[str, Tensor]]:
    """A copy of a call on fresh leaves, all floating tensors in `dtype` if it is given, and those leaves by name."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        leaves[name] = tensor.detach().to(dtype or tensor.dtype, copy=True).requires_grad_(requires_grad)
        return leaves[name]

    copied = {name: leaf(name, getattr(call, name)) for name in ("query", "key", "value")}
    sinks = None if call.sinks is None else leaf("sinks", call.sinks)
    terms = tuple(
        term.with_tensors([leaf(f"terms[{index}].{name}", tensor) for name, tensor in term.tensors().items()])
        for index, term in enumerate(call.terms)
    )
    return replace(call, terms=terms, sinks=sinks, **copied), leaves


def outcome(call: BiasedCall, run: Run, dtype: torch.dtype | None = None) -> Outcome:
    """Output and all gradients of a run on copies of the call's tensors, for a fixed random upstream gradient."""
    copy, leaves = cast(call, dtype)
    output = run(copy)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(output.shape, generator=generator).to(call.value.dtype).to(output.device, output.dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream)
    return Outcome({"output": output.detach()} | dict(zip(leaves, gradients, strict=True)))


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return score.view_as(score)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None


class _FromOutput(torch.autograd.Function):
    """weights @ value; the gradient of the scores takes sum_j P dP from the rounded output, as fused kernels do."""

    @staticmethod
    def forward(ctx, score: Tensor, weights: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
        output = (weights.to(dtype).to(weights.dtype) @ value).to(dtype)
        ctx.save_for_backward(weights, value, output)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, value, output = ctx.saved_tensors
        along = (wide(gradient) * wide(output)).sum(dim=-1, keepdim=True)
        to_value = weights.to(output.dtype).to(weights.dtype).mT @ wide(gradient)
        return weights * (wide(gradient) @ value.mT - along), None, to_value, None


def plain(call: BiasedCall, rounded_bias: bool = False) -> Tensor:
    """Attention in the precision of the inputs: weights and score gradients rounded, sums in float32.

    With `rounded_bias`, the bias, its gradient and the output that the backward pass reads are rounded, too.
    """
    dtype = call.query.dtype
    key, value = (t.repeat_interleave(call.heads_per_kv, dim=1) for t in (call.key, call.value))
    score = wide(call.query) @ wide(key).mT * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    score = _RoundGradient.apply(score, dtype)
    everything = slice(0, call.query.shape[2]), slice(0, call.key.shape[2])
    bias = bias_of(call.terms, call.num_heads, *everything)
    if bias is not None:
        score = _RoundGradient.apply(score + bias.to(dtype), dtype) if rounded_bias else score + bias
    allowed = call.allow.dense()
    if allowed is not None:
        empty = ~allowed.any(dim=-1, keepdim=True)
        score = score.masked_fill(~(allowed | empty), -torch.inf)
    if call.sinks is None:
        weights = score.softmax(dim=-1)
    else:
        sinks = wide(call.sinks)[None, :, None, None].expand(*score.shape[:3], 1)
        weights = torch.cat([score, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    if allowed is not None:
        weights = weights.masked_fill(empty, 0.0)
    if rounded_bias and call.sinks is None:
        return _FromOutput.apply(score, weights.detach(), wide(value), dtype)
    return (weights.to(dtype).to(weights.dtype) @ wide(value)).to(dtype)


NUDGED = 8  # calls: the largest error of few numbers needs several draws to be known within a factor


def nudged(call: BiasedCall, seed: int, dtype: torch.dtype = torch.float32) -> BiasedCall:
    """The call with each number of single precision moved by up to one rounding: luck in one result is not accuracy.

    The rounding is that of `dtype`: half precision, for an implementation that may round the bias.

    The largest error of a handful of numbers varies from one order of summation to another by more than a factor of
    two. A method that is exact for inputs within their rounding is as good as plain attention.
    """
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        noise = torch.rand(tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + torch.finfo(dtype).eps * noise)

    terms = tuple(term.with_tensors([move(t) for t in term.tensors().values()]) for term in call.terms)
    return replace(call, query=move(call.query), key=move(call.key), value=move(call.value), terms=terms)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def check_against_float64(case: Case | BiasedCall, run: str | Run, *, rounded_bias: bool = False) -> Outcome:
    """Assert that output and all gradients of an implementation are as close to float64 as plain attention is.

    Args:
        case: what to compute; the float64 copy has the same numbers, converted from the low precision.
        run: the name of an implementation, which must not refuse the call, or a function of the call.
        rounded_bias: whether the implementation may hold the bias, its gradient for each head and its output for the
            backward pass in the type of the query.

    Returns:
        What the implementation gave.
    """
    call = case.build() if isinstance(case, Case) else case
    if isinstance(run, str):
        assert (reason := refusal(call, run)) is None, reason
        with poisoned():
            actual = outcome(call, lambda c: compute(c, run)[0])
    else:
        with poisoned():
            actual = outcome(call, run)
    exact = outcome(call, lambda c: reference(c)[0], torch.float64)
    rounding = call.query.dtype if rounded_bias else torch.float32
    others = (nudged(call, seed, rounding) for seed in range(NUDGED))
    lows = [outcome(other, lambda c: plain(c, rounded_bias)) for other in (call, *others)]
    assert actual.found["output"].dtype == call.value.dtype
    for name, true in exact.found.items():
        found = actual.found[name]
        assert found.shape == true.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(true.shape)}"
        limit = max(tolerance(low.found[name], true) for low in lows)
        dtype = lows[0].found[name].dtype
        if dtype == torch.float64:  # nothing is more exact: as many roundings as a sum has terms
            limit += 2 * sum(call.query.shape[2:] + call.key.shape[2:]) * 2.0**-52 * exact.scale(name)
        if name.startswith("terms") and not {call.query.shape[2], call.key.shape[2]} & set(true.shape):
            # A sum over all pairs, in which most may cancel (all, in what softmax cannot see): it is rounded like its
            # summands, which are as large as those of the term's largest gradient.
            limit += 2 * torch.finfo(rounding if rounded_bias else dtype).eps * exact.scale(name)
        error = float((found.double() - true).abs().max()) if true.numel() else 0.0
        assert error <= limit, f"{name}: error {error:.3g} against float64, tolerance {limit:.3g} ({case})"
    return actual
