"""Proposition 2.2 on real attention layers, and theorem 2.3 as it is printed."""

import math

import pytest
import torch

from attnflow.geometry.scores import symmetry
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


def test_theorem_2_3_as_printed_holds_for_rows_as_for_columns():
    """There is a w above which more columns than rows have their norms, and a w the other way round, in every matrix.

    Squared norms of rows and of columns have one mean, the mean of P(norm > w) over all w; so neither is larger
    everywhere unless both have the same distribution.
    """
    for matrix in torch.randn(200, 12, 12) * torch.rand(200, 1, 12):
        rows, columns = matrix.norm(dim=1), matrix.norm(dim=0)
        more = [int((columns > w).sum() - (rows > w).sum()) for w in torch.cat([rows, columns])]
        assert max(more) > 0 > min(more)


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
