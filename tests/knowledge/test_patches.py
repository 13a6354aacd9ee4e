"""Edits in files and in stacks: the same bits in any order, the old bits without them, and nothing from a bad file."""

import copy
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from attnflow._core.errors import WrongBase
from attnflow.knowledge import edit, from_ffn, load_edit, to_ffn
from attnflow.knowledge.base import EntryLayout, LayeredKnowledge
from attnflow.knowledge.editing.edited import Edited
from attnflow.knowledge.editing.stack import factors
from attnflow.models.loading import addons
from tests.knowledge.test_edit import FRANCE, SKY, TEXT, WORDS, converted, same, says, state
from tests.models import ZOO, tiny
from tests.models.saved import word_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")


def bits(model):
    entries = model.knowledge.entries.detach()
    return entries.clone().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[entries.element_size()])


def change(model, seed, layers=(0, 1), rank=3, scale=0.05, entries=None):
    """A change of rank 3 of some layers' values, of all entries or of a few."""
    draw, base = torch.Generator().manual_seed(seed), model.knowledge
    made = {}
    for layer in layers:
        count, width = base.rows(layer).stop - base.rows(layer).start, base.layouts[layer].model_dim
        sizes = {"generator": draw, "dtype": torch.float64}
        made[layer] = scale * torch.randn(count, rank, **sizes) @ torch.randn(rank, width, **sizes)
        if entries is not None:
            made[layer][torch.randperm(count, generator=draw)[entries:]] = 0
    return made


def values(model, layer):
    base = model.knowledge
    return base.entries.detach()[base.rows(layer), base.layouts[layer].value]


@pytest.fixture(scope="module")
def models():
    return {dtype: from_ffn(tiny("Llama", dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.sampled_from([None, 5]),
)
def test_the_bits_depend_only_on_the_edits_in_force(steps, dtype, entries):
    """Each step puts an edit in force or takes it back; a model with those that stay must have the same bits."""
    layout, model = EntryLayout(6, gated=True), nn.Module()
    rows = torch.randn(40, layout.entry_dim, generator=torch.Generator().manual_seed(len(steps))).to(dtype)
    rows[:, layout.value.start] = -0.0  # to which a sum with 0 would give another sign
    model.knowledge = LayeredKnowledge(rows, [17, 23], layout)
    plain, before, handles = copy.deepcopy(model), bits(model), {}
    parts = {seed: change(model, seed, layers=[(0,), (1,), (0, 1)][seed % 3], entries=entries) for seed in range(5)}
    for seed in steps:
        if seed in handles:
            handles.pop(seed).remove()
        else:
            handles[seed] = Edited(model, parts[seed])
    other = copy.deepcopy(plain)
    for one in sorted(handles):
        Edited(other, parts[one])
    assert torch.equal(bits(model), bits(other))
    for layer in range(2):
        wanted = sum((parts[one][layer] for one in handles if layer in parts[one]), values(plain, layer).double())
        tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(values(model, layer).double(), wanted, rtol=tolerance, atol=1e-13)
    left = list(handles.values())
    random.Random(len(steps)).shuffle(left)
    for handle in left:
        handle.remove()
    assert torch.equal(bits(model), before)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60), st.integers(0, 1000))
def test_factors_give_the_matrix_back_at_its_rank(rows, columns, rank, seed):
    draw = torch.Generator().manual_seed(seed)
    sizes = {"generator": draw, "dtype": torch.float64}
    matrix = torch.randn(rows, rank, **sizes) @ torch.randn(rank, columns, **sizes)
    left, right = factors(matrix)
    torch.testing.assert_close(left @ right, matrix, rtol=0, atol=1e-12 * (1 + float(matrix.norm())))
    if rank <= 16 and min(rows, columns) > 32:
        assert len(right) == rank
    assert left.numel() + right.numel() <= rows * columns + min(rows, columns) ** 2


def test_an_edit_is_a_small_file_that_gives_the_same_bits(tokenizer, tmp_path):
    model, fresh = converted(), converted()
    before = state(fresh)
    with edit(model, [FRANCE, SKY], text=TEXT, tokenizer=tokenizer, layers=[1, 2]) as handle:
        assert handle.save(tmp_path / "patch") == tmp_path / "patch"
        edited = bits(model)
    handle.save(tmp_path / "again")  # also once it is removed
    again, patch = (addons.read_addon(tmp_path / name, "edit") for name in ("again", "patch"))
    assert all(torch.equal(tensor, patch.tensors[name]) for name, tensor in again.tensors.items())
    assert sorted(path.name for path in (tmp_path / "patch").iterdir()) == ["edit.safetensors", "edit_config.json"]
    assert json.loads((tmp_path / "patch" / "edit_config.json").read_text())["config"]["report"]["layers"] == [1, 2]
    loaded = load_edit(fresh, tmp_path / "patch")
    assert torch.equal(bits(fresh), edited)
    assert (says(fresh, tokenizer, "the capital of France"), says(fresh, tokenizer, "the sky")) == ("Rome", "green")
    assert (loaded.report, loaded.count, loaded.relative_change) == (
        handle.report,
        handle.count,
        handle.relative_change,
    )
    assert str(loaded) == str(handle).removesuffix(" (removed)")
    loaded.remove()
    assert same(fresh, before)


def test_a_patch_of_a_wide_layer_is_small(tmp_path):
    model = from_ffn(tiny("Llama", torch.float32, hidden_size=64, intermediate_size=512))
    handle = Edited(model, change(model, 0, layers=[1]))
    handle.save(tmp_path)
    size = (tmp_path / "edit.safetensors").stat().st_size
    assert size < 8 * 3 * (512 + 64) + 8 * 512 + 4096 < 4 * 512 * 64


def test_patches_of_one_model_in_any_order(tokenizer, tmp_path):
    model = converted()
    first = edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2])
    second = edit(model, SKY, text=first.moments, tokenizer=tokenizer, layers=[2])
    assert first.shared == second.shared == {2: 48}
    assert "other edits in force change 48 entries of these, too, in layers 2" in str(second)
    both = bits(model)
    first.save(tmp_path / "first")
    second.save(tmp_path / "second")
    fresh = converted()
    before = state(fresh)
    later = load_edit(fresh, tmp_path / "second")
    assert later.shared == {}
    assert "other edits" not in str(later)
    earlier = load_edit(fresh, tmp_path / "first")
    assert torch.equal(bits(fresh), both)
    with pytest.raises(ValueError, match="in force on the model already"):
        load_edit(fresh, tmp_path / "second")
    later.remove()
    second.remove()
    assert torch.equal(bits(fresh), bits(model))
    assert says(fresh, tokenizer, "the capital of France") == "Rome"
    earlier.remove()
    assert same(fresh, before)
    load_edit(fresh, tmp_path / "second").remove()
    assert same(fresh, before)


def test_an_edit_is_folded_into_a_saved_model_and_gone_after_it_is_removed(tokenizer, tmp_path):
    model = converted()
    model.save_pretrained(tmp_path / "before")
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2]):
        model.save_pretrained(tmp_path / "edited")
        plain = to_ffn(model)
    model.save_pretrained(tmp_path / "after")
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "edited", "after")}
    assert weights["before"] == weights["after"] != weights["edited"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")
    assert same(again, plain.state_dict())
    assert says(again, tokenizer, "the capital of France") == "Rome"


def test_entries_that_come_and_go_beside_an_edit(models):
    model = copy.deepcopy(models[torch.float32])
    base, before = model.knowledge, state(model)
    handle = Edited(model, change(model, 0, layers=[1], entries=5))
    new = base.insert(0, torch.zeros(2, base.entry_dim))
    other = Edited(model, change(model, 1, layers=[0, 1]))
    handle.remove()
    other.remove()
    base.delete(new)
    assert same(model, before)
    handle = Edited(model, change(model, 0, layers=[1]))
    base.delete(base.ids[base.rows(1)][:1])
    with pytest.raises(RuntimeError, match="changed or deleted"):
        handle.remove()


def test_training_after_an_edit_is_not_lost(models):
    model = copy.deepcopy(models[torch.float32])
    handle = Edited(model, change(model, 0, layers=[1]))
    with torch.no_grad():
        model.knowledge.entries.mul_(1.01)
    trained = state(model)
    for act in (handle.remove, lambda: Edited(model, change(model, 1))):
        with pytest.raises(RuntimeError, match=r"entries of layer 1 were changed.*from_ffn\(to_ffn\(model\)\)"):
            act()
        assert same(model, trained)
    Edited(model, change(model, 1, layers=[0])).remove()  # of another layer
    Edited(from_ffn(to_ffn(model)), change(model, 1))


def test_precision(models, tmp_path):
    single, half = (copy.deepcopy(models[dtype]) for dtype in (torch.float32, torch.bfloat16))
    half.load_state_dict(single.state_dict())
    before = bits(half)
    made = Edited(single, change(single, 0, scale=0.001))
    made.save(tmp_path)
    assert made.rounding < 1e-4
    assert "rounding" not in str(made)
    assert str(made) == "changed values of 96 entries in layers 0, 1"
    assert made.results() == ()
    loaded = load_edit(half, tmp_path)
    assert 0.1 < loaded.rounding < 2
    assert f"rounding to bfloat16 moves the values by {loaded.rounding:.0%} of the change" in str(loaded)
    half.float()
    with pytest.raises(RuntimeError, match=r"cast from torch.bfloat16 to torch.float32 while edits were in force"):
        Edited(half, change(half, 1))
    loaded.remove()
    assert torch.equal(bits(half.bfloat16()), before)
    huge = from_ffn(tiny("Llama", torch.float16))
    kept = bits(huge)
    with pytest.raises(ValueError, match=r"of layer 1 too large for torch.float16"):
        Edited(huge, change(huge, 0, layers=[0]) | change(huge, 0, layers=[1], scale=1e6))
    assert torch.equal(bits(huge), kept)


def refused(model, folder, message, error=ValueError, **options):
    before = bits(model)
    with pytest.raises(error, match=message):
        load_edit(model, folder, **options)
    assert torch.equal(bits(model), before)


def test_models_that_it_was_not_made_for(models, tmp_path):
    model = copy.deepcopy(models[torch.float32])
    Edited(model, change(model, 0, layers=[1])).save(tmp_path)
    plain = copy.deepcopy(models[torch.float32])
    with torch.no_grad():
        plain.model.layers[0].self_attn.q_proj.weight.mul_(2)
    refused(plain, tmp_path, "other weights of this architecture.*strict=False", WrongBase)
    load_edit(plain, tmp_path, strict=False)
    refused(from_ffn(tiny("Llama", torch.float32, num_hidden_layers=3)), tmp_path, "num_layers is 2 there", WrongBase)
    refused(from_ffn(tiny("Mistral", torch.float32)), tmp_path, "model_type is llama there", WrongBase)
    narrow = from_ffn(tiny("Llama", torch.float32, intermediate_size=40))
    refused(narrow, tmp_path, "changes entries that layer 1 of this model does not have", strict=False)
    with pytest.raises(ValueError, match="from_ffn"):
        load_edit(to_ffn(model), tmp_path)
    with pytest.raises(ValueError, match="needs a converted model"):
        load_edit(from_ffn(ZOO["Mixtral"].build()), tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no saved edit"):
        load_edit(model, tmp_path / "nowhere")


@pytest.mark.parametrize("column", [0, 40, 95, 96])  # of two keys, values and thresholds
def test_feed_forward_weights_that_it_was_not_made_for(column, models, tmp_path):
    model = copy.deepcopy(models[torch.float32])
    first = Edited(model, change(model, 1))  # a patch is for the weights without edits
    second = Edited(model, change(model, 0, layers=[1]))
    second.save(tmp_path)
    first.remove()
    second.remove()
    Edited(model, change(model, 1))
    load_edit(model, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        other = copy.deepcopy(models[torch.float32]).to(dtype)
        entries, rows = other.knowledge.entries.detach(), other.knowledge.rows(1)
        entries[rows.start - 1, column] += 1  # of a layer that the patch does not touch
        load_edit(other, tmp_path).remove()
        if dtype == torch.float32:
            entries[rows.stop - 1, column] = torch.nextafter(entries[rows.stop - 1, column], torch.tensor(9.0))
        else:
            entries[rows] *= 1.1
        refused(other, tmp_path, "other feed-forward weights in layer 1.*strict=False", WrongBase)
        load_edit(other, tmp_path, strict=False)


@pytest.fixture
def patch(models, tmp_path):
    model = copy.deepcopy(models[torch.float32])
    Edited(model, change(model, 0, layers=[0, 1])).save(tmp_path)
    return copy.deepcopy(models[torch.float32]), tmp_path


def test_damaged_files(patch):
    model, folder = patch
    file = folder / "edit.safetensors"
    whole = file.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        place = draw.randrange(len(whole))
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        refused(model, folder, r"damaged|was edited|version|not a saved edit|holds a")
    for place in (0, 7, 8, 200, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:place])
        refused(model, folder, "damaged")
    file.write_bytes(whole)
    load_edit(model, folder)


def rewritten(folder, **changes):
    """The same file with other contents and a digest that fits them, as somebody could make it."""
    saved = addons.read_addon(folder, "edit")
    tensors = {name: tensor for name, tensor in {**saved.tensors, **changes}.items() if tensor is not None}
    addons.save_addon(folder, "edit", tensors, saved.config, saved.base)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.left": None}, "layer 0 has shapes"),
        ({"layers.1.right": torch.zeros(3, 5, dtype=torch.float64)}, "layer 1 has shapes"),
        ({"layers.1.left": torch.zeros(2, 3, dtype=torch.float64)}, "layer 1 has shapes"),
        ({"layers.1.ids": torch.zeros(48, dtype=torch.int64)}, "changes entries that layer 1"),
        ({"layers.1.ids": torch.arange(48)}, "changes entries that layer 1"),
        ({"layers.1.left": torch.zeros(48, 3)}, "holds layers.1.left of torch.float32"),
        ({"layers.1.more": torch.zeros(1)}, "holds layers.1.more"),
        (
            {"layers.7.ids": torch.arange(3)},
            "changes module 7 of those that read entries, but those without experts are",
        ),
        ({f"layers.{n}.{name}": None for n in (0, 1) for name in ("ids", "left", "right")}, "it changes nothing"),
    ],
)
def test_files_of_a_wrong_form(changes, message, patch):
    model, folder = patch
    rewritten(folder, **changes)
    refused(model, folder, message)


def test_files_with_nan_or_of_another_version(patch, monkeypatch):
    model, folder = patch
    with monkeypatch.context() as patched:
        patched.setattr(addons, "_nonfinite", lambda tensors: [])
        rewritten(folder, **{"layers.1.right": torch.full((3, 32), torch.nan, dtype=torch.float64)})
    refused(model, folder, "holds NaN or infinity in layers.1.right")
    with monkeypatch.context() as patched:
        patched.setattr(addons, "_VERSION", 2)
        Edited(copy.deepcopy(model), change(model, 0)).save(folder)
    refused(model, folder, "is an add-on edit of version 2, expected edit of version 1; update attnflow")
