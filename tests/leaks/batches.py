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


def wrong(batch, **entries):
    """(the batch with other entries, the batch)."""
    return changed(batch, **entries), batch


def unequal(batch, leaky, clean):
    """(the batch with `leaky` entries, with `clean` ones)."""
    return changed(batch, **leaky), changed(batch, **clean)


def bounds(*ends):
    return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(ends))


def added(allow):
    return torch.zeros(1, 1, 8, 8).masked_fill(~allow, torch.finfo(torch.float32).min)


SHIFTED = torch.tensor([[6, 7, 8, 2, -100, -100, -100, -100]])
UNENDED = {name: ANSWERS[name].where(ANSWERS[name] != 2, 14) for name in ("input_ids", "labels")}
LATE = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2]])
EARLY = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
ONES = torch.ones(1, 8, dtype=torch.int64)
FOUR = (torch.arange(8) >= 4).long()[None]

# cause: (leaky, clean)
CASES = {
    "the first token of a document has a label": wrong(PACKED, labels=IDS),
    "a mask of ones switches packing off": wrong(PACKED, attention_mask=torch.ones_like(IDS)),
    "a mask of pairs mixes documents": unequal(PACKED, {"attention_mask": CAUSAL}, {"attention_mask": APART}),
    "a mask of zeros and ones for transformers": unequal(
        PACKED, {"attention_mask": APART.float()}, {"attention_mask": added(APART)}
    ),
    "labels on padding": wrong(PADDED, labels=PADDED["input_ids"]),
    "labels shifted twice": wrong(PADDED, labels=SHIFTED),
    "labels outside of the vocabulary": wrong(PACKED, labels=LABELS.where(LABELS != 12, 99)),
    "labels that are another text": wrong(PACKED, labels=LABELS.where(LABELS < 6, LABELS + 1)),
    "documents by a name that the model does not read": unequal(
        PACKED, {"position_ids": None, "document_ids": DOCUMENTS}, {"document_ids": DOCUMENTS}
    ),
    "two entries that disagree on documents": unequal(
        PACKED, {"segment_ids": 1 + FOUR}, {"segment_ids": 1 + DOCUMENTS}
    ),
    "a mask that counts documents": wrong(PACKED, position_ids=None, attention_mask=1 + DOCUMENTS),
    "lengths that do not add up": unequal(PACKED, bounds(0, 5, 7), bounds(0, 5, 8)),
    "boundaries in a form that nobody knows": wrong(PACKED, doc_spans=torch.tensor([[0, 4], [5, 7]])),
    "positions that restart one token late": wrong(CLOSED, position_ids=LATE),
    "positions that restart one token early": wrong(CLOSED, position_ids=EARLY),
    "packed documents that nothing tells apart": wrong(CLOSED, position_ids=None, labels=ENDED),
    "answers without an end token": wrong(ANSWERS, **UNENDED),
    "an end token without a label": wrong(ANSWERS, labels=ANSWERS["labels"].where(ANSWERS["labels"] != 2, -100)),
    "a loss mask that the model does not read": (
        changed(PADDED, loss_mask=COMPLETION),
        changed(ANSWERS, loss_mask=COMPLETION),
    ),
    "labels outside of the answers": (
        changed(PADDED, completion_mask=COMPLETION),
        changed(ANSWERS, completion_mask=COMPLETION),
    ),
    "shift_labels that are not shifted": unequal(PADDED, {"shift_labels": PADDED["labels"]}, {"shift_labels": SHIFTED}),
    "one row of labels is shifted": wrong(TWO, labels=torch.cat([PADDED["labels"], PADDED["labels"].roll(-1, 1)])),
    "one label is another token": wrong(PADDED, labels=PADDED["labels"].where(PADDED["labels"] != 7, 20)),
    "a row without a label": wrong(TWO, labels=torch.cat([PADDED["labels"], torch.full((1, 8), -100)])),
    "positions that count padding": unequal(LEFT, {"position_ids": torch.arange(8)[None]}, {"position_ids": COUNTED}),
    "a mask that covers no padding": unequal(LEFT, {"attention_mask": ONES}, {"position_ids": COUNTED}),
    "no mask before padded text": unequal(LEFT, {"attention_mask": None}, {"position_ids": COUNTED}),
    "a label of -1 that is to be ignored": wrong(ANSWERS, labels=ANSWERS["labels"].clamp(min=-1)),
}
