"""The masks that models use, against the weights that they return under eager attention and against formulas."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import attnflow as af
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.in_model import ModelMasks
from attnflow.models.subject import Loaded
from tests.models.saved import word_tokenizer

IDS = [5, 6, 7, 8, 9, 10, 11]
SIZE = len(IDS)
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
TWO = {"vocab_size": 40, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16}
BART = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
BART |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
BART |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
GEMMA = SIZES | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 3, "sliding_window_pattern": 2}
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "Bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "Mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"num_key_value_heads": 1, "sliding_window": 3}),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "Albert": ("AlbertModel", "AlbertConfig", SIZES | {"embedding_size": 8}),  # one layer, which runs four times
    "Bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "T5": ("T5ForConditionalGeneration", "T5Config", TWO),
    "Bart": ("BartForConditionalGeneration", "BartConfig", BART),
}


def made(name: str, implementation: str = "eager") -> PreTrainedModel:
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**options, attn_implementation=implementation)
    return getattr(transformers, kind)(settings).eval()


def told(model: PreTrainedModel, **inputs: torch.Tensor) -> dict[tuple[str, str], list[torch.Tensor]]:
    """The pairs with a weight above zero, by kind and half: what the model itself returns, layer by layer."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    named = {
        ("attention", "encoder"): getattr(output, "encoder_attentions", None),
        ("attention", ""): getattr(output, "decoder_attentions", getattr(output, "attentions", None)),
        ("cross-attention", ""): getattr(output, "cross_attentions", None),
    }
    return {place: [(layer[0] > 0).any(0) for layer in layers] for place, layers in named.items() if layers}


def listed(found: ModelMasks) -> dict[tuple[str, str], dict[int, torch.Tensor]]:
    layers: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for part in found.masks:
        for layer in part.layers:
            layers.setdefault((part.kind, part.half), {})[layer] = torch.as_tensor(part.mask.dense())
    return layers


@pytest.mark.parametrize("name", MODELS)
def test_the_masks_are_those_of_the_weights_that_the_model_returns(name: str) -> None:
    model = made(name)
    ids = torch.tensor([IDS])
    two = {"decoder_input_ids": ids[:, :-1]} if model.config.is_encoder_decoder else {}
    expected = told(model, input_ids=ids, **two)
    found = listed(af.masks.from_model(model, IDS))
    assert found.keys() == expected.keys()
    for place, layers in expected.items():
        assert sorted(found[place]) == list(range(len(layers)))
        assert all(torch.equal(found[place][number], layer) for number, layer in enumerate(layers))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers and torch, once FlexAttention is loaded
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_every_implementation_shows_the_same_masks(implementation: str) -> None:
    q, k = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    found = af.masks.from_model(made("Gemma3", implementation), IDS)
    assert [(part.name, part.mask.name) for part in found.masks] == [
        ("layers 0, 2 attention", "sliding_window"),
        ("layers 1, 3 attention", "causal"),
    ]
    window, causal = (torch.as_tensor(part.mask.dense()) for part in found.masks)
    assert torch.equal(window, (k <= q) & (q - k < 3))
    assert torch.equal(causal, k <= q)


def test_padding_documents_and_a_mask_of_pairs_show() -> None:
    model = made("Llama", "sdpa")
    padding = torch.tensor([[1] * 5 + [0] * 2])
    found = af.masks.from_model(model, {"input_ids": torch.tensor([IDS]), "attention_mask": padding})
    q, k = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    assert torch.equal(torch.as_tensor(found.masks[0].mask.dense()), (k <= q) & (k < 5))
    pairs = torch.eye(SIZE, dtype=torch.bool) | (k == 0)
    found = af.masks.from_model(model, {"input_ids": torch.tensor([IDS]), "attention_mask": pairs[None, None]})
    assert torch.equal(torch.as_tensor(found.masks[0].mask.dense()), pairs)


def test_attached_masks_show_also_where_heads_differ() -> None:
    model = made("Llama", "sdpa")
    prefix, causal = af.masks.prefix_lm(SIZE, 3), af.masks.causal(SIZE)
    with af.masks.attach(model, prefix):
        (part,) = af.masks.from_model(model, IDS).masks
        assert (part.mask, part.layers, part.heads) == (prefix, (0, 1, 2, 3), ())
    with af.masks.attach(model, af.masks.per_head([prefix, causal])):
        parts = af.masks.from_model(model, IDS).masks
        assert [(part.mask, part.heads) for part in parts] == [(prefix, (0,)), (causal, (1,))]
        assert parts[0].name == "layers 0–3 attention, head 0"
    assert [part.mask for part in af.masks.from_model(model, IDS).masks] == [causal]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_weight_that_is_rounded_to_zero_is_still_allowed(implementation: str) -> None:
    model = made("Llama", implementation)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e4)
            layer.self_attn.k_proj.weight.mul_(1e4)
    if implementation == "eager":
        weights = told(model, input_ids=torch.tensor([IDS]))["attention", ""]
        assert not all(torch.equal(layer, torch.ones(SIZE, SIZE).tril() > 0) for layer in weights)
    (part,) = af.masks.from_model(model, IDS).masks
    assert part.mask == af.masks.causal(SIZE)


def test_a_large_negative_number_masks_too() -> None:
    pairs = torch.eye(SIZE, dtype=torch.bool) | (torch.arange(SIZE) == 0)
    added = torch.where(pairs, 0.0, -1e4)[None, None]
    found = af.masks.from_model(made("Llama"), {"input_ids": torch.tensor([IDS]), "attention_mask": added})
    assert torch.equal(torch.as_tensor(found.masks[0].mask.dense()), pairs)


def test_a_layer_that_attends_twice_is_one_layer() -> None:
    config = transformers.DiffLlamaConfig(**SIZES)
    (part,) = af.masks.from_model(transformers.DiffLlamaForCausalLM(config), IDS).masks
    assert (part.mask, part.layers) == (af.masks.causal(SIZE), (0, 1, 2, 3))


def test_the_model_is_left_as_it_was() -> None:
    model = made("Mistral", "sdpa").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    af.masks.from_model(model, IDS)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_layers_beside_attention_are_named_and_a_model_without_it_is_refused() -> None:
    size = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**size))
    with pytest.raises(UnsupportedArchitecture, match="MambaForCausalLM has no attention, and so no mask: its layers "):
        af.masks.from_model(mamba, IDS)
    jamba = transformers.JambaForCausalLM(transformers.JambaConfig(
        **SIZES, num_key_value_heads=1, num_experts=2, mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False,
    ))  # fmt: skip
    found = af.masks.from_model(jamba, IDS)
    assert [(part.layers, part.mask) for part in found.masks] == [((1, 3), af.masks.causal(SIZE))]
    assert "model.layers.0.mamba (JambaMambaMixer)" in found.beside
    assert "No mask controls model.layers.0.mamba" in repr(found)


def test_what_a_text_and_its_tokens_look_like() -> None:
    words = word_tokenizer([f"w{number}" for number in range(40)])
    found = af.masks.from_model(Loaded(made("T5"), words), "w5 w6 w7")
    assert (found.encoder_tokens, found.tokens) == (("w5", " w6", " w7"), ("w5", " w6"))
    cross = next(part for part in found.masks if part.kind == "cross-attention")
    assert found.labels(cross) == (found.tokens, found.encoder_tokens)
    shown = str(found)
    assert "encoder layers 0, 1 attention: full(n=3, num_keys=3)" in shown
    assert "w6 1  ■ ■" in shown
    assert "keys: w5 (0), w6 (1), w7 (2)" in shown
    assert ModelMasks.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="a text needs a tokenizer"):
        af.masks.from_model(made("Llama"), "w5 w6")
    with pytest.raises(ValueError, match="expected one sequence, got a batch of 2 in input_ids"):
        af.masks.from_model(made("Llama"), {"input_ids": torch.tensor([IDS, IDS])})


def test_images_have_no_tokens() -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.ViTModel(transformers.ViTConfig(**size, image_size=8, patch_size=4))
    found = af.masks.from_model(model, {"pixel_values": torch.zeros(1, 3, 8, 8)})
    assert (found.tokens, found.masks[0].mask, found.masks[0].layers) == ((), af.masks.full(5), (0, 1))
    assert found.labels(found.masks[0]) is None


OWN = {  # models that compute their attention themselves: what they return is no weights of their usual pass
    "Falcon": ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}, "computes other outputs"),
    "Longformer": (SIZES | {"attention_window": 4}, "not weights over all keys"),
    "ProphetNet": (
        {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_encoder_layers": 1}
        | {"num_decoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2},
        "not weights over all keys",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_is_no_weight_is_refused(name: str) -> None:
    options, message = OWN[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{"vocab_size": 40, **options})
    with pytest.raises(UnsupportedArchitecture, match=message):
        af.masks.from_model(getattr(transformers, f"{name}Model")(config).eval(), IDS)


def test_weights_that_a_model_returns_rounded_to_zero_are_refused() -> None:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    model = transformers.GPTJModel(transformers.GPTJConfig(**GPT, rotary_dim=4, **ends)).eval()
    assert af.masks.from_model(model, IDS).masks[0].mask == af.masks.causal(SIZE)
    with torch.no_grad():
        for layer in model.h:
            layer.attn.q_proj.weight.mul_(100)
            layer.attn.k_proj.weight.mul_(100)
    with pytest.raises(UnsupportedArchitecture, match="zero in some heads only, where they may be rounded"):
        af.masks.from_model(model, IDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_number_type_shows_the_same_masks(dtype: torch.dtype, implementation: str) -> None:
    found = af.masks.from_model(made("Gemma3", implementation).to(dtype), IDS)
    assert [part.mask.name for part in found.masks] == ["sliding_window", "causal"]


def test_packed_documents_are_those_of_the_call_which_makes_a_cache_by_default() -> None:
    model = made("Llama", "sdpa")
    packed = {"input_ids": torch.tensor([IDS]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    moved = {**packed, "input_ids": packed["input_ids"].clone()}
    moved["input_ids"][0, 0] = 30
    for more, mask in (({}, af.masks.causal(SIZE)), ({"use_cache": False}, af.masks.document([3, 4]))):
        (part,) = af.masks.from_model(model, {**packed, **more}).masks
        with torch.no_grad():
            change = (model(**packed, **more).logits - model(**moved, **more).logits).abs()[0, -1].max()
        assert part.mask == mask
        assert (change > 1e-6) == mask.allows(3, 0)


def test_a_learned_bias_keeps_all_pairs() -> None:
    model, causal = made("Llama", "sdpa"), af.masks.causal(SIZE)
    with af.bias.attach(model, af.bias.GuidanceConfig()):
        assert [part.mask for part in af.masks.from_model(model, IDS).masks] == [causal]
        with af.masks.attach(model, af.masks.prefix_lm(SIZE, 3)):
            assert [part.mask for part in af.masks.from_model(model, IDS).masks] == [af.masks.prefix_lm(SIZE, 3)]
    wide = made("T5")
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_().mul_(1e3)
    assert [part.mask.density for part in af.masks.from_model(wide, IDS).masks] == [1, causal[:-1, :-1].density, 1]


def test_windows_have_no_mask_in_common() -> None:
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4}
    for kind in ("Swin", "Swinv2"):
        model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
        with pytest.raises(UnsupportedArchitecture, match="windows"):
            af.masks.from_model(model, {"pixel_values": torch.zeros(1, 3, 32, 32)})


def test_a_result_with_other_fields_is_refused() -> None:
    content = af.masks.from_model(made("Llama"), IDS).to_dict()
    assert ModelMasks.from_dict(content).to_dict() == content
    (part,) = content["masks"]
    for changed, message in (({"kind": None}, "kind must be text"), ({"more": 1}, "unknown name 'more'")):
        with pytest.raises(ValueError, match=message):
            ModelMasks.from_dict({**content, "masks": [{**part, **changed}]})
    with pytest.raises(ValueError, match="lacks kind"):
        ModelMasks.from_dict({**content, "masks": [{k: v for k, v in part.items() if k != "kind"}]})
