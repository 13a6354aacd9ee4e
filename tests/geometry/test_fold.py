"""Norms folded into the form: against models whose gains are 1, for every architecture with known queries and keys."""

import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

import attnflow as af
from attnflow.geometry.fold import NotFolded, folded, norms_of, pass_of
from attnflow.geometry.score import layers_in_memory, layers_of
from attnflow.models.subject import Subject
from tests.geometry import oracle
from tests.models import ZOO, tokens
from tests.models.checkpoints import write_gguf
from tests.models.inputs import run
from tests.models.table import AUDITED

MODELS = {**ZOO, **{name: AUDITED[name] for name in ("Lfm2", "BigBird", "RemBert", "MegatronBert", "NemotronH")}}
VARIANTS = {"Cohere": {"use_qk_norm": True}, "Phi": {"qk_layernorm": True}}
# The gain is 1 + weight.
PLUS = re.compile(r"Gemma|Qwen3Next|Qwen3_5|Nemotron$")
# Why layers are not folded.
NOT_FOLDED = {
    "DeepseekV2": "products", "DeepseekV3": "products", "DeepseekV3FullQuery": "products", "Albert": "several norms",
    "XLNet": "place is not known", "Funnel": "place is not known", "WavLM": "did not reach",
    "Qwen2_5_VL": "did not reach",
    # they read embeddings, a projection of them, a sum with positions, or what another model made
    **dict.fromkeys(("RemBert", "Marian", "Detr", "GPT2Cross", "BertCross", "SpeechT5", "OpenAIGPT"),
                    "no norm was seen"),
    "Dbrx": "other lengths",  # its queries and keys are clipped
    # activations of these tiny models are far below the norm's epsilon
    "BlipVision": "its norm is not known", "SamVision": "its norm is not known",
}  # fmt: skip


def made(name, **changes):
    """A model in float64 with gains around 1, and inputs that are not all alike."""
    torch.manual_seed(0)
    entry = MODELS[name]
    model = entry.make(**changes).double() if changes else entry.build()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("weight") and (parameter.ndim == 1 or "norm" in path.lower()):
                parameter.add_(0.3 * torch.randn_like(parameter))
    inputs = {}
    for key, value in entry.inputs(8 if entry.inputs is run.patches else 1).items():
        if value.is_floating_point():
            value = torch.randn_like(value)
        elif key.endswith("ids") and "image_token_index" not in entry.options:
            value = tokens(1, 5)
        inputs[key] = value
    return model, inputs


def received(model, inputs, layers):
    """{layer: (query, key)} as attention receives them; absent where it does not call the interface."""
    seen = pass_of(Subject.of(model), layers, inputs)
    assert not isinstance(seen, NotFolded), seen
    return {name: (call.query, call.key) for name, (_, call) in seen.attention.items()}


QUICK = ("Llama", "Qwen3", "Gemma3", "Olmo2", "GPT2", "GPTNeoX", "Bert", "Roberta", "T5", "ViT", "Whisper", "FalconH1",
         "Swin", "Persimmon", "Deberta", "Lfm2", "RemBert", *NOT_FOLDED)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_gains_in_the_weights_are_gains_in_the_norm(name):
    model, inputs = made(name)
    compare(name, model, inputs)


@pytest.mark.parametrize("name", VARIANTS)
def test_so_do_norms_of_queries_and_keys(name):
    model, inputs = made(name, **VARIANTS[name])
    assert compare(name, model, inputs) == 4


def compare(name, model, inputs):
    """How many norms of queries and keys were folded."""
    weights, layers = layers_of(model, "all")
    seen = pass_of(Subject.of(model), layers, inputs)
    found = norms_of(weights, layers, seen)
    why = [str(norms) for norms in found.values() if isinstance(norms, NotFolded)]
    assert all(NOT_FOLDED.get(name, "nothing else") in one for one in why), why
    after = 0
    for place, layer in enumerate(layers):
        norms = found[layer.name]
        if isinstance(norms, NotFolded):
            continue
        before = received(model, inputs, layers)
        copy = deepcopy(model)
        theirs = layers_of(copy, "all")[1][place]
        own = next(other for other in layers_in_memory(copy, "all") if other.name == layer.name)
        own.write(*folded(layer, norms))
        for norm in {one.name: one for side in norms if (one := side.before) is not None}.values():
            weight = getattr(copy.get_submodule(norm.name), "weight", None)
            if weight is not None:
                torch.nn.init.constant_(weight, float(not PLUS.search(name)))
        for norm in (one for side in norms if (one := side.after) is not None):
            copy.get_submodule(norm.name).forward = lambda x: (
                x
            )  # its gains are in the weights, and the rest is a factor
            after += 1
        if layer.name in before and (layer.kind == "self" or not layer.layer):  # states of an encoder go to all layers
            for one, other in zip(before[layer.name], received(copy, inputs, layers)[layer.name], strict=True):
                one, other = (torch.nn.functional.normalize(side, dim=-1) for side in (one, other))
                assert torch.allclose(one, other, atol=2e-5), layer.name
        plain = [oracle.symmetry(sum(oracle.head_matrices(q, k, layer.num_heads, layer.num_kv_heads)))
                 for q, k in (folded(layer, norms), folded(theirs, None)) if q.shape[1] == k.shape[1]]  # fmt: skip
        assert plain == pytest.approx(plain[:1] * len(plain), abs=1e-6)
    return after


@pytest.mark.parametrize("name", [name for name in MODELS if "Vision" not in name and name not in NOT_FOLDED])
def test_tables_say_what_a_pass_shows(name):
    """Where a table knows a family, its norms are those of the pass; files have the table alone."""
    model, inputs = made(name)
    weights, layers = layers_of(model, "all")
    shown, named = (norms_of(weights, layers, seen) for seen in (pass_of(Subject.of(model), layers, inputs), None))
    for layer in layers:
        pairs = [found[layer.name] for found in (shown, named)]
        if any(isinstance(pair, NotFolded) for pair in pairs):
            continue
        for one, other in zip(*pairs, strict=True):
            for mine, its in ((one.before, other.before), (one.after, other.after)):
                assert (mine is None) == (its is None)
                if mine is not None:
                    assert (mine.name, mine.centred) == (its.name, its.centred)
                    ratio = mine.gain.flatten().double() / its.gain.flatten().double()
                    assert ratio.std() < 1e-5 * ratio.mean()


FAMILIES = ("Llama", "Qwen3", "Gemma3", "Olmo2", "GPT2", "Bert", "Cohere2")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_has_the_scores_of_the_model(name, tmp_path):
    model, _ = made(name)
    model.float().save_pretrained(tmp_path)
    live, stored = (af.geometry.score(source, fold=True) for source in (model, tmp_path))
    plain = af.geometry.score(tmp_path, fold=False)
    assert [row.symmetry for row in stored] == pytest.approx([row.symmetry for row in live], abs=1e-5)
    assert [row.directionality for row in stored] == pytest.approx([row.directionality for row in live], abs=1e-3)
    assert max(abs(a.symmetry - b.symmetry) for a, b in zip(stored, plain, strict=True)) > 1e-3
    assert (stored.fold, plain.fold) == (True, False)
    assert not any("not folded" in row.flags for row in stored)
    assert any(note.startswith("folded: the gains of ") for note in stored.notes)


def test_what_is_not_folded_is_said_and_scored_as_stored():
    model, _ = made("DeepseekV3")
    found, plain = (af.geometry.score(model, fold=fold) for fold in (True, False))
    assert all("not folded" in row.flags for row in found)
    assert [row.symmetry for row in found] == [row.symmetry for row in plain]
    assert found.notes == ("not folded: queries or keys are products of several weights, with norms in between",)


def test_a_tower_needs_inputs_or_a_table():
    model, inputs = made("Wav2Vec2")
    without, reached = af.geometry.score(model, fold=True), af.geometry.score(model, fold=True, inputs=inputs)
    assert all("not folded" in row.flags for row in without)
    assert "did not run on 8 tokens" in without.notes[-1]
    assert not any("not folded" in row.flags for row in reached)


def test_no_norm_before_attention_is_said():
    notes = af.geometry.score(made("Olmo2")[0], fold=True).notes
    assert notes == (
        "folded: the gains of model.layers.*.self_attn.q_norm, model.layers.*.self_attn.k_norm",
        "attention reads the residual stream, without a norm before it",
    )


def test_a_published_comparison_says_that_gains_are_in():
    found = af.geometry.score(made("GPT2")[0], fold=True)
    record = replace(found, model="openai-community/gpt2").compare()[0]
    assert any("fold=False" in reason for reason in record.reasons)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3", "Bert"])
def test_half_precision_is_folded(name, dtype):
    model, _ = made(name)
    exact, half = (af.geometry.score(one) for one in (model, deepcopy(model).to(dtype)))
    assert not any("not folded" in row.flags for row in half)
    assert [row.symmetry for row in half] == pytest.approx([row.symmetry for row in exact], abs=0.02)


def test_the_model_is_as_before():
    model, _ = made("Llama")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    af.geometry.score(model, distances=[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


class _Away(Exception):
    """No kind of error that models are known to raise."""


class _Scaled(torch.nn.Module):
    def forward(self, hidden, scale):
        return hidden * scale


def _hooked(model, side):
    vector = torch.rand(32, dtype=torch.float64) + 0.5
    for layer in model.model.layers:
        getattr(layer.self_attn, side).register_forward_pre_hook(lambda _, args: (args[0] * vector,))


def _inside_out(model, side):
    del side
    for layer in model.model.layers:
        norm, inner = layer.input_layernorm, _Scaled()
        layer.input_layernorm = torch.nn.Module()
        layer.input_layernorm.inner = inner
        layer.input_layernorm.forward = lambda hidden, norm=norm, inner=inner: inner(norm(hidden), 2.0)


class _Nested(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.inner = norm.weight, _Scaled()

    def forward(self, hidden):
        return self.inner(torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight), 3.0)


@pytest.mark.parametrize("side", ["q_norm", "k_norm"])
def test_a_norm_of_queries_or_keys_that_is_no_leaf_is_flagged(side):
    model = made("Qwen3")[0]
    for layer in model.model.layers:
        setattr(layer.self_attn, side, _Nested(getattr(layer.self_attn, side)))
    found = af.geometry.score(model, per_head=False)
    assert all("not folded" in row.flags for row in found)
    assert "other lengths" in found.notes[-1]


@pytest.mark.parametrize("side", ["q_proj", "k_proj"])
@pytest.mark.parametrize("change", [_hooked, _inside_out])
def test_what_hides_a_norm_is_flagged(change, side):
    """A product between norm and weights, of one side too; and a module of two arguments."""
    model = made("Llama")[0]
    change(model, side)
    found = af.geometry.score(model, per_head=False)
    assert all("not folded" in row.flags for row in found), found.notes
    stored = af.geometry.score(model, per_head=False, fold=False)
    assert [row.symmetry for row in found] == [row.symmetry for row in stored]


@pytest.mark.parametrize("name", ["Llama", "Persimmon"])
def test_a_model_that_does_not_run_is_read_by_the_table_of_its_family(name):
    expected = [row.symmetry for row in af.geometry.score(made(name)[0], per_head=False)]
    model = made(name)[0]

    def fail(_, args):
        if args[0].shape[1] == 8:  # the pass that looks for norms
            raise _Away("not today")

    getattr(model, "model", model).layers[0].register_forward_pre_hook(fail)
    found = af.geometry.score(model, per_head=False)
    if name == "Llama":
        assert [row.symmetry for row in found] == pytest.approx(expected, rel=1e-9)
    else:  # it is in no table
        assert all("not folded" in row.flags for row in found)
        assert "not today" in found.notes[-1]


@pytest.mark.parametrize(
    ("architecture", "extra", "why"),
    [
        ("falcon", {"attn_norm_2": 32}, "two norms"),
        ("hunyuan-dense", {"attn_q_norm": 8, "attn_k_norm": 8}, "whether they come after rotation"),
        ("qwen3", {"attn_q_norm": 8, "attn_k_norm": 8}, ""),
    ],
)
def test_files_that_leave_a_norm_open_are_flagged(architecture, extra, why, tmp_path):
    torch.manual_seed(0)
    sizes = {"attn_norm": (32,), "attn_q": (32, 32), "attn_k": (32, 32), **{name: (n,) for name, n in extra.items()}}
    tensors = {f"blk.0.{name}.weight": torch.randn(*shape) + 1 for name, shape in sizes.items()}
    about = {"kv_heads": 4, "block_count": 1, "embedding_length": 32, "layer_norm_rms_eps": 1e-6}
    found = af.geometry.score(write_gguf(tmp_path / "m.gguf", architecture, tensors, **about), per_head=False)
    assert [row.flags for row in found] == [("not folded",) if why else ()]
    assert why in found.notes[-1]
