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
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
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
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    found = {}

    def launch(kernel, *values, grid, warmup, **named):
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, values, strict=False)) | {k: v for k, v in named.items() if k in names}
        options = {k: v for k, v in named.items() if k not in names and k != "debug"}
        signature, constants, hints = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            whole = isinstance(value, int) and not isinstance(value, bool)
            if parameter.is_constexpr or value is None or (whole and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if whole else "fp32"
            constant = signature[parameter.name] == "constexpr"
            if not constant and (isinstance(value, torch.Tensor) or (whole and value % 16 == 0)):
                hints[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, hints)
        built = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
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
