"""A bias as a folder: round trips, wrong bases, damaged files, and saves that were interrupted."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import attnflow as af
from attnflow.bias.hf import saving
from attnflow.bias.hf.saving import KINDS, WrongBase
from tests.bias.cases import config_of
from tests.bias.hf.common import BIASES, biased, disturb, family, outputs, rewrite, same_state, tokens

WEIGHTS, CONFIG = "bias.safetensors", "bias_config.json"


class Pair(nn.Module):
    """A user's own bias: an inner product of projections."""

    def __init__(self, shape):
        super().__init__()
        self.left = nn.Linear(shape.num_heads * shape.head_dim, 3)
        self.right = nn.Linear(shape.num_kv_heads * shape.head_dim, 3)

    def forward(self, query, key):
        return (self.left(query) @ self.right(key).mT)[:, None]


OWN = af.bias.CustomConfig(Pair, layers="every", name="pair")


def check_round_trip(biases, folder, custom=()):
    model, ids = family("Llama"), tokens(2, 9)
    fresh = family("Llama")
    fresh.load_state_dict(model.state_dict())
    af.bias.attach(model, biases)
    disturb(model)
    assert af.bias.save(model, folder) == folder
    assert sorted(path.name for path in folder.iterdir()) == [WEIGHTS, CONFIG]
    handle = af.bias.load(fresh, folder, custom=custom)
    assert str(handle) == str(af.bias.handle(model))
    assert handle.layers == af.bias.handle(model).layers
    with torch.no_grad():
        assert torch.equal(outputs(fresh, input_ids=ids), outputs(model, input_ids=ids))
    held = load_file(folder / WEIGHTS)
    assert all(name.startswith("layers.") for name in held)  # only ours
    return model, fresh


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_makes_the_round_trip(kind, tmp_path):
    check_round_trip(config_of(kind, layers=[1], hidden_dim=5, max_length=16), tmp_path / "new" / "folder")


def test_sums_and_a_module_of_the_users_make_the_round_trip(tmp_path):
    check_round_trip((*BIASES["guidance"], OWN, *BIASES["others"]), tmp_path, custom=[OWN])
    with pytest.raises(ValueError, match=r"custom parts .*pair.*, but custom= has (none|\[\])"):
        af.bias.load(family("Llama"), tmp_path, strict=False)


def test_a_bias_can_be_saved_over_an_older_one_and_from_another_precision(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    af.bias.handle(model).remove()
    af.bias.attach(model, BIASES["others"])
    disturb(model)
    af.bias.save(model, tmp_path)
    narrow = family("Llama", torch.bfloat16)
    state = {name: value for name, value in model.state_dict().items() if "score_terms" not in name}
    narrow.load_state_dict(state)
    af.bias.load(narrow, tmp_path)
    for ours, saved in zip(af.bias.handle(narrow).parameters(), af.bias.handle(model).parameters(), strict=True):
        assert torch.equal(ours, saved.bfloat16())


@pytest.fixture
def saved(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    return model, tmp_path


def unchanged(model, error, match, folder, **options):
    """`load` fails as it should and leaves the model without a trace of it."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with pytest.raises(error, match=match):
        af.bias.load(model, folder, train="guidance", **options)
    assert same_state(model, before)
    assert model.config._attn_implementation is implementation
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_another_base_is_refused(saved):
    model, folder = saved
    af.bias.handle(model).remove()
    other = family("Llama")
    unchanged(other, WrongBase, "other weights of this architecture.*strict=False", folder)
    unchanged(family("GPT2"), WrongBase, "another base model: model_type is llama there and gpt2 here", folder)
    unchanged(family("Llama", num_hidden_layers=3), WrongBase, "num_layers is 2 there and 3 here", folder)
    unchanged(
        family("Llama", num_key_value_heads=4), WrongBase, "'num_kv_heads': 2.*there and.*'num_kv_heads': 4", folder
    )
    assert af.bias.load(other, folder, strict=False).parameters
    with pytest.raises(ValueError, match="attached already"):
        af.bias.load(other, folder, strict=False)


def test_damaged_files_are_refused(saved):
    model, folder = saved
    af.bias.handle(model).remove()
    good = {name: (folder / name).read_bytes() for name in (WEIGHTS, CONFIG)}

    def restore():
        for name, content in good.items():
            (folder / name).write_bytes(content)

    (folder / WEIGHTS).write_bytes(good[WEIGHTS][:-7])
    unchanged(model, ValueError, "bias.safetensors is damaged: its numbers are not those that were saved", folder)
    (folder / WEIGHTS).unlink()
    unchanged(model, FileNotFoundError, "bias.safetensors is missing", folder)
    restore()
    (folder / CONFIG).write_bytes(good[CONFIG][:50])
    unchanged(model, ValueError, "is not JSON", folder)
    (folder / CONFIG).write_text("[]")
    unchanged(model, ValueError, "is not the config of a saved bias", folder)
    (folder / CONFIG).write_bytes(good[CONFIG].replace(b'"hidden_dim": 8', b'"hidden_dim": 9'))
    unchanged(model, ValueError, "is damaged, or was edited: it is not as it was saved", folder)
    for change, match in (
        ({"version": 2}, "has version 2, this release reads 1; update"),
        ({"format": "peft"}, "is not the config of a saved bias"),
        ({"bias": {}}, "damaged: bias cannot be read"),
        ({"bias": [{"hidden_dim": 8}]}, "damaged: bias cannot be read"),
        ({"base": None}, "damaged: base cannot be read"),
        ({"bias": [{"kind": "guidance", "layers": "every", "width": 3}]}, "has no field 'width'"),
        ({"bias": [{"kind": "relative", "layers": "every", "max_distance": 4}]}, "max_distance must exceed"),
        ({"bias": [{"kind": "guidance", "hidden_dim": 8, "layers": [5]}]}, r"layers \[5\] do not exist"),
    ):
        restore()
        rewrite(folder, **change)
        unchanged(model, ValueError, match, folder)
    restore()
    tensors = load_file(folder / WEIGHTS)
    first = next(iter(tensors))
    rewrite(folder, tensors | {first: tensors[first] * torch.nan})
    unchanged(model, ValueError, f"NaN or infinity in {first}", folder)
    rewrite(folder, tensors | {first: tensors[first][..., :3]})
    unchanged(model, ValueError, f"does not fit its config: {first} has shape", folder)
    rewrite(folder, {name: tensor for name, tensor in tensors.items() if name != first})
    unchanged(model, ValueError, f"does not fit its config: missing .*{first}", folder)
    (folder / WEIGHTS).write_bytes(b"nonsense")
    unchanged(model, ValueError, "damaged", folder)
    restore()
    assert af.bias.load(model, folder).parameters


def test_every_byte_of_the_tensors_counts(saved):
    """Of the header, too: another name, type or shape in it is refused, whatever it is."""
    model, folder = saved
    af.bias.handle(model).remove()
    (folder / CONFIG).unlink()  # it is not needed
    good = (folder / WEIGHTS).read_bytes()
    draw = random.Random(0)
    for place in [*range(16), *(draw.randrange(len(good)) for _ in range(300))]:
        damaged = bytearray(good)
        damaged[place] ^= draw.randrange(1, 256)
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises((ValueError, FileNotFoundError)):
            saving.read(folder).tensors()
    (folder / WEIGHTS).write_bytes(good)
    assert af.bias.load(model, folder).parameters


def test_a_folder_of_an_older_release_is_loaded(saved):
    """Without checksums, and with a config that alone is not of the tensors, or the other way round."""
    model, folder = saved
    af.bias.handle(model).remove()
    about = json.loads((folder / CONFIG).read_text())
    for name in ("checksum", "header"):
        del about[name]
    tensors = load_file(folder / WEIGHTS)
    for inside, beside in ((about, about), (None, about), (about, about | {"weights": "of another save"})):
        metadata = None if inside is None else {saving._FORMAT: json.dumps(inside)}
        save_file(tensors, folder / WEIGHTS, metadata)
        (folder / CONFIG).write_text(json.dumps(beside))
        af.bias.load(model, folder).remove()
    save_file(tensors, folder / WEIGHTS)
    unchanged(model, ValueError, "is damaged: its numbers are not those that were saved", folder)
    (folder / CONFIG).unlink()
    unchanged(model, FileNotFoundError, "bias_config.json is missing", folder)


def test_a_first_save_that_was_killed_before_its_end_is_loaded(tmp_path, monkeypatch):
    model, moved = biased("Llama"), []

    def killed(path, target, real=os.replace):
        if moved:
            raise KeyboardInterrupt
        moved.append(real(path, target))

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        af.bias.save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    monkeypatch.undo()
    af.bias.handle(model).remove()
    assert af.bias.load(model, tmp_path).parameters


def test_nan_is_not_saved(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        list(af.bias.handle(model).parameters())[-1].fill_(torch.inf)
    with pytest.raises(ValueError, match=r"holds NaN or infinity in layers\.1\..*, which is not saved"):
        af.bias.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_save_that_fails_leaves_the_folder_as_it_was(saved, monkeypatch):
    model, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(os, "fsync", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        af.bias.save(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    monkeypatch.undo()
    af.bias.handle(model).remove()
    with pytest.raises(ValueError, match="has no bias attached"):
        af.bias.save(model, folder)


def test_meta_models(saved):
    _, folder = saved
    with torch.device("meta"):
        model = family("Llama")
    with pytest.raises(ValueError, match="meta device, where weights cannot be loaded"):
        af.bias.load(model, folder)
    af.bias.attach(model)
    with pytest.raises(ValueError, match="meta device, where it has no values"):
        af.bias.save(model, folder)
