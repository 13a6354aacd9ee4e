"""Initialisations: exact in the stored layout, by head and in full, at the scale that was asked for."""

import math

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3Model,
    FalconConfig,
    FalconModel,
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    T5Config,
    T5Model,
)

import attnflow as af
from attnflow.models.attention import attention_layers

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 32, "vocab_size": 50}


def llama(kv_heads, **others):
    return LlamaForCausalLM(LlamaConfig(**SIZE, num_key_value_heads=kv_heads, **others))


MODELS = {
    "separate": lambda: BertModel(BertConfig(**SIZE)),
    "shared": lambda: AlbertModel(AlbertConfig(**SIZE, embedding_size=16)),
    "conv1d": lambda: GPT2Model(GPT2Config(n_embd=64, n_layer=2, n_head=8, vocab_size=50)),
    "interleaved": lambda: GPTNeoXModel(GPTNeoXConfig(**SIZE)),
    "gqa": lambda: llama(2),
    "mqa, wide heads": lambda: llama(1, head_dim=12),
    "fused": lambda: Phi3ForCausalLM(Phi3Config(**SIZE, num_key_value_heads=4, pad_token_id=0)),
    "fused groups": lambda: FalconModel(
        FalconConfig(
            vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_kv_heads=2,
            new_decoder_architecture=True,
        )
    ),
    "uneven scales": lambda: T5Model(T5Config(d_model=64, num_layers=2, num_heads=8, d_kv=7, d_ff=32, vocab_size=50)),
    "encoder and decoder": lambda: BartModel(
        BartConfig(
            vocab_size=50, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
        )
    ),
}  # fmt: skip
BOTH = pytest.mark.parametrize(
    ("initialise", "sign"), [(af.geometry.init_symmetric_, 1), (af.geometry.init_skew_, -1)], ids=["symmetric", "skew"]
)


def forms(live):
    """Every head's M_h in float64, straight from the definition."""
    query = live.query().detach().double().unflatten(0, (live.num_heads, -1))
    key = live.key().detach().double().unflatten(0, (live.num_kv_heads, -1))
    return torch.stack([query[h].T @ key[h // (live.num_heads // live.num_kv_heads)] for h in range(len(query))])


def deviation(matrix, sign):
    """||M -+ M^T|| / ||M||: 0 for exactly symmetric or skew matrices, sqrt(2) for random ones."""
    assert (matrix.norm(dim=(-2, -1)) > 0).all()
    return ((matrix - sign * matrix.mT).norm(dim=(-2, -1)) / matrix.norm(dim=(-2, -1))).max().item()


def own(model, kind="self"):
    return [live for live in attention_layers(model) if live.kind == kind]


def root_mean_square(weight):
    return weight.double().square().mean().sqrt().item()


@BOTH
@pytest.mark.parametrize("scale", ["matched", "paper"])
@pytest.mark.parametrize("name", MODELS)
def test_every_head_and_their_sum_are_exact(name, scale, initialise, sign):
    model = MODELS[name]()
    assert deviation(forms(own(model)[0]), sign) > 0.5
    initialise(model, scale=scale)
    for live in own(model):
        m = forms(live)
        assert deviation(m, sign) < 1e-6, live.name
        assert deviation(m.sum(0), sign) < 1e-6, live.name


@BOTH
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_matched_scale_keeps_the_size_of_both_projections(name, per_head, initialise, sign):
    model = MODELS[name]()
    before = [(root_mean_square(w.query().detach()), root_mean_square(w.key().detach())) for w in own(model)]
    initialise(model, per_head=per_head)
    after = [(root_mean_square(w.query().detach()), root_mean_square(w.key().detach())) for w in own(model)]
    assert torch.tensor(after) == pytest.approx(torch.tensor(before), rel=1e-6)


@BOTH
@pytest.mark.parametrize("name", ["separate", "gqa"])
def test_paper_scale_is_that_of_linear_layers(name, initialise, sign):
    model = MODELS[name]()
    initialise(model, scale="paper")
    for live in own(model):
        for weight in (live.query().detach(), live.key().detach()):
            assert root_mean_square(weight) == pytest.approx(1 / math.sqrt(3 * 64), rel=0.1)


def test_symmetric_init_of_the_paper_copies_the_query():
    model = MODELS["separate"]()
    af.geometry.init_symmetric_(model, scale="paper")
    for live in own(model):
        torch.testing.assert_close(live.key().detach(), live.query().detach(), rtol=1e-6, atol=0)
        assert live.query().detach().abs().max() <= 1 / 8
        assert live.query().detach().abs().max() > 0.99 / 8


@BOTH
@pytest.mark.parametrize("name", ["separate", "conv1d", "interleaved"])
def test_all_but_the_key_stays(name, initialise, sign):
    model = MODELS[name]()
    before = [live.query().detach().clone() for live in own(model)]
    others = {n: p.detach().clone() for n, p in model.named_parameters()}
    queries_and_keys = {n for live in own(model) for n in live.parameters}
    initialise(model)
    for live, query in zip(own(model), before, strict=True):
        assert torch.equal(live.query().detach(), query)
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters() if n not in queries_and_keys)
    if name != "separate":  # values share a parameter with queries and keys, and stay too
        for live in own(model):
            (parameter,) = live.parameters.values()
            (parameter_name,) = live.parameters
            changed = int((parameter.detach() != others[parameter_name]).sum())
            assert 0 < changed <= live.key().detach().numel()


@BOTH
def test_cross_attention_stays(initialise, sign):
    model = MODELS["encoder and decoder"]()
    before = [live.key().detach().clone() for live in own(model, "cross")]
    initialise(model)
    assert before
    for live, key in zip(own(model, "cross"), before, strict=True):
        assert torch.equal(live.key().detach(), key)


@BOTH
def test_heads_of_a_group_differ(initialise, sign):
    model = MODELS["gqa"]()
    initialise(model)
    m = forms(own(model)[0]).flatten(1)
    cosines = torch.corrcoef(m)[:4, :4].abs()
    assert cosines.fill_diagonal_(0).max() < 0.9


@BOTH
def test_full_form_alone_leaves_the_queries_of_a_group_independent(initialise, sign):
    model = llama(2)
    before = [live.query().detach().clone() for live in own(model)]
    initialise(model, per_head=False)
    for live, query in zip(own(model), before, strict=True):
        m = forms(live)
        assert torch.equal(live.query().detach(), query)
        assert deviation(m.sum(0), sign) < 1e-6
        scores = af.geometry.symmetry(m)
        assert (scores * sign).mean() == pytest.approx(1 / 4, abs=0.15)
        assert (scores * sign).max() < 0.7


def test_symmetric_forms_are_positive_semi_definite():
    for name in ("separate", "gqa"):
        model = MODELS[name]()
        af.geometry.init_symmetric_(model)
        for live in own(model):
            eigenvalues = torch.linalg.eigvalsh(forms(live))
            assert eigenvalues.min() > -1e-6 * eigenvalues.max()


def test_under_gqa_heads_with_queries_of_their_own_are_never_all_symmetric():
    """The statement of the docstring: M_h = M_h^T iff W_q,h = B_h W_k with B_h = B_h^T."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    # All W_q with W_q^T W_k symmetric: the null space of a linear map, whose dimension is that of symmetric 4 x 4.
    basis = torch.eye(4 * 16, dtype=torch.float64).unflatten(1, (4, 16))
    images = torch.stack([(query.T @ key - key.T @ query).flatten() for query in basis], dim=1)
    assert 4 * 16 - torch.linalg.matrix_rank(images) == 4 * 5 // 2


@BOTH
def test_bfloat16_is_exact_up_to_its_rounding(initialise, sign):
    for name in ("separate", "gqa", "interleaved"):
        for scale in ("matched", "paper"):
            model = MODELS[name]().bfloat16()
            initialise(model, scale=scale)
            for live in own(model):
                assert live.query().detach().dtype == torch.bfloat16
                m = forms(live)
                assert (sign * af.geometry.symmetry(m)).min() > 1 - 1e-5
                assert sign * af.geometry.symmetry(m.sum(0)) > 1 - 1e-5


@BOTH
def test_generator_fixes_the_draw_and_nothing_else_moves(initialise, sign):
    drawn = []
    for seed in (1, 1, 2):
        model = MODELS["gqa"]()
        state = torch.random.get_rng_state()
        initialise(model, scale="paper", generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.random.get_rng_state(), state)
        drawn.append([live.query().detach() for live in own(model)])
    assert all(torch.equal(one, other) for one, other in zip(drawn[0], drawn[1], strict=True))
    assert not torch.equal(drawn[0][0], drawn[2][0])


@BOTH
def test_frozen_weights_are_written_and_stay_frozen(initialise, sign):
    model = MODELS["separate"]().requires_grad_(False)
    initialise(model)
    assert deviation(forms(own(model)[0]), sign) < 1e-6
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_heads_of_width_one_have_no_skew_form():
    model = llama(8, head_dim=1)
    before = forms(own(model)[0])
    with pytest.raises(af.UnsupportedArchitecture, match="heads of width 1"):
        af.geometry.init_skew_(model)
    assert torch.equal(forms(own(model)[0]), before)


@BOTH
@pytest.mark.parametrize("scale", ["matched", "paper"])
def test_latent_attention_is_refused_before_anything_is_written(initialise, sign, scale):
    config = DeepseekV3Config(
        **SIZE, num_key_value_heads=8, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    )  # fmt: skip
    model = DeepseekV3Model(config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(af.UnsupportedArchitecture, match="latent attention"):
        initialise(model, scale=scale)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
