"""Each handle with four threads: on one model, and each thread on a model of its own. Answers are the serial ones.

Every linear map sleeps for a moment, so that the calls of all threads stand between the same two layers.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnflow as af
from attnflow.geometry.score import layer_scores
from attnflow.models.passes.watching import Watch
from tests.knowledge.readers import opened, store_of
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
    return [af.audit.guard(model, every=6, passes=2)]


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
            assert len(handle.reports) == (calls + 5) // 6
        if "prefixes" in name:
            assert handle.report.calls == handle.report.shared == calls


IDS = torch.arange(3, 15)[None]
LOOKS = {
    "check": lambda model: af.audit.check(model, IDS, passes=3, cache=[10, 1, 1]),
    "check in float64": lambda model: af.audit.check(model, IDS, passes=2, dtype=torch.float64, both_sides=False),
    "quick": lambda model: af.audit.check(model, IDS, mode="quick"),
    "measure": lambda model: af.audit.measure(model, IDS[:, :6]),
    "declared order": lambda model: af.audit.declared_order(model, IDS),
    "a trial": lambda model: af.masks.attach(model, af.masks.causal(12)).remove(),
    "a part of the model": lambda model: af.audit.check(
        model.model, IDS, af.masks.causal(12), passes=2, both_sides=False
    ),
}


class Drops(torch.nn.Module):
    """Shows what mode it is called in."""

    def forward(self, hidden):
        return hidden * (1.0 if self.training else 2.0)


def until(done, call):
    answers = []
    while not done.is_set() or not answers:
        answers.append(call())
    return answers


@pytest.mark.parametrize("direct", [False, True], ids=["the model", "a part"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_thread_that_calls_does_not_see_another_one_look(name, direct):
    model = tiny("Llama").train()
    model.model.norm = torch.nn.Sequential(model.model.norm, Drops().train())
    given = {"input_ids": IDS, "use_cache": False}

    def call():
        with torch.no_grad():
            return model.model(**given).last_hidden_state if direct else model(**given).logits

    expected = call()
    slowed(model)
    done = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(until, done, call)
        try:
            for _ in range(3):
                LOOKS[name](model)
        finally:
            done.set()
        assert all(torch.equal(answer, expected) for answer in answers.result(60))
    assert all(module.training for module in model.modules())


def test_a_guard_in_one_thread_and_audits_in_others():
    """Each waits for the others, and none for ever."""
    model = tiny("Llama").train()
    expected = model(IDS).logits.detach()
    slowed(model)

    def train():
        return torch.equal(model(IDS).logits, expected)

    def look():
        return af.audit.check(model, IDS, passes=2, both_sides=False).ok

    with af.audit.guard(model, every=2, passes=2) as guard, ThreadPoolExecutor(4) as threads:
        work = [threads.submit(call) for call in (train, look, train, train, look, train) * 3]
        assert all(each.result(60) for each in work)
    assert guard.ok
    assert len(guard.reports) == 6


def test_what_one_thread_watches_another_may_call():
    model, seen = tiny("Llama"), []
    with Watch({"norm": model.model.norm}, seen.append, lambda call, output: output * 0), ThreadPoolExecutor(1) as one:
        assert one.submit(lambda: model(IDS).logits.any()).result(60)
        assert not seen
        assert not model(IDS).logits.any()
    assert len(seen) == 1


def test_a_call_that_does_not_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(sys.modules["attnflow._core.threads"], "_PATIENCE", 0.1)
    model, begun, end = tiny("Llama"), threading.Event(), threading.Event()

    def hold(*_):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            end.wait(30)

    model.model.norm.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(model, IDS)
        try:
            assert begun.wait(30)
            with pytest.raises(RuntimeError, match="another thread is inside a call of the model"):
                af.audit.check(model, IDS, passes=1)
        finally:
            end.set()
        call.result(30)
    assert af.audit.check(model, IDS, passes=1).ok


def test_a_monitor_counts_the_steps_of_all_threads(monkeypatch):
    def slowly(*given):
        time.sleep(1e-3)
        return layer_scores(*given)

    monkeypatch.setattr(sys.modules["attnflow.geometry.monitor"], "layer_scores", slowly)
    with af.geometry.monitor(tiny("Llama"), every=5) as handle, ThreadPoolExecutor(THREADS) as threads:
        scored = list(threads.map(lambda _: handle.step() is not None, range(100)))
    assert sum(scored) == 20
    assert list(handle.history) == list(range(0, 101, 5))
