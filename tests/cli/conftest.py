from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnflow.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`attnflow ARGUMENTS` in this process, 80 columns, no terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATTNFLOW_TRACEBACK", raising=False)

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama with a word-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    words = ["[UNK]", "the", "of", "and", "to", "in", "I", "that", "his", "you", "my"]
    words += ["is", "with", "it", "not", "a", "for", "thou", "be", "me", "thy"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
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
