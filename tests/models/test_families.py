"""The registry against how models use their weights, for every family."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from attnflow.geometry.score import score
from attnflow.models.weights.attention import AttentionLayer, attention_layers
from attnflow.models.weights.families.table import KNOWN, Heads, arranged
from tests.geometry.usage import bypass_norms, used_form
from tests.models import ZOO


@pytest.mark.parametrize("name", [name for name in ZOO if name != "Qwen2_5_VL"])  # its towers are there alone
def test_registry_gives_the_forms_that_the_model_uses(name):
    animal = ZOO[name]
    model = animal.build()
    places = attention_layers(model)
    assert not any(live.discovered for live in places), f"{model.config.model_type} is not in the registry"
    bypass_norms(model)
    for live in places:
        width = max(live.query().shape[1], live.key().shape[1])
        run = lambda batch: model(**animal.inputs(batch))  # noqa: E731
        used = used_form(model, live.name, run, width, skip=name == "ConvBert")  # it multiplies by a convolution first
        assert _distance(used, _forms(live)) < 1e-5, live.name


def test_config_of_a_released_model_with_an_older_layout(tmp_path):
    """The config of Qwen2.5-VL has the text's entries at its root, and the family's name in its vision part."""
    model = ZOO["Qwen2_5_VL"].build()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    released = {**config.pop("text_config"), "model_type": "qwen2_5_vl"}
    released["vision_config"] = {**config["vision_config"], "model_type": "qwen2_5_vl"}
    file.write_text(json.dumps(released))
    saved, live = score(tmp_path, fold=False), score(model, fold=False)
    assert [_key(row) for row in saved] == [_key(row) for row in live]
    assert [row.symmetry for row in saved] == [row.symmetry for row in live]
    assert {row.tower for row in saved} == {"text", "vision"}
    assert not saved.notes


def test_every_registered_family_is_in_the_zoo():
    shown = {kind for animal in ZOO.values() for kind in _model_types(animal.build().config.to_dict())}
    # MobileLLM has code of its own that lays out its weights as Llama does; GGUF has tests of its own.
    assert KNOWN - shown == {"mobilellm", "gguf"}


def _model_types(config):
    if isinstance(config, dict):
        yield config.get("model_type")
        for value in config.values():
            yield from _model_types(value)


@pytest.mark.parametrize(
    ("name", "wrong"), [("GPTNeoX", "contiguous"), ("Phi3", "grouped"), ("FalconGrouped", "contiguous")]
)
def test_the_oracle_sees_a_wrong_order_of_rows(name, wrong):
    animal = ZOO[name]
    model = animal.build()
    live = attention_layers(model)[0]
    heads = Heads(live.num_heads, live.num_kv_heads, live.head_dim)
    query, key = arranged(wrong, live.query_rows.tensor, heads)
    used = used_form(model, live.name, lambda batch: model(**animal.inputs(batch)), live.query().shape[1])
    mistaken = replace(live, query_rows=query, key_rows=key)
    assert _distance(used, _forms(live)) < 1e-5
    assert _distance(used, _forms(mistaken)) > 0.1


def test_the_oracle_sees_wrong_pairs_of_heads():
    animal = ZOO["Llama"]
    model = animal.build()
    live = attention_layers(model)[0]
    used = used_form(model, live.name, lambda batch: model(**animal.inputs(batch)), live.query().shape[1])
    key = live.key().detach().unflatten(0, (live.num_kv_heads, -1))
    mistaken = live.query().detach().unflatten(0, (live.num_heads, -1)).mT @ key.repeat(2, 1, 1)  # h mod num_kv_heads
    assert _distance(used, mistaken) > 0.1


def _forms(live: AttentionLayer) -> torch.Tensor:
    query = live.query().detach().unflatten(0, (live.num_heads, -1))
    key = live.key().detach().unflatten(0, (live.num_kv_heads, -1))
    key = key.repeat_interleave(live.num_heads // live.num_kv_heads, 0)
    return query.mT @ key


def _distance(used: torch.Tensor, registered: torch.Tensor) -> float:
    """How far they are from a positive multiple of each other, relative to their size."""
    assert used.shape == registered.shape
    used, registered = used.double() / used.norm(), registered.double() / registered.norm()
    return (used - registered).abs().max().item() / registered.abs().max().item()


@pytest.mark.parametrize("name", ZOO)
def test_saved_model_has_the_scores_of_the_model(name, tmp_path):
    model = ZOO[name].build()
    model.save_pretrained(tmp_path)
    saved, live = (score(source, attention="all", fold=False) for source in (tmp_path, model))
    assert [_key(row) for row in saved] == [_key(row) for row in live]
    assert [row.symmetry for row in saved] == pytest.approx([row.symmetry for row in live], abs=1e-12)
    assert not saved.notes or "share" in saved.notes[0]


def _key(row):
    return row.layer, row.head, row.kind, row.tower
