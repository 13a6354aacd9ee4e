"""Saved biases made to harm, with checksums that are right: refused by their values, before memory is taken."""

import json

import pytest
import torch

import attnflow as af
from attnflow.bias.hf import saving
from tests.bias.hf.common import family

HUGE = 1 << 29


def base_model():
    torch.manual_seed(0)
    return family("Llama")


@pytest.fixture
def saved(tmp_path):
    with af.bias.attach(base_model(), af.bias.GuidanceConfig(layers="every", hidden_dim=4)) as handle:
        af.bias.save(handle.model, tmp_path / "bias")
    return tmp_path / "bias"


def forged(folder, change):
    """Both files of a saved bias, edited by `change(about)`, with the checksums of what they say now."""
    file = folder / saving.WEIGHTS
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about = json.loads(header["__metadata__"][saving._FORMAT])
    change(about)
    about["checksum"] = saving._digest({name: value for name, value in about.items() if name != "checksum"})
    header["__metadata__"][saving._FORMAT] = json.dumps(about)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    (folder / saving.CONFIG).write_text(json.dumps(about))


FIELDS = [
    {"hidden_dim": HUGE},
    {"hidden_dim": 1 << 40},
    {"hidden_dim": 1 << 62},
    {"hidden_dim": 1 << 70},
    {"hidden_dim": "a"},
    {"hidden_dim": None},
    {"hidden_dim": 5},
    {"layers": list(range(10**5))},
    {"layers": ["a"]},
    {"layers": None},
    {"layers": {"a": 1}},
    {"layers": [1 << 70]},
    {"kind": []},
    {"kind": "custom"},
    {"kind": "dense"},
    {"reference": []},
    {"share_heads": 2},
    {"init": {}},
    {"version": []},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: str(fields)[:40])
def test_hostile_configs(saved, fields):
    forged(saved, lambda about: about["bias"][0].update(fields))
    model = base_model()
    with pytest.raises((ValueError, TypeError)) as caught:
        af.bias.load(model, saved)
    assert not isinstance(caught.value, UnicodeError)
    assert str(caught.value)
    with pytest.raises(ValueError, match="has no bias attached"):
        af.bias.handle(model)


@pytest.mark.parametrize(
    "base",
    [
        {"num_layers": "a"},
        {"shape": 3},
        {"samples": {"a": 1}},
        {"samples": ["a"]},
        {"samples": [float("inf")]},
        {"samples": [10**400]},
    ],
    ids=str,
)
def test_hostile_bases(saved, base):
    forged(saved, lambda about: about["base"].update(base))
    with pytest.raises((ValueError, af.AttnflowError), match=r"\w+ \w+"):
        af.bias.load(base_model(), saved)


def test_the_configs_that_a_model_has_no_room_for():
    model = base_model()
    for config in (
        af.bias.GuidanceConfig(hidden_dim=HUGE),
        af.bias.GuidanceConfig(hidden_dim=1 << 55),
        af.bias.LowRankConfig(rank=HUGE),
        af.bias.DenseConfig(max_length=1 << 17),
    ):
        with pytest.raises(ValueError, match=r"has at least [\d,]+ numbers \([\d,.]+ GB\); a bias has at most"):
            af.bias.attach(model, config)
