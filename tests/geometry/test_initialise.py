"""Initialisations: exact in the stored layout, by head and in full, at the scale that was asked for."""

import math

import pytest
import torch

import attnflow as af
from attnflow.models.weights.attention import attention_layers
from tests.models import WIDTH, ZOO, tiny

MODELS = {
    "separate": "Bert",
    "shared": "Albert",
    "conv1d": "GPT2",
    "interleaved": "GPTNeoX",
    "gqa": "Llama",
    "mqa": "Gemma",
    "fused": "Phi3",
    "fused groups": "FalconGrouped",
    "uneven scales": "T5",
    "encoder and decoder": "Bart",
}


def made(name):
    return ZOO[MODELS[name]].build()


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


def own(model):
    return [live for live in attention_layers(model) if live.kind == "self"]


def root_mean_square(weight):
    return weight.double().square().mean().sqrt().item()


@BOTH
@pytest.mark.parametrize("scale", ["matched", "paper"])
@pytest.mark.parametrize("name", MODELS)
def test_every_head_and_their_sum_are_exact(name, scale, initialise, sign):
    model = made(name)
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
    model = made(name)
    before = [(root_mean_square(w.query().detach()), root_mean_square(w.key().detach())) for w in own(model)]
    initialise(model, per_head=per_head)
    after = [(root_mean_square(w.query().detach()), root_mean_square(w.key().detach())) for w in own(model)]
    assert torch.tensor(after) == pytest.approx(torch.tensor(before), rel=1e-6)


@BOTH
@pytest.mark.parametrize("name", ["separate", "gqa"])
def test_paper_scale_is_that_of_linear_layers(name, initialise, sign):
    model = made(name)
    initialise(model, scale="paper")
    for live in own(model):
        for weight in (live.query().detach(), live.key().detach()):
            assert root_mean_square(weight) == pytest.approx(1 / math.sqrt(3 * WIDTH), rel=0.1)


def test_symmetric_init_of_the_paper_copies_the_query():
    model = made("separate")
    af.geometry.init_symmetric_(model, scale="paper")
    for live in own(model):
        torch.testing.assert_close(live.key().detach(), live.query().detach(), rtol=1e-6, atol=0)
        assert live.query().detach().abs().max() <= WIDTH**-0.5
        assert live.query().detach().abs().max() > 0.99 * WIDTH**-0.5


@BOTH
@pytest.mark.parametrize("name", ["separate", "conv1d", "interleaved", "encoder and decoder"])
def test_all_but_the_key_stays(name, initialise, sign):
    model = made(name)
    before = [live.query().detach().clone() for live in own(model)]
    others = {n: p.detach().clone() for n, p in model.named_parameters()}
    queries_and_keys = {n for live in own(model) for n in live.parameters}
    initialise(model)
    for live, query in zip(own(model), before, strict=True):
        assert torch.equal(live.query().detach(), query)
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters() if n not in queries_and_keys)
    if name in ("conv1d", "interleaved"):  # values share a parameter with queries and keys, and stay too
        for live in own(model):
            (parameter,) = live.parameters.values()
            (parameter_name,) = live.parameters
            changed = int((parameter.detach() != others[parameter_name]).sum())
            assert 0 < changed <= live.key().detach().numel()


@BOTH
def test_heads_of_a_group_differ(initialise, sign):
    model = made("gqa")
    initialise(model)
    m = forms(own(model)[0]).flatten(1)
    cosines = torch.corrcoef(m)[:2, :2].abs()
    assert cosines.fill_diagonal_(0).max() < 0.9


@BOTH
def test_full_form_alone_leaves_the_queries_of_a_group_independent(initialise, sign):
    model = made("gqa")
    before = [live.query().detach().clone() for live in own(model)]
    initialise(model, per_head=False)
    for live, query in zip(own(model), before, strict=True):
        m = forms(live)
        assert torch.equal(live.query().detach(), query)
        assert deviation(m.sum(0), sign) < 1e-6
        scores = af.geometry.symmetry(m)
        own_part = len(query) / live.num_heads / WIDTH if sign > 0 else 0  # a skew form has no trace to add up
        assert (scores * sign).mean() == pytest.approx((1 + own_part) / (2 + own_part), abs=0.15)
        assert (scores * sign).max() < 0.7


def test_heads_of_a_group_keep_a_share_of_the_symmetry_of_their_sum():
    """(1 + r/d) / (n + r/d) for n independent queries of width r that share a key; likewise for keys paired wrongly."""
    width, size, n = 288, 32, 3
    query = torch.randn(n * n, size, width, generator=torch.Generator().manual_seed(0))
    key = query.unflatten(0, (n, n)).sum(1)
    heads = torch.stack([query[h].T @ key[h // n] for h in range(n * n)])
    assert af.geometry.symmetry(heads.sum(0)) == pytest.approx(1, abs=1e-5)
    share = (1 + size / width) / (n + size / width)  # 0.357
    assert af.geometry.symmetry(heads).mean() == pytest.approx(share, abs=0.006)
    wrong = torch.stack([query[h].T @ key[h % n] for h in range(n * n)]).sum(0)
    assert af.geometry.symmetry(wrong) == pytest.approx(share, abs=0.015)


def test_symmetric_forms_are_positive_semi_definite():
    for name in ("separate", "gqa"):
        model = made(name)
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
            model = made(name).bfloat16()
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
        model = made("gqa")
        state = torch.random.get_rng_state()
        initialise(model, scale="paper", generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.random.get_rng_state(), state)
        drawn.append([live.query().detach() for live in own(model)])
    assert all(torch.equal(one, other) for one, other in zip(drawn[0], drawn[1], strict=True))
    assert not torch.equal(drawn[0][0], drawn[2][0])


@BOTH
def test_frozen_weights_are_written_and_stay_frozen(initialise, sign):
    model = made("separate").requires_grad_(False)
    initialise(model)
    assert deviation(forms(own(model)[0]), sign) < 1e-6
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_heads_of_width_one_have_no_skew_form():
    model = tiny("Llama", head_dim=1, num_key_value_heads=4)
    before = forms(own(model)[0])
    with pytest.raises(af.UnsupportedArchitecture, match="heads of width 1"):
        af.geometry.init_skew_(model)
    assert torch.equal(forms(own(model)[0]), before)


@BOTH
@pytest.mark.parametrize("scale", ["matched", "paper"])
def test_latent_attention_is_refused_before_anything_is_written(initialise, sign, scale):
    model = ZOO["DeepseekV3FullQuery"].build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(af.UnsupportedArchitecture, match="latent attention"):
        initialise(model, scale=scale)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
