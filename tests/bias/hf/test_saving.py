"""A bias as a folder: round trips, wrong bases, damaged files, and saves that were interrupted."""

import random
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import attnflow as af
from attnflow._core.errors import WrongBase
from attnflow.bias.config import KINDS as REGISTERED
from attnflow.bias.positions import Alibi
from tests.bias.cases import KINDS, config_of
from tests.bias.hf.common import (
    BIASES,
    biased,
    disturb,
    family,
    handle_of,
    layer_biases,
    outputs,
    read_addon,
    rewrite,
    tokens,
    untouched,
)
from tests.models import ZOO, tiny

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
    assert str(handle_of(model)).startswith(f"{handle}; ")  # for inference it announces nothing to train
    assert handle.layers == handle_of(model).layers
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


@dataclass(frozen=True, kw_only=True)
class SteepConfig(af.bias.AlibiConfig):
    """A user's kind: ALiBi with a field of its own."""

    makes: ClassVar = lambda config, shape: Alibi(replace(config, gain=config.steepness), shape)
    steepness: float = 3.0


STEEP = "tests.bias.hf.test_saving.SteepConfig"


def test_a_kind_of_the_users_is_loaded_where_its_class_is_imported(tmp_path, monkeypatch):
    model, _ = check_round_trip(SteepConfig(steepness=2.0), tmp_path)
    assert read_addon(tmp_path, "bias").config["bias"][0]["class"] == STEEP
    monkeypatch.delitem(REGISTERED, "steep")
    handle_of(model).remove()
    with pytest.raises(ValueError, match=f"'steep' is not defined here: import its class, '{STEEP}', before loading"):
        af.bias.load(model, tmp_path)


def test_two_kinds_of_one_name_are_refused_at_definition(monkeypatch):
    monkeypatch.setattr("attnflow.bias.config.KINDS", dict(REGISTERED))
    with pytest.raises(
        TypeError, match=r"the kind 'guidance', which is attnflow\.bias\.content\.GuidanceConfig: rename"
    ):
        type("Guidance", (af.bias.GuidanceConfig,), {})
    with pytest.raises(TypeError, match=rf"the kind 'steep', which is {STEEP}"):
        type("Mine", (af.bias.KeyConfig,), {"kind": "steep"})
    type("SteepConfig", (af.bias.AlibiConfig,), {"__module__": __name__})  # as a cell of a notebook that runs again


def test_a_bias_can_be_saved_over_an_older_one_and_from_another_precision(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    handle_of(model).remove()
    af.bias.attach(model, BIASES["others"])
    disturb(model)
    af.bias.save(model, tmp_path)
    narrow = family("Llama", torch.bfloat16)
    state = {name: value for name, value in model.state_dict().items() if "score_terms" not in name}
    narrow.load_state_dict(state)
    af.bias.load(narrow, tmp_path)
    for ours, theirs in zip(handle_of(narrow).parameters(), handle_of(model).parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_default_dtype_changes_nothing(dtype, tmp_path):
    ids = tokens(1, 6)
    torch.set_default_dtype(dtype)
    try:
        for model in (tiny("Llama", torch.float32), ZOO["Llama"].make()):  # of its own precision, and of the default's
            with af.bias.attach(model):
                af.bias.save(model, tmp_path / "bias")
            with af.bias.load(model, tmp_path / "bias"):
                model(ids)
            with af.masks.attach(model, af.masks.causal(6)):
                model(ids)
            af.knowledge.from_ffn(model)
            assert len(af.geometry.score(model, per_head=False)) == 2
            assert af.audit.check_batch({"input_ids": ids, "labels": ids}, model).labels > 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("change", [{"reference": "rotated"}, {"layers": [1]}, {"name": "other"}], ids=str)
def test_a_module_of_the_users_is_compared_with_the_saved_one(change, tmp_path):
    model = family("Llama")
    af.bias.attach(model, OWN)
    af.bias.save(model, tmp_path)
    handle_of(model).remove()
    unchanged(
        model, ValueError, r"the saved bias has the custom parts .*pair", tmp_path, custom=[replace(OWN, **change)]
    )


def test_sharded_parameters_are_gathered(tmp_path):
    model = biased("Llama", dtype=torch.float32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = next(bias for _, bias in layer_biases(model)).kinds[0]
        network.output_weight = nn.Parameter(
            distribute_tensor(network.output_weight.data, init_device_mesh("cpu", (1,)))
        )
        weight = network.output_weight.full_tensor()
        folder = af.bias.save(model, tmp_path / "new")
    finally:
        dist.destroy_process_group()
    saved = next(t for name, t in load_file(folder / "bias.safetensors").items() if name.endswith("output_weight"))
    assert torch.equal(saved, weight)


@pytest.fixture
def saved(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    handle_of(model).remove()
    return model, tmp_path


def unchanged(model, error, match, folder, **options):
    untouched(model, error, match, lambda model: af.bias.load(model, folder, train="guidance", **options))


def test_another_base_is_refused(saved):
    model, folder = saved
    other = family("Llama")
    unchanged(other, WrongBase, "other weights of this architecture.*strict=False", folder)
    unchanged(family("GPT2"), WrongBase, "made for another base model: model_type is llama there and gpt2 here", folder)
    unchanged(family("Llama", num_hidden_layers=3), WrongBase, "num_layers is 2 there and 3 here", folder)
    unchanged(family("Llama", num_key_value_heads=4), WrongBase, "num_kv_heads is 2 there and 4 here", folder)
    nn.init.normal_(model.model.layers[-1].self_attn.q_proj.weight)
    unchanged(model, WrongBase, "other weights of this architecture", folder)
    assert af.bias.load(other, folder, strict=False).parameters
    with pytest.raises(ValueError, match="attached already"):
        af.bias.load(other, folder, strict=False)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda content: content[:-7], "is damaged or was edited"),
        (lambda content: content.replace(b"hidden_dim", b"hidden_din"), "is damaged or was edited"),
        (lambda content: b"nonsense", "not a saved bias: its header cannot be read"),
        (lambda content: b"", "its header cannot be read"),
        (lambda content: (2).to_bytes(8, "little") + b"[]" + content[8:], "its header cannot be read"),
        (lambda content: (1 << 62).to_bytes(8, "little") + content[8:], "its header cannot be read"),
        (lambda content: (40000).to_bytes(8, "little") + b"[" * 40000, "its header cannot be read"),
    ],
)
def test_damaged_files_are_refused(saved, damage, match):
    model, folder = saved
    good = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(damage(good))
    unchanged(model, ValueError, match, folder)
    (folder / WEIGHTS).unlink()
    unchanged(model, FileNotFoundError, "bias.safetensors is missing", folder)
    (folder / WEIGHTS).write_bytes(good)
    assert af.bias.load(model, folder).parameters


HUGE = 1 << 29


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bias": {}}, "damaged: its configs cannot be read"),
        ({"bias": [{"hidden_dim": 8}]}, "damaged: its configs cannot be read"),
        ({"kind": "guidance", "layers": "every", "width": 3}, "has no field 'width'"),
        ({"kind": "relative", "layers": "every", "max_distance": 4}, "max_distance must exceed"),
        ({"layers": [5]}, r"layers \[5\] do not exist"),
        ({"layers": list(range(10**5))}, "do not exist"),
        ({"layers": ["a"]}, "layers must be an integer"),
        ({"layers": None}, "layers"),
        ({"layers": {"a": 1}}, "layers must"),
        ({"layers": [1 << 70]}, "layers"),
        ({"hidden_dim": 5}, r"does not fit its config: .* has shape .*, expected"),
        ({"hidden_dim": HUGE}, "does not fit its config"),
        ({"hidden_dim": 1 << 40}, "does not fit its config"),
        ({"hidden_dim": 1 << 62}, "impossible size"),
        ({"hidden_dim": 1 << 70}, "hidden_dim must be at most"),
        ({"hidden_dim": "a"}, "hidden_dim"),
        ({"hidden_dim": None}, "hidden_dim"),
        ({"kind": []}, "kind must be one of"),
        ({"kind": "custom"}, "custom parts"),
        ({"kind": "dense"}, "has no field"),
        ({"reference": []}, "reference must be one of"),
        ({"share_heads": 2}, "share_heads must be one of"),
        ({"init": {}}, "init"),
        ({"version": 1}, "has no field 'version'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configs_made_to_harm_are_refused_before_memory_is_taken(saved, change, match):
    model, folder = saved
    first = read_addon(folder, "bias").config["bias"][0]
    config = (
        change
        if "bias" in change
        else {"bias": [{**({} if "kind" in change and len(change) > 1 else first), **change}]}
    )
    rewrite(folder, config=config)
    unchanged(model, (ValueError, TypeError), match, folder)


@pytest.mark.parametrize(
    "base",
    [
        {"num_layers": "a"},
        {"hidden_size": 3},
        {"samples": {"a": 1}},
        {"samples": ["a"]},
        {"samples": [float("inf")]},
        {"samples": [10**400]},
    ],
    ids=str,
)
def test_hostile_bases(saved, base):
    model, folder = saved
    rewrite(folder, base=base)
    unchanged(model, WrongBase, "was made for", folder)


def test_tensors_that_do_not_belong_to_the_config(saved):
    model, folder = saved
    tensors = dict(read_addon(folder, "bias").tensors)
    first, good = max(tensors, key=lambda name: tensors[name].shape[-1]), (folder / WEIGHTS).read_bytes()
    for other, match in (
        (tensors | {first: tensors[first] * torch.nan}, f"NaN or infinity in {first}"),
        (tensors | {first: tensors[first][..., :3].contiguous()}, f"does not fit its config: {first} has shape"),
        ({name: tensor for name, tensor in tensors.items() if name != first}, f"{first} has shape none"),
        (tensors | {"more": torch.ones(2)}, "unexpected .*more"),
    ):
        (folder / WEIGHTS).write_bytes(good)
        rewrite(folder, other)
        unchanged(model, ValueError, match, folder)


def test_every_byte_of_the_tensors_counts(saved):
    """Of the header, too: another name, type or shape in it is refused, whatever it is."""
    model, folder = saved
    (folder / CONFIG).unlink()  # which nothing reads
    good = (folder / WEIGHTS).read_bytes()
    draw = random.Random(0)
    for place in [*range(16), *(draw.randrange(len(good)) for _ in range(300))]:
        damaged = bytearray(good)
        damaged[place] ^= draw.randrange(1, 256)
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bias\.safetensors"):
            read_addon(folder, "bias")
    (folder / WEIGHTS).write_bytes(good)
    assert af.bias.load(model, folder).parameters


def test_nan_is_not_saved(tmp_path):
    model = biased("Llama")
    af.bias.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        list(handle_of(model).parameters())[-1].fill_(torch.inf)
    with pytest.raises(ValueError, match=r"holds NaN or infinity in layers\.1\..*, which is not saved"):
        af.bias.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_meta_models(saved):
    _, folder = saved
    with torch.device("meta"):
        model = family("Llama")
    with pytest.raises(ValueError, match="meta device, where weights cannot be loaded"):
        af.bias.load(model, folder)
    af.bias.attach(model)
    with pytest.raises(ValueError, match="meta device, where it has no values"):
        af.bias.save(model, folder)
