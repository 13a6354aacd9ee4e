"""`merge` under any masks: every pair of positions by the values of random models, and families on real models."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow import masks, tasks
from attnflow.tasks import Label, Task, Token
from attnflow.tasks.merging import MergedTask

LAYERS = 12  # as many as a random family has positions: no difference takes longer to arrive
WIDTH = 6
APART = 1e-8


@st.composite
def specs(draw: st.DrawFn, total: int = 12, self_too: bool = False) -> list:
    """Plain data of tasks with few different inputs: (allow, input numbers, labels as (position, data index))."""
    family, left = [], total
    while left and len(family) < 3 and (not family or draw(st.booleans())):
        n = draw(st.integers(1, min(left, 6)))
        bits, digits = draw(st.integers(0, 2 ** (n * n) - 1)), draw(st.integers(0, 4**n - 1))
        allow = np.array([bits >> i & 1 for i in range(n * n)], dtype=bool).reshape(n, n)
        kind = draw(st.sampled_from(["any", "causal", "window", "full"]))
        if kind == "full":
            allow[:, : draw(st.integers(1, n))] = True
        elif kind != "any":
            allow = np.tril(allow)
        if kind == "window":
            allow = np.tril(np.ones((n, n), bool)) & ~np.tril(np.ones((n, n), bool), -draw(st.integers(1, 3)))
        if self_too or draw(st.booleans()):
            allow |= np.eye(n, dtype=bool)
        chosen = [digits // 4**i % 4 for i in range(n)]
        labels = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, 3)), max_size=3))
        family.append((allow, chosen, labels))
        left -= n
    return family


KINDS = Token(1, 0, (0,)), Token(1, 0, (1, 2)), Token(2, 0, ()), Token(2, 1, (3,))


def build(spec: list) -> list[Task]:
    return [
        Task(
            [KINDS[kind] for kind in chosen],
            [Label(place, Token(7, 9, (index,))) for place, index in labels],
            masks.from_dense(torch.from_numpy(allow)),
        )
        for allow, chosen, labels in spec
    ]


def states(tables: Sequence[np.ndarray], inputs: Sequence[Sequence[Token]], sink: float, seed: int) -> list[np.ndarray]:
    """What each position holds before and after each layer of a random model, float64 [n, (layers + 1) x width].

    A table counts how often each query reads each key; the sink takes part in the softmax and has no value.
    """
    rng = np.random.default_rng(seed)
    vectors = dict(zip(KINDS, rng.normal(size=(len(KINDS), WIDTH)), strict=True))
    layers = rng.normal(size=(LAYERS, 5, WIDTH, WIDTH)) / WIDTH**0.5
    result = []
    for table, tokens in zip(tables, inputs, strict=True):
        state = np.array([vectors[token] for token in tokens])
        held = [state]
        for query, key, value, own, mixed in layers:
            weight = table * np.exp(state @ query @ key.T @ state.T)
            state = np.tanh(state @ own + weight @ state @ value / (sink + weight.sum(1, keepdims=True)) @ mixed)
            held.append(state)
        result.append(np.concatenate(held, axis=1))
    return result


def counted(merged: MergedTask) -> np.ndarray:
    table = merged.task.mask.dense().numpy().astype(float)
    query, key, many = merged.multiplicity.T
    assert (table[query, key] == 1).all()
    table[query, key] = many
    assert np.allclose(np.exp(merged.log_multiplicity().numpy()) * (table > 0), table, rtol=1e-15)
    return table


def check_values(family: list[Task], merged: MergedTask, sink: float, smallest: bool = True) -> None:
    """The merged task holds all values, and with `smallest` positions are one iff they are equal in both models."""
    tables = [task.mask.dense().numpy().astype(float) for task in family]
    place, equal = np.concatenate(merged.positions), True
    for seed in (0, 1):
        every = np.concatenate(states(tables, [task.inputs for task in family], sink, seed))
        [whole] = states([counted(merged)], [merged.task.inputs], sink, seed)
        assert np.abs(whole[place] - every).max() < APART
        equal &= np.abs(every[:, None] - every).max(axis=2) < APART
    together = place[:, None] == place
    assert (equal >= together).all()
    if smallest:
        assert np.array_equal(equal, together)
        assert merged.is_minimal
        assert sorted(set(place.tolist())) == list(range(merged.task.size))


@given(specs())
@settings(max_examples=300)
def test_positions_are_one_iff_all_models_say_so(spec):
    """With a sink, attention counts what it reads; then equal colours and equal values are the same."""
    family = build(spec)
    merged = tasks.merge(family, key_bias=True)
    check_values(family, merged, sink=1.0)
    assert merged.embeds(family).ok


@given(specs(self_too=True))
@settings(max_examples=300)
def test_a_mask_alone_serves_plain_softmax(spec):
    """Without bias: values are held by the mask, by copies in dense families, or the family is refused by name.

    Plain softmax averages: a token read twice is a token read once. So a smaller task might serve plain softmax alone,
    but not where no row reads one input twice.
    """
    family = build(spec)
    once = all(len({chosen[k] for k in np.flatnonzero(row)}) == row.sum() for allow, chosen, _ in spec for row in allow)
    several = len(tasks.merge(family, key_bias=True).multiplicity)
    if several and not all(task.is_dense for task in family):
        with pytest.raises(ValueError, match=r"family is not dense, and position \d of task \d reads positions"):
            tasks.merge(family)
        return
    merged = tasks.merge(family)
    assert not len(merged.multiplicity)
    assert merged.is_minimal or several
    check_values(family, merged, sink=0.0, smallest=once)
    assert merged.embeds(family).ok


@given(specs(total=8), st.data())
@settings(max_examples=200)
def test_embeds_finds_what_a_mask_does_not_hold(spec, data):
    """Against values: a position is missing iff no position of the sequence has its values in two random models."""
    family = build(spec)
    merged = tasks.merge(family, key_bias=True)
    if all(task.is_dense and task.attends_itself for task in family):
        return  # there the closure of the mask counts
    allow = merged.task.mask.dense()
    q, k = (data.draw(st.integers(0, merged.task.size - 1)) for _ in range(2))
    allow[q, k] = ~allow[q, k]
    own = masks.from_dense(allow)
    held = True
    for seed in (0, 1):
        [whole] = states([allow.numpy().astype(float)], [merged.task.inputs], 1.0, seed)
        tables = [task.mask.dense().numpy().astype(float) for task in family]
        every = np.concatenate(states(tables, [task.inputs for task in family], 1.0, seed))
        held &= np.abs(every[:, None] - whole).max(axis=2) < APART
    names = [(number, (i,)) for number, task in enumerate(family) for i in range(task.size)]
    missing = [name for name, here in zip(names, held.any(axis=1), strict=True) if not here]
    found = merged.embeds(family, own)
    assert ([(node.task, node.positions) for node in found.missing], found.num_nodes) == (missing, len(names))


@given(specs())
@settings(max_examples=300)
def test_the_merged_task_leaks_iff_a_subtask_leaks(spec):
    """And label by label: what leaks in a subtask leaks from the same inputs."""
    family = build(spec)
    merged = tasks.merge(family, key_bias=True)
    expected = {
        (number, int(place[leak.position]), leak.label.target, int(place[leak.carrier]))
        for number, (task, place) in enumerate(zip(family, merged.positions, strict=True))
        for leak in tasks.check(task).leaks
    }
    report = tasks.check(merged)
    assert {(leak.label.task, leak.position, leak.label.target, leak.carrier) for leak in report.leaks} == expected
    assert report.ok == all(tasks.check(task).ok for task in family)


def gist_family() -> list[Task]:
    """Three questions on a prompt of 24 tokens that two gist tokens compress (Mu et al., arXiv:2304.08467)."""
    prompt, gists, answer = 24, 2, 4
    n = prompt + gists + answer
    allow = torch.ones(n, n, dtype=torch.bool).tril()
    allow[prompt + gists :, :prompt] = False
    shared = [Token(20 + i, i) for i in range(prompt)] + [Token(99, prompt + i, ()) for i in range(gists)]
    family = []
    for question in range(3):
        said = [Token(50 + 10 * question + i, 26 + i, (100 + 4 * question + i,)) for i in range(answer)]
        labels = [Label(prompt + gists - 1 + i, token) for i, token in enumerate(said)]
        family.append(Task([*shared, *said], labels, masks.from_dense(allow)))
    return family


def windowed_rollouts() -> list[Task]:
    family = tasks.rollouts(list(range(3, 23)), [[7, 9, 1, 5], [7, 9, 2, 1, 8], [6, 1]])
    return [Task(task.inputs, task.labels, task.mask & masks.sliding_window(task.size, 6)) for task in family]


def with_sinks(layers: int = 0) -> list[Task]:
    family = []
    for task in tasks.causal_lm(list(range(3, 23))):
        mask = masks.attention_sink(task.size, 1, 4)
        family.append(Task(task.inputs, task.labels, [mask] * layers or mask))
    return family


def windowed_streams() -> list[Task]:
    family = tasks.block_two_stream(list(range(3, 19)), 4, mask_token=0)
    return [Task(t.inputs, t.labels, t.mask & masks.sliding_window(t.size, 6, causal=False)) for t in family]


def equal_documents() -> list[Task]:
    """Two or three copies of one retrieved passage, at equal positions: one key with log 2 or log 3."""

    def over(copies: int) -> Task:
        passage = [Token(5, 0, ()), Token(6, 1, ())] * copies
        size = 2 * copies
        pairs = [(i, i) for i in range(size + 2)] + [(2 * i + 1, 2 * i) for i in range(copies)]
        pairs += [(size, 2 * i + 1) for i in range(copies)] + [(size + 1, size)]
        labels = [Label(size, Token(9, 3)), Label(size + 1, Token(8, 4))]
        return Task([*passage, Token(3, 2), Token(9, 3)], labels, masks.from_edges(pairs, size + 2))

    return [over(2), over(3), over(1)]


FAMILIES = [
    (gist_family, 90, 38),
    (windowed_rollouts, 68, 26),
    (with_sinks, 190, 19),
    (lambda: with_sinks(layers=3), 190, 19),
    (windowed_streams, 36, 24),
    (equal_documents, 18, 8),
]


@pytest.mark.parametrize(("make", "before", "after"), FAMILIES)
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_values_and_gradients_in_double_precision(make, before, after, kind):
    family = make()
    key_bias = make is equal_documents
    merged = tasks.merge(family, key_bias)
    assert (sum(task.size for task in family), merged.task.size) == (before, after)
    assert (len(merged.multiplicity) > 0) == key_bias
    assert tasks.check(merged).ok
    assert merged.embeds(family).ok
    torch.manual_seed(0)
    if kind == "Llama":
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **size, attn_implementation="eager"))
    else:
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4, n_positions=64, **ids))
    result = tasks.verify(family, merged, model.double())
    assert max(result.output_difference, result.loss_difference, result.gradient_difference) < 1e-12


def test_next_tokens_under_sinks_and_a_window_are_one_sequence():
    assert tasks.merge(with_sinks()).task.mask == masks.attention_sink(19, 1, 4)
    stack = tasks.merge(with_sinks(layers=3)).task
    assert stack.masks == (masks.attention_sink(19, 1, 4),) * 3
    assert stack.num_layers == 3


def test_the_multiplicity_is_needed():
    """Without it, and for a family that is merged after `densified`, a model computes something else."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    ).double()
    family = equal_documents()
    merged = tasks.merge(family, key_bias=True)
    alone = MergedTask(merged.task, merged.positions, merged.node, merged.lower_bound, merged.is_minimal)
    assert tasks.verify(family, alone, model, gradients=False).output_difference > 1e-3
    right = tasks.verify(family, merged, model, gradients=False)
    assert -sum(tasks.score(model, merged).log_probs) == pytest.approx(right.merged_loss, rel=1e-6)
    with pytest.raises(ValueError, match="key_bias=True"):
        tasks.score(model, family)
    gists = gist_family()
    dense = tasks.merge([task.densified() for task in gists])
    assert tasks.verify(gists, dense, model, gradients=False).output_difference > 1e-3


def test_text_of_a_merged_task_says_what_it_needs():
    assert str(tasks.merge(equal_documents(), key_bias=True)).endswith("embedded; 2 pairs need log_multiplicity")
    assert "log_multiplicity" not in str(tasks.merge(gist_family()))


@pytest.mark.parametrize("word", ["aba", "abcb", "abcba", "ababab"])
def test_one_key_for_letters_that_stand_forwards_and_backwards(word):
    """Numbers of equal positions go up and down again within one interval of keys."""
    family = [Task([Token(ord(letter), 0) for letter in word], [], masks.full(len(word)))]
    merged = tasks.merge(family, key_bias=True)
    letters = [chr(token.ids[0]) for token in merged.task.inputs]
    assert sorted(letters) == sorted(set(word))
    assert merged.task.mask == masks.full(len(letters))
    many = {(q, k): many for q, k, many in merged.multiplicity.tolist()}
    for q in range(len(letters)):
        assert [many.get((q, k), 1) for k in range(len(letters))] == [word.count(letter) for letter in letters]


@pytest.mark.parametrize("masks_form", ["dense", "intervals"])
def test_the_collator_adds_the_logarithm_or_refuses(masks_form):
    collate = tasks.Collator(lambda _: equal_documents(), by_length=False, masks=masks_form, pad_to_multiple_of=16)
    if masks_form == "intervals":
        with pytest.raises(ValueError, match=r"sample 0 .* one key under a mask counts once\. Call merge"):
            collate([[1]])
        return
    twice = [Task([Token(5, 0, ())] * 2, [], masks.full(2))]  # of dense families it keeps copies
    assert tasks.Collator(lambda _: twice, by_length=False)([[1]])["input_ids"].tolist() == [[5, 5]]
    batch = collate([[1], [2]])
    merged = tasks.merge(equal_documents(), key_bias=True)
    allow = merged.task.mask.dense()
    assert torch.equal(batch["attention_mask"][1, 0, :8, :8][allow], merged.log_multiplicity()[allow].float())
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    labels = batch.pop("labels")
    loss = tasks.loss(model(**batch, use_cache=False), labels, reduction="sum")
    expected = 2 * tasks.verify(equal_documents(), merged, model).merged_loss
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert af.audit.check(model, batch, order="mask").ok
