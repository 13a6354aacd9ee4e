"""Objectives that are trained today: what each reads, what its merge computes, and what the published masks do."""

from functools import partial

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow import tasks
from attnflow.models.subject import Subject
from attnflow.tasks import Label, Task, Token
from attnflow.tasks.embedding import run
from attnflow.tasks.merging import embedding
from tests.models import tiny
from tests.refused import refused

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
OBJECTIVES = {
    "LLaDA": tasks.masked_lm(IDS, "random", mask_token=0),
    "SBD": tasks.block_diffusion(IDS, 2, mask_token=0, clean="causal", next_token=True),
    "SBD, partly masked": tasks.block_diffusion(IDS, 4, [1, 2, 6], 0, clean="causal", next_token=True),
    "I-DLM": tasks.block_diffusion(IDS, 2, mask_token=0, clean="causal", noisy="causal", next_token=True),
    "block diffusion, causal blocks": tasks.block_diffusion(IDS, 4, mask_token=0, noisy="causal"),
    "DiffusionGemma": tasks.block_diffusion(IDS, 2, mask_token=0, clean="causal", prompt=2),
    "a prompt of another length": tasks.block_diffusion(IDS[:7], 2, mask_token=0, clean="causal", prompt=3),
    "look ahead": tasks.look_ahead(IDS, 3, mask_token=0),
    "MuToR": tasks.look_ahead(IDS, 4, mask_token=0, chained=False),
    "gist": tasks.gist(IDS, [[7, 8], [7, 2, 3], [5]], 2, gist_token=11),
    "segments": tasks.gist(IDS, [[7, 8], [7, 2, 3]], 1, gist_token=11, segment=3),
}


@pytest.mark.parametrize("make", [partial(tiny, "Llama", num_hidden_layers=3, vocab_size=16), partial(tiny, "GPT2")])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_are_those_of_the_tasks_alone(name, make):
    family = OBJECTIVES[name]
    merged = tasks.merge(family)
    assert tasks.check(merged).ok
    torch.manual_seed(0)
    assert tasks.verify(family, merged, make(), tolerance=1e-11).ok


def _table(task):
    return task.mask.dense().numpy()


@pytest.mark.parametrize("clean", ["block", "causal"])
@pytest.mark.parametrize("noisy", ["block", "causal"])
@pytest.mark.parametrize("prompt", [0, 2])
def test_what_a_masked_block_reads(clean, noisy, prompt):
    family = tasks.block_diffusion(IDS, 2, mask_token=0, clean=clean, noisy=noisy, prompt=prompt)
    assert len(family) == (len(IDS) - prompt) // 2
    for number, task in enumerate(family):
        first = prompt + 2 * number
        q, k = np.indices((first + 2, first + 2))
        before = {"causal": k <= q, "block": k // 2 <= q // 2}
        assert np.array_equal(_table(task), np.where(q < first, before[clean], before[noisy]))
        assert [label.data_index for label in task.labels] == [first, first + 1]
        assert [token.provenance == frozenset() for token in task.inputs] == [i >= first for i in range(first + 2)]


def test_blocks_begin_behind_the_prompt():
    torch.manual_seed(0)
    for _ in range(20):
        family = tasks.block_diffusion(IDS[:7], 4, "random", 0, clean="causal", prompt=3)
        assert len(family) == 1
        hidden = [label.data_index for label in family[0].labels]
        assert set(hidden) <= {3, 4, 5, 6}
        assert {label.weight for label in family[0].labels} == {1 / len(hidden)}


def test_the_masked_tokens_of_llada_are_drawn_anew():
    torch.manual_seed(0)
    counts = [len(tasks.masked_lm(IDS, "random", mask_token=0)[0].labels) for _ in range(400)]
    assert set(counts) == set(range(1, 9))
    assert min(map(counts.count, set(counts))) > 30  # 50 of each are expected, with a deviation of 6.6
    task = tasks.masked_lm(IDS, "random", mask_token=0)[0]
    assert sum(label.weight for label in task.labels) == pytest.approx(1)
    assert task.mask == af.masks.full(8)


@pytest.mark.parametrize("chained", [True, False])
def test_what_looks_ahead(chained):
    n, horizon = len(IDS), 4
    for i, task in enumerate(tasks.look_ahead(IDS, horizon, mask_token=0, chained=chained)):
        q, k = np.indices((task.size, task.size))
        assert np.array_equal(_table(task), (k <= q) & ((k <= i) | (k == q) | chained))
        assert task.position_ids.tolist() == list(range(task.size))
        wanted = [(i + d, i + d + 1) for d in range(horizon) if i + d + 1 < n]
        assert [(label.position, label.data_index) for label in task.labels] == wanted


def test_looking_ahead_is_the_mask_of_the_catalogue():
    n, horizon = 7, 3
    clean = [Token(id, i) for i, id in enumerate(IDS[:n])]
    masks = [Token(0, i + d, ()) for i in range(n) for d in range(1, horizon)]
    task = Task([*clean, *masks], [], af.masks.look_ahead(n, horizon))
    assert embedding(task, tasks.look_ahead(IDS, horizon, mask_token=0)).ok
    assert not embedding(task, tasks.look_ahead(IDS, horizon, mask_token=0, chained=False)).ok


def test_answers_read_a_context_through_its_gists_alone():
    family = OBJECTIVES["gist"]
    for task, answer in zip(family, [[7, 8], [7, 2, 3], [5]], strict=True):
        table = _table(task)
        assert table[10:, 8:10].all()
        assert not table[10:, :8].any()
        assert np.array_equal(table[:10, :10], np.tri(10, dtype=bool))
        assert [label.target_id for label in task.labels] == answer
        assert [label.position for label in task.labels] == [9 + i for i in range(len(answer))]
    segmented = _table(OBJECTIVES["segments"][0])  # three parts of 3, 3 and 2 tokens, a gist behind each
    assert segmented[4:8, [0, 1, 2]].sum() == 0
    assert segmented[8:, [0, 1, 2, 4, 5, 6]].sum() == 0
    assert segmented[11:, [3, 7, 10]].all()


def test_gists_weigh_answers_as_rollouts_do():
    weights = [0.5, [-1.0, 2.0, 3.0]]
    family = tasks.gist(IDS, [[7, 8], [7, 2, 3]], 1, gist_token=11, weights=weights)
    assert [[label.weight for label in task.labels] for task in family] == [[0.5, 0.5], [-1.0, 2.0, 3.0]]


CLEAN = [Token(10 + i, i) for i in range(8)]
BLANK = [Token(0, i, ()) for i in range(8)]


def _published(block: int, noisy: str) -> Task:
    """Set Block Decoding as it is published: masked blocks, then the clean sequence, 2 n positions."""
    q, k = np.indices((16, 16))
    i, j = q % 8, k % 8
    own = (i // block == j // block) & ((j <= i) | (noisy == "block"))
    allow = np.where(q < 8, np.where(k < 8, own, j // block < i // block), (k >= 8) & (j <= i))
    labels = [Label(i, CLEAN[i]) for i in range(8)] + [Label(8 + i, CLEAN[i + 1]) for i in range(7)]
    return Task([*BLANK, *CLEAN], labels, af.masks.from_dense(torch.from_numpy(allow)))


@pytest.mark.parametrize("noisy", ["block", "causal"])
def test_the_published_set_blocks_hold_the_family_and_a_dead_position(noisy):
    family = tasks.block_diffusion(range(10, 18), 2, mask_token=0, clean="causal", noisy=noisy, next_token=True)
    merged = tasks.merge(family)
    assert (merged.task.size, merged.is_minimal) == (15, True)
    published = _published(2, noisy)
    report = tasks.check(published)
    assert report.ok
    assert report.dead == (15,)  # with its labels; without those of the next token, the last clean block is
    assert embedding(published, family).ok
    denoising = Task(published.inputs, published.labels[:8], published.mask)
    assert tasks.check(denoising).dead == (14, 15)


def test_a_public_mask_of_tidar_leaks_and_the_published_one_does_not():
    """Masked tokens that read all of the clean prefix read their own labels."""
    q, k = np.indices((16, 16))
    i, j = q % 8, k % 8
    clean, blocks = (q < 8) & (k < 8) & (j <= i), (q >= 8) & (k >= 8)
    leaking = clean | ((q >= 8) & (k < 8)) | (blocks & (j // 4 <= i // 4))
    published = clean | ((q >= 8) & (k < 8) & (j // 4 < i // 4)) | (blocks & (j // 4 == i // 4))
    labels = [Label(8 + i, CLEAN[i]) for i in range(8)] + [Label(i, CLEAN[i + 1]) for i in range(7)]
    reports = [
        tasks.check(Task([*CLEAN, *BLANK], labels, af.masks.from_dense(torch.from_numpy(allow))))
        for allow in (leaking, published)
    ]
    assert [report.ok for report in reports] == [False, True]
    assert len({(leak.position, leak.label.data_index) for leak in reports[0].leaks}) == 8
    assert (reports[0].num_labels, reports[0].leaks[0].route) == (15, "layer 1: 0 -> 8")


def test_the_rectangle_of_diffusion_gemma_is_clean_and_has_a_dead_block():
    """[canvas, encoder + canvas] as published, put into a square; ours leaves the last clean block out."""
    tokens = [Token(20 + i, i) for i in range(12)]
    prompt, block = 4, 4
    q, k = np.indices((20, 20))
    i, j = (q - 12) // block, (k - prompt) // block
    canvas = (k < prompt) | ((k < 12) & (j < i)) | ((k >= 12) & ((k - 12) // block == i))
    allow = np.where(q < 12, k <= q, canvas)
    labels = [Label(12 + i, tokens[4 + i]) for i in range(8)]
    canvases = [Token(0, 4 + i, ()) for i in range(8)]
    report = tasks.check(Task([*tokens, *canvases], labels, af.masks.from_dense(torch.from_numpy(allow))))
    assert report.ok
    assert report.dead == (8, 9, 10, 11)
    merged = tasks.merge(tasks.block_diffusion(range(20, 32), block, mask_token=0, clean="causal", prompt=prompt))
    assert merged.task.size == 16
    assert tasks.check(merged).dead == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.block_diffusion(IDS, 2, mask_token=0, next_token=True), 'next_token needs clean="causal"'),
        (lambda: tasks.block_diffusion(IDS, 2, mask_token=0, clean="full"), 'clean must be "block" or "causal"'),
        (lambda: tasks.block_diffusion(IDS, 2, mask_token=0, prompt=3), "the number of tokens after the prompt"),
        (lambda: tasks.block_diffusion(IDS[:7], 2, mask_token=0, prompt=3), "the length of the prompt must be"),
        (lambda: tasks.block_diffusion(IDS, 2, mask_token=0, prompt=9), "prompt must be at most 8, got 9"),
        (
            lambda: tasks.block_diffusion(IDS, 2, [0], 0, prompt=2),
            r"no block holds a \[MASK\]: 8 tokens, a prompt of 2",
        ),
        (lambda: tasks.look_ahead(IDS, 0, mask_token=0), "horizon must be at least 1"),
        (lambda: tasks.look_ahead(IDS, 2), "mask_token is required"),
        (lambda: tasks.gist([], [[1]], 1, 0), "the context is empty"),
        (lambda: tasks.gist([1], [[1]], 0, 0), "count must be at least 1"),
        (lambda: tasks.gist([1], [[]], 1, 0), "at least one response must have a token"),
        (lambda: tasks.gist([1], [[1]], 1, 0, segment=0), "segment must be at least 1"),
        (lambda: tasks.masked_lm(IDS, "all", mask_token=0), 'masked must be places, None for all of them, or "random"'),
    ],
)
def test_what_is_refused(call, message):
    with refused(ValueError, message):
        call()


M = 15
LEARNT = {  # the family of a text of 12 tokens, the part of it that verifies what is written, tokens of the prompt
    "next token": (tasks.causal_lm, None, 4),
    "look ahead": (partial(tasks.look_ahead, horizon=3, mask_token=M), tasks.causal_lm, 4),
    "MuToR": (partial(tasks.look_ahead, horizon=3, mask_token=M, chained=False), tasks.causal_lm, 4),
    "LLaDA": (partial(tasks.masked_lm, masked=None, mask_token=M), None, 0),
    "BD3-LM": (partial(tasks.block_diffusion, block=4, mask_token=M), None, 4),
    "SBD": (
        partial(tasks.block_diffusion, block=4, mask_token=M, clean="causal", next_token=True),
        tasks.causal_lm,
        4,
    ),
    "I-DLM": (
        partial(tasks.block_diffusion, block=4, mask_token=M, clean="causal", noisy="causal", next_token=True),
        tasks.causal_lm,
        4,
    ),
    "DiffusionGemma": (partial(tasks.block_diffusion, block=4, mask_token=M, clean="causal", prompt=4), None, 4),
    "gist": (lambda text: tasks.gist(text[:8], [text[8:]], 2, gist_token=14), None, 8),
    "segments": (lambda text: tasks.gist(text[:8], [text[8:]], 1, gist_token=14, segment=3), None, 8),
    "rollouts": (lambda text: tasks.rollouts(text[:8], [text[8:]]), None, 8),
}


@pytest.mark.parametrize("name", LEARNT)
def test_it_is_trained_and_then_writes_what_its_task_says(name):
    family, verifying, known = LEARNT[name]
    torch.manual_seed(0)
    model = tiny("Llama", torch.float32, vocab_size=16, num_hidden_layers=2, initializer_range=0.3)
    collate = tasks.Collator(family)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), list[float]()
    for _ in range(12):
        batch = collate([list(range(1, 13)), [5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4]])
        loss = tasks.loss(model(**{key: value for key, value in batch.items() if key != "labels"}), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    model.double().eval()
    written = tasks.generate(model, tasks.decoder(family(range(12))), list(range(1, known + 1)), eos_token=-1)
    text = [*range(1, known + 1), *written.tokens[0]]
    assert len(text) == 12
    task = tasks.merge((verifying or family)(text)).task
    with torch.no_grad():
        best = run(Subject(model), task).argmax(dim=-1)
    assert {label.data_index: label.target_id for label in task.labels if label.data_index >= known} == {
        label.data_index: int(best[label.position]) for label in task.labels if label.data_index >= known
    }


def test_a_context_that_only_gists_read_leaves_the_cache():
    torch.manual_seed(0)
    model = tiny("Llama", torch.float64, vocab_size=16, num_hidden_layers=2)
    widths = list[int]()
    model.model.layers[1].self_attn.register_forward_hook(
        lambda _, __, kwargs, ___: widths.append(kwargs["attention_mask"].shape[-1]), with_kwargs=True
    )
    for family in (lambda text: tasks.gist(text[:8], [text[8:]], 2, gist_token=14), tasks.causal_lm):
        tasks.generate(model, tasks.decoder(family(range(12))), list(range(1, 9)), eos_token=-1)
    assert widths == [10, 3, 4, 5, 8, 9, 10, 11]  # two gist tokens stand for eight
