"""`generate` with a bias gives what the whole sequence, computed anew for every token, gives."""

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import attnflow as af
from tests.bias.hf.common import BIASES, biased, disabled, disturb, family, handle_of, outputs, padded, tokens
from tests.models.saved import word_tokenizer

FAMILIES = ["Llama", "GPT2", "Mistral", "Gemma3", "Phi3", "GPTNeoX", "Qwen3", "OPT", "MBartDecoder"]
OTHERS = [(name, "others") for name in ("Llama", "GPT2", "Mistral", "OPT")] + [
    ("Llama", "rotated"),
    ("Gemma3", "rotated"),
]
NEW = 6
WHOLE = {"max_new_tokens": NEW, "disable_compile": True}


def greedy(model, ids, real):
    """Tokens and logits of greedy decoding without a cache, one whole forward pass each."""
    found = []
    with torch.no_grad():
        for _ in range(NEW):
            positions = (real.cumsum(dim=1) - 1).clamp(min=0)
            where = {} if model.config.model_type in ("opt", "mbart") else {"position_ids": positions}
            found.append(outputs(model, input_ids=ids, attention_mask=real, use_cache=False, **where)[:, -1])
            ids = torch.cat([ids, found[-1].argmax(dim=-1, keepdim=True)], dim=1)
            real = torch.cat([real, torch.ones_like(real[:, :1])], dim=1)
    return ids, torch.stack(found)


def generate(model, ids, **options):
    inputs = {"attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, **{**WHOLE, "do_sample": False, **inputs})


def with_logits(model, ids, **options):
    result = generate(model, ids, output_logits=True, return_dict_in_generate=True, **options)
    return result.sequences, torch.stack(result.logits)


def moved(model, ids, logits, **options):
    """Whether the bias is what made these logits."""
    with disabled(model):
        return (with_logits(model, ids, **options)[1] - logits).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "kind"), [(name, "guidance") for name in FAMILIES] + OTHERS)
def test_greedy_decoding_of_a_left_padded_batch(name, kind):
    model = biased(name, BIASES[kind], eos_token_id=None, forced_eos_token_id=None)
    _, batch = padded((6, 3))
    ids, real = batch["input_ids"], batch["attention_mask"]
    expected, scores = greedy(model, ids, real)
    found, logits = with_logits(model, ids, attention_mask=real)
    assert torch.equal(found, expected)
    torch.testing.assert_close(logits, scores.float(), rtol=1e-4, atol=1e-4)
    assert moved(model, ids, logits, attention_mask=real)


def test_a_checkpoint_of_a_model_with_a_bias_loads_without_one(tmp_path, recwarn):
    model, ids = biased("Llama"), tokens(1, 5)
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with disabled(model), torch.no_grad():
        assert torch.equal(outputs(plain, input_ids=ids), outputs(model, input_ids=ids))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lm_evaluation_harness_sees_the_bias():
    words = ["[UNK]", "[S]", "[E]", *(f"w{i}" for i in range(3, 50))]
    tokenizer = word_tokenizer(words, pad_token="[UNK]", bos_token="[S]", eos_token="[E]")
    model = family("Llama", torch.float32)
    pairs = [("w5 w9 w11", " w7 w8"), ("w3 w6", " w4"), ("w40 w41 w42 w43", " w44")]
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]

    def scores():
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2).loglikelihood(requests, disable_tqdm=True)

    plain = scores()
    af.bias.attach(model, BIASES["guidance"])
    assert scores() == plain
    disturb(model)
    assert all(abs(ours[0] - base[0]) > 1e-4 for ours, base in zip(scores(), plain, strict=True))
    with disabled(model):
        assert scores() == plain
    handle_of(model).remove()
    assert scores() == plain
