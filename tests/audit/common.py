"""What tests of the audit share: tiny models of three layers, their inputs, and faults to inject into them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.models import DEEP_VOCABULARY, WINDOW
from tests.models import deep as tiny

LENGTH = 13
ATTENTION = ["Llama", "Mistral", "GPT2", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "GPTNeo", "Llama4", "BertDecoder"]
ENCODERS = ["Bert", "Albert", "ModernBert", "Gemma3Encoder"]
SEQUENCE_TO_SEQUENCE = ["T5", "Bart", "SeamlessM4T"]
EXPERTS = ["Qwen3Moe"]
RECURRENT = ["Mamba2", "FalconMamba", "Jamba", "Bamba", "NemotronH", "Qwen3Next", "MiniMax", "Lfm2"]
REPAIRED = ["RoFormer", "BigBird", "RemBert", "MegatronBert"]


def tokens(batch=2, length=LENGTH, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, DEEP_VOCABULARY, (batch, length), generator=generator)


def inputs(name, batch=2, length=LENGTH):
    """The keyword arguments of one call; the decoder's sequence is shorter than the encoder's."""
    given = {"input_ids": tokens(batch, length)}
    return given | ({"decoder_input_ids": tokens(batch, 9, seed=6)} if name in SEQUENCE_TO_SEQUENCE else {})


@contextlib.contextmanager
def open_attention(model, layer, allow, head=0):
    """The attention of one head of one layer also lets query q read key k where `allow[q, k]`: a kernel with a bug."""

    def leaky(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        score = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
        mask = attention_mask.expand(*score.shape).clone()
        if module.layer_idx == layer:
            past = score.shape[-1] - score.shape[-2]
            opened = allow[past : score.shape[-1], : score.shape[-1]]
            mask[:, head] = torch.where(opened, 0.0, mask[:, head])
        return (score + mask).softmax(-1).matmul(value).transpose(1, 2).contiguous(), None

    old = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("leaky", leaky)
    ALL_MASK_ATTENTION_FUNCTIONS.register("leaky", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = "leaky"
    try:
        yield model
    finally:
        model.config._attn_implementation = old


@contextlib.contextmanager
def wrapped(module, change):
    """`module.forward` returns `change(output, *args, **kwargs)`."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return change(original(*args, **kwargs), *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def to_one_row(output, hidden):
    """A change that carries position 6 of sequence 1 to position 2 of sequence 3."""
    output = output.clone()
    output[3, 2] += 1e-2 * hidden[1, 6].repeat(2)[:48]
    return output


def routed(output, hidden):
    """A change that no gradient shows."""
    return output + (hidden[..., :1] > 0).to(output).flip(1)


def remembering():
    """A change that adds what it saw in the call before."""
    memory = {}

    def change(output, hidden):
        old = memory.get("mean", torch.zeros(1))
        memory["mean"] = hidden.mean()
        return output + 1e-3 * old

    return change


def centred(strength):
    model = tiny("Llama")
    layer = model.model.layers[2]
    layer.post_attention_layernorm = CentredOverSequence(layer.post_attention_layernorm, strength)
    return model


def convolved():
    model = tiny("Qwen3")
    model.model.layers[1].mlp = Convolved(model.model.layers[1].mlp, 32)
    return model


class Stack(nn.Module):
    """A plain stack over embeddings; `run(hidden, layers)` is what it does with them."""

    def __init__(self, run, layers):
        super().__init__()
        self.run = run
        self.embed = nn.Embedding(DEEP_VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(layers))

    def forward(self, input_ids):
        return self.run(self.embed(input_ids), self.layers)


class CentredOverSequence(nn.Module):
    """A normalisation with statistics over the sequence, next to the right one."""

    def __init__(self, norm, strength):
        super().__init__()
        self.norm = norm
        self.strength = strength

    def forward(self, hidden):
        return self.norm(hidden) - self.strength * hidden.mean(1, keepdim=True)


class Convolved(nn.Module):
    """A block behind a convolution that looks both ways."""

    def __init__(self, block, width):
        super().__init__()
        self.block = block
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)

    def forward(self, hidden):
        return self.block(hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2))


def folder(package):
    """Where an installed package keeps its files; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    return spec and spec.submodule_search_locations[0]


__all__ = ["WINDOW", "tiny"]
