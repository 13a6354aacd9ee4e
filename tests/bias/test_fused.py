"""Fused attention with a bias as columns: values and gradients, masks, extremes, memory, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attnflow import masks
from attnflow.bias import attention, fused
from attnflow.bias.attention import choose, refusal
from attnflow.bias.call import Allow
from attnflow.bias.columns import widen
from attnflow.bias.fused import OPERATORS, Part
from attnflow.bias.terms import Factors
from tests.bias.cases import MASKS, Additive, Case, Product, Ripple, cast, compute, outcome, poisoned, reference
from tests.memory import Largest

# Of the norm of the output and of every gradient, against float64; 16-bit operators round weights and gradients.
LIMITS = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
KEY = (("additive", "kv"),)
BOTH = (("additive", "kv"), ("product", "one"))
KINDS = ("additive", "additive with rows", "product")


def check(case, run=None, sinks_limit=4):
    """Output and all gradients of fused attention against the reference in float64; returns them."""
    call = case.build() if isinstance(case, Case) else case
    assert refusal(call, "fused") is None
    with poisoned():
        found = outcome(call, run or (lambda c: compute(c, "fused")[0])).found
    exact = outcome(call, lambda c: reference(c)[0], torch.float64).found
    assert found["output"].dtype == call.value.dtype
    for name, true in exact.items():
        assert found[name].isfinite().all(), name
        limit = LIMITS[call.query.dtype] * (sinks_limit if name == "sinks" else 1)
        error = float((found[name].double() - true).norm())
        assert error <= limit * max(float(true.norm()), 0.1), f"{name}: {error:.2g} of {float(true.norm()):.2g}"
    return found


def with_mask(call, mask):
    return replace(call, allow=Allow.of(mask, call.query.shape[2], call.key.shape[2], call.query.device))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", ["causal", "window", "document", "holes"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_several_blocks_of_queries(dtype, mask, sinks):
    case = Case(BOTH, mask, 2, 6, 2, 32, queries=300, keys=300, sinks=sinks, dtype=dtype)
    check(case)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_and_map(mask, kind, maps, sinks):
    check(Case(((kind, maps),), mask, dtype=torch.float64, queries=150, keys=150, num_heads=6, sinks=sinks))


@settings(deadline=None)
@given(
    terms=st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(("one", "kv", "heads"))), max_size=2),
    mask=st.sampled_from(MASKS),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    ratio=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    value_dim=st.none() | st.integers(1, 50),
    keys=st.integers(1, 280),
    share=st.floats(0, 1),
    scale=st.none() | st.floats(-1.5, 1.5).filter(lambda scale: abs(scale) > 1e-2),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(terms, mask, batch, kv_heads, ratio, share, keys, **options):
    """Also one query, fewer queries than keys, heads of any width, and no term at all."""
    queries = max(1, round(share * keys))
    heads = {"num_heads": kv_heads * ratio, "num_kv_heads": kv_heads}
    case = Case(tuple(terms), mask, batch, **heads, queries=queries, keys=keys, dtype=torch.float64, **options)
    call = case.build()
    if isinstance(fused.count(call), int) and fused.count(call) > 16:
        assert "columns, but beyond" in refusal(call, "fused")
    else:
        check(call)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_large_bias_of_a_key_is_exact(dtype):
    """In bfloat16 one column for a bias of -153 would be off by 13 % after the softmax."""
    call = Case(KEY, "causal", queries=200, keys=200, dtype=dtype).build()
    keys = -153.0 - torch.rand(2, 2, 200).to(call.terms[0].columns.dtype) * 4
    call = replace(call, terms=(Additive(keys),))
    found = outcome(call, lambda c: compute(c, "fused")[0]).found
    for name, true in outcome(call, lambda c: reference(c)[0], torch.float64).found.items():
        # A score of float32 ends in steps of 2^-16 there, whatever computes it.
        limit = LIMITS[dtype] + 2.0**-15 * (dtype != torch.float64)
        assert (found[name].double() - true).norm() <= limit * true.norm(), name


@pytest.mark.parametrize("size", [1e6, 1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_extreme_bias_of_a_key_gives_no_nan(dtype, size):
    call = Case(KEY, "causal", queries=150, keys=150, dtype=dtype, sinks=True).build()
    keys = torch.randn(2, 2, 150)
    keys[:, :, ::7] = size
    copy, leaves = cast(replace(call, terms=(Additive(keys),)))
    output = compute(copy, "fused")[0]
    assert output.isfinite().all()
    if size < 0:  # these keys are out of the way, and the others as if they were not there
        torch.testing.assert_close(output, reference(copy)[0], atol=16 * torch.finfo(dtype).eps, rtol=0)
    gradients = torch.autograd.grad(output.float().square().sum(), list(leaves.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero_and_give_zero_gradients(sinks, dtype):
    call = Case(BOTH, "holes", queries=300, keys=300, sinks=sinks, dtype=dtype).build()
    allow = call.allow.dense().clone()
    allow[:, :, 100:280] = False  # also a whole block
    call = with_mask(call, allow)
    found = outcome(call, lambda c: compute(c, "fused")[0]).found
    empty = ~allow.any(dim=-1)[:, 0]
    for name in ("output", "query"):
        assert (found[name].transpose(1, 2)[empty] == 0).all()
    assert (found["terms[1].rows"][:, 0][empty] == 0).all()
    unseen = ~allow.any(dim=2)[:, 0]
    for name in ("key", "value"):
        assert (found[name].transpose(1, 2)[unseen] == 0).all()
    nothing = with_mask(call, torch.zeros(300, 300, dtype=torch.bool))
    assert all((tensor == 0).all() for tensor in outcome(nothing, lambda c: compute(c, "fused")[0]).found.values())


def test_inputs_of_any_strides():
    call, _ = cast(Case(BOTH, "causal", queries=200, keys=200, head_dim=20, dtype=torch.float64).build())

    def apart(tensor):  # every other number of a larger tensor, with the axes the other way round
        larger = torch.full((*tensor.shape[::-1], 2), torch.nan, dtype=tensor.dtype)
        larger[..., 0] = tensor.detach().permute(*range(tensor.ndim)[::-1])
        return larger[..., 0].permute(*range(tensor.ndim)[::-1])

    strided = call.with_tensors([apart(tensor) for tensor in call.tensors()])
    assert not strided.query.is_contiguous()
    check(strided)
    upstream = torch.randn(2, 200, 4, 20, dtype=torch.float64).transpose(1, 2)
    found, true = (torch.autograd.grad(compute(call, b)[0], call.query, upstream)[0] for b in ("fused", "reference"))
    torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


def test_a_causal_mask_is_the_flag_and_a_window_is_narrow_blocks():
    n = 500
    everything = slice(0, n), slice(0, n)
    parts = OPERATORS["cpu"].parts
    causal = torch.ones(n, n).tril().bool()
    for mask in (masks.causal(n), causal, causal[None, None].expand(2, -1, -1, -1)):
        assert parts(Allow.of(mask, n, n, torch.device("cpu"))) == [Part(*everything, causal=True)]
    known = Allow(lambda rows: pytest.fail("the mask was looked at"), n, n, causal=True)
    assert parts(known) == [Part(*everything, causal=True)]
    for mask in (None, torch.ones(n, n) > 0):
        assert parts(Allow.of(mask, n, n, torch.device("cpu"))) == [Part(*everything)]
    window = parts(Allow.of(masks.sliding_window(n, 20), n, n, torch.device("cpu")))
    assert [(p.rows.start, p.columns.start, p.columns.stop) for p in window] == [
        (0, 0, 128), (128, 109, 256), (256, 237, 384), (384, 365, 500)
    ]  # fmt: skip
    oblong = Allow.of(causal[:, :400], n, 400, torch.device("cpu"))
    assert not any(part.causal for part in parts(oblong))


def test_memory_grows_with_the_tokens():
    """A training step: no tensor is larger than 128 rows of pairs, and under a causal mask there is no table at all."""
    n, heads = 2048, 2
    for mask, most in ((masks.causal(n), heads * n * 24), (masks.attention_sink(n, 4, 900), 128 * n)):
        q, k, v = (torch.randn(1, heads, n, 16, requires_grad=True) for _ in range(3))
        bias = Additive(torch.randn(1, heads, n, requires_grad=True))
        with Largest() as largest:
            attention(q, k, v, [bias], mask, backend="fused")[0].sum().backward()
        assert largest.numel <= most


def test_second_derivatives_are_refused():
    call, leaves = cast(Case(KEY).build())
    (first,) = torch.autograd.grad(compute(call, "fused")[0].square().sum(), leaves["query"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mask", ["causal", "holes"])
def test_gradient_checkpointing_gives_the_same_gradients(mask, reentrant):
    call, leaves = cast(Case(BOTH, mask, queries=200, keys=200, sinks=True).build())
    names = list(leaves)

    def layer(*tensors):
        return compute(call.with_tensors(tensors), "fused")[0]

    found = []
    for run in (layer, lambda *tensors: checkpoint(layer, *tensors, use_reentrant=reentrant)):
        run(*call.tensors()).square().sum().backward()
        found.append([leaves[name].grad.clone() for name in names])
        for name in names:
            leaves[name].grad = None
    assert all(map(torch.equal, *found))


def test_what_is_kept_for_the_backward_pass_goes_by_the_hooks():
    """So that offloading and checkpointing find all of it: widened inputs, output, and two numbers a query."""
    packed = []
    call, _ = cast(Case(KEY, queries=200, keys=200, sinks=True).build())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        compute(call, "fused")
    wide = [(2, heads, 200, 40) for heads in (4, 2, 2, 4)]
    assert [tuple(t.shape) for t in packed if t.ndim == 4][-4:] == wide
    assert sum(t.numel() for t in packed) < 2 * sum(t.numel() for t in call.tensors()) + 4 * 2 * 4 * 200


def test_the_same_numbers_every_time_and_under_autocast():
    case = Case(BOTH, queries=150, keys=150, mask="holes")
    expected, again = (outcome(case.build(), fused.run).found for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        lowered = outcome(case.build(), fused.run).found
    for found in (again, lowered):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_gradients_that_nobody_asks_for():
    call, leaves = cast(Case(BOTH, queries=200, keys=200, sinks=True).build())
    plain = replace(call, terms=cast(call, requires_grad=False)[0].terms)
    found = torch.autograd.grad(compute(plain, "fused")[0].sum(), [leaves["query"], leaves["sinks"]])
    exact = torch.autograd.grad(reference(plain)[0].sum(), [leaves["query"], leaves["sinks"]])
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not compute(call, "fused")[0].requires_grad


def call_of(**changes):
    return replace(Case(KEY, "causal", queries=200, keys=200).build(), **changes)


REFUSED = {
    "drops no weights, but dropout is 0.1": lambda: call_of(dropout=0.1),
    "a soft cap would bend the bias": lambda: call_of(softcap=20.0),
    "the scale is 0": lambda: call_of(scale=0.0),
    "at least one query, key and channel": lambda: Case(KEY, "everything", queries=0).build(),
    "share one of float32, float64, bfloat16, float16 on cpu": lambda: call_of(value=torch.zeros(2, 2, 200, 32).half()),
    "Ripple is no short inner product": lambda: Case((("user", "one"),)).build(),
    "Guidance is no short inner product": lambda: Case().build(),
    "3 maps do not fit 2 key heads": lambda: call_of(
        query=torch.zeros(2, 6, 200, 32), terms=(Additive(torch.zeros(2, 3, 200)),)
    ),
    "takes 20 columns, but beyond 16 on heads of 32": lambda: call_of(
        terms=(Product(torch.zeros(1, 1, 200, 20), torch.zeros(1, 1, 200, 20)),)
    ),
    "no fused attention takes a bias on meta": lambda: call_of().with_tensors(
        [t.to("meta") for t in call_of().tensors()]
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_refuses_goes_to_tiles(reason):
    call = REFUSED[reason]()
    assert reason in refusal(call, "fused")
    with pytest.raises(ValueError, match=f"backend='fused' cannot compute this call: .*{reason}"):
        compute(call, "fused")
    many = call.query.shape[2] == 200
    assert choose(call, "auto") == ("tiled" if many else "reference")


def test_auto_takes_the_reference_then_fused_attention_then_tiles(caplog):
    few, many, pairs, decoding = (
        Case(KEY).build(),
        Case(KEY, queries=200, keys=200).build(),
        Case((("guidance", "one"),), queries=200, keys=200).build(),
        Case(KEY, queries=1, keys=20_000, batch=1).build(),
    )
    with caplog.at_level("INFO", logger="attnflow.bias"):
        assert [choose(call, "auto") for call in (few, many, pairs, decoding)] == [
            "reference",
            "fused",
            "tiled",
            "tiled",
        ]
    messages = [record.getMessage() for record in caplog.records]
    assert sum("'fused'" in message for message in messages) <= 1
    assert all("Guidance is no short" in message for message in messages if "'tiled: " in message)
    assert choose(many, "auto", need_weights=True) == "reference"


class Own(Ripple):
    """A user's term that says how it is an inner product: cos(x + y) = cos x cos y - sin x sin y."""

    def factors(self):
        rows, columns = (phase[:, None, :, None] for phase in (self.phase_of_rows, self.phase_of_columns))
        left = torch.cat([rows.cos(), -rows.sin()], dim=-1) * self.strength[:, None, None]
        return Factors(left, torch.cat([columns.cos(), columns.sin()], dim=-1).expand(-1, self.groups, -1, -1))

    def with_tensors(self, tensors):
        return Own(*tensors)


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
def test_a_users_term_with_factors(maps):
    call = Case((("user", maps),), "causal", queries=200, keys=200, dtype=torch.float64).build()
    check(replace(call, terms=(Own(*call.terms[0].tensors().values()),)))


def test_columns_are_the_definition():
    """scale * q . k + left . right, by hand, with two maps for each key head."""
    call = Case((("product", "heads"),), "everything", batch=1, queries=3, keys=4, dtype=torch.float64).build()
    wider, term = widen(call), call.terms[0]
    assert wider.query.shape[3] == wider.key.shape[3] == wider.value.shape[3] == 48
    for head in range(4):
        score = call.scale * wider.query[0, head] @ wider.key[0, head // 2].T
        plain = call.scale * call.query[0, head] @ call.key[0, head // 2].T
        torch.testing.assert_close(score, plain + term.rows[0, head] @ term.columns[0, head].T)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sinks", [False, True])
def test_on_a_gpu(mask, sinks, dtype):
    case = Case(BOTH, mask, queries=300, keys=300, head_dim=64, sinks=sinks, dtype=dtype, device="cuda")
    call = case.build()
    if refusal(call, "fused") is None:
        check(call)
    else:
        assert mask in ("padding", "holes", "heads") or dtype == torch.float32
        assert choose(call, "auto") == "tiled"


def make(mask, batch=1, n=300, sinks=True, terms=BOTH):
    return with_mask(
        Case(terms, "everything", batch, 6, 2, 32, queries=n, keys=n, sinks=sinks, dtype=torch.float64).build(), mask
    )


def rows_of(*batch):
    return torch.stack([mask.dense() for mask in batch])[:, None]


FORMS = {
    "causal": (masks.causal(300), {"window": 0}),
    "window": (masks.sliding_window(300, 70), {"window": 70}),
    "document": (masks.document([100, 1, 150, 49]), {"starts": [0, 100, 101, 251], "longest": 150}),
    "documents of a batch": (
        rows_of(masks.document([300]), masks.document([1, 299])), {"starts": [0, 300, 301], "longest": 300}
    ),
}  # fmt: skip


def flash(query, key, value, starts, other, most, most_keys, dropout, causal, debug, *, scale, **window):
    """torch's `_flash_attention_forward` by its documentation, in float64."""
    assert starts is other
    assert dropout == 0
    assert most == most_keys
    packed = starts is not None
    if packed:
        query, key, value = query[None], key[None], value[None]
    where = torch.arange(query.shape[1])
    allow = where[:, None] >= where if causal else torch.ones(len(where), len(where)) > 0
    if window:
        allow = allow & (where[:, None] - where <= window["window_size_left"])
        assert window["window_size_right"] == 0
    if packed:
        assert int(starts.diff().max()) == most
        assert starts[-1] == len(where)
        document = torch.bucketize(where, starts, right=True)
        allow = allow & (document[:, None] == document)
    ratio = query.shape[2] // key.shape[2]
    query, key, value = (
        query.transpose(1, 2),
        *(t.transpose(1, 2).repeat_interleave(ratio, dim=1) for t in (key, value)),
    )
    score = (scale * query @ key.mT).masked_fill(~allow, -torch.inf)
    output, sums = (score.softmax(dim=-1) @ value).transpose(1, 2), score.logsumexp(dim=-1)
    return (output[0], sums[0]) if packed else (output, sums), allow


def forward(*arguments, **options):
    (output, sums), _ = flash(*arguments, **options)
    return output, sums, torch.tensor(1), torch.tensor(2), torch.empty(0)


def backward(gradient, query, key, value, output, sums, *rest, **options):
    """As the operator: weights from the given sums, and sum_j P dP from the given output."""
    mask, states = rest[:-2], rest[-2:]
    assert [int(state) for state in states] == [1, 2]
    _, allow = flash(query, key, value, *mask, False, **options)
    if mask[0] is not None:
        gradient, query, key, value, output, sums = (t[None] for t in (gradient, query, key, value, output, sums))
    ratio = query.shape[2] // key.shape[2]
    g, q, o = (t.transpose(1, 2) for t in (gradient, query, output))
    k, v = (t.transpose(1, 2).repeat_interleave(ratio, dim=1) for t in (key, value))
    weights = torch.exp((options["scale"] * q @ k.mT).masked_fill(~allow, -torch.inf) - sums[..., None])
    scores = weights * (g @ v.mT - (g * o).sum(dim=-1, keepdim=True)) * options["scale"]
    found = scores @ k, *(t.unflatten(1, (-1, ratio)).sum(dim=2) for t in (scores.mT @ q, weights.mT @ g))
    return tuple(t.transpose(1, 2)[0] if mask[0] is not None else t.transpose(1, 2) for t in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_operators_forms_of_masks(form, sinks, monkeypatch):
    """What CUDA's operator is asked for, with its documented meaning in its place."""
    mask, expected = FORMS[form]
    monkeypatch.setitem(OPERATORS, "cpu", replace(OPERATORS["cuda"], dtypes=(torch.float64,)))
    monkeypatch.setattr(fused, "_flash_attention", (forward, backward))
    for batch in (2,) if form == "documents of a batch" else (1, 2):
        call = make(mask, batch, sinks=sinks)
        (part,) = OPERATORS["cpu"].parts(call.allow)
        assert part.causal
        assert {
            name: list(v) if isinstance(v := getattr(part, name), torch.Tensor) else v for name in expected
        } == expected
        check(call)
    check(make(None, 2, sinks=sinks))


@pytest.mark.parametrize(
    "mask",
    [
        masks.attention_sink(300, 4, 20),
        torch.rand(300, 300) < 0.5,
        masks.causal(300).dense() & (torch.arange(300) > 3),
    ],
    ids=["sink", "random", "padding"],
)
def test_masks_that_flash_attention_has_no_form_of(mask):
    assert "knows no form of this mask" in OPERATORS["cuda"].parts(make(mask).allow)


@pytest.mark.parametrize("form", [*FORMS, "everything"])
def test_shapes_of_the_operators_on_cuda(form):
    """By their own shape functions, without a GPU: inputs are laid out as they want, and results have our shapes."""
    mask = FORMS[form][0] if form in FORMS else None
    call = make(mask, 2)
    (part,) = OPERATORS["cuda"].parts(call.allow)
    if part.starts is not None:
        part = replace(part, starts=part.starts.to("meta"))
    query, key, value = (torch.empty(2, heads, 300, 40, dtype=torch.bfloat16, device="meta") for heads in (6, 2, 2))
    output, sums, rest = OPERATORS["cuda"].forward((query, key, value), part, None, 0.1)
    assert output.shape == query.shape
    assert (sums.shape, sums.dtype) == ((2, 6, 300), torch.float32)
    found = OPERATORS["cuda"].backward(query, (query, key, value), (output, sums), rest, part, None, 0.1)
    assert [t.shape for t in found] == [query.shape, key.shape, value.shape]
