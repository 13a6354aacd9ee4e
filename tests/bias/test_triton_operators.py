"""The operators of the Triton kernels as torch.library sees them: schemas, fake kernels, autograd, compilation."""

import os
from dataclasses import replace

import pytest
import torch

from attnflow.bias.call import make_call
from tests.bias.cases import Case, cast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1 (`make kernels`)"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
SMALL = Case(batch=2, num_heads=2, num_kv_heads=1, queries=5, keys=7, head_dim=8, hidden=4, device=DEVICE)
ALL = (("guidance", "heads"), ("product", "one"), ("offset", "kv"), ("dense", "one"), ("additive with rows", "one"))
CASES = [
    replace(SMALL, terms=()),
    replace(SMALL, terms=ALL, mask="padding", sinks=True, softcap=2.0),
    replace(SMALL, terms=(("guidance", "one"),), mask="holes", dtype=torch.bfloat16),
    replace(SMALL, terms=(("dense", "one"),)),
]


def packed(case, requires_grad):
    from attnflow.bias.impl.blocks import blocks_of
    from attnflow.bias.impl.triton.inputs import pack

    call, _ = cast(case.build(), requires_grad=requires_grad)
    return call, pack(call, blocks_of(call.allow, call.query.device, 64).flat())[0].arguments()


def fresh(arguments):
    """The same arguments as leaves: what is packed may be computed from the call's tensors."""

    operands, *rest = arguments
    leaves = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in operands]
    return [leaves, *rest]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case):
    from attnflow.bias.impl.triton import ops

    _, arguments = packed(case, True)
    torch.library.opcheck(ops.biased_attention, (*fresh(arguments), True))


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_opcheck_of_the_backward(case):
    from attnflow.bias.impl.triton import ops

    _, arguments = packed(case, False)
    output = ops.biased_attention(*arguments, True)
    operands = (*arguments, *output, torch.ones_like(output[0]), [True] * len(arguments[0]))
    torch.library.opcheck(ops.biased_attention_backward, operands)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_of_decoding(case):
    from attnflow.bias.impl.triton import ops

    _, arguments = packed(case, False)
    mask = torch.ones(1, 1, case.queries, case.keys, dtype=torch.uint8, device=DEVICE)
    torch.library.opcheck(ops.biased_attention_decode, (*arguments, mask))


@pytest.mark.parametrize("grad", [True, False])
def test_compiles_without_a_break(grad):
    from attnflow.bias.impl import triton

    call, leaves = cast(replace(SMALL, terms=ALL, mask="holes").build(), requires_grad=grad)
    allowed = call.allow.dense()

    def attend(query, key, value, terms, mask):
        again = make_call(query, key, value, terms, mask, None, None, None, 0.0)
        return triton.run(again)[0] * 2

    operands = (call.query, call.key, call.value, call.terms, allowed)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*operands)
    eager = attend(*operands)
    torch.testing.assert_close(compiled, eager)
    if grad:
        found, true = (torch.autograd.grad(out.square().sum(), list(leaves.values())) for out in (compiled, eager))
        for name, one, two in zip(leaves, found, true, strict=True):
            torch.testing.assert_close(one, two, msg=name)
