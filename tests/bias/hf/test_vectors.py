"""The vectors that a bias reads are the layer's projections, whatever layout they are stored in."""

import pytest
import torch
from torch import nn

import attnflow as af
from tests.bias.hf.common import family, outputs, tokens

HEADS, DIM = 4, 8


class Record(nn.Module):
    """A bias of the user's making that keeps what it is shown."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, None

    def forward(self, query, key):
        self.seen = query, key
        return torch.zeros(1, 1, query.shape[1], key.shape[1], dtype=query.dtype)


def separate(query, key):
    def project(module, x):
        return getattr(module, query)(x), getattr(module, key)(x)

    return project


def fused(module, x):  # [query | key | value]
    both = x @ module.qkv_proj.weight.T
    return both[..., : HEADS * DIM], both[..., HEADS * DIM : HEADS * DIM + 2 * DIM]


def conv(module, x):  # Conv1D: stored (in, out)
    both = x @ module.c_attn.weight + module.c_attn.bias
    return both[..., :32], both[..., 32:64]


def interleaved(module, x):  # each head's query, key and value side by side
    linear = module.query_key_value
    heads = (x @ linear.weight.T + linear.bias).unflatten(-1, (HEADS, 3, DIM))
    return heads[..., 0, :].flatten(-2), heads[..., 1, :].flatten(-2)


def stacked(module, x):  # [3, heads, head_dim]
    both = (x @ module.Wqkv.weight.T).unflatten(-1, (3, HEADS * DIM))
    return both[..., 0, :], both[..., 1, :]


PROJ = separate("q_proj", "k_proj")
LAYOUTS = {
    **dict.fromkeys(
        ("Llama", "Mistral", "Qwen2", "Gemma", "Gemma2", "Mixtral", "GptOss", "StableLm", "OPT", "MBartDecoder"), PROJ
    ),
    **dict.fromkeys(("Phi", "Starcoder2", "Cohere2", "FalconH1"), PROJ),
    **dict.fromkeys(("Qwen3", "Gemma3", "Olmo2"), PROJ),
    **dict.fromkeys(("Bert", "Roberta", "Electra", "Albert"), separate("query", "key")),
    "DistilBert": separate("q_lin", "k_lin"),
    "Phi3": fused,
    "GPT2": conv,
    "GPTNeoX": interleaved,
    "ModernBert": stacked,
}
NORMED = {"Qwen3", "Gemma3", "Olmo2"}  # attention gets them after a norm that the projection does not include
SCALED = {"FalconH1", "OPT", "GptOss"}  # attention gets keys, or queries, times a constant


@pytest.mark.parametrize("name", LAYOUTS)
def test_unrotated_vectors_are_the_projections_of_the_modules_weights(name):
    model, made, inputs, calls = family(name), [], [], []
    custom = [
        af.bias.CustomConfig(lambda shape: made.append(Record(shape)) or made[-1], layers="every", reference=r)
        for r in ("unrotated", "hidden", "rotated")
    ]
    af.bias.attach(model, custom)
    owner = next(module for module in model.modules() if hasattr(module, "score_terms"))
    owner.score_terms.observer = calls.append
    owner.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs.get("hidden_states", args[0] if args else None)),
        with_kwargs=True,
    )
    with torch.no_grad():
        outputs(model, input_ids=tokens(2, 6))
        expected = LAYOUTS[name](owner, inputs[-1])
    unrotated, hidden, rotated = (record.seen for record in made[:3])
    for ours, theirs in zip(unrotated, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours in hidden:
        assert torch.equal(ours, inputs[-1])
    in_attention = tuple(tensor.transpose(1, 2).flatten(2) for tensor in (calls[-1].query, calls[-1].key))
    for ours, theirs in zip(rotated, in_attention, strict=True):
        assert torch.equal(ours, theirs)
    shape = made[0].shape
    assert (shape.num_heads, shape.head_dim, shape.hidden_size) == (HEADS, DIM, 32)
    assert [vectors.shape[-1] for vectors in unrotated] == [HEADS * DIM, shape.num_kv_heads * DIM]
    if name not in NORMED:
        for before, after in zip(unrotated, in_attention, strict=True):
            ratio = after[:, 0] / before[:, 0]  # rotary embedding is the identity at position 0
            expected_ratio = torch.ones_like(ratio) if name not in SCALED else ratio[:1, :1].expand_as(ratio)
            torch.testing.assert_close(ratio, expected_ratio, rtol=1e-5, atol=1e-5)
