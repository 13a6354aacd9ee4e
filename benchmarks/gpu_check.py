"""One run on a GPU, ten minutes at most: does each path for a bias work there, how exact is it, and what does it cost?

    python -m benchmarks.gpu_check                              # writes gpu_check.jsonl into $OUT or the current folder
    TRITON_INTERPRET=1 python -m benchmarks.gpu_check --dry-run # on a CPU: the same code at toy size

Each finding is one line of JSON with what was expected. The most important parts come first, a part that fails is a
finding too, and nothing new starts after five minutes; the rest is for `experiments daa_cost`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnflow import masks
from attnflow.bias import attention, dense
from attnflow.bias.call import Allow, make_call
from attnflow.bias.terms import Dense, Guidance, Offset, Term

Findings = Iterator[dict[str, Any]]
BUDGET = 300  # seconds after which no part starts
COST = ["-m", "experiments", "daa_cost", "--scale", "small"]


@dataclass(frozen=True)
class Scene:
    dry: bool
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    width: int = 128
    hidden: int = 64
    exact_length: int = 333
    lengths: tuple[int, ...] = (2048, 8192)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype).requires_grad_()

    def heads_of(self, n: int) -> list[Tensor]:
        return [self.randn(1, self.heads, n, self.width) for _ in range(3)]

    def guidance(self, n: int) -> Guidance:
        shapes = (1, 1, n, self.hidden), (1, 1, n, self.hidden), *[(1, self.hidden)] * 3, (1,)
        return Guidance(*(self.randn(*shape, dtype=torch.float32) for shape in shapes))

    def milliseconds(self, run: Callable[[], object], count: int = 20) -> float:
        """Median of runs that find the second-level cache flushed."""
        if self.dry:
            run()
            return 0.0
        flush = torch.empty(1 << 26, device=self.device)
        times = []
        for _ in range(count + 2):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return round(sorted(times[2:])[count // 2], 4)

    def step(self, run: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, float]:
        """Milliseconds of a forward pass, and of one with its backward pass."""
        upstream = torch.randn_like(run())
        both = self.milliseconds(lambda: torch.autograd.grad(run(), leaves, upstream), 10)
        return {"forward_ms": self.milliseconds(run), "forward_backward_ms": both}


def error(found: Tensor, true: Tensor) -> float:
    found, true = found.detach(), true.detach()
    return float((found.double() - true.double()).norm() / true.double().norm().clamp(min=1e-30))


def kernels_are_exact(scene: Scene) -> Findings:
    from attnflow.bias.pairs import blocks, pairs

    n, term = scene.exact_length, scene.guidance(scene.exact_length)
    leaves = list(term.tensors().values())
    allow = torch.ones(n, n, dtype=torch.bool, device=scene.device).tril()
    needed, upstream = blocks(allow, n, n), torch.randn(1, 1, n, n, device=scene.device) * allow
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = Guidance(*exact).tile(slice(0, n), slice(0, n))
    expected = torch.autograd.grad(true, exact, upstream.double())
    runs = []
    for _ in range(2):
        bias = pairs(*leaves, needed)
        runs.append([bias.detach() * allow, *torch.autograd.grad(bias, leaves, upstream)])
    yield {
        "forward": error(runs[0][0], true.detach() * allow),
        "gradients": [error(one, other) for one, other in zip(runs[0][1:], expected, strict=True)],
        "same_bits": all(map(torch.equal, *runs)),
        "expect": "errors below 2e-6, same bits",
    }


def through_map(query: Tensor, key: Tensor, value: Tensor, term: Term, mask: object, sinks: Any = None) -> Tensor:
    """`attention(..., backend="dense")`, which on a CPU would refuse."""
    return dense.run(make_call(query, key, value, [term], mask, None, None, sinks, 0.0))


def through_tiles(query: Tensor, key: Tensor, value: Tensor, term: Term, mask: object) -> Tensor:
    return attention(query, key, value, [term], mask, backend="tiled")[0]


def dense_path_is_exact(scene: Scene) -> Findings:
    n = scene.exact_length
    causal = torch.ones(n, n, dtype=torch.bool, device=scene.device).tril()
    for name, sinks in (("causal", False), ("holes", False), ("causal", True)):
        allow = causal if name == "causal" else causal & (torch.rand(n, n, device=scene.device) < 0.7)
        *learned, offset = scene.guidance(n).tensors().values()  # the gradient of the offset is zero
        leaves = [*scene.heads_of(n), *learned]
        leaves += [scene.randn(scene.heads, dtype=torch.float32)] if sinks else []
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        term, last = Guidance(*exact[3:8], offset.detach().double()), exact[8] if sinks else None
        true = attention(*exact[:3], [term], allow, sinks=last, backend="reference")[0]
        term, last = Guidance(*leaves[3:8], offset.detach()), leaves[8] if sinks else None
        found = through_map(*leaves[:3], term, allow, last)
        upstream = torch.randn_like(found)
        expected = torch.autograd.grad(true, exact, upstream.double())
        gradients = torch.autograd.grad(found, leaves, upstream)
        errors = [error(one, other) for one, other in zip(gradients, expected, strict=True)]
        yield {"mask": name, "sinks": sinks, "output": error(found, true), "gradients": errors, "expect": "some 1e-2"}


def kernels_cost(scene: Scene) -> Findings:
    from attnflow.bias.pairs import blocks, pairs

    for n in scene.lengths:
        term = scene.guidance(n)
        leaves = list(term.tensors().values())
        needed = blocks(torch.ones(n, n, dtype=torch.bool, device=scene.device).tril(), n, n)
        times = scene.step(lambda leaves=leaves, needed=needed: pairs(*leaves, needed), leaves)
        yield {"n": n, **times, "expect": "n = 2,048: forward 0.1, forward and backward 0.65"}


def layers_cost(scene: Scene) -> Findings:
    """Attention of a LLaMA-2-7B layer with each kind, over the same without a bias."""
    for n in scene.lengths:
        heads, mask = scene.heads_of(n), masks.causal(n)
        relation = Allow.of(mask, n, n, torch.device(scene.device))
        base = scene.step(lambda heads=heads: functional.scaled_dot_product_attention(*heads, is_causal=True), heads)
        yield {"n": n, "kind": "none: causal SDPA", **base}
        guidance, values = scene.guidance(n), scene.randn(1, 1, n, n, dtype=torch.float32)
        where, buckets = torch.arange(n, device=scene.device), torch.arange(2 * n - 1, device=scene.device) % 32
        table = Offset(scene.randn(1, 32, dtype=torch.float32), buckets, where[None], where[None], n - 1)
        kinds = [("guidance", guidance), ("given", Dense(values)), ("relative", table)]
        arms = [(kind, term, through_map) for kind, term in kinds]
        arms += [("guidance", guidance, through_tiles)] if n == scene.lengths[0] else []
        for kind, term, run in arms:
            leaves = [*heads, *(t for t in term.tensors().values() if t.requires_grad)]
            times = scene.step(partial(run, *heads, term, relation), leaves)
            over = round(times["forward_backward_ms"] - base["forward_backward_ms"], 4)
            yield {"n": n, "kind": kind, "path": run.__name__, **times, "over_base_ms": over}


def operator_costs(scene: Scene) -> Findings:
    """The memory-efficient operator: its error, and its time with and without the gradient of the bias."""
    for n in scene.lengths:
        query, key, value = (t.detach() for t in scene.heads_of(n))
        bias, upstream = torch.randn(1, 1, n, n, device=scene.device).to(scene.dtype), torch.randn_like(query)
        maps, scale = bias.expand(1, scene.heads, n, n), scene.width**-0.5
        forward = partial(dense._forward, query, key, value, maps, True, 0.0, True, scale=scale)
        output, *rest = forward()
        if n == scene.lengths[0]:
            score = query.float() @ key.float().mT * scale + bias.float()
            allowed = torch.ones(n, n, dtype=torch.bool, device=scene.device).tril()
            true = score.masked_fill(~allowed, -torch.inf).softmax(dim=-1) @ value.float()
            yield {"n": n, "error": error(output, true), "expect": "takes a bias and is_causal at once, below 5e-3"}
        yield {"n": n, "forward_ms": scene.milliseconds(forward)}
        for learns in (False, True) if n == scene.lengths[0] else (False,):
            saved = upstream, query, key, value, maps, output, *rest
            backward = partial(dense._backward, *saved, 0.0, [True, True, True, learns], True, scale=scale)
            yield {"n": n, "learns": learns, "backward_ms": scene.milliseconds(backward, 10)}


def flex_costs(scene: Scene) -> Findings:
    """FlexAttention with a captured map, and with one in 16 bits whose gradient a kernel of its own gives."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from benchmarks.map_gradient import map_gradient

    n = scene.lengths[0]
    query, key, value = (t.detach().requires_grad_(not scene.dry) for t in scene.heads_of(n))
    upstream, scale = torch.randn_like(query), scene.width**-0.5
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=scene.device)
    compiled = flex_attention if scene.dry else torch.compile(flex_attention, dynamic=False)
    two = {"bwd_num_stages": 2}
    for options, dtype, learns in (
        (two, torch.float32, True), ({}, scene.dtype, False), (two, scene.dtype, False), ({}, torch.float32, True)
    ):  # fmt: skip
        bias = torch.randn(n, n, device=scene.device).to(dtype).requires_grad_(learns and not scene.dry)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, bias: Tensor = bias) -> Tensor:
            return score + bias[i, j]

        run = partial(compiled, query, key, value, score_mod=score_mod, block_mask=blocks, kernel_options=options)
        said = {"n": n, "options": str(options), "dtype": str(dtype), "learns": learns}
        try:
            leaves = [query, key, value, *([bias] if learns else [])]
            # It has no backward pass on a CPU.
            yield said | ({"forward_ms": scene.milliseconds(run)} if scene.dry else scene.step(run, leaves))
        except Exception as problem:  # one that does not fit must not hide the others
            yield said | {"failed": repr(problem)[:300], "expect": "with {}, float32 and learns: 262,144 bytes"}
        torch._dynamo.reset()
    heads = [t.detach()[0].contiguous() for t in (query, key, value, upstream)]
    bias = torch.randn(n, n, device=scene.device).to(scene.dtype)
    output, lse, *_ = dense._forward(
        *(t.detach() for t in (query, key, value)), bias.expand(1, scene.heads, n, n), True, 0.0, True, scale=scale
    )
    delta = (output[0].float() * heads[3].float()).sum(dim=-1)
    gradient = partial(map_gradient, *heads, lse[0, :, :n].contiguous(), delta, bias, scale)
    true = map_by_hand(*(t.double() for t in heads), bias.double(), scale)
    yield {"n": n, "kernel of dB": error(gradient(), true), "ms": scene.milliseconds(gradient), "expect": "below 1e-2"}


def map_by_hand(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, bias: Tensor, scale: float) -> Tensor:
    total = torch.zeros_like(bias)
    for q, k, v, up in zip(query, key, value, upstream, strict=True):
        allowed = torch.ones_like(bias, dtype=torch.bool).tril()
        weights = (q @ k.mT * scale + bias).masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        slope = up @ v.mT
        total += weights * (slope - (weights * slope).sum(dim=-1, keepdim=True))
    return total


def columns_cost(scene: Scene) -> Findings:
    for n in scene.lengths:
        heads = scene.heads_of(n)
        base = scene.step(lambda heads=heads: functional.scaled_dot_product_attention(*heads, is_causal=True), heads)
        for extra in (3, 8, 64):
            width = -(-(scene.width + extra) // 8) * 8

            def run(heads: list[Tensor] = heads, width: int = width) -> Tensor:
                wider = (functional.pad(t, (0, width - scene.width)) for t in heads)
                scale = scene.width**-0.5
                return functional.scaled_dot_product_attention(*wider, is_causal=True, scale=scale)[..., : scene.width]

            times = scene.step(run, heads)
            ratios = {name: round(time / max(base[name], 1e-9), 3) for name, time in times.items()}
            yield {"n": n, "width": width, "over the base": ratios, "expect": "at most 1.8 at a width of 136"}


PARTS: tuple[Callable[[Scene], Findings], ...] = (
    *(kernels_are_exact, dense_path_is_exact, kernels_cost, layers_cost),
    *(operator_costs, flex_costs, columns_cost),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at toy size, under TRITON_INTERPRET=1")
    dry = parser.parse_args().dry_run
    scene = Scene(dry)
    if dry:
        from tests.bias import efficient

        dense._forward, dense._backward = efficient.forward, efficient.backward
        scene = Scene(True, "cpu", torch.float32, heads=2, width=16, hidden=8, exact_length=37, lengths=(40, 48))
    folder, start = Path(os.environ.get("OUT", ".")), time.monotonic()
    with (folder / "gpu_check.jsonl").open("w") as file:

        def say(**finding: object) -> None:
            line = json.dumps({**finding, "at_s": round(time.monotonic() - start, 1)})
            print(line, flush=True)
            print(line, file=file, flush=True)

        torch.manual_seed(0)
        say(part="machine", device="cpu" if dry else torch.cuda.get_device_name(), torch=torch.__version__)
        for part in PARTS:
            if time.monotonic() - start > BUDGET:
                say(part=part.__name__, skipped="no time left")
                continue
            try:
                for finding in part(scene):
                    say(part=part.__name__, **finding)
            except Exception as problem:
                where = traceback.format_exc().splitlines()[-3].strip()
                say(part=part.__name__, failed=repr(problem)[:400], where=where)
        arguments = ["--dry-run"] if dry else ["--seeds", "6", "--work", str(folder / "work"), "--results", str(folder)]
        done = subprocess.run([sys.executable, *COST, *arguments], capture_output=True, text=True)
        say(part="daa_cost", code=done.returncode, said=(done.stdout + done.stderr)[-2000:])


if __name__ == "__main__":
    main()
