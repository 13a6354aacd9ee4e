import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Trainer

import attnflow as af
from attnflow import tasks
from attnflow.models.passes.evaluation import precision
from attnflow.tasks import Collator, Label, Task, Token
from tests.models.table import AUDITED, CAUSAL
from tests.tasks.training import arguments

DOUBLE = torch.float64
MIN = torch.finfo(DOUBLE).min


def pack_labels(targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    bits = torch.where(targets != -100, weights.view(torch.int64), -100)
    return F.pad(torch.stack([targets, bits], dim=-2), (1, 0), value=-100)


def unpack_labels(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    targets, bits = labels[..., 1:].unbind(-2)
    return targets, torch.where(targets == -100, 0.0, bits.contiguous().view(DOUBLE))


def model(name: str = "Llama", **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return {**CAUSAL, **AUDITED}[name].make(vocab_size=32, initializer_range=0.02, **options)


def samples(lengths: list[int]) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 32, (n,), generator=generator).tolist()} for n in lengths]


def weighted(tokens: list[int]) -> list[Task]:
    """Two weighted labels per position: the next token, and the one after it at a third."""
    return [
        Task(
            task.inputs,
            [Label(e.position, e.target, weight=1.0 if h == 0 else 1 / 3) for h, e in enumerate(task.labels)],
            task.mask,
        )
        for task in tasks.multi_token_prediction(tokens, 2)
    ]


FAMILIES = {
    "causal": tasks.causal_lm,
    "block two-stream": partial(tasks.block_two_stream, block=2, mask_token=31),
    "butterfly": tasks.butterfly,
    "weighted": weighted,
}


def test_a_batch_of_one_is_the_merged_task():
    ids = [5, 6, 7, 8]
    batch = Collator(FAMILIES["block two-stream"], dtype=DOUBLE)([ids])
    merged = tasks.merge(tasks.block_two_stream(ids, 2, mask_token=31)).task
    assert batch["input_ids"].tolist() == [[5, 6, 31, 31]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]]
    assert batch["attention_mask"].shape == (1, 1, 4, 4)
    assert torch.equal(batch["attention_mask"][0, 0] == 0, merged.mask.dense())
    assert batch["attention_mask"].dtype == DOUBLE
    assert batch["attention_mask"].unique().tolist() == [MIN, 0.0]
    targets, weights = unpack_labels(batch["labels"])
    assert targets.tolist() == [[[-100], [-100], [7], [8]]]
    assert weights.tolist() == [[[0.0], [0.0], [1.0], [1.0]]]


def test_averaged_tokens_have_several_ids(caplog):
    batch = Collator(tasks.butterfly)([[5, 6, 7]])
    assert "[batch, n, 2]: call af.tasks.average_embeddings(model)" in caplog.text
    assert batch["input_ids"].tolist() == [[[5, -100], [6, -100], [6, -100], [7, -100], [6, -100], [5, 7], [6, -100]]]
    assert batch["position_ids"].tolist() == [[0, 1, 1, 2, 0, 1, 2]]
    assert Collator(tasks.butterfly)([[5, 6]])["input_ids"].shape == (1, 4)  # nothing to average


def test_padding_attends_to_itself_and_is_attended_by_none():
    batch = Collator(tasks.causal_lm, pad_to_multiple_of=4)([[5, 6, 7, 8], [5, 6]])
    allow = batch["attention_mask"][:, 0] == 0
    assert allow.shape == (2, 4, 4)
    assert torch.equal(allow[0, :3, :3], af.masks.causal(3).dense())
    assert allow[0, 3].tolist() == [False, False, False, True]
    assert torch.equal(allow[1], torch.eye(4, dtype=torch.bool))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [5, 0, 0, 0]]
    assert (unpack_labels(batch["labels"])[0][..., 0] == -100).tolist() == [[False] * 3 + [True], [False] + [True] * 3]


def logits(llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return llama(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_that_of_all_subtasks(name):
    """The same number as running every subtask of every sample alone."""
    llama = model().double()
    tasks.average_embeddings(llama)
    some = samples([6, 8])
    batch = Collator(FAMILIES[name], dtype=DOUBLE)(some)
    found = tasks.loss(logits(llama, batch), batch["labels"], reduction="sum")
    families = [list(FAMILIES[name](sample["input_ids"])) for sample in some]
    alone = [tasks.verify(family, tasks.merge(family), llama, gradients=False) for family in families]
    assert float(found.detach()) == pytest.approx(sum(t.loss for v in alone for t in v.tasks), rel=1e-6)
    count = sum(len(task.labels) for family in families for task in family)
    mean = tasks.loss(logits(llama, batch), batch["labels"])
    assert float(mean.detach()) == pytest.approx(float(found.detach()) / count)


def test_gradients_reach_the_embedding_through_averages():
    llama = model().double()
    tasks.average_embeddings(llama)
    batch = Collator(tasks.butterfly, dtype=DOUBLE)([[3, 4, 5]])
    tasks.loss(logits(llama, batch), batch).backward()
    touched = llama.get_input_embeddings().weight.grad.abs().sum(dim=1) > 0
    assert touched[[3, 4, 5]].all()
    assert int(touched.sum()) == 3


def test_a_model_takes_averaged_tokens_until_the_handle_is_removed():
    llama = model()
    averaged = torch.tensor([[[3, -100], [4, 4]]])
    plain = llama(torch.tensor([[3, 4]]), use_cache=False).logits
    handle = tasks.average_embeddings(llama)
    assert str(handle) == "LlamaForCausalLM reads input_ids [batch, n, width] as mean embeddings"
    assert torch.equal(llama(torch.tensor([[3, 4]]), use_cache=False).logits, plain)
    assert torch.equal(llama(input_ids=averaged, use_cache=False).logits, plain)
    handle.remove()
    with pytest.raises(IndexError, match="index out of range in self"):
        llama(input_ids=averaged)


@pytest.mark.parametrize(("name", "kind"), [*((name, "Llama") for name in FAMILIES), ("butterfly", "Bert")])
def test_trainer_trains_what_a_plain_loop_trains(name, kind, tmp_path):
    """Two steps of two accumulated batches: the loss is normalised over all their labels, nothing is shifted.

    Of a causal model `Trainer` counts shifted labels, of BERT all.
    """
    data = samples([6, 8, 10, 4, 8, 6, 4, 12])
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    trained, reference = (model(kind, **(dropout if kind == "Bert" else {})) for _ in range(2))
    tasks.average_embeddings(trained)
    tasks.average_embeddings(reference)
    collate = Collator(FAMILIES[name])
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 1}
    trainer = Trainer(
        trained, arguments(tmp_path, **options), data_collator=collate, train_dataset=data, compute_loss_func=tasks.loss
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    expected = plain_loop(reference, collate, data)
    assert losses == pytest.approx(expected, rel=1e-4)
    for (key, value), other in zip(trained.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6, msg=key)
    assert trainer.evaluate(data[:2])["eval_loss"] > 0


def plain_loop(llama: PreTrainedModel, collate: Collator, data: list) -> list[float]:
    optimiser = torch.optim.SGD(llama.parameters(), lr=0.1)
    llama.train()
    losses = []
    for step in range(2):
        batches = [collate(data[start : start + 2]) for start in (4 * step, 4 * step + 2)]
        count = sum(int((unpack_labels(batch["labels"])[0] != -100).sum()) for batch in batches)
        total = sum(tasks.loss(logits(llama, batch), batch, reduction="sum") for batch in batches) / count
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        losses.append(float(total.detach()))
    return losses


def counting(family_fn):
    calls = []

    def function(tokens: list[int]):
        calls.append(len(tokens))
        return family_fn(tokens)

    return function, calls


def test_one_merge_serves_all_samples_of_a_length():
    function, calls = counting(tasks.butterfly)
    collate = Collator(function, by_length=True)
    first = collate(samples([6, 6, 7, 6]))
    assert sorted(calls) == [6, 6, 7, 7]  # the structure, and the test on the first sample
    again = Collator(tasks.butterfly, by_length=False)(samples([6, 6, 7, 6]))
    assert all(torch.equal(first[name], again[name]) for name in first)
    collate(samples([7, 6]))
    assert len(calls) == 4


def test_known_families_are_shared_by_length_and_others_are_not():
    assert Collator(tasks.butterfly).by_length
    assert Collator(partial(partial(tasks.block_two_stream, block=2, mask_token=0), mask_token=3)).by_length
    assert Collator(partial(tasks.butterfly, block=4, masked=[1], mask_token=0)).by_length
    function, calls = counting(tasks.causal_lm)
    collate = Collator(function)
    assert not collate.by_length
    collate([[1, 2, 3], [4, 5, 6]])
    assert calls == [3, 3]
    assert not Collator(tasks.butterfly, by_length=False).by_length


def test_a_collator_survives_pickling():
    collate = Collator(partial(tasks.block_two_stream, block=2, mask_token=0))
    batch = collate([[1, 2, 3, 4]])
    again = pickle.loads(pickle.dumps(collate))([[1, 2, 3, 4]])
    assert all(torch.equal(batch[name], again[name]) for name in batch)


@pytest.mark.parametrize(
    "feature",
    [
        [5, 6, 7],
        (5, 6, 7),
        torch.tensor([5, 6, 7]),
        {"input_ids": [5, 6, 7]},
        {"input_ids": torch.tensor([5, 6, 7]), "attention_mask": torch.tensor([1, 1, 1])},
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [5, 6, 7, -100, -100]},
        {"input_ids": [0, 5, 6, 7], "attention_mask": [0, 1, 1, 1]},
    ],
)
def test_samples_of_any_kind(feature):
    expected, batch = Collator(tasks.causal_lm)([[5, 6, 7]]), Collator(tasks.causal_lm)([feature])
    assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_loss_against_cross_entropy():
    scores = torch.randn(2, 3, 7, dtype=DOUBLE, requires_grad=True)
    targets = torch.tensor([[[1, 2], [-100, -100], [3, -100]], [[4, 0], [5, -100], [-100, -100]]])
    weights = torch.rand(targets.shape, dtype=DOUBLE)
    labels = pack_labels(targets, weights)
    expected = sum(
        float(weights[b, i, s]) * F.cross_entropy(scores[b, i], targets[b, i, s])
        for b in range(2)
        for i in range(3)
        for s in range(2)
        if targets[b, i, s] != -100
    )
    torch.testing.assert_close(tasks.loss(scores, labels, reduction="sum"), expected)
    torch.testing.assert_close(tasks.loss(scores, {"labels": labels}), expected / 6)
    torch.testing.assert_close(tasks.loss(scores, labels, num_items_in_batch=torch.tensor(24)), expected / 12)
    torch.testing.assert_close(tasks.loss(scores, labels, num_items_in_batch=24), expected / 12)


def test_a_batch_without_labels_has_no_loss():
    labels = pack_labels(torch.full((1, 2, 1), -100), torch.zeros(1, 2, 1, dtype=DOUBLE))
    scores = torch.randn(1, 2, 7, requires_grad=True)
    loss = tasks.loss(scores, labels)
    loss.backward()
    assert (float(loss.detach()), float(scores.grad.abs().sum())) == (0.0, 0.0)
    assert float(tasks.loss(scores, labels, num_items_in_batch=torch.tensor(0)).detach()) == 0.0


def test_drawn_places_are_drawn_for_each_sample():
    """Never once for all sequences of a length, as what depends on the length alone."""
    collate = tasks.Collator(partial(tasks.block_diffusion, block=4, masked="random", mask_token=9))
    assert not collate.by_length
    batch = collate([[1, 2, 3, 4, 5, 6, 7, 8]] * 6)
    assert len({tuple(row) for row in batch["input_ids"].tolist()}) > 1


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_row_intervals_train_what_dense_masks_train(name, backend):
    """Loss and gradients in float64, with sequences of unequal length and fewer heads of keys than of queries."""
    some = samples([6, 12, 2 if name == "causal" else 4])
    results = []
    for form in ("dense", "intervals"):
        llama = model(attn_implementation=backend).double()
        tasks.average_embeddings(llama)
        batch = Collator(FAMILIES[name], dtype=DOUBLE, masks=form, pad_to_multiple_of=5)(some)
        with af.masks.attach(llama, "batch"):
            loss = tasks.loss(logits(llama, batch), batch)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in llama.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)
    assert batch["attention_mask"].dtype == torch.int32
    assert batch["attention_mask"].shape[-1] % 5 == 0


def windowed(tokens: list[int]) -> Task:
    """One task whose mask is not dense: two layers see farther than one."""
    inputs = [Token(id, i) for i, id in enumerate(tokens)]
    labels = [Label(i, inputs[i + 1]) for i in range(len(inputs) - 1)]
    return Task(inputs, labels, af.masks.sliding_window(len(inputs), 3))


@pytest.mark.parametrize("by_length", [False, True])
def test_a_single_task_is_taken_as_it_is(by_length):
    """Merging needs dense tasks; windows, and layouts made elsewhere, need no merge."""
    batch = Collator(windowed, by_length=by_length)([[5, 6, 7, 8, 9], [4, 3]])
    allow = batch["attention_mask"][:, 0] == 0
    assert torch.equal(allow, af.masks.batch([af.masks.sliding_window(5, 3), af.masks.causal(2)]).dense()[:, 0])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert unpack_labels(batch["labels"])[0][0, :, 0].tolist() == [6, 7, 8, 9, -100]


def test_room_for_intervals():
    assert Collator(windowed, masks="intervals")([[5, 6, 7]])["attention_mask"].shape == (1, 1, 2, 3)
    assert Collator(windowed, masks="intervals", min_width=3)([[5, 6, 7]])["attention_mask"].shape == (1, 1, 8, 3)


PACKED = {**FAMILIES, "one task under a window": windowed}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("form", ["dense", "intervals"])
def test_packed_rows_compute_what_samples_alone_compute(name, form):
    """Logits of every sample, the loss and all gradients in float64; samples of several structures share a row."""
    some, results = samples([6, 8, 4, 10, 6, 12]), []
    packed = Collator(PACKED[name], dtype=DOUBLE, masks=form, pack_to=36)
    for collate in (Collator(PACKED[name], dtype=DOUBLE, masks=form), packed):
        llama = model().double()
        tasks.average_embeddings(llama)
        batch = collate(some)
        with precision(llama, DOUBLE), af.masks.attach(llama, "batch"):
            scores = logits(llama, batch)
            loss = tasks.loss(scores, batch)
            loss.backward()
        results.append((batch, scores.detach(), loss.detach(), [p.grad for p in llama.parameters()]))
    (alone, alone_scores, *expected), (batch, scores, *found) = results
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    rows, _ = places(packed, some)
    assert len(batch["labels"]) == len(rows) < len(some)
    assert all(length <= 36 for length in rows)
    for number, (row, part) in enumerate(places(packed, some)[1]):
        size = part.stop - part.start
        torch.testing.assert_close(scores[row, part], alone_scores[number, :size], rtol=1e-12, atol=1e-14)
        assert torch.equal(batch["position_ids"][row, part], alone["position_ids"][number, :size])


def places(collate, some):
    """(length of each row, (row, positions) of each sample), by first fit."""
    rows, found = [], []
    for sample in some:
        given = collate.tasks_of(sample)
        size = given.size if isinstance(given, Task) else tasks.merge(given).task.size
        row = next((row for row, length in enumerate(rows) if length + size <= collate.pack_to), len(rows))
        rows += [0] * (row == len(rows))
        found.append((row, slice(rows[row], rows[row] + size)))
        rows[row] += size
    return rows, found


def test_packed_rows_stay_apart():
    """No position of a sample can be reached from another one, in any number of layers; positions restart."""
    collate = Collator(partial(tasks.block_two_stream, block=2, mask_token=31), pack_to=16)
    batch = collate(samples([6, 8, 4]))
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7],
    ]
    flow = af.order.analyze(af.masks.from_dense(batch["attention_mask"][0, 0] == 0))
    assert not flow.reachability()[:8, 8:].any()
    assert not flow.reachability()[8:, :8].any()
    assert flow.masks[0] == af.masks.block_diagonal([af.masks.block_two_stream(n, 2) for n in (3, 2)])


def test_groups_of_rollouts_are_packed():
    groups = [{"prompts": [1, 2, 3], "responses": [[4, 5], [4, 6]]}, {"prompts": [7], "responses": [[8, 9]]}]
    alone, packed = Collator(tasks.rollouts)(groups), Collator(tasks.rollouts, pack_to=32)(groups)
    assert alone["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert torch.equal(packed["labels"][0], torch.cat([alone["labels"][0], alone["labels"][1, :2]]))


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"sample 1 of the batch takes 7 positions, more than pack_to=6"):
        Collator(tasks.causal_lm, pack_to=6)([[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]])
    with pytest.raises(ValueError, match="pack_to must be at least 1"):
        Collator(tasks.causal_lm, pack_to=0)
