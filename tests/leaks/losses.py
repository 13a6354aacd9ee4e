"""Losses that train what they should not, each beside its clean twin: functions of a batch, and the batch."""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.leaks.parts import seeded

V, N = 50, 9
SIZE = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
OWN = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5}
MODEL = seeded(lambda: LlamaForCausalLM(LlamaConfig(**SIZE, **OWN)).eval())
IDS = torch.tensor([[1, 7, 8, 9, 20, 21, 22, 23, 2], [1, 10, 11, 12, 30, 31, 2, 0, 0]])
REAL = (IDS > 0).long()
LABELS = IDS.where((torch.arange(N) > 3) & (REAL == 1), -100)
BATCH = {"input_ids": IDS, "attention_mask": REAL, "labels": LABELS}
TEXT = {"input_ids": IDS, "attention_mask": REAL, "labels": IDS.where(REAL == 1, -100)}
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
PACKED = {"input_ids": IDS[:1], "position_ids": POSITIONS, "labels": IDS[:1].where(POSITIONS > 0, -100)}
MASK = (IDS != 21).long()
WEIGHTS = torch.arange(1.0, 1 + 2 * N).view(2, N)
ROWS = (LABELS != -100).sum(1)  # 5 and 3


def logits(batch):
    return MODEL(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")).logits


def mean(z, targets, **more):
    return F.cross_entropy(z.reshape(-1, V), targets.reshape(-1), **more)


def terms(batch, targets=None):
    """The loss of each label but the first, [batch, n - 1]."""
    targets = batch["labels"] if targets is None else targets
    return mean(logits(batch)[:, :-1], targets[:, 1:], reduction="none").view(len(targets), -1)


def shifted(by):
    def step(batch):
        start, end = max(by, 0), min(by, 0)
        return mean(logits(batch)[:, -end : N - start], batch["labels"][:, start : N + end])

    return step


def of(change):
    """The mean loss of the labels that `change` makes of the batch."""
    return lambda batch: mean(logits(batch)[:, :-1], change(batch)[:, 1:])


def weighed(weights, total=10):
    """`weights` [batch, n] of the labels, or of what the batch holds."""
    return lambda batch: (terms(batch) * weights(batch)[:, 1:]).sum() / total


def by_rows(batch, sizes):
    return (terms(batch).sum(1) / sizes).mean()


def by_documents(batch):
    """Documents of 6 and 3 tokens, each by itself."""
    losses = terms(batch)[0]
    return losses[:5].sum() / 5 + losses[6:].sum() / 2


def in_chunks(batch, end, size=4):
    """The head on a few positions at a time."""
    hidden = MODEL.model(batch["input_ids"], batch["attention_mask"])[0]
    ahead = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    parts = [MODEL.lm_head(hidden[:, i : i + size]) for i in range(0, end, size)]
    sums = [mean(part, ahead[:, size * i : size * (i + 1)], reduction="sum") for i, part in enumerate(parts)]
    return sum(sums) / 8


def headed(batch, where):
    """The head on some positions alone, and the labels after them."""
    hidden = MODEL.model(batch["input_ids"], batch["attention_mask"])[0][:, :-1]
    ahead = batch["labels"][:, 1:]
    return mean(MODEL.lm_head(hidden[where]), ahead[where])


class Fused(torch.autograd.Function):
    """Cross-entropy of hidden states and a head that forms no logits in the graph, as fused kernels compute it."""

    @staticmethod
    def forward(ctx, hidden, head, targets):
        with torch.enable_grad():
            states = hidden.detach().requires_grad_()
            loss = F.cross_entropy(states @ head.detach().T, targets)
        ctx.save_for_backward(*torch.autograd.grad(loss, states))
        return loss.detach()

    @staticmethod
    def backward(ctx, *grads):
        return ctx.saved_tensors[0] * grads[0], None, None


def fused(by, model=MODEL):
    def step(batch):
        hidden = model.model(batch["input_ids"], batch["attention_mask"])[0]
        targets = batch["labels"][:, by:].flatten()
        states = hidden[:, : N - by].flatten(0, 1)[targets != -100]
        return Fused.apply(states, model.lm_head.weight, targets[targets != -100])

    return step


PLAIN = shifted(1)
EVEN = weighed(lambda batch: torch.ones(2, N))
MASKED, WEIGHED = {**BATCH, "loss_mask": MASK}, {**BATCH, "token_weights": WEIGHTS}
MICRO = [BATCH, TEXT]


def beside(leaky, batch=BATCH, clean=PLAIN):
    return (leaky, batch), (clean, batch)


# cause: ((leaky loss, its batch), (clean loss, its batch))
CASES = {
    "a loss that shifts twice": beside(shifted(2)),
    "a loss that shifts three times": beside(shifted(3)),
    "a loss that never shifts": beside(shifted(0)),
    "a loss that shifts back": beside(shifted(-1)),
    "a fused loss that shifts twice": beside(fused(2), clean=fused(1)),
    "the model shifts what a collator has shifted": (
        (MODEL, {**BATCH, "labels": F.pad(LABELS[:, 1:], (0, 1), value=-100)}),
        (MODEL, BATCH),
    ),
    "rows run together": beside(
        lambda batch: mean(logits(batch).flatten(0, 1)[:-1], batch["labels"].flatten()[1:]), TEXT
    ),
    "a shift that wraps around": beside(
        lambda batch: mean(logits(batch), batch["labels"].roll(-1, 1)),
        TEXT,
        lambda batch: mean(logits(batch), F.pad(batch["labels"][:, 1:], (0, 1), value=-100)),
    ),
    "prompts are trained": beside(of(lambda batch: batch["input_ids"].where(REAL == 1, -100))),
    "padding is trained": beside(of(lambda batch: batch["input_ids"].where(torch.arange(N) > 3, -100))),
    "what is ignored becomes token 0": beside(of(lambda batch: batch["labels"].clamp(min=0))),
    "ids of another text": beside(of(lambda batch: (batch["input_ids"] * 7 + 3) % V)),
    "an offset of the vocabulary": beside(of(lambda batch: batch["labels"] + (batch["labels"] >= 0).long())),
    "the targets of the batch before": beside(of(lambda batch: ((IDS + 5) % V).where(batch["labels"] != -100, -100))),
    "the targets of the next row": beside(of(lambda batch: batch["labels"].roll(1, 0))),
    "targets in reverse": beside(of(lambda batch: batch["labels"].flip(1)), TEXT),
    "its own best guess": beside(lambda batch: mean(logits(batch)[:, :-1], logits(batch)[:, :-1].argmax(-1))),
    "one wrong target": beside(of(lambda batch: batch["labels"].where(batch["labels"] != 21, 35))),
    "a hole in the labels": beside(weighed(lambda batch: (IDS != 21).float()), clean=EVEN),
    "the last token is dropped": beside(lambda batch: mean(logits(batch)[:, :-2], batch["labels"][:, 1:-1])),
    "the end token is never trained": beside(of(lambda batch: batch["labels"].where(batch["labels"] != 2, -100))),
    "the last chunk is dropped": beside(lambda batch: in_chunks(batch, 4), clean=lambda batch: in_chunks(batch, N)),
    "half of the positions": beside(
        lambda batch: headed(batch, (torch.arange(N - 1) % 2 == 0).expand(2, -1)),
        clean=lambda batch: headed(batch, LABELS[:, 1:] != -100),
    ),
    "the first row alone": beside(lambda batch: PLAIN({name: value[:1] for name, value in batch.items()})),
    "a mean for each row": beside(lambda batch: by_rows(batch, ROWS), clean=lambda batch: by_rows(batch, 4)),
    "a mean over the padded length": beside(
        lambda batch: by_rows(batch, REAL.sum(1)), clean=lambda batch: by_rows(batch, N)
    ),
    "a mean for each document": beside(by_documents, PACKED, lambda batch: terms(batch).sum() / 7),
    "micro-batches that count alike": beside(
        MODEL, MICRO, lambda batch: MODEL(**batch, num_items_in_batch=8 + 14).loss
    ),
    "a negative weight": beside(weighed(lambda batch: 1.0 - 2 * (IDS == 21)), clean=EVEN),
    "a weight that falls along the text": beside(
        weighed(lambda batch: 1 / (1 + torch.arange(N)).expand(2, -1)), clean=EVEN
    ),
    "a loss mask that is ignored": beside(PLAIN, MASKED, weighed(lambda batch: batch["loss_mask"].float())),
    "a loss mask that is one off": beside(
        weighed(lambda batch: batch["loss_mask"].float().roll(-1, 1)),
        MASKED,
        weighed(lambda batch: batch["loss_mask"].float()),
    ),
    "weights of tokens that are ignored": beside(PLAIN, WEIGHED, weighed(lambda batch: batch["token_weights"])),
    "weights of tokens in the wrong rows": beside(
        weighed(lambda batch: batch["token_weights"].flip(0)), WEIGHED, weighed(lambda batch: batch["token_weights"])
    ),
    "documents that predict the next one": ((MODEL, {**PACKED, "labels": IDS[:1]}), (MODEL, PACKED)),
}
