"""`BiasConfig`: frozen, hashable, the same after JSON, and clear about what it cannot be."""

import json

import pytest

from attnflow.bias import BiasConfig


@pytest.mark.parametrize(
    "config",
    [
        BiasConfig(),
        BiasConfig(kind="lowrank", layers=[3, 0], rank=4),
        BiasConfig(kind="alibi", layers="every", rope="remove", init="kaiming"),
        BiasConfig(reference="per_head", share_heads="kv", hidden_dim=8),
        BiasConfig(share_heads=False),
    ],
    ids=str,
)
def test_json_there_and_back(config):
    again = BiasConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)
    assert again.share_heads is config.share_heads or again.share_heads == "kv"


def test_placement():
    assert BiasConfig().layer_indices(5) == [0, 2, 4]
    assert BiasConfig(layers="every").layer_indices(3) == [0, 1, 2]
    assert BiasConfig(layers="every_fourth").layer_indices(9) == [0, 4, 8]
    assert BiasConfig(layers=[5, 1]).layer_indices(6) == [1, 5]
    with pytest.raises(ValueError, match=r"layers \[6\] do not exist: the model has layers 0 to 5"):
        BiasConfig(layers=[6]).layer_indices(6)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kind": "gate"}, ValueError, "kind must be one of 'guidance', .*, got 'gate'"),
        ({"reference": "keys"}, ValueError, "reference must be one of"),
        ({"init": "normal"}, ValueError, "init must be one of 'zero', 'kaiming'"),
        ({"rope": "none"}, ValueError, "rope must be one of"),
        ({"share_heads": "query"}, ValueError, "share_heads must be one of True, False, 'kv'"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1, got 0"),
        ({"hidden_dim": 8.0}, TypeError, "hidden_dim must be an integer"),
        ({"rank": 0}, ValueError, "rank must be at least 1"),
        ({"num_buckets": 2}, ValueError, "num_buckets must be at least 4"),
        ({"max_distance": 8}, ValueError, "max_distance must exceed num_buckets // 4 = 8"),
        ({"layers": "some"}, ValueError, "layers must be one of 'every'"),
        ({"layers": []}, ValueError, "at least one layer, each once"),
        ({"layers": [1, 1]}, ValueError, "at least one layer, each once"),
        ({"layers": [-1]}, ValueError, "layers must be at least 0"),
        ({"version": 2}, ValueError, "version 2 was given, this release reads 1"),
    ],
    ids=str,
)
def test_bad_values(fields, error, message):
    config = object.__new__(BiasConfig)  # past the type checker of the tests, which users do not have
    for name, value in (BiasConfig().to_dict() | fields).items():
        object.__setattr__(config, name, value)
    with pytest.raises(error, match=message):
        config.__post_init__()


def test_unknown_fields():
    with pytest.raises(ValueError, match="a bias config has no field 'heads'; it has"):
        BiasConfig.from_dict({"heads": 2})
