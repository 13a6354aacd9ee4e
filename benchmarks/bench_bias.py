"""Attention with the guidance network, and the kinds it is compared with, against the base model and named peers.

Every provider starts from queries and keys, so that the bias and its own backward are paid for by all. One layer:
LLaMA-2-7B's shape in bfloat16 on a GPU, SmolLM2-135M's in float32 on a CPU. Whole models: training step and decoding,
with a bias on every other layer, against the same model without. `ratio` is over ours: below 1 is faster than ours.

Kinds other than guidance cost little over SDPA, so each of their runs alternates with SDPA, and its note has the median
ratio; on a CPU by the process's own time, which other programs disturb less than the clock.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnflow import masks
from attnflow.bias import attention
from attnflow.bias.attention import Backend
from attnflow.bias.call import Allow
from attnflow.bias.positions import buckets, slopes
from attnflow.bias.terms import Additive, Guidance, Offset, Product, Term
from benchmarks.harness import Case, Seconds, main

HIDDEN, RANK, NARROW, NEW_TOKENS = 64, 64, 16, 32
SMOLLM2 = {  # as LlamaConfig has them
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA2 = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
CHECKED = 1024  # sizes up to here are compared with the reference before they are timed
MEMORY = 14 << 30  # bytes that a case may map on a CPU
HERE = "benchmarks.bench_bias"


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer's tensors, and the parameters of every bias that is measured on it."""

    query: Tensor
    key: Tensor
    value: Tensor
    parameters: dict[str, Tensor]

    @classmethod
    def random(cls, n: int, device: str, backward: bool, sizes: Mapping[str, int] | None = None) -> Layer:
        sizes = sizes or (LLAMA2 if device == "cuda" else SMOLLM2)
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        dim = sizes["hidden_size"] // heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)

        def draw(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
            return (std * torch.randn(shape, device=device)).to(dtype).requires_grad_(backward)

        width, kv_width = heads * dim, kv_heads * dim
        parameters = {
            "query": draw(HIDDEN, width, std=width**-0.5),
            "key": draw(HIDDEN, kv_width, std=kv_width**-0.5),
            "bias": draw(HIDDEN),
            "gain": draw(1, HIDDEN),
            "shift": draw(1, HIDDEN),
            "weight": draw(1, HIDDEN, std=HIDDEN**-0.5),
            "offset": draw(1),
            "gate": draw(heads, kv_width, std=kv_width**-0.5),
            "slope": draw(heads),
            "table": draw(heads, 32),
            "form": draw(heads, dim, dim, std=1 / dim),
        }
        shapes = ((1, heads, n, dim), (1, kv_heads, n, dim), (1, kv_heads, n, dim))
        return cls(*(draw(*shape, dtype=dtype) for shape in shapes), parameters)

    def project(self) -> tuple[Tensor, Tensor]:
        """Hidden features of queries and keys, [queries, hidden] and [keys, hidden], in float32."""
        p, sides = self.parameters, (self.query, self.key)
        flat = (side.transpose(1, 2).flatten(2)[0] for side in sides)
        rows, columns = (x @ p[name].to(x.dtype).T for x, name in zip(flat, ("query", "key"), strict=True))
        return rows.float() + p["bias"], columns.float()

    def leaves(self) -> list[Tensor]:
        return [self.query, self.key, self.value, *self.parameters.values()]


def guidance_terms(layer: Layer) -> list[Term]:
    rows, columns = layer.project()
    parameters = (layer.parameters[name] for name in ("gain", "shift", "weight", "offset"))
    return [Guidance(rows[None, None], columns[None, None], *parameters)]


def lowrank_terms(layer: Layer) -> list[Term]:
    rows, columns = layer.project()
    return [Product(rows[None, None] / math.sqrt(RANK), columns[None, None])]


def cumulative_terms(layer: Layer) -> list[Term]:
    gates = layer.key.transpose(1, 2).flatten(2) @ layer.parameters["gate"].to(layer.key.dtype).T
    return [Additive(-functional.logsigmoid(gates.float()).cumsum(dim=1).mT)]


def narrow_terms(layer: Layer) -> list[Term]:
    """The first numbers of both sides."""
    (term,) = lowrank_terms(layer)
    assert isinstance(term, Product)
    return [Product(term.rows[..., :NARROW], term.columns[..., :NARROW])]


def key_terms(layer: Layer) -> list[Term]:
    _, columns = layer.project()
    return [Additive(network(columns, layer.parameters)[None, None])]


def positions_of(layer: Layer) -> Tensor:
    return torch.arange(layer.query.shape[2], device=layer.query.device)[None]


def alibi_terms(layer: Layer) -> list[Term]:
    slope = layer.parameters["slope"] * slopes(layer.query.shape[1], layer.query.device)
    return [Additive(slope[None, :, None] * positions_of(layer))]


def bilinear_terms(layer: Layer) -> list[Term]:
    """Each head reads its own part of the queries and keys."""
    rows = layer.query.float() @ layer.parameters["form"]
    return [Product(rows, layer.key.float().repeat_interleave(layer.query.shape[1] // layer.key.shape[1], dim=1))]


def relative_terms(layer: Layer) -> list[Term]:
    where = positions_of(layer)
    bucket_of = buckets(torch.arange(-128, 129, device=where.device), 32, 128, bidirectional=False)
    return [Offset(layer.parameters["table"], bucket_of, where, where, 128)]


TERMS: dict[str, Callable[[Layer], list[Term]]] = {
    "guidance": guidance_terms,
    "key": key_terms,
    "cumulative": cumulative_terms,
    "alibi": alibi_terms,
    f"lowrank {RANK}": lowrank_terms,
    f"lowrank {NARROW}": narrow_terms,
    "bilinear": bilinear_terms,
    "relative": relative_terms,
}


def network(hidden: Tensor, p: dict[str, Tensor]) -> Tensor:
    normal = functional.layer_norm(hidden, (HIDDEN,), p["gain"][0], p["shift"][0])
    return functional.gelu(normal) @ p["weight"][0] + p["offset"]


def separated_map(layer: Layer) -> Tensor:
    """B as anyone would write it who knows that the first layer separates: [1, 1, queries, keys]."""
    rows, columns = layer.project()
    return network(rows[:, None] + columns, layer.parameters)[None, None]


def concatenated_map(layer: Layer) -> Tensor:
    """B as the paper writes it, on the concatenation of every query with every key."""
    q, k = (side.transpose(1, 2).flatten(2)[0] for side in (layer.query, layer.key))
    n, p = len(q), layer.parameters
    pairs = torch.cat([q[:, None].expand(-1, n, -1), k.expand(n, -1, -1)], dim=-1)
    first = torch.cat([p["query"], p["key"]], dim=1)
    return network((pairs @ first.to(pairs.dtype).T).float() + p["bias"], p)[None, None]


def cumulative_map(layer: Layer) -> Tensor:
    (term,) = cumulative_terms(layer)
    everything = slice(0, layer.query.shape[2])
    return term.tile(everything, everything)


def pinned(layer: Layer, *backends: SDPBackend) -> AbstractContextManager[None]:
    return sdpa_kernel(list(backends)) if layer.query.is_cuda else nullcontext()


def sdpa(layer: Layer, bias: Tensor) -> Tensor:
    """With a materialised bias; cuDNN's kernel is left out because it returns no gradient of the bias."""
    n = layer.query.shape[2]
    allowed = torch.ones(n, n, dtype=torch.bool, device=bias.device).tril()
    mask = bias.to(layer.query.dtype).masked_fill(~allowed, -torch.inf)
    mask = mask.expand(-1, layer.query.shape[1], -1, -1)
    with pinned(layer, SDPBackend.EFFICIENT_ATTENTION):
        return functional.scaled_dot_product_attention(
            layer.query, layer.key, layer.value, attn_mask=mask, enable_gqa=layer.key.shape[1] != layer.query.shape[1]
        )


def base(layer: Layer) -> Tensor:
    with pinned(layer, SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(
            layer.query, layer.key, layer.value, is_causal=True, enable_gqa=layer.key.shape[1] != layer.query.shape[1]
        )


def widened(layer: Layer, kind: str) -> Tensor:
    """FlashBias: a bias of low rank as further channels of queries and keys."""
    (term,) = TERMS[kind](layer)
    heads, dim, dtype = layer.query.shape[1], layer.query.shape[3], layer.query.dtype
    if isinstance(term, Additive):
        columns = term.columns[..., None]
        rows = torch.ones_like(columns[:, :1])
    else:
        assert isinstance(term, Product)
        rows, columns = term.rows, term.columns
    rows, columns = (x.to(dtype).expand(1, heads, -1, -1) for x in (rows, columns))
    key, value = (x.repeat_interleave(heads // layer.key.shape[1], dim=1) for x in (layer.key, layer.value))
    query = torch.cat([layer.query / math.sqrt(dim), rows], dim=-1)
    key = torch.cat([key, columns], dim=-1)
    with pinned(layer, SDPBackend.EFFICIENT_ATTENTION):
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)


def flex(layer: Layer) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    n, device = layer.query.shape[2], layer.query.device
    block_mask = masks.causal(n).block_mask(device=device)

    def attend(bias: Tensor) -> Tensor:
        return flex_attention(
            layer.query,
            layer.key,
            layer.value,
            score_mod=lambda score, b, h, q, k: score + bias[q, k],
            block_mask=block_mask,
            enable_gqa=layer.key.shape[1] != layer.query.shape[1],
        )

    # Two graphs: on a CPU the compiler of torch 2.13 fails on one.
    make, attend = (torch.compile(function, dynamic=False) for function in (lambda: separated_map(layer)[0, 0], attend))
    return lambda: attend(make())


def ours(layer: Layer, kind: str, backend: Backend = "auto") -> Callable[[], Tensor]:
    n = layer.query.shape[2]
    allow = Allow.of(masks.causal(n), n, n, layer.query.device)  # layers of a model share it
    return lambda: attention(layer.query, layer.key, layer.value, TERMS[kind](layer), allow, backend=backend)[0]


def compiled(layer: Layer) -> Callable[[], Tensor]:
    make = torch.compile(lambda: separated_map(layer), dynamic=False)
    return lambda: sdpa(layer, make())


def forward_of(provider: str, kind: str, layer: Layer) -> Callable[[], Tensor]:
    return {
        "attnflow": lambda: ours(layer, kind),
        "tiles": lambda: ours(layer, kind, "tiled"),
        "base": lambda: lambda: base(layer),
        "eager": lambda: lambda: sdpa(layer, separated_map(layer)),
        "compiled": lambda: compiled(layer),
        "flex": lambda: flex(layer),
        "concatenation": lambda: lambda: sdpa(layer, concatenated_map(layer)),
        "widened": lambda: lambda: widened(layer, kind),
        "gates": lambda: lambda: sdpa(layer, cumulative_map(layer)),
    }[provider]()


def one_layer(provider: str, kind: str, n: int, device: str, backward: bool) -> Callable[[], object]:
    if device == "cpu":  # rather than have the system end some other process
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        return _one_layer(provider, kind, n, device, backward)
    except RuntimeError as error:
        if "allocate memory" in str(error):
            raise MemoryError from error
        raise


def _one_layer(provider: str, kind: str, n: int, device: str, backward: bool) -> Callable[[], object]:
    layer = Layer.random(n, device, backward)
    attend = forward_of(provider, kind, layer)
    if n <= CHECKED and provider != "base":  # no speed of a wrong result
        with torch.no_grad():
            arguments = layer.query, layer.key, layer.value, TERMS[kind](layer), masks.causal(n)
            expected = attention(*arguments, backend="reference")[0]
            torch.testing.assert_close(attend(), expected, atol=3e-2 if device == "cuda" else 1e-4, rtol=1e-2)
    upstream = torch.randn_like(layer.query)

    def run() -> object:
        with torch.set_grad_enabled(backward):
            found = attend()
        grads = torch.autograd.grad(found, layer.leaves(), upstream, allow_unused=True) if backward else ()
        if device == "cuda":
            torch.cuda.synchronize()
        return found, grads

    run()  # compiles
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return run


@dataclass
class Alternating:
    """Runs SDPA without a bias and then another arm; times the second, and notes the median ratio."""

    base: Callable[[], object]
    arm: Callable[[], object]
    clock: Callable[[], float]
    ratios: list[float] = field(default_factory=list[float])
    note: str = ""

    def __call__(self) -> Seconds:
        times = [self.clock()]
        for run in (self.base, self.arm):
            run()
            times.append(self.clock())
        base, seconds = (after - before for before, after in pairwise(times))
        self.ratios.append(seconds / base)
        median = statistics.median(self.ratios)
        threads, load = torch.get_num_threads(), os.getloadavg()[0]
        self.note = f"{median:.2f} of SDPA, alternating; {threads} threads, load {load:.0f}"
        return Seconds(seconds)


def beside_base(provider: str, kind: str, n: int, device: str, backward: bool) -> Alternating:
    arms = (one_layer(name, kind, n, device, backward) for name in ("base", provider))
    return Alternating(*arms, time.perf_counter if device == "cuda" else time.process_time)


def base_model(sizes: Mapping[str, int], device: str) -> Any:
    """Random weights: bfloat16 on a GPU, float32 elsewhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = LlamaConfig(**sizes, max_position_embeddings=8192, pad_token_id=0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype)


def model_of(device: str, biased: bool) -> Any:
    """SmolLM2-135M's shape on a CPU; four layers of LLaMA-2-7B on a GPU. Random weights, a bias that is not zero."""
    import attnflow as af

    model = base_model({**LLAMA2, "num_hidden_layers": 4} if device == "cuda" else SMOLLM2, device)
    if biased:
        af.bias.attach(model, af.bias.GuidanceConfig(init="kaiming"))
    return model


def training_step(provider: str, n: int, device: str) -> Callable[[], object]:
    run = training_on(model_of(device, provider == "attnflow"), n)
    run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return run


def training_on(model: Any, n: int) -> Callable[[], object]:
    """A step of AdamW on one row of n tokens."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)
    tokens = torch.randint(1, 1000, (1, n), device=model.device)

    def run() -> object:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def decoding(provider: str, n: int, device: str) -> Callable[[], object]:
    run = decoding_on(model_of(device, provider == "attnflow"), n, NEW_TOKENS)
    run()
    return run


def decoding_on(model: Any, n: int, new_tokens: int) -> Callable[[], object]:
    """So many tokens, one at a time, behind a prompt of n that is cached already."""
    model.eval()
    tokens = torch.randint(1, 1000, (1, n), device=model.device)
    with torch.no_grad():
        prompt = model(input_ids=tokens, use_cache=True).past_key_values

    @torch.no_grad()
    def run() -> object:
        token = tokens[:, -1:]
        for _ in range(new_tokens):
            token = model(input_ids=token, past_key_values=prompt, use_cache=True).logits.argmax(dim=-1)
        prompt.crop(-new_tokens)
        return token.tolist()

    return run


PEERS = {
    "guidance": {
        "base (SDPA, no bias)": "base",
        "eager module": "eager",
        "SDPA, compiled bias held whole": "compiled",
        "FlexAttention, bias captured": "flex",
        "the paper's concatenation": "concatenation",
    },
}
TILES, FLASHBIAS = {"tiles": "tiles"}, {"FlashBias, wider q and k in SDPA": "widened"}
CHEAP: dict[str, dict[str, str]] = {
    "key": TILES | FLASHBIAS,
    "cumulative": TILES | {"SDPA, gates held whole": "gates"},
    "alibi": TILES | FLASHBIAS,
    f"lowrank {NARROW}": TILES | FLASHBIAS,
    f"lowrank {RANK}": TILES | FLASHBIAS,
    "bilinear": TILES | FLASHBIAS,
    "relative": TILES,
}


def cases(device: str) -> list[Case]:
    gpu = device == "cuda"
    repeats = 30 if gpu else 5
    listed: list[Case] = []
    for kind, peers in PEERS.items():
        for n in (512, 1024, 2048, 4096, 8192):
            for backward in (False, True):
                what = f"{kind} bias, {'forward + backward' if backward else 'forward'}"
                for name, key in {"attnflow": "attnflow", **peers}.items():
                    if key == "flex" and backward and not gpu:
                        continue  # FlexAttention computes no gradients on a CPU
                    if key == "concatenation" and n > 2048:
                        continue
                    arguments = (key, kind, n, device, backward)
                    listed.append(Case(what, name, n, HERE, "one_layer", arguments, repeats=repeats))
    for kind, peers in CHEAP.items():
        for n in (512, 1024, 2048, 4096):
            for backward in (False, True):
                what = f"{kind} bias, {'forward + backward' if backward else 'forward'}"
                for name, key in {"attnflow": "attnflow", **peers}.items():
                    arguments = (key, kind, n, device, backward)
                    listed.append(Case(what, name, n, HERE, "beside_base", arguments, repeats=max(repeats, 9)))
    for what, function, sizes in (
        ("training step", "training_step", (512, 1024, 2048)),
        (f"decoding of {NEW_TOKENS} tokens", "decoding", (512, 2048)),
    ):
        for n in sizes:
            for name, key in (("attnflow", "attnflow"), ("base (no bias)", "base")):
                note = "4 layers of LLaMA-2-7B" if gpu else "SmolLM2-135M, random weights"
                listed.append(Case(what, name, n, HERE, function, (key, n, device), repeats=repeats, note=note))
    return listed


if __name__ == "__main__":
    main(cases, ["torch", "transformers"], time_limit=120)
