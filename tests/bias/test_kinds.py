"""Every kind: the identity at initialisation, and afterwards what its definition says of each pair."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from attnflow.bias import AlibiConfig, CumulativeConfig, CustomConfig, DenseConfig, GuidanceConfig, attention
from attnflow.bias.config import BiasConfig, LayerShape, Vectors
from attnflow.bias.kind import LayerBias
from attnflow.bias.positions import buckets, slopes
from tests.bias.cases import KINDS, Additive, Dense, config_of

SHAPE = LayerShape(index=0, num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=20, is_causal=True)
BOTH_WAYS = LayerShape(index=0, num_heads=4, num_kv_heads=2, head_dim=6, hidden_size=20, is_causal=False)
TOKENS = 9
POSITIONS = torch.arange(TOKENS)[None]
SHARED = [("unrotated", True), ("unrotated", "kv"), ("rotated", False), ("hidden", True), ("per_head", True)]
SHARED += [("per_head", "kv"), ("per_head", False)]


def vectors(seed=0, shape=SHAPE, batch=2):
    """(of the queries, of the keys), in float64; queries and keys share the layer's input."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width):
        return torch.randn(batch, TOKENS, width, generator=generator, dtype=torch.float64)

    hidden, sides = draw(shape.hidden_size), []
    for heads in (shape.num_heads, shape.num_kv_heads):
        width = heads * shape.head_dim
        sides.append(Vectors(draw(width), draw(width), hidden, POSITIONS))
    return sides


def module_of(config, shape=SHAPE):
    torch.manual_seed(1)
    module = config.module(shape).double()
    if hasattr(module, "norm"):  # away from 1 and 0, where mistakes would hide
        torch.nn.init.normal_(module.norm.weight)
        torch.nn.init.normal_(module.norm.bias)
    return module


def tile_of(module, shape=SHAPE, batch=2):
    queries, keys = vectors(shape=shape, batch=batch)
    term = module.term(queries, module.columns(keys), torch.arange(TOKENS))
    return term.tile(slice(0, TOKENS), slice(0, TOKENS))


def part(side, config, heads, head):
    """What the network of one query head reads of one side, [batch, tokens, width]."""
    whole = side.reference(config.reference)
    if config.reference != "per_head":
        return whole
    return whole.unflatten(-1, (heads, -1))[:, :, head * heads // SHAPE.num_heads]


def naive(config, pair):
    """A map per query head, [batch, heads, queries, keys], from pair(network, head, q_i, k_j)."""
    queries, keys = vectors()
    found = torch.empty(2, SHAPE.num_heads, TOKENS, TOKENS, dtype=torch.float64)
    networks = SHAPE.groups(config.share_heads)
    for head in range(SHAPE.num_heads):
        q, k = part(queries, config, SHAPE.num_heads, head), part(keys, config, SHAPE.num_kv_heads, head)
        for b in range(2):
            for i in range(TOKENS):
                for j in range(TOKENS):
                    found[b, head, i, j] = pair(head * networks // SHAPE.num_heads, head, q[b, i], k[b, j])
    return found


def assert_is(tile, expected):
    per_head = tile.repeat_interleave(expected.shape[1] // tile.shape[1], dim=1)
    torch.testing.assert_close(per_head.expand_as(expected), expected, atol=1e-12, rtol=1e-12)


def network(module, g, hidden):
    normal = functional.layer_norm(hidden, hidden.shape, module.norm.weight[g], module.norm.bias[g])
    return functional.gelu(normal) @ module.output_weight[g]


def guidance(m, g, q, k):
    first = torch.cat([m.query.weight[g], m.key.weight[g]], dim=1)  # on [q; k], as the paper writes it
    return network(m, g, first @ torch.cat([q, k]) + m.hidden_bias[g]) + m.output_bias[g]


def dot(m, g, q, k):
    width = len(k)
    if len(q) > width:  # full width: every query head with the key head that it uses
        k = k.unflatten(0, (SHAPE.num_kv_heads, -1)).repeat_interleave(2, dim=0).flatten()
    return m.gain[g] * (q @ k) / math.sqrt(width)


def pairs(definition):
    """The map of a kind that is defined for each pair: definition(module, network, q_i, k_j)."""
    return lambda config, module, shape: naive(config, lambda g, head, q, k: definition(module, g, q, k))


def cumulative(config, module, shape):
    logs = naive(config, lambda g, h, q, k: functional.logsigmoid(module.gate.weight[g, 0] @ k + module.gate_bias[g]))
    expected = torch.zeros_like(logs)
    for head in range(SHAPE.num_heads):
        gain = module.gain[head * SHAPE.groups(config.share_heads) // SHAPE.num_heads]
        for i in range(TOKENS):
            for j in range(TOKENS):
                between, sign = (range(j + 1, i + 1), 1) if j <= i else (range(i + 1, j + 1), -1)
                expected[:, head, i, j] = sign * gain * sum(logs[:, head, 0, l] for l in between)
    return expected


DISTANCE = POSITIONS[0] - POSITIONS[0][:, None]


def alibi(config, module, shape):
    """Its form for causal layers is linear in the key's position, beyond the query too, where no pair exists."""
    away = -DISTANCE if shape.is_causal else DISTANCE.abs()
    return -(module.gain * slopes(4).double())[None, :, None, None] * away


def relative(config, module, shape):
    bucket = buckets(DISTANCE.flatten(), config.num_buckets, config.max_distance, not shape.is_causal)
    return module.table[:, bucket.view_as(DISTANCE)][None]


# One for each kind: (config, module, shape) -> its map, [batch or 1, heads or networks, queries, keys].
ORACLES = {
    "guidance": pairs(guidance),
    "key": pairs(lambda m, g, q, k: network(m, g, m.key.weight[g] @ k + m.hidden_bias[g])),
    "cumulative": cumulative,
    "lowrank": pairs(lambda m, g, q, k: (m.query.weight[g] @ q) @ (m.key.weight[g] @ k) / math.sqrt(3)),
    "bilinear": pairs(lambda m, g, q, k: k @ m.query.weight[g] @ q / math.sqrt(len(q) * len(k))),
    "dot": pairs(dot),
    "dense": lambda config, module, shape: module.values[:, :, :TOKENS, :TOKENS],
    "alibi": alibi,
    "relative": relative,
}


def test_every_kind_has_an_oracle():
    assert set(ORACLES) == set(KINDS)


@pytest.mark.parametrize("shape", [SHAPE, BOTH_WAYS], ids=["causal", "both ways"])
@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize(("reference", "share"), SHARED)
def test_a_kind_is_its_definition_on_every_pair(kind, reference, share, shape):
    sizes = {"hidden_dim": 5, "rank": 3, "max_length": 12, "num_buckets": 8, "max_distance": 6}
    config = config_of(kind, reference=reference, share_heads=share, **sizes)
    if kind == "cumulative" and not shape.is_causal:
        pytest.skip("refuses layers without an order in time")
    module = config.module(shape).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    assert not module.is_zero()
    assert_is(tile_of(module, shape), ORACLES[kind](config, module, shape))


def test_dense_is_the_table_at_the_positions():
    module = module_of(DenseConfig(share_heads=False, max_length=12, std=0.02))
    queries, _ = vectors()
    where = torch.tensor([[3, 1, 11, 0, 0, 5, 7, 8, 2]])
    keys = Vectors(None, None, None, where)
    tile = module.term(queries, module.columns(keys), None).tile(slice(0, TOKENS), slice(0, TOKENS))
    assert torch.equal(tile, module.values[:, :, :TOKENS][..., where[0]])
    beyond = module.columns(Vectors(None, None, None, where + 1))
    with pytest.raises(ValueError, match="covers 12 positions, but the sequence reaches 12: attach it with a larger"):
        module.term(queries, beyond, None)


def test_alibi_slopes_are_the_published_ones():
    """Press et al. (2022), sec. 3 and their code, for head counts that are and are not powers of two."""
    assert slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert slopes(16).tolist() == pytest.approx([2.0 ** (-h / 2) for h in range(1, 17)])
    assert slopes(12).tolist() == pytest.approx(slopes(8).tolist() + slopes(16).tolist()[0::2][:4])
    assert slopes(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000)])
def test_buckets_are_t5s(num_buckets, max_distance, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-2 * max_distance, 2 * max_distance + 1)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(buckets(distance, num_buckets, max_distance, bidirectional), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reference", "share"), SHARED)
def test_every_kind_begins_as_the_identity_and_learns(kind, reference, share):
    config = config_of(kind, reference=reference, share_heads=share, hidden_dim=5, max_length=12)
    module = config.module(SHAPE)
    queries, keys = (Vectors(*(x.float() for x in (s.unrotated, s.rotated, s.hidden)), s.positions) for s in vectors())
    assert module.is_zero()
    term = module.term(queries, module.columns(keys), torch.arange(TOKENS))
    assert SHAPE.num_heads % term.groups == 0
    assert (term.tile(slice(0, TOKENS), slice(0, TOKENS)) == 0).all()
    query, key = torch.randn(2, 4, TOKENS, 6), torch.randn(2, 2, TOKENS, 6)
    allow = torch.ones(TOKENS, TOKENS).tril().bool()
    for backend in ("reference", "tiled"):
        output = attention(query, key, key, [term], allow, backend=backend)[0]
        assert torch.equal(output, attention(query, key, key, [], allow, backend=backend)[0])
    output.square().sum().backward()
    learned = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-6]
    assert learned, "no parameter gets a gradient in the first step"
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1e-2)
    assert not module.is_zero()


@pytest.mark.parametrize(
    ("kind", "name", "fan_in"),
    [
        ("guidance", "output_weight", 64),
        ("key", "output_weight", 64),
        ("lowrank", "key.weight", 2 * 64),
        ("bilinear", "query.weight", 32 * 64),
    ],
)
def test_kaiming_is_hes_initialisation_of_the_last_layer(kind, name, fan_in):
    """daa, sec. 5.7: "a standard Kaiming (He) initialization instead of zeros": std sqrt(2 / fan_in), 0.177 for 64."""
    shape = LayerShape(index=0, num_heads=32, num_kv_heads=2, head_dim=64, hidden_size=20, is_causal=True)
    torch.manual_seed(0)
    module = config_of(kind, start=True, hidden_dim=64, share_heads=False).module(shape)
    weight = module.get_parameter(name).detach()
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / fan_in), rel=0.05)
    assert abs(float(weight.mean())) < 0.1 * math.sqrt(2 / fan_in)
    if kind == "guidance":
        assert math.sqrt(2 / fan_in) == pytest.approx(0.177, abs=1e-3)
        assert not module.output_bias.any()
        bound = 1 / math.sqrt((32 + 2) * 64)  # the hidden layer is as with init="zero"
        assert float(module.query.weight.detach().abs().max()) == pytest.approx(bound, rel=1e-3)


def test_vectors_that_were_not_asked_for():
    with pytest.raises(ValueError, match="must name reference='rotated'"):
        Vectors(None, None, None, POSITIONS).reference("rotated")


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


def test_placement():
    assert GuidanceConfig().layer_indices(5) == [0, 2, 4]
    assert GuidanceConfig(layers="every").layer_indices(3) == [0, 1, 2]
    assert GuidanceConfig(layers="every_fourth").layer_indices(9) == [0, 4, 8]
    assert GuidanceConfig(layers=[5, 1]).layer_indices(6) == [1, 5]


def test_alibi_is_the_papers_baseline():
    """daa, sec. 4.2: ALiBi in place of rotary embedding, in every layer, with the published slopes."""
    config = AlibiConfig()
    assert (config.layers, config.rope) == ("every", "remove")
    module = config.module(LayerShape(0, 8, 8, 4, 32, is_causal=True))
    assert torch.equal(module.gain, torch.ones(8))
    assert not module.is_zero()


def test_a_custom_config_writes_all_but_its_code():
    config = CustomConfig(lambda shape: torch.nn.Identity(), layers=[1], name="mine")
    assert config.to_dict() == {
        "kind": "custom", "layers": [1], "rope": "keep", "reference": "unrotated", "name": "mine"
    }  # fmt: skip
    assert replace(config, layers="every").layer_indices(2) == [0, 1]
    assert isinstance(config, BiasConfig)
