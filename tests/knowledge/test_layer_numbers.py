"""A user gives and sees the model's layers, also where some have two modules that read entries, and others none."""

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import attnflow as af
from attnflow.knowledge import edit, from_ffn, load_edit, to_ffn
from attnflow.knowledge.editing.edit import edited_layers
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reading.results import EntryReport, layer_labels
from tests.knowledge.test_edit import FRANCE, TEXT, WORDS
from tests.knowledge.test_experts import made
from tests.knowledge.test_patches import bits
from tests.models import tiny
from tests.models.saved import word_tokenizer
from tests.models.table import REGISTERED

IDS = [3, 4, 5, 6]
SHARED = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
PLACE = "layers.{}.mlp.shared_expert.down_proj"


def moe():
    """Two layers, each of experts and a shared expert."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(num_hidden_layers=2, **sizes, **SHARED)).eval()


def paths(model, chosen):
    return [name for name, module in model.named_modules() if module in {*chosen.values()}]


def test_the_layers_to_edit_are_those_of_the_model():
    hybrid = from_ffn(made("NemotronH"))  # a layer of experts with a shared one, and a plain one
    assert paths(hybrid, edited_layers(hybrid, [3])) == ["model.layers.3.mixer.down_proj"]
    assert paths(hybrid, edited_layers(hybrid, [1])) == ["model.layers.1.mixer.shared_experts.down_proj"]
    for layer in (0, 2):
        with pytest.raises(
            ValueError, match=r"must be among \[1, 3\], which have feed-forward entries outside experts"
        ):
            edited_layers(hybrid, [layer])
    with pytest.raises(ValueError, match="layers must be at most 3"):
        edited_layers(hybrid, [4])
    deep = from_ffn(made("Qwen2Moe"))
    assert paths(deep, edited_layers(deep, [1])) == [PLACE.format(1)]
    assert paths(deep, edited_layers(deep)) == [PLACE.format(0), PLACE.format(2)]  # every second, from a quarter


def test_layers_of_images_are_not_edited():
    model = from_ffn(REGISTERED["Llava"].build(), check=False)
    for layer in (0, 1):
        assert paths(model, edited_layers(model, [layer])) == [f"model.language_model.layers.{layer}.mlp.down_proj"]


def test_an_edit_changes_and_names_the_layer_that_was_given(tmp_path):
    tokenizer = word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")
    plain = moe()
    model, fresh = from_ffn(plain), from_ffn(plain)
    with edit(model, FRANCE, layers=[1], text=TEXT, tokenizer=tokenizer, guard=False) as handle:
        now = to_ffn(model).state_dict()
        assert [name for name, was in plain.state_dict().items() if not torch.equal(now[name], was)] == [
            f"model.{PLACE.format(1)}.weight"
        ]
        assert handle.report.layers == (1,)
        assert [bound.layer for bound in handle.report.certificate] == [1]
        assert "24 entries in layers 1 moved" in str(handle)
        handle.save(tmp_path)
        edited, moments = bits(model), handle.moments
        with edit(model, FRANCE, layers=[1], text=moments, tokenizer=tokenizer, guard=False) as again:
            assert again.shared == handle.shared == {1: 24}
            assert "too, in layers 1" in str(again)
        with pytest.raises(ValueError, match=r"the moments are of an edit of other layers: layers \[0\]"):
            edit(model, FRANCE, layers=[0], text=moments, tokenizer=tokenizer, guard=False)
    loaded = load_edit(fresh, tmp_path)
    assert torch.equal(bits(fresh), edited)
    assert loaded.report.layers == (1,)
    rows = fresh.knowledge.ids[fresh.knowledge.rows(3)][:1]
    fresh.knowledge.update(rows, fresh.knowledge.get(rows) + 1)
    with pytest.raises(RuntimeError, match="entries of layer 1 were changed"):
        loaded.remove()


def test_activity_counts_by_the_models_layer():
    model = from_ffn(moe())
    with af.knowledge.activity(model) as seen:
        model(torch.tensor([IDS]))
        with pytest.raises(ValueError, match="readings of layer 0 are"), af.knowledge.activity(model):
            pass
    report = seen.report()
    assert [(one.layer, one.reader) for one in report.layers] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert report.layers[3].name == f"model.{PLACE.format(1)}"
    assert [line.split("  ")[0] for line in map(str.strip, str(report).splitlines())][1:5] == [
        *("0 experts", "0 shared_expert", "1 experts", "1 shared_expert")
    ]
    ids, counts = seen.fired(1)
    own = torch.cat([reader.ids(reader.every()) for reader in readers(model)[2:]])
    assert sorted(own.tolist()) == ids.tolist()
    assert int(counts.sum()) == round(sum(one.mean * one.tokens for one in report.layers[2:]))
    with pytest.raises(ValueError, match=r"layer must be one of \[0, 1\], got 3"):
        seen.fired(3)


def test_an_entry_is_found_by_the_models_layer():
    model = from_ffn(moe())
    for fired in af.knowledge.trace(model, IDS, position=-1).fired():
        found = af.knowledge.entry(model, fired.entry, layer=fired.layer, count=3)
        assert isinstance(found, EntryReport)
        assert (found.name, found.layer, found.reader) == (fired.name, fired.layer, fired.reader)
    with pytest.raises(ValueError, match=f"entry {fired.entry} belongs to layer {fired.layer}, got layer="):
        af.knowledge.entry(model, fired.entry, layer=1 - fired.layer)
    with pytest.raises(ValueError, match=r"layer must be one of \[0, 1\], which read entries, got 3"):
        af.knowledge.entry(model, fired.entry, layer=3)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_an_entry_that_writes_a_token_names_what_reads_it(name):
    model = from_ffn(tiny(name))
    for one in af.knowledge.writers(model, 7, count=50).entries:
        reader = readers(model)[one.reader]
        assert one.entry in reader.ids(reader.every()).tolist()


def test_modules_of_one_layer_are_told_apart_by_where_their_paths_part():
    def labels(*modules):
        return layer_labels([type("Module", (), {"layer": layer, "name": name}) for layer, name in modules])

    both = (0, "encoder.block.0.layer.1.wo"), (0, "decoder.block.0.layer.2.wo"), (1, "encoder.block.1.layer.1.wo")
    assert labels(*both) == ["0 encoder", "0 decoder", "1"]
    assert labels((2, "h.2.mlps.0.down"), (2, "h.2.mlps.1.down")) == ["2 0", "2 1"]
    assert labels((2, "h.2.a.x.down"), (2, "h.2.a.y.down"), (2, "h.2.b")) == ["2 a.x", "2 a.y", "2 b"]
    assert labels((2, "h.2"), (2, "h.2.mlp.down")) == ["2 2", "2 2.mlp"]


@pytest.mark.parametrize("name", ["Qwen2Moe", "NemotronH"])
def test_features_and_stores_name_the_models_layer(name):
    model = from_ffn(made(name))
    base = model.knowledge
    with af.knowledge.Store.open("memory", dim=base.entry_dim, num_thresholds=base.num_layers) as store:
        af.knowledge.convert.save_entries(model, store, name="tiny")
        numbers = {
            reader.layer: one.layer for reader, one in zip(readers(model), af.knowledge.trace(model, IDS), strict=True)
        }
        for entry in store.get(base.ids[:: max(1, len(base.ids) // 40)].tolist()):
            assert entry.source.split(",")[0] == f"layer {numbers[base.layer_of([entry.id])[0]]}"
