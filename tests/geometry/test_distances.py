"""Scores by distance under rotary positions, against rotations written out, and against what attention receives."""

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.geometry.fold import pass_of
from attnflow.geometry.rotary import rotary_of
from attnflow.models.subject import Subject
from attnflow.models.weights.attention import attention_layers
from tests.geometry import oracle
from tests.geometry.test_in_use import caught, disturbed
from tests.models import ZOO, tokens

SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "halves, grouped heads": ("Llama", {"num_key_value_heads": 2}, 4),
    "scaled": ("Llama", {"rope_parameters": SCALED}, 4),
    "a part of the head": ("GPTNeoX", {}, None),
    "a part, grouped": ("Phi", {}, None),
    "neighbours": ("Cohere2", {}, None),
    "norms of queries and keys": ("Qwen3", {}, None),
    "two tables": ("Gemma3", {}, None),
    "one sequence of several axes": ("Qwen2VLText", {}, None),
}


def rotation(rotary, width, place):
    """R_place as a matrix."""
    matrix = np.eye(width)
    pairs = len(rotary.frequencies)
    for c, frequency in enumerate(rotary.frequencies.tolist()):
        a, b = (c, c + pairs) if rotary.order == "halves" else (2 * c, 2 * c + 1)
        cosine, sine = np.cos(place * frequency), np.sin(place * frequency)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cosine, -sine, sine, cosine
    return matrix


def model_of(name):
    family, changes, _ = MODELS[name]
    if family == "Qwen2VLText":
        from tests.models import ZOO

        torch.manual_seed(0)
        return ZOO[family].build()
    return disturbed(family, **changes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fold", [False, True])
def test_symmetry_and_norm_are_those_of_the_rotated_form(name, fold):
    model = model_of(name)
    rows = af.geometry.score(model, distances=(0, 1, 5), fold=fold)
    layers = attention_layers(model)
    seen = pass_of(Subject.of(model), layers, None)
    from attnflow.geometry.fold import folded, norms_of
    from attnflow.models.weights.checkpoints import open_weights

    norms = norms_of(open_weights(model), layers, seen) if fold else {}
    for layer in layers:
        rotary = rotary_of(model, layer, seen)
        query, key = (side.double().numpy() for side in folded(layer, norms.get(layer.name)))
        for row in (row for row in rows if row.name == layer.name):
            assert [one.distance for one in row.by_distance] == [0, 1, 5]
            for one in row.by_distance:
                turn = np.kron(np.eye(layer.num_kv_heads), rotation(rotary, layer.head_dim, -one.distance))
                forms = oracle.head_matrices(query, turn @ key, layer.num_heads, layer.num_kv_heads)
                form = sum(forms) if row.head == "all" else forms[row.head]
                assert one.symmetry == pytest.approx(oracle.symmetry(form), abs=1e-6)
                assert one.norm == pytest.approx(np.linalg.norm(form), rel=1e-6)
            assert row.by_distance[0].symmetry == pytest.approx(row.symmetry, abs=1e-6)


@pytest.mark.parametrize("name", ["halves, grouped heads", "scaled", "a part of the head", "neighbours"])
def test_scores_of_two_tokens_follow_the_form_at_their_distance(name):
    """What attention receives for one token everywhere: q_i . k_j = x^T M_{i-j} x, the same along each diagonal."""
    model, text = model_of(name), torch.full((9,), 7)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "proj.bias" in path or "query_key_value.bias" in path:
                parameter.zero_()
    layer = attention_layers(model)[0]
    rotary = rotary_of(model, layer, pass_of(Subject.of(model), [layer], None))
    queries, keys = caught(model, {"input_ids": text[None]}, 0)
    for query, key in zip(queries, keys, strict=True):
        scores = query @ key.T
        turned = [query[0] @ rotation(rotary, layer.head_dim, -r) @ key[0] for r in range(9)]
        for i in range(9):
            for j in range(i + 1):
                assert scores[i, j] == pytest.approx(turned[i - j], rel=1e-5, abs=1e-5 * abs(scores).max())


def test_what_turns_no_keys_is_refused():
    for name in ("GPT2", "Bert"):
        with pytest.raises(af.UnsupportedArchitecture, match="distance changes nothing"):
            af.geometry.score(disturbed(name), distances=[1])
    with pytest.raises(af.UnsupportedArchitecture, match="not read where attention receives them"):
        af.geometry.score(disturbed("GPTJ"), distances=[1])


def test_layers_without_positions_between_rotary_ones_have_no_distances():
    model = ZOO["SmolLM3"].make(no_rope_layers=[1, 0]).eval()
    found = af.geometry.score(model, per_head=False, distances=[1])
    assert [len(row.by_distance) for row in found] == [1, 0]
    assert "distance changes nothing" in found.notes[-1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_distances(dtype):
    exact = af.geometry.score(disturbed("Llama"), per_head=False, distances=[3])
    rounded = af.geometry.score(disturbed("Llama").to(dtype), per_head=False, distances=[3])
    for one, other in zip(exact, rounded, strict=True):
        assert one.by_distance[0].symmetry == pytest.approx(other.by_distance[0].symmetry, abs=0.01)


def test_distances_need_a_model_in_memory_and_numbers():
    with pytest.raises(ValueError, match="distances need a model in memory"):
        af.geometry.score("somewhere", distances=[1])
    with pytest.raises(ValueError, match="distances must be"):
        af.geometry.score(disturbed("Llama"), distances=[-1])


def test_rows_have_columns_for_each_distance():
    found = af.geometry.score(disturbed("Llama"), distances=(0, 4), inputs=tokens(1, 6)[0])
    assert {"symmetry_at_0", "norm_at_4"} <= set(found.rows()[0])
    assert type(found).from_json(found.to_json()) == found
    assert "at distance 4: symmetry" in repr(found)
