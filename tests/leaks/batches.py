"""Batches of collators that are wrong, each beside its clean twin: what `check_batch` reads without a model."""

import torch

IDS = torch.tensor([[5, 6, 7, 8, 9, 11, 12, 13]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
LABELS = IDS.where(POSITIONS > 0, -100)
CAUSAL = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
APART = CAUSAL & (torch.arange(8) >= 5)[:, None].eq(torch.arange(8) >= 5)
PACKED = {"input_ids": IDS, "labels": LABELS, "position_ids": POSITIONS}
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 2, 1, 1, 1]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]]),
    "labels": torch.tensor([[5, 6, 7, 8, 2, -100, -100, -100]]),
}

# cause: (leaky, clean)
CASES = {
    "the first token of a document has a label": ({**PACKED, "labels": IDS}, PACKED),
    "a mask of ones switches packing off": ({**PACKED, "attention_mask": torch.ones_like(IDS)}, PACKED),
    "a mask of pairs mixes documents": ({**PACKED, "attention_mask": CAUSAL}, {**PACKED, "attention_mask": APART}),
    "a mask of zeros and ones for transformers": (
        {**PACKED, "attention_mask": APART.float()},
        {**PACKED, "attention_mask": torch.zeros(1, 1, 8, 8).masked_fill(~APART, torch.finfo(torch.float32).min)},
    ),
    "labels on padding": ({**PADDED, "labels": PADDED["input_ids"]}, PADDED),
    "labels shifted twice": (
        {**PADDED, "labels": torch.tensor([[6, 7, 8, 2, -100, -100, -100, -100]])},
        PADDED,
    ),
    "labels outside of the vocabulary": ({**PACKED, "labels": LABELS.where(LABELS != 12, 99)}, PACKED),
    "labels that are another text": ({**PACKED, "labels": LABELS.where(LABELS < 6, LABELS + 1)}, PACKED),
}
