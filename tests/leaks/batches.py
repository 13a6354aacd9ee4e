"""Batches of collators that are wrong, each beside its clean twin: what `check_batch` finds, with a model that runs."""

import torch

IDS = torch.tensor([[5, 6, 7, 8, 9, 11, 12, 13]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
LABELS = IDS.where(POSITIONS > 0, -100)
CAUSAL = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
APART = CAUSAL & (torch.arange(8) >= 5)[:, None].eq(torch.arange(8) >= 5)
PACKED = {"input_ids": IDS, "labels": LABELS, "position_ids": POSITIONS}
DOCUMENTS = (torch.arange(8) >= 5).long()[None]
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 2, 1, 1, 1]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
    "labels": torch.tensor([[5, 6, 7, 8, 2, -100, -100, -100]]),
}
LEFT = {name: value.roll(3, 1) for name, value in PADDED.items()}
COUNTED = (LEFT["attention_mask"].cumsum(-1) - 1).clamp(min=0)
ENDED = torch.tensor([[5, 6, 7, 8, 2, 11, 12, 13, 2]])  # documents of 5 and 4 tokens
ENDS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
CLOSED = {"input_ids": ENDED, "position_ids": ENDS, "labels": ENDED.where(ENDS > 0, -100)}
ANSWERS = {**PADDED, "labels": PADDED["labels"].where(torch.arange(8) > 1, -100)}
COMPLETION = (ANSWERS["labels"] != -100).long()
TWO = {name: torch.cat([value, value]) for name, value in PADDED.items()}


def changed(batch, **entries):
    """The batch with other entries; None takes one away."""
    return {name: value for name, value in {**batch, **entries}.items() if value is not None}


# cause: (leaky, clean)
CASES = {
    "the first token of a document has a label": (changed(PACKED, labels=IDS), PACKED),
    "a mask of ones switches packing off": (changed(PACKED, attention_mask=torch.ones_like(IDS)), PACKED),
    "a mask of pairs mixes documents": (changed(PACKED, attention_mask=CAUSAL), changed(PACKED, attention_mask=APART)),
    "a mask of zeros and ones for transformers": (
        changed(PACKED, attention_mask=APART.float()),
        changed(PACKED, attention_mask=torch.zeros(1, 1, 8, 8).masked_fill(~APART, torch.finfo(torch.float32).min)),
    ),
    "labels on padding": (changed(PADDED, labels=PADDED["input_ids"]), PADDED),
    "labels shifted twice": (
        changed(PADDED, labels=torch.tensor([[6, 7, 8, 2, -100, -100, -100, -100]])),
        PADDED,
    ),
    "labels outside of the vocabulary": (changed(PACKED, labels=LABELS.where(LABELS != 12, 99)), PACKED),
    "labels that are another text": (changed(PACKED, labels=LABELS.where(LABELS < 6, LABELS + 1)), PACKED),
    "documents by a name that the model does not read": (
        changed(PACKED, position_ids=None, document_ids=DOCUMENTS),
        changed(PACKED, document_ids=DOCUMENTS),
    ),
    "two entries that disagree on documents": (
        changed(PACKED, segment_ids=1 + (torch.arange(8) >= 4).long()[None]),
        changed(PACKED, segment_ids=1 + DOCUMENTS),
    ),
    "a mask that counts documents": (changed(PACKED, position_ids=None, attention_mask=1 + DOCUMENTS), PACKED),
    "lengths that do not add up": (
        changed(PACKED, cu_seq_lens_q=torch.tensor([0, 5, 7]), cu_seq_lens_k=torch.tensor([0, 5, 7])),
        changed(PACKED, cu_seq_lens_q=torch.tensor([0, 5, 8]), cu_seq_lens_k=torch.tensor([0, 5, 8])),
    ),
    "boundaries in a form that nobody knows": (changed(PACKED, doc_spans=torch.tensor([[0, 4], [5, 7]])), PACKED),
    "positions that restart one token late": (
        changed(CLOSED, position_ids=torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])),
        CLOSED,
    ),
    "positions that restart one token early": (
        changed(CLOSED, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])),
        CLOSED,
    ),
    "packed documents that nothing tells apart": (
        changed(CLOSED, position_ids=None, labels=ENDED),
        CLOSED,
    ),
    "answers without an end token": (
        changed(ANSWERS, input_ids=ANSWERS["input_ids"].where(ANSWERS["input_ids"] != 2, 14),
                labels=ANSWERS["labels"].where(ANSWERS["labels"] != 2, 14)),
        ANSWERS,
    ),
    "an end token without a label": (
        changed(ANSWERS, labels=ANSWERS["labels"].where(ANSWERS["labels"] != 2, -100)),
        ANSWERS,
    ),
    "a loss mask that the model does not read": (
        changed(PADDED, loss_mask=COMPLETION),
        changed(ANSWERS, loss_mask=COMPLETION),
    ),
    "labels outside of the answers": (
        changed(PADDED, completion_mask=COMPLETION),
        changed(ANSWERS, completion_mask=COMPLETION),
    ),
    "shift_labels that are not shifted": (
        changed(PADDED, shift_labels=PADDED["labels"]),
        changed(PADDED, shift_labels=torch.tensor([[6, 7, 8, 2, -100, -100, -100, -100]])),
    ),
    "one row of labels is shifted": (
        changed(TWO, labels=torch.cat([PADDED["labels"], PADDED["labels"].roll(-1, 1)])),
        TWO,
    ),
    "one label is another token": (changed(PADDED, labels=PADDED["labels"].where(PADDED["labels"] != 7, 20)), PADDED),
    "a row without a label": (
        changed(TWO, labels=torch.cat([PADDED["labels"], torch.full((1, 8), -100)])),
        TWO,
    ),
    "positions that count padding": (
        changed(LEFT, position_ids=torch.arange(8)[None]),
        changed(LEFT, position_ids=COUNTED),
    ),
    "a mask that covers no padding": (
        changed(LEFT, attention_mask=torch.ones(1, 8, dtype=torch.int64)),
        changed(LEFT, position_ids=COUNTED),
    ),
    "no mask before padded text": (changed(LEFT, attention_mask=None), changed(LEFT, position_ids=COUNTED)),
    "a label of -1 that is to be ignored": (
        changed(ANSWERS, labels=ANSWERS["labels"].where(ANSWERS["labels"] >= 0, -1)),
        ANSWERS,
    ),
}  # fmt: skip
