"""`LayerBias`: several kinds as one, and a user's own module."""

import torch
from torch import nn

from attnflow.bias import AlibiConfig, CumulativeConfig, CustomConfig, GuidanceConfig, attention
from attnflow.bias.kind import LayerBias
from attnflow.bias.terms import Additive, Dense
from tests.bias.test_kinds import SHAPE, TOKENS, module_of, tile_of, vectors

EVERY = slice(0, TOKENS), slice(0, TOKENS)


def layer_of(*modules):
    return LayerBias(modules, SHAPE, ["unrotated", "per_head"])


def terms_of(bias):
    queries, keys = vectors()
    return bias.terms(queries, bias.columns(keys), torch.arange(TOKENS))


def test_kinds_are_summed():
    modules = [
        module_of(GuidanceConfig(hidden_dim=5, init="kaiming")),
        module_of(CumulativeConfig(share_heads=False, gain=1.0)),
        module_of(AlibiConfig(layers="every_other", rope="keep")),
    ]
    bias = layer_of(*modules)
    assert bias.references == {"unrotated"}
    for term, module in zip(terms_of(bias), modules, strict=True):
        torch.testing.assert_close(term.tile(*EVERY), tile_of(module).expand_as(term.tile(*EVERY)))
    assert {p for m in modules for p in m.parameters()} == set(bias.parameters())


class Distance(nn.Module):
    """A user's module with the methods of a kind."""

    def __init__(self, shape):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(shape.num_heads, dtype=torch.float64))

    def columns(self, keys):
        return keys.positions[..., None].double()

    def term(self, queries, columns, slots):
        return Additive(columns.squeeze(-1)[:, None] * self.slope[:, None])

    def is_zero(self):
        return False


class Similarity(nn.Module):
    """A user's module on all pairs."""

    def forward(self, query, key):
        return torch.tanh(query[..., :12] @ key.mT)[:, None]


def test_a_users_module():
    shaped, simple = (
        CustomConfig(Distance).module(SHAPE),
        CustomConfig(lambda shape: Similarity(), layers="every").module(SHAPE),
    )
    positions, similarity = terms_of(layer_of(shaped, simple))
    assert isinstance(similarity, Dense)
    queries, keys = vectors()
    torch.testing.assert_close(similarity.values[:, 0], torch.tanh(queries.unrotated[..., :12] @ keys.unrotated.mT))
    query = torch.randn(2, 4, TOKENS, 6, dtype=torch.float64)
    outputs = [
        attention(query, query, query, [positions, similarity], backend=backend)[0]
        for backend in ("reference", "tiled")
    ]
    torch.testing.assert_close(*outputs)
    outputs[1].sum().backward()
    assert shaped.slope.grad is not None
    assert CustomConfig(Distance).layer_indices(3) == [0, 2]
