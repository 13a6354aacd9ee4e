"""`generate` against the merged task run whole, by greedy choice in float64, and against exact probabilities."""

from collections import Counter
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attnflow import masks, tasks
from attnflow.models.passes.evaluation import precision
from attnflow.models.subject import Subject
from attnflow.tasks import Label, Task, Token
from attnflow.tasks.embedding import run
from attnflow.tasks.hf.cached import Choice
from tests.tasks.drafting import MASK, speculative

N, HORIZON = 16, 4
ORDER = np.random.default_rng(1).permutation(N).tolist()


def after_a_mean(text):
    """Next tokens in a window of three, after a fixed mean of two ids that stands for no data."""
    inputs = [Token((7, 9), 0, ()), *(Token(token, i + 1, (i,)) for i, token in enumerate(text[:-1]))]
    labels = [Label(i, Token(token, i + 1, (i,))) for i, token in enumerate(text)]
    return [Task(inputs, labels, masks.sliding_window(len(text), 3))]


def random_order(text):
    """Each token from some of those before it in a random order, at shuffled positions of the task."""
    draw, n = np.random.default_rng(5), len(text)
    step = np.append(0, 1 + draw.permutation(n - 1))  # the prompt is token 0
    allow = (step[:, None] > step) & (draw.random((n, n)) < 0.4) | np.eye(n, dtype=bool)
    place = np.argsort(step).tolist()
    labels = [Label(place[t], Token(text[place[t + 1]], place[t + 1])) for t in range(n - 1)]
    return [Task([Token(token, i) for i, token in enumerate(text)], labels, masks.from_dense(torch.from_numpy(allow)))]


FAMILIES = {  # the family of a text, the part of it that verifies, tokens of the prompt
    "causal": (tasks.causal_lm, tasks.causal_lm, 5),
    "blocks": (partial(tasks.block_two_stream, block=4, mask_token=MASK),) * 2 + (4,),
    "blocks, causal": (partial(tasks.block_diffusion, block=4, mask_token=MASK, clean="causal"),) * 2 + (4,),
    "permuted": (partial(tasks.permutation_lm, permutation=ORDER, mask_token=MASK),) * 2 + (0,),
    "whole": (lambda text: tasks.masked_lm(text, range(len(text)), mask_token=MASK),) * 2 + (0,),
    "drafts": (partial(speculative, horizon=HORIZON), tasks.causal_lm, 5),
    "look-ahead": (partial(speculative, horizon=2, ahead=1), tasks.causal_lm, 3),
    "after a mean": (after_a_mean,) * 2 + (0,),
    "random": (random_order,) * 2 + (1,),
}


def tiny(kind, attention="sdpa", vocabulary=48):
    """Random weights so large that the best token changes from place to place."""
    torch.manual_seed(0)
    common = {"vocab_size": vocabulary, "initializer_range": 0.5, "attn_implementation": attention}
    special = {"bos_token_id": None, "eos_token_id": None}
    if kind == "Llama":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = LlamaConfig(**common, **sizes, **special, max_position_embeddings=64)
        return LlamaForCausalLM(config).double().eval()
    config = GPT2Config(**common, **special, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config).double().eval()


def whole(model, family):
    """The best token of each data token by one pass over the merged task, or over the only one."""
    task = tasks.merge(family).task if len(family) > 1 else family[0]
    with torch.no_grad(), precision(model, torch.float64):
        best = run(Subject(model), task).argmax(dim=-1)
    return {label.data_index: int(best[label.position]) for label in task.labels}


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(1, 48, length).tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_is_what_the_merged_task_says(kind, attention, name):
    family, verifying, length = FAMILIES[name]
    model, prompt = tiny(kind, attention), prompt_of(length)
    plan = tasks.decoder(family(range(1, N + 1)))  # the ids of the plan's data tokens mean nothing
    with precision(model, torch.float64):
        written = tasks.generate(model, plan, prompt)
    text = [*prompt, *written.tokens[0]]
    expected = whole(model, verifying(text))
    assert len(text) == N
    assert [expected[place] for place in range(length, N)] == text[length:]
    assert len(set(expected.values())) > 3 or name == "whole"  # where every place reads the same
    if name not in ("drafts", "look-ahead"):
        assert written.passes == len(tasks.decoder(family(range(N)), range(length)).passes)


@pytest.mark.parametrize("per_pass", [1, 3])
def test_a_whole_sequence_is_refined_as_its_task_says(per_pass):
    """LLaDA: nothing is cached; each pass is the task with what is written so far in place of its [MASK]s."""
    model, prompt = tiny("GPT2"), [7, None, None, 9, *[None] * 6]
    plan = tasks.decoder(tasks.masked_lm(range(10), range(10), mask_token=MASK))
    text = list(prompt)
    while None in text:
        hidden = [place for place, token in enumerate(text) if token is None]
        [task] = tasks.masked_lm([MASK if token is None else token for token in text], hidden, mask_token=MASK)
        with torch.no_grad(), precision(model, torch.float64):
            chances = run(Subject(model), task).softmax(dim=-1)
        surest = sorted(hidden, key=lambda place: -float(chances[place].max()))
        for place in surest[:per_pass]:
            text[place] = int(chances[place].argmax())
    with precision(model, torch.float64):
        written = tasks.generate(model, plan, prompt, per_pass=per_pass)
    assert [7, *written.tokens[0][:2], 9, *written.tokens[0][2:]] == text
    assert written.passes == -(-8 // per_pass)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_gives_each_text_what_it_gives_alone(name):
    family, _, _ = FAMILIES[name]
    model, plan = tiny("Llama"), tasks.decoder(family(range(N)))
    prompts = [prompt_of(length, length) for length in (8, 4, 12, 4)]
    if name == "random":
        prompts = [[3], [5, *[None] * 4, 6], [9]]
    if name == "permuted":
        prompts = [[5 if place in ORDER[:k] else None for place in range(N)] for k in (3, 0, 7)]
    with precision(model, torch.float64):
        together = tasks.generate(model, plan, prompts, max_new_tokens=7)
        alone = [tasks.generate(model, plan, prompt, max_new_tokens=7) for prompt in prompts]
    assert together.tokens == tuple(each.tokens[0] for each in alone)
    assert together.passes == max(each.passes for each in alone)


def test_a_gap_is_a_place_to_be_written():
    model, text = tiny("Llama"), prompt_of(12)
    plan = tasks.decoder(tasks.butterfly(range(12), block=4, mask_token=MASK))
    with precision(model, torch.float64):
        gap = tasks.generate(model, plan, [*text[:4], *[None] * 4, *text[8:]])
        assert gap == tasks.infill(model, text[:4], text[8:], 4, mask_token=MASK)
    with pytest.raises(ValueError, match=r"token 4 cannot be written: position \d+, .* reads tokens \[8, 9, 10, 11\]"):
        tasks.generate(model, plan, text[:4])


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_mean_of_neighbours_predicts_what_is_between(place):
    model, text = tiny("GPT2"), prompt_of(6)
    plan = tasks.decoder(tasks.butterfly(range(6)))
    with precision(model, torch.float64):
        written = tasks.generate(model, plan, [None if i == place else token for i, token in enumerate(text)])
    assert list(written.tokens[0]) == [whole(model, tasks.butterfly(text))[place]]


def guesses(right, wrong):
    """Of a text that is known: a tree with the right path, paths that leave it, and a repetition."""

    def draft(ids):
        known = right[len(ids) :]
        return [[*known[:1], wrong, wrong], known[:3], [wrong, wrong], known[:2], []]

    return draft


@pytest.mark.parametrize("family", [tasks.causal_lm, partial(speculative, horizon=3)])
def test_drafts_change_how_many_passes_it_takes_and_nothing_else(family):
    model, prompts = tiny("Llama"), [prompt_of(5), prompt_of(3, 1)]
    plan = tasks.decoder(tasks.causal_lm(range(N)))
    with precision(model, torch.float64):
        plain = tasks.generate(model, plan, prompts, max_new_tokens=9)
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain.tokens, strict=True)]
        drafted = tasks.decoder(family(range(N)))
        for text, prompt in zip(texts, prompts, strict=True):
            right = tasks.generate(model, drafted, prompt, max_new_tokens=9, draft=guesses(text, 1))
            assert (list(right.tokens[0]), right.passes) == (text[len(prompt) :], 3)  # three drafts and one more each
            wrong = tasks.generate(model, drafted, prompt, max_new_tokens=9, draft=lambda ids: [[0, 0], [1, 2, 3]])
            assert wrong.tokens == right.tokens
            assert wrong.passes >= 7

        def either(ids):
            text = texts[0] if ids[:5] == texts[0][:5] else texts[1]
            return guesses(text, 1)(ids)

        together = tasks.generate(model, drafted, prompts, max_new_tokens=9, draft=either)
    assert together.tokens == plain.tokens
    assert together.passes == 3


def test_a_family_that_drafts_takes_fewer_passes_where_it_drafts_well():
    """A model that reads nothing but positions: every [MASK] says what the causal stream says."""
    model = tiny("GPT2")
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.lm_head.weight = torch.nn.Parameter(torch.randn(48, 32, dtype=torch.float64))
        model.transformer.wpe.weight[:] = model.transformer.wpe.weight[:1]  # what comes next is the same everywhere
    causal, drafting = (tasks.decoder(FAMILIES[name][0](range(N))) for name in ("causal", "drafts"))
    plain, drafted = tasks.generate(model, causal, [5]), tasks.generate(model, drafting, [5])
    assert drafted.tokens == plain.tokens
    assert (plain.passes, drafted.passes) == (N - 1, 5)  # one token, then HORIZON in each pass


def several_heads(module, args, output):
    """Several logits for each position, [batch, n, heads, vocabulary]: the model's own, moved by each head."""
    output.logits = torch.stack([output.logits.roll(head, -1) for head in range(3)], dim=2)


def test_heads_draft_and_the_first_one_verifies():
    model, prompts = tiny("Llama"), [prompt_of(4), prompt_of(2, 1)]
    several = tasks.decoder(tasks.multi_token_prediction(range(N), horizon=3))
    with precision(model, torch.float64):
        written = tasks.generate(model, tasks.decoder(tasks.causal_lm(range(N))), prompts)
        with pytest.raises(ValueError, match=r"position \d+ predicts \d tokens, but the model gives it 1 row of"):
            tasks.generate(model, several, prompts)
        model.register_forward_hook(several_heads)
        assert tasks.generate(model, several, prompts).tokens == written.tokens


VOCABULARY, NEW, TEMPERATURE, DRAWS = 4, 3, 2.5, 800


def tree(ids):
    return [
        [sum(ids) % VOCABULARY, 1, 2],
        [sum(ids) % VOCABULARY, 3],
        [(sum(ids) + 2) % VOCABULARY, sum(ids) % VOCABULARY],
        [3],
    ]


def accept_all(self, drafts, chances):
    return 0, chances


def draw_anew(self, drafts, chances):
    """A rule that looks right: accept with p / q, and otherwise draw from p instead of what is left of it."""
    for place, draft in enumerate(drafts):
        drawn = 1.0 if draft.chances is None else float(draft.chances[draft.token])
        if float(torch.rand((), generator=self._generator)) < float(chances[draft.token]) / drawn:
            return place, chances
    return None, chances


@pytest.mark.parametrize("rule", [None, accept_all, draw_anew])
@pytest.mark.parametrize("drafts", ["the family's", "a tree"])
def test_what_is_verified_has_the_distribution_of_the_model(monkeypatch, rule, drafts):
    """Chi-square of texts of three tokens against exact probabilities; wrong rules of acceptance fail it."""
    model, prompt = tiny("Llama", vocabulary=VOCABULARY), [3, 1, 2]
    exact = {}
    for text in product(range(VOCABULARY), repeat=NEW):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        chances = (logits / TEMPERATURE).softmax(dim=-1)
        exact[text] = float(chances[torch.arange(NEW), torch.tensor(text)].prod())
    family = partial(speculative, horizon=3) if drafts == "the family's" else tasks.causal_lm
    if rule is not None:
        monkeypatch.setattr(Choice, "_verify", rule)
    options = {"max_new_tokens": NEW, "temperature": TEMPERATURE, "draft": tree if drafts == "a tree" else None}
    drawn = tasks.generate(model, tasks.decoder(family(range(7))), [prompt] * DRAWS, seed=1, **options)
    counts = Counter(drawn.tokens)
    likely = [text for text, chance in exact.items() if chance * DRAWS > 5]
    square = sum((counts[text] - DRAWS * exact[text]) ** 2 / (DRAWS * exact[text]) for text in likely)
    assert len(likely) > 20
    bound = len(likely) + 4 * (2 * len(likely)) ** 0.5  # four standard deviations above the mean
    assert square < bound if rule is None else square > 1.5 * bound


def test_a_wrong_decoder_is_refused(tmp_path):
    """A model with a token-causal clean stream, decoded as block-bidirectional, writes other tokens silently."""
    trained = partial(tasks.block_two_stream, block=4, mask_token=MASK, clean="causal")
    tiny("Llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    prompts = [prompt_of(8, seed) for seed in range(8)]
    blocks = partial(tasks.generate_blocks, model, prompts, 4, max_new_tokens=8, mask_token=MASK)
    other, right = blocks(), blocks(clean="causal")
    for prompt, tokens in zip(prompts, right.tokens, strict=True):
        with precision(model, torch.float64):
            expected = whole(model, trained([*prompt, *tokens]))
        assert [expected[place] for place in range(8, 16)] == list(tokens)
    pairs = np.array(other.tokens) == np.array(right.tokens)
    assert 0.2 < pairs.mean() < 0.9
    tasks.decoder(trained(range(32))).save(tmp_path)
    assert blocks(clean="causal") == right
    with pytest.raises(ValueError, match=r"later in its block: always in the decoder, never in training"):
        blocks()
    with pytest.raises(ValueError, match=r"writes 1 tokens at once.*trained on 4 tokens at once"):
        tasks.generate(model, tasks.decoder(tasks.causal_lm(range(9))), [3, 4])
    with pytest.raises(ValueError, match="token after the block"):
        tasks.infill(model, [1, 2, 3, 4], [5, 6, 7, 8], 4, mask_token=MASK)
    infilled = partial(tasks.butterfly, block=4, mask_token=MASK)
    tasks.decoder(infilled(range(32))).save(tmp_path)
    for left, right in ([1, 2, 3, 4, 5, 6], [7]), ([], [1, 2, 3]), ([3], []):
        assert tasks.infill(model, left, right, 4, mask_token=MASK).passes == 1


def test_it_stops_where_a_text_ends():
    model, plan = tiny("Llama"), tasks.decoder(tasks.causal_lm(range(N)))
    free = tasks.generate(model, plan, [3, 7])
    end = free.tokens[0][4]
    stopped = tasks.generate(model, plan, [3, 7], eos_token=[end])
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(end) + 1]
    assert stopped.passes == len(stopped.tokens[0])
    assert tasks.generate(model, plan, prompt_of(N)).tokens == ((),)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, plan: tasks.generate(model, plan, [1] * 17), "has 17 tokens, but the plan is for 16: make it"),
        (lambda model, plan: tasks.generate(model, plan, [None, 2]), "token 0 cannot be written: no position predicts"),
        (lambda model, plan: tasks.generate(model, plan, [1, -2]), "prompt must hold token ids of at least 0, got -2"),
        (lambda model, plan: tasks.generate(model, plan, [48]), "prompt must hold ids of the 48 entries"),
        (
            lambda model, plan: tasks.generate(model, plan, [1], draft=lambda _: [48]),
            "a token of draft must be at most 47",
        ),
        (
            lambda model, plan: tasks.generate(
                model, tasks.decoder(FAMILIES["blocks"][0](range(8))), [1] * 4, draft=lambda _: [1]
            ),
            "this family writes several at once: leave draft out",
        ),
        (
            lambda model, plan: tasks.generate(model, tasks.decoder(tasks.causal_lm(range(66))), [1]),
            "64 positions, but the text would take 65",
        ),
    ],
)
def test_what_cannot_be_generated_is_named(call, message):
    model, plan = tiny("Llama"), tasks.decoder(tasks.causal_lm(range(N)))
    with pytest.raises(ValueError, match=message):
        call(model, plan)
