"""Batches of the collators that people use, and the mistakes that people make with them."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import attnflow as af
from tests.audit.packing import EOS, MASK, PAD, WORDS, samples, tokenizer

IDS = {"vocab_size": WORDS + 4, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
CAUSAL = LlamaConfig(**IDS, architectures=["LlamaForCausalLM"])
MASKED = BertConfig(**IDS, architectures=["BertForMaskedLM"])
SIZE = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
SEQUENCES = T5Config(**IDS, **SIZE, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])


def completions(count=4, seed=0):
    """Samples whose first two tokens are a prompt without labels."""
    return [{**s, "labels": [-100, -100, *s["input_ids"][2:]]} for s in samples(count, seed)]


def pairs(count=4):
    both = zip(samples(count), samples(count, 1), strict=True)
    return [{"input_ids": question["input_ids"], "labels": answer["input_ids"]} for question, answer in both]


def masked(count=64, **more):
    return DataCollatorForLanguageModeling(tokenizer(), seed=0, **more)(samples(count, shortest=8, longest=16))


def collated(family, **options):
    with torch.no_grad():
        return af.tasks.Collator(family, **options)(samples(3))


def blocks(tokens):
    """Blocks of two, so of an even number."""
    return af.tasks.block_two_stream(tokens[: len(tokens) // 2 * 2], block=2, mask_token=MASK)


def sequence_pairs():
    return DataCollatorForSeq2Seq(tokenizer(), T5ForConditionalGeneration(SEQUENCES))(pairs())


CLEAN = {
    "flattening": (lambda: DataCollatorWithFlattening()(samples()), CAUSAL),
    "flattening, all keys": (
        lambda: DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(samples()),
        CAUSAL,
    ),
    "flattening of completions": (lambda: DataCollatorWithFlattening()(completions()), CAUSAL),
    "flattening from 2": (lambda: DataCollatorWithFlattening(position_ids_start=2)(samples()), CAUSAL),
    "flattening, numpy": (lambda: DataCollatorWithFlattening(return_tensors="np")(samples()), CAUSAL),
    "language modeling": (lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False)(samples()), CAUSAL),
    "masked": (masked, MASKED),
    "masked whole": (lambda: masked(mask_replace_prob=1.0, random_replace_prob=0.0), MASKED),
    "sequence to sequence": (sequence_pairs, SEQUENCES),
    "sequence to sequence, labels alone": (lambda: DataCollatorForSeq2Seq(tokenizer())(pairs()), SEQUENCES),
    "ours, causal": (lambda: collated(af.tasks.causal_lm), CAUSAL),
    "ours, blocks": (lambda: collated(blocks), CAUSAL),
    "ours, several tokens": (lambda: collated(lambda t: af.tasks.multi_token_prediction(t, 2)), CAUSAL),
}


def wrong_at(kind, change):
    """A mistake: its kind, and what it makes of a batch; the batch is its own."""
    return kind, lambda batch: change({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})


def label(batch, row, column, value=None):
    """The label of one position is `value`, by default its own token."""
    batch["labels"][row, column] = batch["input_ids"][row, column] if value is None else value
    return batch


def without(batch, *names):
    return {name: value for name, value in batch.items() if name not in names}


def second_document(batch):
    return int((batch["position_ids"][0] == batch["position_ids"][0, 0]).nonzero()[1])


def last_real(batch, row):
    return int(batch["attention_mask"][row].sum()) - 1


def shortest(batch):
    return int(batch["attention_mask"].sum(-1).argmin())


def all_labels(batch, offset):
    """Labels are the tokens at that offset."""
    ids, n = batch["input_ids"], batch["input_ids"].shape[1]
    source = torch.arange(n) + offset
    inside = (source >= 0) & (source < n)
    batch["labels"] = torch.where(inside, ids[:, source.clamp(0, n - 1)], -100)
    if "attention_mask" in batch:
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def silent_document(batch):
    start = second_document(batch)
    end = start + int((batch["position_ids"][0, start:].diff() <= 0).nonzero()[0]) + 1
    batch["labels"][0, start:end] = -100
    return batch


def full(batch):
    n = batch["input_ids"].shape[1]
    return {**batch, "attention_mask": torch.ones(len(batch["input_ids"]), 1, n, n, dtype=torch.bool)}


def whole_causal(batch):
    return {**full(batch), "attention_mask": full(batch)["attention_mask"].tril()}


def put(batch, **more):
    return {**batch, **more}


def ones(batch):
    return put(batch, attention_mask=torch.ones_like(batch["input_ids"]))


def no_labels(batch):
    return put(batch, labels=torch.full_like(batch["labels"], -100))


def other_labels(batch):
    labels = batch["labels"]
    return put(batch, labels=(labels * 7 % 31).where(labels >= 0, labels))


def silent_sequence(batch):
    batch["labels"][1] = -100
    return batch


def left(batch):
    """Padded on the left, with positions that count the padding."""
    moved = {name: batch[name].flip(1) for name in ("input_ids", "labels", "attention_mask")}
    return put(batch, **moved, position_ids=torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]))


def longer(batch):
    """The second document begins one token later, says one of two entries."""
    return put(batch, cu_seq_lens_k=batch["cu_seq_lens_k"] + (torch.arange(len(batch["cu_seq_lens_k"])) == 1).int())


def runs_on(batch):
    """The positions of the second document do not begin anew."""
    start = second_document(batch)
    batch["position_ids"][0, start:] += start * (batch["seq_idx"][0, start:] == 1)
    return batch


def with_prompts(batch):
    answers, prompt = batch["labels"] != -100, (batch["labels"] == -100) & (batch["position_ids"] == 1)
    return put(batch, labels=batch["input_ids"].where(answers | prompt, -100), completion_mask=answers)


def with_a_gap(batch):
    answers = batch["labels"] != -100
    return put(label(batch, 0, 3, -100), completion_mask=answers)


def open_labels(batch):
    return put(batch, input_ids=batch["labels"].where(batch["labels"] >= 0, batch["input_ids"]))


def labels_on_padding(batch):
    return put(batch, labels=batch["labels"].where(batch["attention_mask"] == 1, PAD))


def decoder_reads_labels(batch):
    return put(batch, decoder_input_ids=batch["labels"].where(batch["labels"] >= 0, PAD))


def open_pairs(batch):
    return put(batch, attention_mask=torch.zeros_like(batch["attention_mask"]))


def labels_one_late(batch):
    labels = batch["labels"]
    return put(batch, labels=torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], 1))


def one_hole(batch):
    """The second token reads the third one, its label."""
    batch["attention_mask"][0, 0, 1, 2] = 0.0
    return batch


FLAT = {
    "a label of another document": wrong_at("documents", lambda b: label(b, 0, second_document(b))),
    "shifted twice": wrong_at("shift", lambda b: all_labels(b, 1)),
    "shifted the wrong way": wrong_at("readable", lambda b: all_labels(b, -1)),
    "a mask of ones": wrong_at("mask", ones),
    "a full mask of pairs": wrong_at("readable", full),
    "a mask of pairs that mixes": wrong_at("mask", whole_causal),
    "a silent document": wrong_at("unsupervised", silent_document),
    "no label": wrong_at("unsupervised", no_labels),
    "labels of another batch": wrong_at("shift", other_labels),
    "-1 where nothing counts": wrong_at("vocabulary", lambda b: put(b, labels=b["labels"].clamp(min=-1))),
    "an id that is not there": wrong_at("vocabulary", lambda b: label(b, 0, 3, 99)),
}
LENGTHS = {
    "lengths end early": wrong_at("documents", lambda b: put(b, cu_seq_lens_q=b["cu_seq_lens_q"][:-1])),
    "lengths are moved": wrong_at("documents", longer),
    "the longest is too short": wrong_at("documents", lambda b: put(b, max_length_q=b["max_length_q"] - 1)),
    "seq_idx of one document": wrong_at("documents", lambda b: put(b, seq_idx=torch.zeros_like(b["seq_idx"]))),
    "positions run on": wrong_at("documents", runs_on),
}
COMPLETIONS = {
    **{name: FLAT[name] for name in ("a label of another document", "a mask of ones", "a silent document", "no label")},
    "prompts have labels": wrong_at("prompt", with_prompts),
    "answers have none": wrong_at("unsupervised", with_a_gap),
}
PADDED = {
    "labels on padding": wrong_at("padding", lambda b: put(b, labels=b["input_ids"].clone())),
    "a mask of ones": wrong_at("mask", ones),
    "shifted twice": wrong_at("shift", lambda b: all_labels(b, 1)),
    "shifted the wrong way": wrong_at("readable", lambda b: all_labels(b, -1)),
    "an end without a label": wrong_at("unsupervised", lambda b: label(b, 1, last_real(b, 1), -100)),
    "a silent sequence": wrong_at("unsupervised", silent_sequence),
    "positions that count padding": wrong_at("positions", left),
}
MISTAKES = {
    "flattening": FLAT,
    "flattening, all keys": {**LENGTHS, **FLAT},
    "flattening of completions": COMPLETIONS,
    "language modeling": PADDED,
    "masked": {
        "nothing is hidden": wrong_at("readable", open_labels),
        "shifted": wrong_at("readable", lambda b: all_labels(b, 1)),
        "labels on padding": wrong_at("padding", labels_on_padding),
    },
    "sequence to sequence": {
        "the decoder reads its labels": wrong_at("readable", decoder_reads_labels),
        "no label": FLAT["no label"],
    },
    "ours, causal": {
        "a full mask": wrong_at("readable", open_pairs),
        "labels one late": wrong_at("readable", labels_one_late),
        "a hole": wrong_at("readable", one_hole),
    },
    "ours, blocks": {"a full mask": wrong_at("readable", open_pairs)},
    "ours, several tokens": {"a full mask": wrong_at("readable", open_pairs)},
}
