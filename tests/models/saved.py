"""A tokenizer of words, and a tiny model in a folder, as commands and servers are given one."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.models import ZOO
from tests.models.options import SPECIAL

NO_SPECIAL_TOKENS = dict.fromkeys(SPECIAL)


def word_tokenizer(words: Iterable[str], **special: str) -> PreTrainedTokenizerFast:
    """Each word is a token, by its place; others are `[UNK]`."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


def save_tiny(folder: Path, name: str = "Llama", **options: object) -> str:
    """A random model of two layers with a word-level tokenizer; the folder as text."""
    words = ["[UNK]", "the", "of", "and", "to", "in", "I", "that", "his", "you", "my"]
    words += ["is", "with", "it", "not", "a", "for", "thou", "be", "me", "thy"]
    word_tokenizer(words).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ZOO[name].make(vocab_size=len(words), **NO_SPECIAL_TOKENS | options)
    model.save_pretrained(folder)
    return str(folder)


def save_tiny_llama(folder: Path) -> str:
    return save_tiny(folder, max_position_embeddings=2048)
