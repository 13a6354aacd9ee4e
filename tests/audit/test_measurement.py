"""The measured order of models, and golden files of it: backends, versions and faults against them."""

from pathlib import Path

import pytest
import torch
import transformers

import attnflow as af
from attnflow.audit import check, measure
from attnflow.audit.measurement import MeasuredOrder, record
from tests.audit.common import LENGTH, RECURRENT, WINDOW, inputs, open_attention, tiny, tokens, wrapped
from tests.audit.golden.make import LEAKS, measured_order

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("5.17.0", "5.23.0")
SHORT = 8
IDS = tokens(1, SHORT)
CHAIN = [(i, i + 1) for i in range(LENGTH - 1)]


@pytest.mark.parametrize("by", ["layer", "output"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_and_hybrid_models_are_chains(name, by):
    flow = measure(tiny(name), inputs(name), by=by)
    assert flow.hasse.nodes == [(i,) for i in range(LENGTH)]
    assert flow.hasse.edges == CHAIN
    assert flow.hasse.levels == list(range(LENGTH))


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("Llama", [af.masks.causal(LENGTH)] * 3),
        ("Mistral", [af.masks.sliding_window(LENGTH, WINDOW)] * 3),
        ("Gemma3", [af.masks.sliding_window(LENGTH, WINDOW)] * 2 + [af.masks.causal(LENGTH)]),
        ("Bert", [af.masks.full(LENGTH)] * 3),
        ("ModernBert", [af.masks.sliding_window(LENGTH, 3, causal=False)] * 3),
        ("Lfm2", [af.masks.sliding_window(LENGTH, 3), af.masks.causal(LENGTH), af.masks.sliding_window(LENGTH, 3)]),
    ],
)
def test_layers_are_measured_as_they_are_masked(name, masks):
    assert list(measure(tiny(name), inputs(name)).masks) == masks


def test_output_of_a_stack_of_windows_is_their_product():
    flow = measure(tiny("Mistral"), inputs("Mistral"), by="output")
    assert flow.num_layers is None
    assert flow.masks[0] == af.masks.sliding_window(LENGTH, 3 * (WINDOW - 1) + 1)


def test_encoder_and_decoder_are_measured_together():
    flow = measure(tiny("T5"), inputs("T5"))
    joint = torch.zeros(LENGTH + 9, LENGTH + 9, dtype=torch.bool)
    joint[:, :LENGTH] = True
    joint[:LENGTH, LENGTH:] = False
    joint[LENGTH:, LENGTH:] = torch.ones(9, 9).tril().bool()
    assert torch.equal(flow.reachability(), joint)
    assert flow.classes[0] == tuple(range(LENGTH))
    assert flow.num_layers == 5


def test_measured_order_is_an_order_to_audit_against():
    model = tiny("Jamba")
    flow = measure(model, inputs("Jamba"))
    given = {**inputs("Jamba"), "use_cache": False}
    assert check(model, given, order=flow).ok
    with wrapped(model.model.layers[2].feed_forward, lambda out, hidden: out + 0.1 * hidden.roll(-1, 1)):
        assert check(model, given, order=flow).violations[0].module == "model.layers.2.feed_forward"


def test_rounding_of_experts_is_not_measured_as_flow():
    assert measure(tiny("Qwen3Moe"), inputs("Qwen3Moe")).hasse.edges == CHAIN
    assert measure(tiny("Qwen3Moe"), inputs("Qwen3Moe"), by="output").hasse.edges == CHAIN


def test_flow_outside_of_the_layers_is_refused():
    model = tiny("Llama")
    with (
        wrapped(model.model.norm, lambda out, hidden: out + hidden.flip(1)),
        pytest.raises(af.UnsupportedArchitecture, match="outside of the layers"),
    ):
        measure(model, tokens())


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3"])
def test_backends_have_one_order(name):
    golden = record(tiny(name, attn_implementation="eager"), IDS)
    other = record(tiny(name, attn_implementation="sdpa"), IDS)
    assert (golden.backend, other.backend) == ("eager", "sdpa")
    difference = other.difference(golden)
    assert difference.ok, difference
    assert difference.compared == 3
    assert af.audit.measure(tiny(name), IDS).difference(golden.flows[0]).ok


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' block masks, and of torch.compile itself
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_flex_has_the_order_of_eager(name):
    """Its forward runs on a CPU, too."""
    other = record(tiny(name, attn_implementation="flex_attention"), IDS)
    assert other.backend == "flex_attention"
    difference = other.difference(record(tiny(name, attn_implementation="eager"), IDS))
    assert difference.ok, difference


def test_a_backend_with_a_bug_is_seen():
    model = tiny("Llama", attn_implementation="eager")
    golden = record(model, IDS)
    allow = torch.zeros(SHORT, SHORT, dtype=torch.bool)
    allow[2, 5] = True
    with open_attention(model, 1, allow):
        different = record(model, IDS).difference(golden)
    (layer,) = different.layers
    assert (layer.layer, layer.extra, layer.missing, layer.extra_pairs) == (1, 1, 0, ((2, 5),))
    assert str(different).splitlines() == [
        "DIFFERENT in 1 of 3 layers: 1 extra, 0 missing",
        "layer 1: 1 extra pair (query, key): (2, 5)",
    ]
    assert not different.ok


def test_a_golden_file_is_read_back(tmp_path):
    order = record(tiny("Mistral"), {"input_ids": IDS, "use_cache": False})
    path = order.save(tmp_path / "order.json")
    again = MeasuredOrder.from_json(path.read_text())
    assert again.difference(order).ok
    assert torch.equal(again.arguments()["input_ids"], IDS)
    assert again.arguments()["use_cache"] is False
    assert again.versions["transformers"] == transformers.__version__
    assert "MistralForCausalLM" in str(again)


@pytest.mark.parametrize("name", LEAKS)
def test_released_versions(name):
    """5.17 lets the heads of four families see the future, 5.23 does not; the installed one is as its golden file."""
    saved = {version: (GOLDEN / f"{version}/{name}.json").read_text() for version in VERSIONS}
    old, new = (MeasuredOrder.from_json(text) for text in saved.values())
    difference = new.difference(old)
    assert difference.ok == (name == "BertLMHeadModel")
    if not difference.ok:
        assert all(each.extra == 0 for each in difference.layers)
        assert all(query < key for each in difference.layers for query, key in each.missing_pairs)
    installed = measured_order(name)
    version = transformers.__version__
    if version in VERSIONS:
        assert installed.difference(MeasuredOrder.from_json(saved[version])).ok
