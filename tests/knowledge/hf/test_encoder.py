"""Embeddings of texts, against the model run on one text at a time; versions; what is cut is said."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

from attnflow.knowledge.hf.encoder import TextEncoder, TruncatedText
from attnflow.models.names import MODELS

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


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_equals_the_model_on_one_text_at_a_time(pooling, batch_size, monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.encoder._WINDOW", 2)
    model, tokens = bert().eval(), tokenizer()
    found = TextEncoder((model, tokens), pooling=pooling, batch_size=batch_size)(TEXTS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack([alone(model, tokens, text, pooling) for text in TEXTS]))


def test_dropout_is_off_and_the_mode_of_the_model_is_kept():
    model = bert().train()
    encoder = TextEncoder((model, tokenizer()))
    assert torch.equal(encoder(TEXTS), encoder(TEXTS))
    assert model.training


def test_progress_counts_texts():
    seen = []
    TextEncoder((bert(), tokenizer()), batch_size=2).encode(TEXTS, progress=lambda *now: seen.append(now))
    assert seen == [(2, 5, "texts"), (4, 5, "texts"), (5, 5, "texts")]
    assert TextEncoder((bert(), tokenizer()))([]).shape == (0, 16)


def test_what_is_cut_is_said():
    model, tokens = bert().eval(), tokenizer()
    encoder = TextEncoder((model, tokens))
    assert encoder.max_length == 12  # as many as it has positions
    long = "the cat sat on the mat a cat sat on the mat"
    found = encoder.encode(["a cat", long, "mat", long])
    assert found.truncated == (1, 3)
    torch.testing.assert_close(found.embeddings[1], alone(model, tokens, " ".join(long.split()[:10])))
    with pytest.warns(TruncatedText, match=r"1 of 2 texts have more than 12 tokens.*\[1\]; split them"):
        encoder(["a", long])


def test_only_the_key_is_embedded_where_a_separator_is_given():
    encoder = TextEncoder((bert(), tokenizer()), separator="\t")
    with_value, key, whole = encoder(["the cat\tsat on", "the cat", "the cat sat on"])
    assert torch.equal(with_value, key)
    assert not torch.equal(key, whole)


def test_a_version_tells_what_changes_embeddings():
    model, tokens = bert(), tokenizer()
    first = TextEncoder((model, tokens), name="tiny")
    version = first.version
    assert version.startswith("tiny@")
    assert TextEncoder((bert(), tokenizer()), name="tiny").version == version
    others = [
        TextEncoder((bert(1), tokens), name="tiny"),
        TextEncoder((bert(), tokens), name="tiny", pooling="first"),
        TextEncoder((bert(), tokens), name="tiny", normalise=False),
        TextEncoder((bert(), tokens), name="tiny", max_length=5),
        TextEncoder((bert().bfloat16(), tokens), name="tiny"),
        TextEncoder((bert(), tokens), name="other"),
        TextEncoder((bert(), tokens), name="tiny", separator="\t"),
    ]
    assert len({version, *(other.version for other in others)}) == 1 + len(others)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[4, 0] += 1e-3
    assert first.version != version  # of the weights as they are now


def test_files_of_sentence_transformers_are_respected(tmp_path):
    bert().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert (TextEncoder(tmp_path).pooling, TextEncoder(tmp_path).max_length) == ("mean", 12)
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6}))
    found = TextEncoder(tmp_path)
    assert (found.pooling, found.max_length, found.name) == ("first", 6, str(tmp_path))
    pooling.write_text(json.dumps({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="pools by pooling_mode_max_tokens, which is not supported"):
        TextEncoder(tmp_path)


def test_a_language_model_embeds_by_its_trunk():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, **sizes)).eval()
    tokens = tokenizer(special=False)
    with pytest.raises(ValueError, match="is a decoder that writes texts"):  # unless it is asked for
        TextEncoder((model, tokens))
    encoder = TextEncoder((model, tokens), pooling="mean")
    torch.testing.assert_close(encoder(["a cat sat", "mat"])[1], alone(model.model, tokens, "mat"))
    with pytest.raises(ValueError, match="text 1 has no tokens: ''"):
        encoder(["a", ""])


def test_bad_input(tmp_path):
    with pytest.raises(TypeError, match="must be a sequence of strings"):
        TextEncoder((bert(), tokenizer()))("a cat")
    with pytest.raises(ValueError, match="max_length must be at least 3, got 2"):
        TextEncoder((bert(), tokenizer()), max_length=2)
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        TextEncoder(tmp_path / "nothing")
    t5 = T5(T5Config(vocab_size=10, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0))
    with pytest.raises(ValueError, match=r"pass \(model.get_encoder\(\), tokenizer\)"):
        TextEncoder((t5, tokenizer()))
    TextEncoder((t5.get_encoder(), tokenizer()), max_length=8)(["a cat"])
    broken = bert()
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[9] = torch.nan
    with pytest.raises(ValueError, match="the embedding of text 1 is not finite: 'mat'"):
        TextEncoder((broken, tokenizer()))(["a", "mat"])


@pytest.mark.slow
def test_minilm(tmp_path):
    if MODELS["minilm"].find() is None:
        pytest.skip("the package of minilm is not installed")
    encoder = TextEncoder("minilm")
    assert (encoder.pooling, encoder.max_length, encoder.dim, encoder.name) == ("mean", 256, 384, "minilm")
    texts = ["How many people live in Berlin?", "Berlin has a population of 3.5 million.", "I bake bread on Sundays."]
    found = encoder(texts)
    near, far = float(found[0] @ found[1]), float(found[0] @ found[2])
    assert near > 0.5 > 0.2 > far
    torch.testing.assert_close(found[1], alone(encoder.model, encoder.tokenizer, texts[1]))
    copy = shutil.copytree(MODELS["minilm"].path(), tmp_path / "copy")
    assert TextEncoder(copy).version.partition("@")[2] == encoder.version.partition("@")[2]
