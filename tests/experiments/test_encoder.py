"""Embeddings of texts, against the model run on one text at a time; versions; what is cut is said."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional

from experiments.reader.encoder import TextEncoder, TruncatedText
from tests.models import BIDIRECTIONAL, WIDTH
from tests.models.saved import word_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "on", "the", "mat"]
TEXTS = ["a cat", "the cat sat on the mat", "mat", "on the mat a cat sat", "a a a"]


def tokenizer():
    made = word_tokenizer(WORDS, pad_token="[PAD]")
    template = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.backend_tokenizer.post_processor = template
    return made


def bert():
    torch.manual_seed(0)
    return BIDIRECTIONAL["Bert"].make(max_position_embeddings=12)


def alone(model, tokens, text):
    with torch.no_grad():
        hidden = model(torch.tensor([tokens(text)["input_ids"]])).last_hidden_state[0]
    return functional.normalize(hidden.mean(dim=0), dim=0)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_equals_the_model_on_one_text_at_a_time(batch_size, monkeypatch):
    monkeypatch.setattr("experiments.reader.encoder._WINDOW", 2)
    monkeypatch.setattr("experiments.reader.encoder._BATCH", batch_size)
    model, tokens, seen = bert().train(), tokenizer(), []
    found, truncated = TextEncoder((model, tokens)).encode(TEXTS, progress=lambda *now: seen.append(now))
    assert found.dtype == torch.float32
    assert (seen[-1], truncated, model.training) == ((5, 5, "texts"), [], True)
    model.eval()  # dropout was off
    torch.testing.assert_close(found, torch.stack([alone(model, tokens, text) for text in TEXTS]))
    assert TextEncoder((model, tokens))([]).shape == (0, WIDTH)


def test_what_is_cut_is_said():
    model, tokens = bert().eval(), tokenizer()
    encoder = TextEncoder((model, tokens))
    assert encoder.max_length == 12  # as many as it has positions
    long = "the cat sat on the mat a cat sat on the mat"
    found, truncated = encoder.encode(["a cat", long, "mat", long])
    assert truncated == [1, 3]
    torch.testing.assert_close(found[1], alone(model, tokens, " ".join(long.split()[:10])))
    with pytest.warns(TruncatedText, match=r"1 of 2 texts have more than 12 tokens.*\[1\]; split them"):
        encoder(["a", long])
