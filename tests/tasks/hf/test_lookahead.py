"""Lookahead: the model's own text, greedy and drawn, whatever the adapter says."""

from itertools import product

import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.models.evaluation import precision
from attnflow.tasks.hf.decoding_choice import Choice
from attnflow.tasks.hf.decoding_pass import CachedPasses
from attnflow.tasks.hf.lookahead_adapter import inputs, layout
from attnflow.tasks.hf.lookahead_decode import Drafts, verify
from tests.models import tiny
from tests.tasks.hf.passes import recorded
from tests.tasks.hf.test_decoding import MODELS, same

PROMPT = [3, 7, 11]
TEXTS = [[(7 * i) % 47 + 3 for i in range(40)]]
UNWINDOWED = {
    "Llama": {},
    "GPT2": {},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 64},
}
assert list(UNWINDOWED) == MODELS


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return tiny(request.param, **UNWINDOWED[request.param])


def disturbed(model, drafts=3):
    """A lookahead whose adapter says something at random."""
    ahead = tasks.lookahead(model, drafts=drafts, rank=4)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in ahead.adapter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return ahead


def stock(model, most):
    ids = torch.tensor([PROMPT])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most, eos_token_id=50, pad_token_id=0
    )
    return tuple(whole[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("mode", ["quadratic", "linear"])
def test_greedy_text_is_that_of_generate(model, mode):
    ahead = disturbed(model)
    result = ahead.generate(PROMPT, max_new_tokens=30, mode=mode, eos_token=-1)
    assert result.tokens[0] == stock(model, 30)
    assert result.accepted <= result.drafted
    assert result.passes == 30 - result.accepted - (1 if sum(map(len, result.tokens)) < 30 else 0)
    compared = ahead.compare(PROMPT, max_new_tokens=30, mode=mode, eos_token=-1)
    assert (compared.ok, compared.divergence, compared.margin) == (True, None, None)
    assert compared.passes == result.passes


@pytest.mark.parametrize("mode", ["quadratic", "linear"])
def test_fitted_drafts_are_accepted_and_the_text_stays(mode):
    torch.manual_seed(0)
    model = tiny("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ahead = tasks.lookahead(model, drafts=2, rank=8)
    own = list(stock(model, 40))
    steps = []
    losses = ahead.fit(
        [[*PROMPT, *own]], steps=60, length=43, learning_rate=1e-2, progress=lambda *step: steps.append(step)
    )
    assert losses[-1] < 0.5 * losses[0]
    assert steps[-1] == (60, 60, "steps")
    result = ahead.generate(PROMPT, max_new_tokens=30, mode=mode, eos_token=-1)
    assert list(result.tokens[0]) == own[:30]
    assert result.accepted > 0
    assert result.tokens_per_pass > 1.2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_rows_of_the_model_are_the_same_to_the_bit_whatever_the_adapter_is(model):
    ahead = disturbed(model)
    plain = tasks.lookahead(model, drafts=3, rank=4)
    ids = torch.tensor([[*PROMPT, 5, 9]])
    logits = []
    for each in (ahead, plain):
        run = CachedPasses(model)
        positions, allow = layout(0, 5, [2, 3, 4], 3)
        embedded = inputs(model, each.adapter, ids, 3, 3)
        with torch.no_grad(), each.adapter.gate(14, 9):
            logits.append(run.run(embedded, positions[None], allow[None], 14)[0])
    assert torch.equal(logits[0][:5], logits[1][:5])
    assert not torch.equal(logits[0][5:], logits[1][5:])


def test_every_row_of_a_pass_is_what_its_lookahead_task_computes(model):
    """Against each group alone, without a cache: [text | its masks], causal."""
    ahead = disturbed(model, drafts=2)
    with recorded(model) as passes, precision(model, torch.float64):
        result = ahead.generate(PROMPT, max_new_tokens=8, eos_token=-1)
        del passes[result.passes :]
        text = [*PROMPT, *result.tokens[0]]
        accepted = 0
        for number, logits in enumerate(passes[:2]):
            clean = 1  # rows before the first draft that a pass shows
            drafts = (logits.shape[1] - clean - 2) // 3 if number else 0
            upto = len(PROMPT) if number == 0 else len(PROMPT) + 1
            run = CachedPasses(model)
            positions, allow = layout(0, upto, [upto - 1], 2)
            embedded = inputs(model, ahead.adapter, torch.tensor([text[:upto]]), 1, 2)
            with torch.no_grad(), ahead.adapter.gate(upto + 2, 2):
                alone = run.run(embedded, positions[None], allow[None], 3)[0]
            assert same(logits[0, 0], alone[0])
            first = clean + drafts
            assert same(logits[0, first : first + 2], alone[1:])
            accepted += drafts
        assert accepted >= 1


def test_no_drafts_is_stock_decoding(model):
    result = disturbed(model).generate(PROMPT, max_new_tokens=9, drafts=0, eos_token=-1)
    assert (result.tokens[0], result.passes, result.drafted) == (stock(model, 9), 9, 0)
    empty = tasks.lookahead(model, drafts=0)
    assert empty.generate(PROMPT, max_new_tokens=9, eos_token=-1) == result
    with pytest.raises(ValueError, match="nothing to fit"):
        empty.fit(TEXTS)


def exact(model, prompt, length, temperature):
    """The probability of every continuation, by the model alone."""
    table = {}
    for text in product(range(model.config.vocab_size), repeat=length):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1] / temperature
        chances = logits.log_softmax(-1)[range(length), list(text)]
        table[text] = float(chances.sum().exp())
    return table


@pytest.mark.parametrize("total", [200, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["quadratic", "linear"])
def test_drawn_text_has_the_models_distribution(mode, total):
    torch.manual_seed(0)
    model = tiny("Llama", torch.float32, vocab_size=2, pad_token_id=0, num_hidden_layers=1)
    ahead = disturbed(model, drafts=2)
    expected = exact(model, [1, 0], 4, 1.5)
    counts = dict.fromkeys(expected, 0)
    drafted = accepted = 0
    for seed in range(total):
        result = ahead.generate([1, 0], max_new_tokens=4, mode=mode, temperature=1.5, seed=seed, eos_token=-1)
        counts[result.tokens[0]] += 1
        drafted, accepted = drafted + result.drafted, accepted + result.accepted
    assert 0.1 * drafted < accepted < 0.9 * drafted  # both ways of the rule are used
    chi_square = sum((counts[text] - total * p) ** 2 / (total * p) for text, p in expected.items())
    assert chi_square < 37.70  # 99.9 % of chi-square with 15 degrees of freedom


def test_the_rule_that_rejects_draws_from_the_model():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    draft = torch.tensor([[0.1, 0.6, 0.3, 0.0]], dtype=torch.float64)
    choice = Choice(1.0, None, None, 1)
    counts = torch.zeros(4, 5)  # first token, second (4: not yet drawn)
    total = 4000
    for _ in range(total):
        tokens = choice.pick(draft).tolist()
        right, following = verify(logits, Drafts(tokens, draft), choice)
        counts[(*tokens, following) if right else (following, 4)] += 1
    first, second = logits.softmax(-1)
    expected = total * first
    assert float(((counts.sum(1) - expected) ** 2 / expected).sum()) < 16.27  # 99.9 %, 3 degrees of freedom
    accepted = total * torch.minimum(first, draft[0])
    after = counts[:, :4].sum(0)
    assert float(((after - accepted.sum() * second) ** 2 / (accepted.sum() * second)).sum()) < 16.27 + 4


def test_it_stops_at_the_end_of_a_text(model):
    text = stock(model, 12)
    end = text[5]
    result = disturbed(model).generate(PROMPT, max_new_tokens=12, eos_token=end)
    assert result.tokens[0] == text[: text.index(end) + 1]
    assert disturbed(model).compare(PROMPT, max_new_tokens=12, eos_token=end).ok


def test_the_handle_leaves_the_model_as_it_was(model):
    ids = torch.tensor([PROMPT])
    before = model(ids).logits
    with disturbed(model) as ahead:
        assert torch.equal(model(ids).logits, before)
        assert "lookahead of 3 tokens" in str(ahead)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="was removed"):
        ahead.generate(PROMPT)


def test_an_adapter_is_kept_and_taken_up_again(tmp_path):
    torch.manual_seed(0)
    model = tiny("Llama")
    ahead = disturbed(model)
    torch.save(ahead.adapter.state_dict(), tmp_path / "adapter.pt")
    other = tasks.lookahead(model, drafts=3, rank=4)
    other.adapter.load_state_dict(torch.load(tmp_path / "adapter.pt"))
    assert other.generate(PROMPT, max_new_tokens=20) == ahead.generate(PROMPT, max_new_tokens=20)


def test_a_difference_beyond_rounding_is_seen():
    parted = tasks.decoded.GreedyComparison(20, 9, 4, 0.5, 10.0, 1e-3)
    assert not parted.ok
    assert "part at new token 4 of 20" in str(parted)
    assert tasks.decoded.GreedyComparison(20, 9, 4, 1e-3, 10.0, 1e-3).ok


def test_bad_input():
    torch.manual_seed(0)
    model = tiny("Llama")
    ahead = tasks.lookahead(model, drafts=2, rank=2)
    for call, message in (
        (lambda: ahead.generate([[3], [4]]), r"one text at a time.*got 2 prompts"),
        (lambda: ahead.generate([]), r"got 1 prompts of \[0\] tokens"),
        (lambda: ahead.generate(PROMPT, max_new_tokens=62), r"64 positions, but the text would take 65"),
        (lambda: ahead.generate(PROMPT, max_new_tokens=4, drafts=3), r"drafts must be at most 2"),
        (lambda: ahead.generate([77], max_new_tokens=4), r"ids must hold ids of the 50 entries.*got 77"),
        (lambda: ahead.fit([[3, 4, 5, 6, 77]]), r"texts must hold ids of the 50 entries.*got 77"),
        (lambda: ahead.fit([[3, 4, 5]]), r"must have at least 4, got 3"),
        (lambda: tasks.lookahead(tiny("Mistral")).generate(PROMPT, max_new_tokens=4), r"window of 4 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(af.UnsupportedArchitecture, match="beside its attention"):
        tasks.lookahead(tiny("Jamba", torch.float32))


@pytest.mark.slow
def test_smollm2_writes_its_own_text_with_fitted_drafts():
    model, tokenizer = af.load_model("smollm2-135m")
    ids = tokenizer(af.models.sample_text("hamlet", 40_000))["input_ids"]
    prompt, rest = ids[-32:], ids[:-64]
    ahead = tasks.lookahead(model, drafts=2, rank=8)
    untrained = [ahead.compare(prompt, max_new_tokens=16, mode=mode, eos_token=-1) for mode in ("quadratic", "linear")]
    assert all(each.ok for each in untrained)
    losses = ahead.fit([rest], steps=12, length=24, learning_rate=2e-3)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    for mode in ("quadratic", "linear"):
        compared = ahead.compare(prompt, max_new_tokens=32, mode=mode, eos_token=-1)
        assert compared.ok, str(compared)
        assert compared.passes <= 32
