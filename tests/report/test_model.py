"""Everything about a model on one page; what it has not got is named."""

import torch

from attnflow import audit, bias
from attnflow.audit import declared
from attnflow.report import model_page
from tests.models import tiny
from tests.report.reading import parse_page


def test_order_audit_bias_geometry_and_entries_on_one_page():
    model, steps = tiny("Llama", torch.float32), []
    bias.attach(model, bias.GuidanceConfig(hidden_dim=8, init="kaiming"))
    made = model_page(model, [5, 6, 7, 8], title="mine", progress=lambda *step: steps.append(step))
    names = [section.name for section in made.sections]
    assert [name for name in names if name in ("order", "audit", "bias", "geometry", "entries")] == [
        "order", "audit", "bias", "geometry", "entries"
    ]  # fmt: skip
    assert made.ok
    parts = ["order", "audit", "bias", "geometry", "attribution", "knowledge"]
    assert steps == [(i, 6, what) for i, what in enumerate(parts)]
    assert "Over 2 layers of mine" in parse_page(made.html).text


def test_one_head_is_explained():
    made = model_page(tiny("Llama", torch.float32), [5, 6, 7, 8], title="mine")
    names = [section.name for section in made.sections]
    assert "problems" not in names
    assert names[names.index("why") : names.index("why") + 3] == ["why", "pairs", "received"]
    assert "In layer 1, head " in parse_page(made.html).text  # two thirds of two layers up


def test_what_cannot_be_found_out_is_named_and_the_rest_is_shown():
    model = tiny("Llama", torch.float32)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    made = model_page(model, [5, 6, 7])
    names = [section.name for section in made.sections]
    assert names[0] == "problems"
    assert {"order", "audit", "geometry", "why"} <= set(names)
    assert "bias" not in names
    assert "Knowledge could not be shown" in parse_page(made.html).text


def test_the_declared_order_is_found_once_and_keeps_its_words(monkeypatch):
    model, calls, find = tiny("Gemma2", torch.float32), [], declared.declared
    words = audit.check(model, [5, 6, 7, 8]).order
    assert "window" in words
    monkeypatch.setattr(declared, "declared", lambda *inputs: calls.append(inputs) or find(*inputs))
    made = model_page(model, [5, 6, 7, 8])
    assert len(calls) == 1
    assert f"against the order: {words}." in parse_page(made.html).text
