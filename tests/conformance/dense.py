"""What a small Llama computes, written out in float64 over dense tables; nothing here imports attnflow.

Weights are read by their names in `named_parameters`, so that adapters, biases and readers come with the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.conformance import oracles

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD = 2, 32, 4, 2, 8
VOCABULARY = 64
_WRAPPERS = re.compile(r"^((module|_orig_mod|base_model\.model)\.)+|(?<=\.)base_layer\.")
Weights = Mapping[str, Tensor]


def plain(name: str) -> str:
    """The name of a parameter without the wrappers around its module."""
    return _WRAPPERS.sub("", name)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters in float64, ready for gradients; those that are offloaded are not among them."""
    found: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        value = value.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not value.is_meta:
            found[plain(name)] = value.double().clone().requires_grad_()
    return found


@dataclass(frozen=True)
class Call:
    """One call: ids [batch, n]; allow bool[batch, n, n]; positions [batch, n]; noise on the embeddings; entries."""

    ids: Tensor
    allow: Tensor
    positions: Tensor
    noise: Tensor | None = None
    entries: Tensor | None = None
    biased: bool = True
    adapted: bool = True


def logits(weights: Weights, call: Call) -> Tensor:
    """float64[batch, n, vocabulary]."""
    x = weights["model.embed_tokens.weight"][call.ids]
    x = x if call.noise is None else x + call.noise
    angle = call.positions[..., None].double() / 10000 ** (torch.arange(0, HEAD, 2).double() / HEAD)
    turn = torch.cat([angle, angle], -1)[:, None]
    for number in range(LAYERS):
        path = f"model.layers.{number}."
        h = _norm(x, weights[path + "input_layernorm.weight"])
        flat = {one: h @ _matrix(weights, f"{path}self_attn.{one}_proj", call).mT for one in "qkv"}
        q, k, v = (value.unflatten(-1, (-1, HEAD)).transpose(1, 2) for value in flat.values())
        q, k = (value * turn.cos() + _half_turned(value) * turn.sin() for value in (q, k))
        k, v = (value.repeat_interleave(HEADS // KV_HEADS, 1) for value in (k, v))
        scores = q @ k.mT / HEAD**0.5
        if call.biased and (bias := f"{path}self_attn.score_terms.kinds.0.") + "query.weight" in weights:
            scores = scores + _guidance(weights, bias, flat["q"], flat["k"])[:, None]
        x = (
            x
            + _attend(scores, call.allow, v).transpose(1, 2).flatten(2)
            @ _matrix(weights, path + "self_attn.o_proj", call).mT
        )
        h = _norm(x, weights[path + "post_attention_layernorm.weight"])
        up, gate = (h @ weights[f"{path}mlp.{one}_proj.weight"].mT for one in ("up", "gate"))
        x = x + (functional.silu(gate) * up) @ weights[path + "mlp.down_proj.weight"].mT
        if call.entries is not None and (reader := path + "self_attn.knowledge_reader.") + "gate" in weights:
            pooled = _attend(torch.zeros_like(scores), call.allow, v)[:, :: HEADS // KV_HEADS]
            x = x + _read(weights, reader, x, pooled.transpose(1, 2).flatten(2), call.entries)
    return _norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].mT


def _attend(scores: Tensor, allow: Tensor, values: Tensor) -> Tensor:
    allow = allow[:, None]
    shares = scores.masked_fill(~allow, -1e30).softmax(-1).masked_fill(~allow, 0)  # nothing for a row without keys
    return shares @ values


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _matrix(weights: Weights, name: str, call: Call) -> Tensor:
    """A projection, with the low-rank adapter that may be on it (rank 4, alpha 8)."""
    matrix = weights[name + ".weight"]
    down = weights.get(name + ".lora_A.default.weight")
    return matrix if down is None or not call.adapted else matrix + 2 * weights[name + ".lora_B.default.weight"] @ down


def _guidance(weights: Weights, path: str, q: Tensor, k: Tensor) -> Tensor:
    """Linear(GELU(LayerNorm(Linear([q_i; k_j])))) of all heads side by side, before rotation (daa, sec. 3.2.1)."""
    left, right = q @ weights[path + "query.weight"][0].mT, k @ weights[path + "key.weight"][0].mT
    hidden = left[:, :, None] + right[:, None] + weights[path + "hidden_bias"][0]
    hidden = (hidden - hidden.mean(-1, keepdim=True)) / (hidden.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    hidden = functional.gelu(hidden * weights[path + "norm.weight"][0] + weights[path + "norm.bias"][0])
    return hidden @ weights[path + "output_weight"][0] + weights[path + "output_bias"][0]


def _read(weights: Weights, path: str, x: Tensor, pooled: Tensor, entries: Tensor) -> Tensor:
    """gate sqrt(d) softmax_one(X W_Q (E W_K)^T / sqrt(d_k) + b) E W_V with X = own norm(H) + W_P norm(P)."""

    def normal(y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt()

    w = {name.removeprefix(path): value for name, value in weights.items() if name.startswith(path)}
    asked = w["own"] * normal(x) + normal(pooled) @ w["pooled_map.weight"].mT
    query, key = asked @ w["attention.query"][0], entries @ w["attention.key"][0, 0]
    powers = (query @ key.mT / key.shape[-1] ** 0.5 + w["attention.constant"][0, 0]).exp()
    shares = powers / (1 + powers.sum(-1, keepdim=True))
    return w["gate"] * WIDTH**0.5 * (shares @ entries) @ w["attention.value"][0]


def loss(out: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the next token, -100 left out."""
    return functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def geometry(weights: Weights, adapted: bool) -> list[tuple[float, float]]:
    call = Call(*[torch.empty(0)] * 3, adapted=adapted)
    scores: list[tuple[float, float]] = []
    for number in range(LAYERS):
        path = f"model.layers.{number}.self_attn."
        q, k = (_matrix(weights, f"{path}{one}_proj", call).detach().mT.unflatten(-1, (-1, HEAD)) for one in "qk")
        scores.append(oracles.geometry(q, k))
    return scores


def beams(next_logits: Callable[[Tensor], Tensor], prompt: Sequence[int], width: int, new: int) -> list[int]:
    """The most likely continuation that a search over `width` beams finds; nothing ends a text early."""
    kept = [(0.0, list(prompt))]
    for _ in range(new):
        told = next_logits(torch.tensor([text for _, text in kept])).log_softmax(-1)
        every = [(score + float(p), [*text, i]) for (score, text), row in zip(kept, told, strict=True)
                 for i, p in enumerate(row)]  # fmt: skip
        kept = sorted(every, reverse=True)[:width]
    return kept[0][1]
