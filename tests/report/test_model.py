"""Everything about a model on one page: the verdict first, masks by their names; what it has not got is named."""

import re

import pytest
import torch

from attnflow import audit, bias, explain, knowledge, masks
from attnflow.report import model_page, page
from tests.models import tiny
from tests.report.reading import parse_page


def opening(made):
    return parse_page(re.search(r'<p class="reading">.*?</p>', made.html).group()).text.replace("\xa0", " ")


def test_the_verdict_comes_first_and_the_mask_last():
    model, steps = tiny("Llama", torch.float32), []
    bias.attach(model, bias.GuidanceConfig(hidden_dim=8, init="kaiming"))
    made = model_page(model, [5, 6, 7, 8], title="mine", progress=lambda *step: steps.append(step))
    names = [section.name for section in made.sections]
    shown = ["audit", "geometry", "bias", "entries", "mask", "order"]
    assert [name for name in names if name in shown] == shown
    assert made.ok
    assert "problems" not in names
    parts = ["audit", "geometry", "answer", "bias", "attribution", "knowledge", "order"]
    assert steps == [(i, 7, what) for i, what in enumerate(parts)]
    assert re.match(r"No leak found, 100 % of the forbidden pairs tested\. mine says “", opening(made))
    scores = r"Symmetry \S+, directionality \S+ \(median of 2 layers\)\."
    assert re.search(scores, parse_page(made.html).text.replace("\xa0", " "))
    assert "queries may attend" not in opening(made)


def test_a_leak_opens_the_page_with_its_place():
    model = tiny("Llama", torch.float32)
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, inputs, output: output + output.mean(1, keepdim=True)
    )
    made = model_page(model, [5, 6, 7, 8])
    assert not made.ok
    assert re.match(r"Leak found, first in model.layers.1.mlp \(layer 1\): \d+ violations?, \d+ % of", opening(made))


def test_the_page_opens_with_the_answer_and_a_line_for_each_question():
    model = tiny("Llama", torch.float32)
    made = model_page(model, [5, 6, 7, 8], title="mine")
    names = [section.name for section in made.sections]
    assert "problems" not in names
    assert names[:4] == ["flow", "edges", "sources", "audit"]
    said = opening(made)
    assert re.match(r"No leak found, .*\. mine says “\S+” \(.* %\), \S+ logits above the mean of all tokens\.", said)
    edge = explain.answer(model, [5, 6, 7, 8]).edges[0]
    assert f"Head {edge.name} tells it most" in said
    assert '<dl class="key"' not in made.html  # no wall of numbers
    flow = parse_page(made.sections[0].body.markup).text
    assert re.search(rf"In which geometry\? {edge.name} has symmetry \S+ and directionality \S+\. It gives “", flow)


def test_the_head_that_told_most_is_explained_against_another_token():
    model = tiny("Llama", torch.float32)
    made = model_page(model, [5, 6, 7, 8], title="mine")
    names = [section.name for section in made.sections]
    assert names[names.index("why") : names.index("why") + 3] == ["why", "pairs", "received"]
    edge = explain.answer(model, [5, 6, 7, 8]).edges[0]
    why = parse_page(next(section for section in made.sections if section.name == "why").body.markup).text
    assert f"In layer {edge.layer} head {edge.head} the query" in why
    assert re.search(r"The largest term (for|against) looking there, \S+ logits above “", why)


def test_without_an_answer_a_head_two_thirds_up_is_explained():
    made = model_page(tiny("Llama", torch.float32).model, [5, 6, 7, 8], title="mine")  # no logits
    text = parse_page(made.html).text
    assert "Answer: " in text
    assert "In layer 1 head " in text
    assert "of its heads, this one has the most weight on a token besides the first" in text


def test_what_cannot_be_found_out_is_named_at_the_end_and_the_rest_is_shown():
    model = tiny("Llama", torch.float32)
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    made = model_page(model, [5, 6, 7])
    names = [section.name for section in made.sections]
    assert names[-1] == "problems"
    assert {"order", "audit", "geometry", "why"} <= set(names)
    assert "bias" not in names
    assert "Knowledge: " in parse_page(made.html).text
    assert opening(made).endswith("Not shown: knowledge; the end of the page says why.")
    assert opening(made).startswith("No leak found")


def test_a_batch_is_audited_and_its_first_sequence_traced():
    """As `attnflow report` calls it: with a second sequence, so that the audit sees what crosses a batch."""
    made = model_page(tiny("Llama", torch.float32), {"input_ids": torch.tensor([[5, 6, 7, 8], [8, 7, 6, 5]])})
    assert "entries" in [section.name for section in made.sections]
    assert "2 sequences, 4 positions" in parse_page(made.html).text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Llama", [masks.causal(8)]),
        ("Bert", [masks.full(8)]),
        ("Gemma2", [masks.sliding_window(8, 4), masks.causal(8)]),
    ],
)
def test_a_models_masks_have_the_names_of_the_catalogue(name, expected):
    flow = audit.declared_order(tiny(name), list(range(5, 13)))
    named = {mask.to_dict()["name"]: mask for mask in flow.masks}
    assert named == {mask.name: mask for mask in expected}
    assert {repr(mask) for mask in flow.masks} == {repr(mask) for mask in expected}


def test_every_entry_of_the_last_token_has_its_words():
    """By default 128 entries get words; many positions must not use them up before the last one has its 40."""
    model = tiny("Llama", torch.float32)
    trace = knowledge.trace(model, [5 + i % 20 for i in range(100)])
    shown = trace.fired(-1, count=40)
    assert len(shown) > 10
    assert all(one.promotes for one in shown)
    html = page(trace).html
    assert "<td></td>" not in html
    assert "<small>probability " in html


def test_the_audit_says_the_declared_order_in_words():
    model = tiny("Gemma2", torch.float32)
    words = audit.check(model, [5, 6, 7, 8]).order
    assert "window" in words
    assert f"against the order: {words}." in parse_page(model_page(model, [5, 6, 7, 8]).html).text


def test_an_encoder_forbids_no_pair_and_has_no_empty_columns():
    made = model_page(tiny("Bert", torch.float32), [5, 6, 7, 8], title="mine")
    said = parse_page(made.html).text.replace("\xa0", " ")
    assert opening(made).startswith("The audit tested nothing: a bidirectional model forbids no pair of these inputs.")
    assert "of 0" not in said
    assert "Text, or tokens" not in said
    assert "Direct effect</th>" not in made.html
    assert made.html.count(">Model</dt>") == 1
