"""The tiled implementation under torch.compile: one operator, the same numbers, no graph break."""

import pytest
import torch

from attnflow.bias import attention, tiled
from tests.bias.cases import Case, cast

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own, at compilation
]

ALL = (("guidance", "kv"), ("offset", "heads"), ("additive with rows", "one"), ("product", "one"), ("dense", "kv"))
CASES = [
    Case(),
    Case(mask="everything", terms=(("additive", "one"),), dtype=torch.bfloat16),
    Case(ALL, mask="holes", softcap=3.0, sinks=True),
    Case(terms=()),
]


def operands(call):
    return tiled._arguments(call, torch.tensor(7) if call.dropout else None)


@pytest.mark.parametrize(("case", "dropout"), [(CASES[1], 0.2), (CASES[2], 0.0), (CASES[3], 0.0)], ids=str)
def test_opcheck(case, dropout):
    call, _ = cast(case.build())
    call = type(call)(**{**vars(call), "dropout": dropout})
    torch.library.opcheck(torch.ops.attnflow.tiled_attention.default, operands(call))
    frozen = operands(cast(call, requires_grad=False)[0])
    gradient = torch.randn(2, 4, 37, 32).to(call.value.dtype)
    for needs in (False, True):
        operator = torch.ops.attnflow.tiled_attention_backward.default
        torch.library.opcheck(operator, (gradient, [True] * 3 + [needs] * (len(frozen[0]) - 3), *frozen))


@pytest.mark.parametrize(
    ("case", "backend"), [(CASES[0], "inductor"), *((case, "aot_eager") for case in CASES[1:])], ids=str
)
def test_compiled_attention_is_the_eager_one(case, backend):
    torch._dynamo.reset()
    call, leaves = cast(case.build())
    allow = call.allow.dense()

    def attend(query, key, value, terms):
        return attention(
            query, key, value, terms, allow, softcap=call.softcap, sinks=call.sinks, scale=call.scale, backend="tiled"
        )[0]

    found = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        output = function(call.query, call.key, call.value, call.terms)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), list(leaves.values()))])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_one_graph_serves_other_lengths():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, terms, allow: attention(q, k, v, terms, allow, backend="tiled")[0],
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for n in (37, 50, 64):
        call = Case(queries=n, keys=n).build()
        arguments = call.query, call.key, call.value, call.terms, call.allow.dense()
        torch.testing.assert_close(compiled(*arguments), attention(*arguments, backend="tiled")[0])


def test_a_users_term_is_refused_under_a_compiler():
    torch._dynamo.reset()
    call = Case(terms=(("user", "one"),)).build()
    compiled = torch.compile(lambda q: tiled.refuses(call), backend="eager")
    assert "under torch.compile only terms of Guidance" in compiled(call.query)
    assert tiled.refuses(call) is None
