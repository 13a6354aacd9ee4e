"""What a call declares, against brute force: one token changed, whole outputs compared, in float64."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

import attnflow as af
from attnflow.audit import check, declared_order, measure
from tests.audit.common import LENGTH, Stack, inputs, open_attention, tiny, tokens, wrapped
from tests.conformance.inputs import with_image
from tests.conformance.miniature import named, shrink
from tests.models.table import in_double

PACKED = [5, 7]
RESTARTS = torch.cat([torch.arange(n) for n in PACKED])[None]
# Classes with attention in one of two layers. In transformers 5.23 none of their other mixers takes notice of position
# ids that restart.
HYBRIDS = {
    **{f"{name}ForCausalLM": "linear_attn" for name in ("Qwen3Next", "Qwen3_5", "OlmoHybrid")},
    **{f"{name}ForCausalLM": "mamba" for name in ("Jamba", "Bamba", "Zamba2", "FalconH1", "GraniteMoeHybrid")},
    "NemotronHForCausalLM": "mixer",
    "Lfm2MoeForCausalLM": "conv",
}


PICTURED = ("Llava", "PaliGemma", "Gemma3", "Gemma4", "Qwen2_5_VL", "Llama4", "ColPali")
PREFIXES = ("PaliGemma", "ColPali")  # a prefix of the image and most of the text sees itself


def hybrid(name):
    """A miniature whose mixers are no small part of it."""
    model = named(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 and HYBRIDS[name] in path:
                parameter.mul_(5)
    return model


def pictured(name):
    """A miniature, and its call: three tokens, those of an image, four tokens."""
    if name == "ColPali":
        model, given = pictured("PaliGemma")
        config = transformers.ColPaliConfig(vlm_config=model.config.to_dict(), embedding_dim=8)
        return transformers.ColPaliForRetrieval(config).eval(), given
    model = named(f"{name}ForConditionalGeneration")
    if name == "Llama4":  # four pixels become one, four times as wide
        model.config.vision_config.intermediate_size = 4 * model.config.vision_config.hidden_size
    if name == "Gemma4":
        sizes = {"pooling_kernel_size": 2, "position_embedding_size": 16, "default_output_length": 4}
        model.config.vision_config = shrink(transformers.Gemma4VisionConfig(**sizes), narrow=True)
    model = type(model)(model.config).eval()
    given = with_image(model)
    if name in PREFIXES:
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
        given["token_type_ids"][:, -2:] = 1
    return model, given


def moved(model, given, position):
    """Positions of the logits that another token at `position` moves, in float64; shares nothing with the audit."""
    model = in_double(model)
    given = {n: v.double() if v.is_floating_point() else v for n, v in given.items()}
    with torch.no_grad():
        before = model(**given, use_cache=False)[0]
        other = given["input_ids"].clone()
        other[:, position] = (other[:, position] - 10 + 7) % 50 + 10
        after = model(**{**given, "input_ids": other}, use_cache=False)[0]
    return ((after - before).abs().amax(-1) > 1e-9).nonzero()[:, 1].tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_documents_are_declared_whatever_mixes_them(name):
    model, given = hybrid(name), {"input_ids": tokens(1, 12).clamp(min=10), "position_ids": RESTARTS}
    report = check(model, {**given, "use_cache": False}, both_sides=False)
    assert report.order.startswith("causal within 2 packed documents, 5 + 7 tokens")
    assert report.verdict == "leak"
    first = report.violations[0]
    assert first.module.endswith(HYBRIDS[name])
    assert first.layer == 0
    assert first.source < 5 <= first.target
    assert any(position >= 5 for position in moved(model, given, 4))


@pytest.mark.parametrize("name", PICTURED)
def test_pictures_raise_no_alarm(name):
    report = check(*pictured(name), both_sides=False)
    assert report.verdict == "clean", str(report)
    assert report.coverage == 1.0
    assert not report.skipped


@pytest.mark.parametrize("name", PICTURED)
def test_a_leak_among_pictures_is_found(name):
    """Also one that starts at an image token, whose id is never changed."""
    model, given = pictured(name)
    (layers,) = [m for n, m in model.named_modules() if n.endswith("layers") and "language_model" in n]
    size = given["input_ids"].shape[1]
    target, source = (size - 2, size - 1) if name in PREFIXES else (2, size - 5)

    def read_ahead(out, hidden, *args, **kwargs):
        ahead = torch.nn.functional.pad(hidden[:, source : source + 1], (0, 0, target, hidden.shape[1] - target - 1))
        return out + 0.1 * ahead

    block = layers[1].feed_forward if name == "Llama4" else layers[1].mlp
    if name == "Llama4":  # its block also returns what its router chose
        block = layers[1].post_attention_layernorm
    with wrapped(block, read_ahead):  # a position before the image reads the last of its tokens
        report = check(model, given, both_sides=False)
    first = report.violations[0]
    assert (first.kind, first.layer, first.source, first.target) == ("order", 1, source, target)


@pytest.mark.parametrize("name", ["Gemma3", "Gemma4", "PaliGemma"])
def test_image_tokens_see_one_another_as_the_model_asks(name):
    """The declared order is what brute force sees of the vectors that enter the layers: later ones inside the image."""
    flow = declared_order(*pictured(name)).reachability()
    assert flow[3, -5]
    assert not flow[2, -5] or name == "PaliGemma"
    assert not flow[3, -1]


def test_a_causal_mask_that_is_left_out():
    """PaliGemma of transformers 5.23 asks for a causal mask; where the kernel stands for it, its text sees later text.

    With padding the mask is made, and the same text is causal: brute force says so, too.
    """
    model, ids = named("PaliGemmaForConditionalGeneration"), tokens(2)
    other = ids.clone()
    other[:, -1] = torch.where(ids[:, -1] == 3, 4, 3)
    real = torch.ones_like(ids)
    real[1, :2] = 0
    for mask, leaks in ((torch.ones_like(ids), True), (real, False)):
        with torch.no_grad():
            moved = model(ids, attention_mask=mask).logits != model(other, attention_mask=mask).logits
        report = check(model, {"input_ids": ids, "attention_mask": mask}, both_sides=False)
        assert report.order.startswith("bidirectional; causal in 2 of 2 layers")
        assert bool(moved[:, 2:-1].any()) == bool(report.violations) == leaks


def test_a_causal_head_that_asks_for_everything_is_not_believed():
    """Asking for all pairs is a leak of a model that declares itself causal, whatever its token types are."""
    order = check(tiny("RoFormer"), {**inputs("RoFormer"), "token_type_ids": torch.zeros(2, LENGTH).long()}).order
    assert order == "causal"


def test_positions_of_padding_and_of_images_are_no_documents():
    left = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    positions = (left.cumsum(-1) - 1).clamp(min=0)
    report = check(tiny("Llama"), {"input_ids": tokens(1, 12), "attention_mask": left, "position_ids": positions})
    assert report.verdict == "clean", str(report)


def test_a_hole_between_documents_is_found_in_the_mask_that_is_passed():
    hole = af.masks.document(PACKED).dense().clone()
    hole[8, 2] = True
    given = {"input_ids": tokens(1, 12), "position_ids": RESTARTS, "attention_mask": hole[None, None]}
    first = check(tiny("Llama"), given, both_sides=False).violations[0]
    assert (first.module, first.source, first.target) == ("model.layers.0.self_attn", 2, 8)
    hole[8, 2] = False
    assert check(tiny("Llama"), given, both_sides=False).ok


def test_a_block_mask_of_batch_and_head_is_read_whole():
    """The pairs of any head, sequence by sequence: not those of sequence 0 and head 0."""

    def mask_mod(b, h, q, k):
        return (k <= q) & ((q - k < 3 + b) | (h == 1))

    mask = create_block_mask(mask_mod, 2, 4, 12, 12, device="cpu", BLOCK_SIZE=16)
    from attnflow.audit.declared import pairs_passed
    from attnflow.audit.inputs import read
    from attnflow.models.subject import Subject

    seen = read(Subject(tiny("Llama")), {"input_ids": tokens(2, 12), "attention_mask": mask})
    allow = pairs_passed(seen, seen.slots[0])
    assert torch.equal(allow, torch.ones(2, 12, 12).bool().tril())  # head 1 sees all


def test_a_mask_that_nothing_uses_is_said_at_once():
    class Deaf(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, attention_mask=None):
            return self.inner(input_ids)

    mask = af.masks.document(PACKED).dense()[None, None]
    report = check(Deaf(tiny("Llama")), {"input_ids": tokens(1, 12), "attention_mask": mask}, order="mask")
    assert report.verdict == "leak"
    assert any("attention_mask reaches no layer of Deaf" in note for note in report.notes)


def test_what_cannot_be_read_is_not_guessed(monkeypatch):
    model = tiny("Llama")
    model.config.layer_types = ["full_attention", "something_new", "full_attention"]
    assert (
        check(model, {"input_ids": tokens(), "use_cache": False}).order == "causal"
    )  # it asks for a mask in that layer, which says what it means
    model = tiny("Mamba2")
    monkeypatch.setattr(type(model.config), "layer_types", ["something_new"] * 2)
    with pytest.raises(af.UnsupportedArchitecture, match=r"unknown; its layer type 'something_new'.*Pass order="):
        check(model, {"input_ids": tokens(), "use_cache": False})


def test_a_window_that_the_model_forgets_to_ask_for():
    """Its configuration says four back; it asks transformers for plain causal attention."""
    model = tiny("Llama")
    model.config.layer_types = ["sliding_attention"] * 3
    model.config.sliding_window = 4
    report = check(model, tokens())
    assert report.order == "causal; window 4 in 3 of 3 layers"
    assert report.violations[0].module == "model.layers.0.self_attn"


def test_samples_that_differ_are_measured_one_by_one():
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, :3] = 0
    one, two = measure(tiny("Llama"), {"input_ids": tokens(2, 8), "attention_mask": mask})
    assert one.masks[0] == af.masks.causal(8)
    assert not two.reachability()[5, :3].any()
    assert two.reachability()[5, 3:6].all()


def test_pictures_are_measured():
    model, given = pictured("Gemma3")
    assert torch.equal(measure(model, given).masks[1].dense(), declared_order(model, given).masks[1].dense())


def test_streams_and_batches_of_one_size_are_told_apart():
    """Layers that are called with [streams, batch, positions, width], as Gemma 3n's are."""

    def run(hidden, layers):
        hidden = hidden.expand(4, -1, -1, -1)
        for layer in layers:
            hidden = hidden + layer(hidden).cumsum(-2)
        return hidden.mean(0)

    ids = torch.randint(40, (4, 6), generator=torch.Generator().manual_seed(0))
    assert check(Stack(run, 2), {"input_ids": ids}, order=af.masks.causal(6)).ok
    leaky = Stack(run, 2)
    with wrapped(leaky.layers[1], lambda out, hidden: out + 0.1 * hidden.flip(-2)):
        assert check(leaky, {"input_ids": ids}, order=af.masks.causal(6)).violations[0].module == "layers.1"


def test_a_pair_that_attention_lacks():
    """A note by default, a finding when both sides are asked for; with the first layer that lacks it."""
    narrow = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def cut(module, query, key, value, attention_mask, scaling=None, **kwargs):
        allowed = narrow.clone()
        if module.layer_idx >= 1:
            allowed[8:, 0] = False
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    model = tiny("Llama")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("cut", cut)
    AttentionMaskInterface.register("cut", sdpa_mask)
    model.config._attn_implementation = "cut"
    noted = check(model, tokens(1))
    assert noted.ok
    assert any("2 layers lack pairs that the order allows, first model.layers.1" in note for note in noted.notes)
    report = check(model, tokens(1), both_sides=True)
    assert [(v.kind, v.layer, v.source, v.target) for v in report.violations] == [
        ("missing", 1, 0, 8),
        ("missing", 2, 0, 8),
    ]
    assert check(tiny("Llama"), tokens(1), both_sides=True).ok
    assert check(tiny("Mistral"), tokens(1), both_sides=True).ok
    with open_attention(tiny("Llama", attn_implementation="eager"), 1, narrow) as whole:
        assert check(whole, tokens(1), both_sides=True).ok


def permuted(ranks, **more):
    """XLNet and inputs whose perm_mask lets each token read those of lower rank."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48)
    ranks = torch.tensor(ranks)
    hidden = (ranks[..., :, None] <= ranks[..., None, :]).float()
    ids = torch.randint(5, 60, (2, ranks.shape[-1]), generator=torch.Generator().manual_seed(0))
    return transformers.XLNetLMHeadModel(config).eval(), {
        "input_ids": ids,
        "perm_mask": hidden.expand(2, -1, -1),
        **more,
    }


@pytest.mark.parametrize(
    "ranks", [list(range(8)), [3, 1, 0, 2, 5, 4, 7, 6], [[3, 1, 0, 2, 5, 4, 7, 6], [0, 7, 1, 6, 2, 5, 3, 4]]]
)
def test_the_order_of_a_permutation(ranks):
    model, given = permuted(ranks)
    report = check(model, given)
    assert (report.verdict, report.order) == ("clean", "the order of perm_mask"), str(report)
    layer = model.transformer.layer[1].ff
    with wrapped(layer, lambda out, hidden: out + hidden.roll(1, 0)):  # [positions, batch, width]
        assert check(model, given).verdict == "leak"
    with wrapped(layer, lambda out, hidden: out + hidden.flip(1)):
        assert check(model, given).violations[0].kind == "batch"


def test_targets_of_a_permutation_are_named_as_not_tested():
    for targets in (torch.eye(8)[6:], torch.eye(8)[1:]):
        model, given = permuted(list(range(8)), target_mapping=targets.expand(2, -1, -1))
        report = check(model, given)
        assert report.verdict == "nothing tested", str(report)
        assert any("target_mapping" in each for each in report.untested)
