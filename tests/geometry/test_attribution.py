"""Attribution of scores, against attention written out by hand, finite differences and interventions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import attnflow as af
from tests.models import deep

IDS = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(1))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions as in the paper: pairs of entries, half of the width apart."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], dim=-1)


def llama_states(model, ids: Tensor, without: int | None = None, scales: list[Tensor] | None = None):
    """A LLaMA written out: (summands of the stream before the last layer, its scores of all heads).

    `without` takes one summand out at the last layer only; `scales` are those of its norm, to hold them.
    """
    config, weights = model.config, {n: p.double() for n, p in model.state_dict().items()}
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps

    def scale(x):
        return (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5

    def attend(x, prefix):
        q, k, v = ((x @ weights[f"{prefix}.{n}_proj.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
                   for n in "qkv")  # fmt: skip
        k, v = (one.repeat_interleave(heads // kv, dim=0) for one in (rotate(k, theta), v))
        return rotate(q, theta) @ k.mT / math.sqrt(config.head_dim), v

    summands = [weights["model.embed_tokens.weight"][ids[0]]]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    for layer in range(config.num_hidden_layers):
        last, x = layer == config.num_hidden_layers - 1, sum(summands)
        at = f"model.layers.{layer}"
        if last and without is not None:
            x = x - summands[without]
        norm = scale(x) if not last or scales is None else scales[0]
        scores, v = attend(x * norm * weights[f"{at}.input_layernorm.weight"], f"{at}.self_attn")
        if last:
            return summands, scores, norm
        mixed = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        summands.append(mixed.transpose(0, 1).flatten(1) @ weights[f"{at}.self_attn.o_proj.weight"].T)
        x = sum(summands)
        x = x * scale(x) * weights[f"{at}.post_attention_layernorm.weight"]
        gate, up = (x @ weights[f"{at}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        summands.append((torch.nn.functional.silu(gate) * up) @ weights[f"{at}.mlp.down_proj.weight"].T)
    raise AssertionError


def test_scores_of_a_llama_written_out():
    model = deep("Llama", num_key_value_heads=2).double().eval()
    _, scores, _ = llama_states(model, IDS)
    result = af.geometry.attribute(model, IDS, layer=2)
    torch.testing.assert_close(result.scores, scores[:, -1], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(result.raw.sum((-1, -2)) + result.constant, scores[:, -1], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(result.weights, scores[:, -1].softmax(-1), atol=1e-7, rtol=1e-7)
    assert result.error < 1e-12
    assert not result.constant.any()


@pytest.mark.parametrize("component", range(5))
def test_a_component_taken_out_with_norms_held(component):
    model = deep("Llama", num_key_value_heads=2).double().eval()
    _, before, norm = llama_states(model, IDS)
    _, after, _ = llama_states(model, IDS, without=component, scales=[norm])
    raw = af.geometry.attribute(model, IDS, layer=2).raw
    gone = raw[..., component, :].sum(-1) + raw[..., component].sum(-1) - raw[..., component, component]
    torch.testing.assert_close((before - after)[:, -1], gone, atol=1e-7, rtol=1e-7)
    assert gone.abs().max() > 1e-3
