"""Golden files: what they hold, how they are compared, and what backends, versions and faults make of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import attnflow as af
from attnflow.audit.measurement import MeasuredOrder, load_order, record
from tests.audit.common import inputs, open_attention, tiny, tokens
from tests.audit.golden.make import LEAKS, measured_order
from tests.refused import refused

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("5.17.0", "5.23.0")
LENGTH = 8
IDS = tokens(1, LENGTH)


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
    allow = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
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
    again = load_order(path)
    assert again.difference(order).ok
    assert torch.equal(again.arguments()["input_ids"], IDS)
    assert again.arguments()["use_cache"] is False
    assert again.versions["transformers"] == transformers.__version__
    assert "MistralForCausalLM" in str(again)


def test_padding_of_sequences_that_differ():
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :3] = 0
    call = {"input_ids": tokens(2, LENGTH), "attention_mask": mask}
    assert record(tiny("Llama"), call).difference(record(tiny("Llama"), call)).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "GPT2LMHeadModel"}, "another model: the saved order is of GPT2LMHeadModel"),
        ({"parameters": 5}, "with 5 parameters"),
        ({"by": "output"}, "the saved order is by output, this one by layer"),
        ({"inputs": {"input_ids": [[1] * LENGTH]}}, "other inputs: input_ids differ"),
    ],
)
def test_other_models_and_inputs_are_not_compared(change, message):
    order = record(tiny("Llama"), IDS)
    other = MeasuredOrder(**{**vars(order), **change})
    with pytest.raises(ValueError, match=message):
        order.difference(other)


def test_bad_files(tmp_path):
    path = tmp_path / "order.json"
    with pytest.raises(ValueError, match="cannot read"):
        load_order(path)
    for content, message in (
        ("{", "is not JSON"),
        ("{}", "expected a saved MeasuredOrder, got no result of attnflow"),
        (af.order.analyze(af.masks.causal(3)).to_json(), "expected a saved MeasuredOrder, got 'Flow'"),
        ('{"attnflow": "MeasuredOrder", "version": 1, "model": "a"}', "it has no parameters"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            load_order(path)
    with refused(TypeError, "golden file holds integers"):
        record(tiny("Llama"), {"inputs_embeds": torch.randn(1, 4, 32)})


@pytest.mark.parametrize("name", LEAKS)
def test_released_versions(name):
    """5.17 lets the heads of four families see the future, 5.23 does not; the installed one is as its golden file."""
    old, new = (load_order(GOLDEN / f"{version}/{name}.json") for version in VERSIONS)
    difference = new.difference(old)
    assert difference.ok == (name == "BertLMHeadModel")
    if not difference.ok:
        assert all(each.extra == 0 for each in difference.layers)
        assert all(query < key for each in difference.layers for query, key in each.missing_pairs)
    installed = measured_order(name)
    version = transformers.__version__
    if version in VERSIONS:
        assert installed.difference(load_order(GOLDEN / f"{version}/{name}.json")).ok


def test_golden_files_name_what_made_them(tmp_path):
    for version in VERSIONS:
        for path in (GOLDEN / version).iterdir():
            shutil.copy(path, tmp_path)
            assert json.loads(path.read_text())["versions"]["transformers"] == version
            assert path.stem in LEAKS


def test_the_words_of_inputs():
    assert record(tiny("T5"), inputs("T5")).inputs.keys() == {"input_ids", "decoder_input_ids"}
