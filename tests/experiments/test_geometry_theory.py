"""Proposition 2.2 on real attention layers, and the measurements of theorems 2.3 and 2.4."""

import json
import math
from pathlib import Path

import pytest
import scipy.stats
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from experiments.geometry_theory import recipe, theory
from experiments.geometry_theory.language_model import LanguageModel, draw_tokens
from experiments.geometry_theory.recipe import EXPERIMENT, read_updates
from experiments.runner.files import read
from experiments.runner.jobs import Job
from experiments.runner.statistics import Interval, student
from tests.experiments.miniature import run_miniature

HEADS, WIDTH = 4, 32


def bert():
    config = BertConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48, vocab_size=50,
        initializer_range=0.3, attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    return model, [layer.attention.self for layer in model.bert.encoder.layer]


def gpt2():
    config = GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=50, initializer_range=0.3, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
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
    model.double()
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
    model.double()
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


@pytest.mark.parametrize("objective", theory.OBJECTIVES)
def test_measured_gradients_are_those_of_autograd(objective):
    model = LanguageModel(48, 32, 4, 2, seed=3).double()
    generator = torch.Generator().manual_seed(0)
    model.loss(draw_tokens(0), objective, 0.3, generator).backward()
    gradients, steps = theory._gradient_and_step(model)
    for layer, gradient, step in zip(model.layers(), gradients, steps, strict=True):
        query, key = layer.query.weight.detach(), layer.key.weight.detach()
        # Of each head, dL/dW_q = W_k G_h^T, so that the whole gradients bound what the sum of G_h may be.
        moved = -(layer.query.weight.grad.T @ key + query.T @ layer.key.weight.grad)
        torch.testing.assert_close(step, moved, rtol=1e-9, atol=1e-12)
        assert gradient.shape == (32, 32)


def test_one_head_gives_the_gradient_of_the_form_itself():
    model = LanguageModel(48, 32, 1, 1, seed=3).double()
    model.loss(draw_tokens(0), "causal", 0.3, torch.Generator().manual_seed(0)).backward()
    (gradient,), _ = theory._gradient_and_step(model)
    (layer,) = model.layers()
    torch.testing.assert_close(layer.query.weight.grad, layer.key.weight.detach() @ gradient.T, rtol=1e-9, atol=1e-12)


def test_interval_is_students():
    values = [0.1, 0.4, 0.35, -0.2]
    found = student(values)
    low, high = scipy.stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=scipy.stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((sum(values) / 4, low, high))
    assert f"{found:.3f}" == f"{found.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert student([0.5]) == Interval(0.5, -math.inf, math.inf)


def test_columns_and_rows_above_a_common_threshold():
    matrix = torch.ones(1, 50, 50)
    matrix[:, :, [3, 4]] = 9.0
    found = theory._scores(matrix)
    assert found[2] == pytest.approx(2 / 50)
    assert theory._scores(matrix.mT)[2] == pytest.approx(-2 / 50)
    assert found[1] == -1


def test_text_follows_its_chain():
    tokens = draw_tokens(5)
    assert torch.equal(tokens, draw_tokens(5))
    assert not torch.equal(tokens, draw_tokens(6))
    counts = torch.zeros(48, 48).index_put((tokens[:-1], tokens[1:]), torch.ones(len(tokens) - 1), accumulate=True)
    joint = counts / counts.sum()
    conditional = torch.special.entr(joint).sum() - torch.special.entr(joint.sum(1)).sum()
    unigram = torch.special.entr(joint.sum(0)).sum()
    assert conditional < unigram - 0.5  # there is something to learn from the context


def test_theorem_2_3_as_printed_holds_for_rows_as_for_columns():
    """There is a w above which more columns than rows have their norms, and a w the other way round, in every matrix.

    Squared norms of rows and of columns have one mean, the mean of P(norm > w) over all w; so neither is larger
    everywhere unless both have the same distribution.
    """
    for matrix in torch.randn(200, 12, 12) * torch.rand(200, 1, 12):
        rows, columns = matrix.norm(dim=1), matrix.norm(dim=0)
        more = [int((columns > w).sum() - (rows > w).sum()) for w in torch.cat([rows, columns])]
        assert max(more) > 0 > min(more)


def updates(tmp_path, text=None, seeds=2, **settings):
    """What small models of both objectives say."""
    runs = {
        objective: [
            theory.run_updates(
                draw_tokens(seed) if text is None else text,
                objective,
                seed,
                tmp_path / f"{objective}{seed}",
                **settings,
            )
            for seed in range(seeds)
        ]
        for objective in theory.OBJECTIVES
    }
    return theory.study_of(runs, settings["steps"])


@pytest.mark.slow
def test_small_models_learn_and_the_study_reports_them(tmp_path):
    study = updates(tmp_path, steps=120, width=32, num_layers=1)
    assert [(row.stage, row.objective) for row in study.rows] == [
        (stage, objective) for stage in theory.STAGES for objective in (*theory.OBJECTIVES, "difference")
    ]
    assert study.losses["causal"].mean < study.unigram_loss - 0.5
    assert study.losses["bidirectional"].mean < study.unigram_loss
    for row in study.rows:
        for name in ("symmetry", "directionality", "more_columns"):
            interval = getattr(row, name)
            assert interval.low <= interval.mean <= interval.high
            if row.objective == "difference":
                pair = [getattr(study.row(objective, row.stage), name).mean for objective in theory.OBJECTIVES]
                assert interval.mean == pytest.approx(pair[1] - pair[0], abs=1e-6)
    assert study.row("causal", "training").symmetry.mean != 0
    lines = str(study).splitlines()
    assert lines[0] == "2 seeds, 120 steps; mean and 95 % interval"
    assert len(lines) == 2 + 12
    with pytest.raises(KeyError, match="no row for objective 'prefix'"):
        study.row("prefix", "training")


def test_own_text_and_the_same_study_twice(tmp_path):
    tokens = torch.arange(400) % 7
    settings = {"steps": 3, "width": 16, "num_heads": 2, "num_layers": 1}
    one, other = (updates(tmp_path / name, tokens, **settings) for name in "ab")
    assert one == other
    assert one.unigram_loss == pytest.approx(math.log(7), abs=1e-3)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="steps must be at least 1"):
        theory.run_updates(draw_tokens(0), "causal", 0, tmp_path, steps=0)
    with pytest.raises(ValueError, match="at least 33 tokens, got 32"):
        theory.run_updates(torch.zeros(32, dtype=torch.long), "causal", 0, tmp_path, steps=1)
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, got 30 and 4"):
        theory.run_updates(draw_tokens(0), "causal", 0, tmp_path, steps=1, width=30)


def test_the_committed_table_is_that_of_the_committed_results():
    folder = EXPERIMENT.results("tiny")
    lines = (folder / "results.csv").read_text().splitlines()[1:]
    for row in read(folder / "results.json")["rows"]:
        for quantity in ("symmetry", "directionality", "more_columns"):
            numbers = ",".join(f"{row[quantity][end]:.5f}" for end in ("mean", "low", "high"))
            assert f"{row['stage']},{row['objective']},{quantity},{numbers}" in lines


def test_a_study_is_a_table_and_a_figure(tmp_path):
    config = EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]())
    assert run_miniature(EXPERIMENT, tmp_path, config).startswith("2 seeds, 2 steps")
    assert len((tmp_path / "results" / "results.csv").read_text().splitlines()) == 1 + 12 * 3
    assert (tmp_path / "results" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert read(tmp_path / "results" / "results.json")["seeds"] == 2
    assert {one.claim for one in EXPERIMENT.judge(tmp_path / "results")} == {"G3", "G4"}
    (tmp_path / "runs" / "causal-1.json").unlink()
    assert read_updates(tmp_path).seeds == 1
    (tmp_path / "runs" / "bidirectional-0.json").unlink()
    with pytest.raises(FileNotFoundError, match="no seed"):
        read_updates(tmp_path)


def test_letters_of_a_data_set_are_streamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipe, "stream", lambda source: iter([source, "zé", "never read"]))
    assert recipe.streamed("ab", 6).tolist() == [*b"ab\nz", *"é".encode()]
    config = EXPERIMENT.recipes["paper"]()
    monkeypatch.setattr(recipe, "stream", lambda source: iter([f"{source} " * 200]))
    found = recipe.setup(EXPERIMENT.miniature(config)).run(Job("causal", seed=0), tmp_path, lambda *_: None)
    assert "NaN" not in json.dumps(found)
