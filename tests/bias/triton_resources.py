"""What a Triton kernel needs of an H100, from Triton's compiler, without a GPU."""

import re
import subprocess
import tempfile
from pathlib import Path

INTEGERS = ("rows", "cols", "groups", "chunk", "n", "stride")
ALIGNED = ("rows", "cols")  # sizes that are multiples of 16 in practice


def resources(kernel, warps, types, num_stages=3, **constants):
    """(registers of a thread, bytes on its stack, bytes of shared memory); pointers are float32 unless `types` say."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    integer = {name for name in names if name in INTEGERS or name.startswith(("needed_", "gradient_"))}
    signature = {name: "i32" if name in integer else "*fp32" for name in names} | types
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in ALIGNED]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": num_stages}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return registers, stack, made.metadata.shared
