"""Embeddings of texts, against the model run on one text at a time; versions; what is cut is said."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

from experiments.reader.encoder import TextEncoder, TruncatedText

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "on", "the", "mat"]
TEXTS = ["a cat", "the cat sat on the mat", "mat", "on the mat a cat sat", "a a a"]


def tokenizer(special=True):
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    if special:
        made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")


def bert(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=12, initializer_range=0.5, **sizes)
    return BertModel(config)


def alone(model, tokens, text, pooling="mean"):
    """The embedding of one text, without any padding."""
    with torch.no_grad():
        hidden = model(torch.tensor([tokens(text)["input_ids"]])).last_hidden_state[0]
    pooled = hidden.mean(dim=0) if pooling == "mean" else hidden[0]
    return pooled / pooled.norm()


@pytest.fixture
def folder(tmp_path):
    """A saved encoder, with what sentence-transformers writes beside one."""
    bert().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    return tmp_path


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
    assert TextEncoder((model, tokens))([]).shape == (0, 16)


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


def test_files_of_sentence_transformers_are_respected(folder):
    found = TextEncoder(folder)
    assert (found.pooling, found.max_length, found.name) == ("first", 6, str(folder))
    torch.testing.assert_close(found(TEXTS[:1])[0], alone(bert().eval(), tokenizer(), TEXTS[0], "first"))
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pools by pooling_mode_max_tokens, which is not supported"):
        TextEncoder(folder)


def test_a_language_model_embeds_by_its_trunk_where_its_files_say_so(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)).eval()
    tokens = tokenizer(special=False)
    with pytest.raises(ValueError, match="is a decoder that writes texts"):
        TextEncoder((model, tokens))
    model.config.name_or_path = str(folder)
    encoder = TextEncoder((model, tokens))
    torch.testing.assert_close(encoder(["a cat sat", "mat"])[1], alone(model.model, tokens, "mat"))
    with pytest.raises(ValueError, match="text 1 has no tokens: ''"):
        encoder(["a", ""])


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match="must be a sequence of strings"):
        TextEncoder((bert(), tokenizer()))("a cat")
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        TextEncoder(tmp_path / "nothing")
    t5 = T5(T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0))
    with pytest.raises(ValueError, match=r"pass \(model.get_encoder\(\), tokenizer\)"):
        TextEncoder((t5, tokenizer()))
    assert TextEncoder((t5.get_encoder(), tokenizer()))(["a cat"]).shape == (1, 8)
    broken = bert()
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[9] = torch.nan
    with pytest.raises(ValueError, match="the embedding of text 1 is not finite: 'mat'"):
        TextEncoder((broken, tokenizer()))(["a", "mat"])
