"""A tokenizer of words, and a tiny model in a folder, as commands and servers are given one."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def word_tokenizer(words: Iterable[str], **special: str) -> PreTrainedTokenizerFast:
    """Each word is a token, by its place; others are `[UNK]`."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **special)


def save_tiny_llama(folder: Path) -> str:
    """A random Llama of two layers with a word-level tokenizer; the folder as text."""
    words = ["[UNK]", "the", "of", "and", "to", "in", "I", "that", "his", "you", "my"]
    words += ["is", "with", "it", "not", "a", "for", "thou", "be", "me", "thy"]
    word_tokenizer(words).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
