"""Samples of words, a tokenizer of them, and trainers that pack, for tests of what is found in real batches."""

from __future__ import annotations

import torch

from tests.models.saved import word_tokenizer

WORDS = 40
PAD, EOS, MASK = 1, 2, 3


def tokenizer(**more):
    """Of the words w0, w1, ...; ids 0 to 3 are special."""
    words = ["[UNK]", "<pad>", "<eos>", "<mask>", *map("w{}".format, range(WORDS))]
    return word_tokenizer(words, **{"pad_token": "<pad>", "eos_token": "<eos>", "mask_token": "<mask>", **more})


def texts(count=32, seed=0, shortest=3, longest=8):
    """Random words, as many as `shortest` to `longest`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    return [" ".join(f"w{draw(0, WORDS)}" for _ in range(draw(shortest, longest + 1))) for _ in range(count)]


def samples(count=4, seed=0, **lengths):
    """Token ids of such texts, each closed by the end token."""
    read = tokenizer()
    return [{"input_ids": [*read(text)["input_ids"], EOS]} for text in texts(count, seed, **lengths)]
