"""Each handle with four threads: on one model, and each thread on a model of its own. Answers are the serial ones.

Every linear map sleeps for a moment, so that the calls of all threads stand between the same two layers.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnflow as af
from attnflow.geometry.score import layer_scores
from tests.knowledge.hf.readers import opened, store_of
from tests.models import tiny

THREADS, CALLS, LENGTH = 4, 6, 12
PREFIX = [7, 9, 11, 13, 15, 17]


@pytest.fixture(autouse=True)
def _many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def batch(number: int) -> dict[str, torch.Tensor]:
    """Two rows that begin alike, others in each call; their length and padding differ from call to call."""
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 30, (2, LENGTH - number % 3), generator=draw)
    ids[:, : len(PREFIX)] = torch.tensor(PREFIX)
    real = torch.ones_like(ids)
    real[1, -1 - number % 2 :] = 0
    return {"input_ids": ids, "attention_mask": real}


def with_labels(number: int) -> dict[str, torch.Tensor]:
    given = batch(number)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[:, : len(PREFIX)] = -100
    return {**given, "labels": labels}


def with_masks(number: int) -> dict[str, torch.Tensor]:
    ids = batch(number)["input_ids"]
    size = ids.shape[1]
    masks = [af.masks.sliding_window(size, 1 + number % 4), af.masks.document([number % 5 + 1, size - number % 5 - 1])]
    return {"input_ids": ids, "attention_mask": af.masks.batch(masks).row_intervals()}


def unshared(number: int) -> dict[str, torch.Tensor]:
    return {"input_ids": batch(number)["input_ids"]}


def bias(model):
    return [af.bias.attach(model, [af.bias.GuidanceConfig(init="kaiming"), af.bias.AlibiConfig()])]


def reader(model):
    return [opened(af.knowledge.attach(model, store_of(), layers=[0, 1]))]


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return reader(model)


def mask(model):
    return [af.masks.attach(model, af.masks.sliding_window(LENGTH, 3))]


def guard(model):
    return [af.audit.guard(model, every=3, passes=2)]


HANDLES = {
    "none": (lambda model: [], batch),
    "mask": (mask, batch),
    "batch of masks": (lambda model: [af.masks.attach(model, "batch")], with_masks),
    "bias": (bias, batch),
    "reader": (reader, batch),
    "reader and gradient checkpointing": (checkpointed, batch),
    "guard": (guard, batch),
    "shared prefixes": (lambda model: [af.tasks.share_prefixes(model)], batch),
    "shared prefixes with labels": (lambda model: [af.tasks.share_prefixes(model)], with_labels),
    "mask, bias, reader and guard": (
        lambda model: [*mask(model), *bias(model), *reader(model), *guard(model)],
        unshared,
    ),
}


def answer(model, given, learns: bool):
    """Logits; or the loss, whose gradients add up in the model."""
    with torch.set_grad_enabled(learns):  # where it learns, in training mode, which nothing here draws numbers in
        output = model(**given, use_cache=False)
    if not learns:
        return output.logits
    loss = output.logits.square().sum() if output.get("loss") is None else output.loss
    loss.backward()
    return loss.detach()


def taken(model):
    """The gradients that calls have added up."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def slowed(*models):
    for model in models:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_: time.sleep(1e-4))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("learns", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("way", ["one model", "one model, at full speed", "several models"])
@pytest.mark.parametrize("name", HANDLES)
def test_threads_answer_as_one_call_after_another(name, way, learns):
    put, given = HANDLES[name]
    models = [tiny("Llama").train(learns) for _ in range(THREADS if way == "several models" else 1)]
    handles = [put(model) for model in models]
    numbers = range(THREADS * CALLS)
    expected = [answer(models[number % len(models)], given(number), learns) for number in numbers]
    gradients = [taken(model) for model in models]
    if "speed" not in way:
        slowed(*models)

    def serve(thread):
        return [answer(models[thread % len(models)], given(n), learns) for n in numbers if n % THREADS == thread]

    with ThreadPoolExecutor(THREADS) as threads:
        answers = list(threads.map(serve, range(THREADS)))
    for number in numbers:
        torch.testing.assert_close(answers[number % THREADS][number // THREADS], expected[number], msg=f"call {number}")
    for model, gradient in zip(models, gradients, strict=True):
        torch.testing.assert_close(taken(model), gradient)
    calls = 2 * len(numbers) // len(models)
    for handle in (one[-1] for one in handles if one):
        if "guard" in name:
            assert handle.ok
            assert len(handle.reports) == (calls + 2) // 3
        if "prefixes" in name:
            assert handle.report.calls == handle.report.shared == calls


def test_a_monitor_counts_the_steps_of_all_threads(tmp_path, monkeypatch):
    def slowly(*given):
        time.sleep(1e-3)
        return layer_scores(*given)

    monkeypatch.setattr(sys.modules["attnflow.geometry.monitor"], "layer_scores", slowly)
    with af.geometry.monitor(tiny("Llama"), tmp_path / "scores.csv", every=5) as handle:
        with ThreadPoolExecutor(THREADS) as threads:
            scored = list(threads.map(lambda _: handle.step() is not None, range(100)))
        lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert sum(scored) == 20
    assert list(dict.fromkeys(line.split(",")[0] for line in lines[1:])) == [str(step) for step in range(0, 101, 5)]
