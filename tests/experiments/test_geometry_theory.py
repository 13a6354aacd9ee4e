"""The statements of the geometry paper about updates: on real attention layers, exactly, and by drawing."""

import math

import pytest
import torch

from attnflow.geometry.scores import directionality, symmetry
from experiments.geometry_theory import theory
from experiments.geometry_theory.language_model import LENGTH, LanguageModel
from tests.models.options import WIDTH
from tests.models.table import AUDITED, CAUSAL

HEADS = 4


def bert():
    model = AUDITED["Bert"].build()
    return model, [layer.attention.self for layer in model.bert.encoder.layer]


def gpt2():
    model = CAUSAL["GPT2"].build()
    return model, [block.attn for block in model.transformer.h]


def run(model, layers, forms):
    """The model's loss with `x_i^T forms_h x_j` added to the scores of every layer, and what each layer computed.

    The additive mask of eager attention carries the added scores, so that the model's own code is what is tested.
    """
    tokens = [None] * len(layers)
    hooks = []
    for number, layer in enumerate(layers):

        def add(module, args, kwargs, number=number):
            x = tokens[number] = args[0] if args else kwargs["hidden_states"]
            added = torch.einsum("bqi,hij,bkj->bhqk", x, forms[number], x) / math.sqrt(WIDTH // HEADS)
            mask = kwargs.get("attention_mask")
            return args, kwargs | {"attention_mask": added if mask is None else mask + added}

        hooks.append(layer.register_forward_pre_hook(add, with_kwargs=True))
    ids = torch.randint(50, (3, 7))
    ones = torch.ones_like(ids)
    ones[0, 5:] = 0  # padding, so that there is a mask
    output = model(input_ids=ids, attention_mask=ones, labels=ids, output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    for hook in hooks:
        hook.remove()
    return output, tokens


@pytest.mark.parametrize("make", [bert, gpt2])
def test_proposition_2_2_on_the_attention_of_real_models(make):
    model, layers = make()
    forms = [torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in layers]
    output, tokens = run(model, layers, forms)
    output.loss.backward()
    for form, x, weights in zip(forms, tokens, output.attentions, strict=True):
        assert form.grad.abs().max() > 1e-6
        beta = theory.score_gradient(weights, weights.grad) / math.sqrt(WIDTH // HEADS)
        for head in range(HEADS):
            # The sum of rank-1 terms, one by one, as the proposition has it.
            total = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
            for b in range(x.shape[0]):
                for i in range(x.shape[1]):
                    for j in range(x.shape[1]):
                        total += beta[b, head, i, j] * torch.outer(x[b, i], x[b, j])
            torch.testing.assert_close(total, form.grad[head], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(theory.rank_one_sum(x, beta[:, head]), form.grad[head], rtol=1e-9, atol=1e-12)


def test_gradients_of_the_projections_follow_from_that_of_the_form():
    """dL/dW_q = W_k G^T and dL/dW_k = W_q G, hence `implicit_step`; queries and keys without biases."""
    model, layers = bert()
    for layer in layers:
        torch.nn.init.zeros_(layer.query.bias)
        torch.nn.init.zeros_(layer.key.bias)
    forms = [torch.zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in layers]
    run(model, layers, forms)[0].loss.backward()
    rate = 1e-6
    for layer, form in zip(layers, forms, strict=True):
        query, key = (w.weight.detach().unflatten(0, (HEADS, -1)) for w in (layer.query, layer.key))
        query_grad, key_grad = (w.weight.grad.unflatten(0, (HEADS, -1)) for w in (layer.query, layer.key))
        torch.testing.assert_close(query_grad, key @ form.grad.mT, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(key_grad, query @ form.grad, rtol=1e-9, atol=1e-12)
        for head in range(HEADS):
            after = (query[head] - rate * query_grad[head]).T @ (key[head] - rate * key_grad[head])
            moved = (after - query[head].T @ key[head]) / rate
            step = theory.implicit_step(query[head], key[head], form.grad[head])
            torch.testing.assert_close(moved, step, rtol=1e-4, atol=1e-7)
            cosine = torch.nn.functional.cosine_similarity(step.flatten(), -form.grad[head].flatten(), dim=0)
            assert cosine < 0.95  # the step is not proportional to the gradient of M


def test_coefficients_of_a_query_add_up_to_zero():
    weights = torch.rand(2, 5, 5, dtype=torch.float64).softmax(-1)
    beta = theory.score_gradient(weights, torch.randn(2, 5, 5, dtype=torch.float64))
    torch.testing.assert_close(beta.sum(-1), torch.zeros(2, 5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_theorem_2_3_as_printed_is_vacuous():
    """There is a w above which more columns than rows have their norms, and one the other way round, or neither.

    Squares of row norms and of column norms have one sum, so that neither counts more above every w. Where the norms
    are the same numbers, as in symmetric and skew matrices, there is no such w at all.
    """
    drawn = torch.randint(-3, 4, (200, 6, 6), generator=torch.Generator().manual_seed(0))
    for matrix, normal in ((m, n) for d in drawn for m, n in ((d, False), (d + d.T, True), (d - d.T, True))):
        rows, columns = matrix.square().sum(1), matrix.square().sum(0)
        more = [int((columns >= w).sum() - (rows >= w).sum()) for w in torch.cat([rows, columns])]
        same = torch.equal(rows.sort().values, columns.sort().values)
        assert same or not normal
        assert set(more) == {0} if same else max(more) > 0 > min(more)


def test_a_token_adds_to_rows_and_columns_as_proposition_s1_7_says():
    x, beta = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    context = [(beta[:, j] @ x, x[j]) for j in range(5)]  # of token j: sum_i beta_ij x_i, and x_j
    predicted = [(x[i], beta[i] @ x) for i in range(5)]
    for pairs in (context, predicted):
        total = sum(torch.outer(column, row) for column, row in pairs)
        torch.testing.assert_close(total, theory.rank_one_sum(x[None], beta[None]), rtol=1e-12, atol=1e-12)
    for column, row in context:
        update = torch.outer(column, row)
        assert torch.equal(
            update[:, 2], column * row[2]
        )  # eq. S42: the sum of what is predicted, times an entry of x_j
        assert torch.equal(update[3], column[3] * row)  # eq. S43


def test_rows_and_columns_grow_alike_in_the_mean():
    """Propositions S1.8 and S1.9, by all signs of embeddings x = sign * scale: expectations without an error."""
    signs = torch.cartesian_prod(*[torch.tensor([-1, 1])] * 9).unflatten(1, (3, 3))
    scale, beta = torch.tensor([1, 2, 3]), torch.tensor([2, -1])
    for context in (scale, torch.tensor([3, 1, 1])):
        column = (signs[:, :2] * scale * beta[:, None]).sum(1)
        updates = column[:, :, None] * (signs[:, 2] * context)[:, None]
        rows, columns = updates.square().sum(2), updates.square().sum(1)
        assert torch.equal(rows.sum(1), columns.sum(1))  # in every update: both are its squared norm
        ratio = columns.double().mean(0) / rows.double().mean(0)
        shares = [s.square() / s.square().sum() for s in (context, scale)]
        torch.testing.assert_close(ratio, (shares[0] / shares[1]).double())  # 1 where both covariances are the same


@pytest.mark.parametrize(
    ("law", "low", "high"), [("normal", -0.04, 0.04), ("heavy tails", -1, -0.1), ("signs", 0.9, 1)]
)
def test_directionality_of_one_update_is_that_of_the_law_of_embeddings(law, low, high):
    """16 predicted tokens and one context: sums are nearer to normal than what is summed, and that alone tells them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draw = {
            "normal": lambda *size: torch.randn(size),
            "heavy tails": lambda *size: torch.distributions.StudentT(3.0).sample(torch.Size(size)),
            "signs": lambda *size: torch.randint(2, size) * 2.0 - 1,
        }[law]
        column, row = (draw(2000, 16, 64) * torch.randn(2000, 16, 1)).sum(1), draw(2000, 64)
    assert low < directionality(column[:, :, None] * row[:, None]).mean() < high


@pytest.mark.parametrize("rank", [None, 32])
def test_directionality_of_random_matrices_vanishes_with_their_size(rank):
    """Proposition S1.18.3, of independent entries and of products of two such matrices."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size):
        if rank is None:
            return torch.randn(150, size, size, generator=generator)
        query, key = torch.randn(2, 150, rank, size, generator=generator)
        return query.mT @ key

    small, large = directionality(drawn(64)), directionality(drawn(256))
    assert large.mean().abs() < 4 * large.std() / 150**0.5
    assert large.std() == pytest.approx(small.std() / 2, rel=0.25)  # as 1 / sqrt(d)


def test_a_pair_moves_m_by_two_terms_of_rank_one():
    """Remark S1.6: of one pair both have rank 1; those of a batch have that of the head."""
    query, key, x = (torch.randn(size, 12, dtype=torch.float64) for size in (4, 4, 20))
    pair, batch = torch.outer(x[0], x[1]), theory.rank_one_sum(x[None], torch.randn(1, 20, 20, dtype=torch.float64))
    for gradient, rank in ((pair, 1), (batch, 4)):
        terms = gradient @ key.mT @ key, query.mT @ query @ gradient
        torch.testing.assert_close(theory.implicit_step(query, key, gradient), -(terms[0] + terms[1]))
        assert [int(torch.linalg.matrix_rank(term)) for term in terms] == [rank, rank]


def test_pairs_of_masked_tokens_are_those_of_remark_s1_15():
    model = LanguageModel(20, 16, 2, 2, seed=0).double()
    model.loss(torch.arange(400) % 20, "bidirectional", 0.3, torch.Generator().manual_seed(1)).backward()
    tokens, weights, gradient = model.layers()[-1].recorded()
    beta, masked = theory.score_gradient(weights, gradient), model.masked
    assert (beta.transpose(1, 2)[~masked] == 0).all()  # without a loss there is no gradient in the last layer
    share, agreement, both, one, below = theory.masked_pairs(model).tolist()
    pairs = [(b, i, j) for b, i in masked.nonzero().tolist() for j in range(LENGTH) if j != i]
    mutual = [(b, i, j) for b, i, j in pairs if masked[b, j]]
    assert share == pytest.approx(len(mutual) / len(pairs))
    products = sum(beta[b, :, i, j] @ beta[b, :, j, i] for b, i, j in mutual)
    assert agreement == pytest.approx(float(products / sum(beta[b, :, i, j].square().sum() for b, i, j in mutual)))
    for found, some in ((both, mutual), (one, [pair for pair in pairs if pair not in mutual])):
        terms = (beta[b, :, i, j].sum() * torch.outer(tokens[b, i], tokens[b, j]) for b, i, j in some)
        assert found == pytest.approx(float(symmetry(sum(terms))))
    assert 0 < below < 1


def test_operators_of_remark_s1_4_are_projections_up_to_a_factor():
    """P v = (v^T M x) x has P P = (x^T M x) P: idempotent after division, and nilpotent where M is skew."""
    draw = torch.Generator().manual_seed(0)
    form, x, v, w = (torch.randn(shape, generator=draw).double() for shape in ((5, 5), (5,), (5,), (5,)))
    for of in (form, form + form.mT, form - form.mT):
        operator = torch.outer(x, of @ x)  # v -> x (v^T M x)
        torch.testing.assert_close(operator @ v, (v @ of @ x) * x)
        torch.testing.assert_close(operator @ operator, (x @ of @ x) * operator)
        torch.testing.assert_close((2 * v + w) @ of @ x, 2 * (v @ of @ x) + w @ of @ x)  # linear, as any bilinear form
    assert (operator @ operator).abs().max() < 1e-12 < operator.abs().max()


def test_heads_do_not_compute_what_the_sum_of_their_forms_would():
    """Remark S1.5: the full matrix is the sum of the heads' forms, and attention is no function of it."""
    draw = torch.Generator().manual_seed(0)
    one, other, x = (torch.randn(shape, generator=draw).double() for shape in ((3, 6), (3, 6), (4, 6)))
    query, key = torch.cat([one, one]), torch.cat([other, -other])  # two heads of width 3, opposite forms
    heads = [x @ q.mT @ k @ x.mT for q, k in zip(query.split(3), key.split(3), strict=True)]
    full = x @ query.mT @ key @ x.mT
    torch.testing.assert_close(full, sum(heads))
    assert full.abs().max() < 1e-12, "alone it would attend to all tokens alike"
    assert all((scores.softmax(dim=-1) - 1 / 4).abs().max() > 0.3 for scores in heads)
