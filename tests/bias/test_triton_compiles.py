"""Every kernel compiles to machine code for Hopper, which needs no GPU: types, shapes and shared memory are right.

The interpreter hides what a compiler refuses, such as a variable that changes its type in a loop.
"""

import os
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from tests.bias.cases import Case, cast

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled in the interpreter"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # triton's own, at compilation
]
SHARED = 227 * 1024  # bytes that a program may have on Hopper
ALL = (("guidance", "one"), ("product", "heads"), ("offset", "one"), ("dense", "one"), ("additive", "one"))
SMALL = Case(batch=1, num_heads=2, num_kv_heads=2, queries=192, keys=192, head_dim=64, dtype=torch.bfloat16)
CASES = [
    replace(SMALL, terms=ALL, mask="heads", softcap=5.0, sinks=True, hidden=64),
    replace(SMALL, head_dim=128, hidden=64),
]


@pytest.fixture
def launched(monkeypatch):
    """Names and shared memory of the kernels that were launched: compiled, not run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    found, target = {}, GPUTarget("cuda", 90, 32)
    backend = make_backend(target)

    def launch(kernel, *values, grid, warmup, **named):
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*values, debug=False, **named)
        packed = kernel._pack_args(backend, {**named, "debug": False}, bound, specialization, options)
        options, signature, constants, hints = packed
        built = compile(ASTSource(kernel, signature, constants, hints), target=target, options=options.__dict__)
        assert built.asm["cubin"]
        found[kernel.__name__] = built.metadata.shared

    monkeypatch.setattr(JITFunction, "run", launch)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case, launched):
    from attnflow.bias.impl import triton

    call, leaves = cast(case.build())
    torch.autograd.grad(triton.run(call)[0].float().sum(), list(leaves.values()))
    assert {"forward_kernel", "query_kernel", "key_kernel", "pairs_kernel", "pairs_gradient_kernel"} < set(launched)
    assert max(launched.values()) <= SHARED, launched


@pytest.mark.parametrize("queries", [1, 4])
def test_decoding(queries, launched):
    from attnflow.bias.impl import triton

    case = replace(SMALL, terms=ALL, mask="padding", queries=queries, sinks=True, hidden=64)
    with torch.no_grad():
        triton.run(case.build())
    assert set(launched) == {"row_pairs_kernel", "decode_kernel", "combine_kernel"}
    assert max(launched.values()) <= SHARED, launched
