"""Configs of biases: frozen, hashable, the same after JSON, and clear about what they cannot be."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from attnflow.bias import AlibiConfig, CustomConfig, GuidanceConfig, KeyConfig, LowRankConfig
from attnflow.bias.config import BiasConfig, LayerShape
from attnflow.bias.hf.saving import KINDS, config_from_dict


@pytest.mark.parametrize(
    "config",
    [
        *(kind() for kind in KINDS.values()),
        LowRankConfig(layers=[3, 0], rank=4),
        AlibiConfig(layers="every_other", rope="keep", gain=0.0),
        GuidanceConfig(reference="per_head", share_heads="kv", hidden_dim=8),
        KeyConfig(share_heads=False),
    ],
    ids=str,
)
def test_json_there_and_back(config):
    again = config_from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert type(again) is type(config)
    assert hash(again) == hash(config)
    with pytest.raises(FrozenInstanceError):
        config.layers = "every"


def test_placement():
    assert GuidanceConfig().layer_indices(5) == [0, 2, 4]
    assert GuidanceConfig(layers="every").layer_indices(3) == [0, 1, 2]
    assert GuidanceConfig(layers="every_fourth").layer_indices(9) == [0, 4, 8]
    assert GuidanceConfig(layers=[5, 1]).layer_indices(6) == [1, 5]
    with pytest.raises(ValueError, match=r"layers \[6\] do not exist: the model has layers 0 to 5"):
        GuidanceConfig(layers=[6]).layer_indices(6)


def test_alibi_is_the_papers_baseline():
    """daa, sec. 4.2: ALiBi in place of rotary embedding, in every layer, with the published slopes."""
    config = AlibiConfig()
    assert (config.layers, config.rope) == ("every", "remove")
    module = config.module(LayerShape(0, 8, 8, 4, 32, is_causal=True))
    assert torch.equal(module.gain, torch.ones(8))
    assert not module.is_zero()


def test_a_custom_config_writes_all_but_its_code():
    config = CustomConfig(lambda shape: torch.nn.Identity(), layers=[1], name="mine")
    assert config.to_dict() == {
        "kind": "custom", "version": 1, "layers": [1], "rope": "keep", "reference": "unrotated", "name": "mine"
    }  # fmt: skip
    assert replace(config, layers="every").layer_indices(2) == [0, 1]
    assert isinstance(config, BiasConfig)
