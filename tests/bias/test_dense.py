"""One number a pair through the memory-efficient operator, whose place a definition in plain PyTorch takes here.

The operator itself runs on CUDA only (`test_on_a_gpu`).
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attnflow import masks
from attnflow.bias import dense
from attnflow.bias.call import Allow
from attnflow.bias.terms import Dense
from tests.bias.cases import MASKS, TERMS, Case, cast, check_against_float64
from tests.bias.efficient import backward, forward

EVERY = slice(0, None)


@pytest.fixture(autouse=True)
def definition(monkeypatch):
    monkeypatch.setattr(dense, "_forward", forward)
    monkeypatch.setattr(dense, "_backward", backward)
    monkeypatch.setattr(dense, "_guidance", lambda term, _: Dense(term.tile(EVERY, EVERY)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_values_and_gradients(kind, mask, dtype):
    check_against_float64(Case(terms=((kind, "one"),), mask=mask, dtype=dtype), dense.run, rounded_bias=True)


@pytest.mark.parametrize("maps", ["one", "kv", "heads"])
@pytest.mark.parametrize("ratio", [1, 3])
def test_grouped_queries_and_several_terms(ratio, maps):
    terms = (("guidance", maps), ("dense", "one"), ("additive", "kv"))
    for mask in ("causal", "holes"):
        case = Case(terms=terms, num_heads=2 * ratio, num_kv_heads=2, mask=mask, value_dim=8)
        check_against_float64(case, dense.run, rounded_bias=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [(1, 40), (300, 300), (150, 300)], ids=str)
def test_the_gradient_of_the_bias_by_blocks_of_queries(sizes, mask, monkeypatch):
    monkeypatch.setattr(dense, "_MAPS", 1)
    queries, keys = sizes
    case = Case((("dense", "one"),), mask, queries=queries, keys=keys, batch=1, num_heads=2, num_kv_heads=1, head_dim=8)
    check_against_float64(case, dense.run, rounded_bias=True)


@pytest.mark.parametrize("mask", ["everything", "causal", "holes", "heads"])
def test_sinks(mask):
    """The row's maximum is taken from the bias first, so the sinks must follow it."""
    case = Case((("dense", "one"), ("offset", "heads")), mask, sinks=True, scale=0.7)
    check_against_float64(case, dense.run, rounded_bias=True)


def test_a_large_bias_is_as_exact_as_a_small_one():
    """In 16 bits a number near -153 is off by 0.5; less its row's maximum, it is not."""
    call = Case((("dense", "one"),), dtype=torch.bfloat16).build()
    moved = replace(call, terms=(Dense(call.terms[0].values - 153.0),))
    check_against_float64(moved, dense.run, rounded_bias=True)
    torch.testing.assert_close(dense.run(moved), dense.run(call), atol=2e-2, rtol=0)


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    needs = []
    monkeypatch.setattr(dense, "_backward", lambda *args, **kwargs: needs.append(args[10]) or backward(*args, **kwargs))
    call, leaves = cast(Case((("dense", "one"),)).build())
    frozen = replace(call, terms=cast(call, requires_grad=False)[0].terms)
    torch.autograd.grad(dense.run(frozen).sum(), [leaves["query"], leaves["key"], leaves["value"]])
    torch.autograd.grad(dense.run(call).sum(), list(leaves.values()))
    assert needs == [[True, True, True, False], [True] * 4]


def test_a_relation_is_read_once():
    relation = Allow.of(masks.causal(9), 9, 9, torch.device("cpu"))
    form = dense.form_of(relation, torch.device("cpu"))
    assert dense.form_of(relation, torch.device("cpu")) is form
    assert form.causal
    assert form.empty is None
    assert not dense.form_of(replace(Case(mask="holes").build()).allow, torch.device("cpu")).causal


@pytest.mark.parametrize(
    ("options", "reason", "device"),
    [
        ({}, None, "cuda"),
        ({"dtype": torch.float64}, "float64", "cuda"),
        ({"head_dim": 12, "dtype": torch.bfloat16}, "multiples of 16 bytes", "cuda"),
        ({"softcap": 2.0}, "soft cap", "cuda"),
        ({"terms": ()}, "at least one term", "cuda"),
        ({"queries": 0, "mask": "everything"}, "at least one term, query", "cuda"),
        ({}, "on cpu", "cpu"),
    ],
    ids=str,
)
def test_what_it_refuses(options, reason, device):
    call = Case(**{"terms": (("dense", "one"),), "mask": "everything"} | options).build()
    mode = FakeTensorMode()  # only carries the name of the device
    found = dense.refusal(
        call.with_tensors([FakeTensor(mode, t.to("meta"), torch.device(device)) for t in call.tensors()])
    )
    assert (found is None) if reason is None else reason in found


OPERATED = [{"sinks": True}, {"num_heads": 6, "queries": 1, "keys": 43}, {"mask": "heads"}, {"mask": "causal"}]


@pytest.mark.parametrize("change", OPERATED, ids=str)
def test_the_operator_of_pytorch_takes_what_it_is_given(change, monkeypatch):
    """Shapes and types of a training step through the operator itself, on tensors without numbers."""
    monkeypatch.undo()
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # does not know such tensors
    call = Case(**{"terms": (("dense", "one"),), "mask": "everything", "dtype": torch.bfloat16} | change).build()
    mask = change.get("mask")
    allowed = None if mask is None else call.allow.dense().to("meta")
    form = dense.DenseForm(allowed, None, mask == "causal", needed=torch.empty(0))
    monkeypatch.setattr(dense, "form_of", lambda *_: form)
    leaves = [tensor.to("meta").requires_grad_() for tensor in call.tensors()]
    output = dense.run(call.with_tensors(leaves))
    gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
    assert output.shape == (*call.query.shape[:3], call.value.shape[3])
    assert [(t.shape, t.dtype) for t in gradients] == [(t.shape, t.dtype) for t in leaves]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TERMS)
def test_on_a_gpu(kind, mask, dtype, monkeypatch):
    monkeypatch.undo()
    case = Case(terms=((kind, "kv"),), mask=mask, dtype=dtype, device="cuda", queries=150, keys=150)
    check_against_float64(case, "dense", rounded_bias=True)
