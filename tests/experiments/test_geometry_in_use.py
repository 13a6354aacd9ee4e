"""The measurement of the geometry in use: white tokens give the weights' scores back, ends go, intervals hold."""

import math

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.geometry.in_use import observe
from experiments.geometry_in_use import study
from experiments.geometry_in_use.models import ANTIBODIES, clips, untrained, whisper_of
from experiments.geometry_in_use.recipe import _verdict
from experiments.geometry_in_use.summary import exchanged, over_layers, spearman, within_layers
from tests.models import tiny


def spread_out(reading):
    """Its heads from nearly symmetric to nearly skew, so that ranks mean something: k := s q + noise."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for number, layer in enumerate(reading.model.layers):
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            rows = query.unflatten(0, (2, 2, -1))[:, 0].flatten(0, 1)  # the first query head of each group
            strength = torch.tensor([[1.0], [0.2 - 0.7 * number]]).repeat_interleave(len(rows) // 2, 0)
            key.copy_(strength * rows + 0.02 * torch.randn(rows.shape, generator=draw) * (1 + number))
    return reading


def test_white_tokens_give_the_weights_scores_back():
    """The positive control, on grouped heads; with few tokens ranks are lost, and with other heads' scores all is."""
    found = study.of_weights(spread_out(untrained(2, 6)), 20_000)[""]
    numbers = {name: np.array(values) for name, values in found.items()}
    assert len(numbers["layer"]) == 8
    assert np.ptp(numbers["symmetry"]) > 0.3
    assert numbers["symmetry, many white tokens"] == pytest.approx(numbers["symmetry"], abs=0.03)
    for score, least in (("symmetry", 0.9), ("directionality", 0.7)):
        many, few = (spearman(numbers[score], numbers[f"{score}, {which} white tokens"]) for which in ("many", "few"))
        assert many > max(few, least)
    other = numbers["symmetry, many white tokens"]
    assert abs(exchanged(numbers["symmetry"], other, numbers["layer"], within=False)["mean"]) < 0.05


def test_all_tokens_are_what_score_says():
    reading = untrained(2, 9)
    found = study.in_use(reading, reading.texts[0])[""]
    rows = [row for row in af.geometry.score(reading.model, inputs=reading.texts[0]) if row.head != "all"]
    assert found["tokens"] == 9
    for name in study.USED:
        assert found[study.ALL][name] == pytest.approx([getattr(row.in_use, name) for row in rows], abs=1e-4)


@pytest.mark.parametrize("window", [None, 4])
def test_without_ends_rows_are_centred_over_what_is_left(window):
    torch.manual_seed(0)
    model = tiny("Mistral", torch.float64, sliding_window=window)
    layers = study.self_attention(model)
    seen = []
    observe(model, layers, {"input_ids": torch.arange(1, 10)[None]}, lambda layer, one: seen.append((layer, one)))
    for layer, whole in seen:
        part = study.inner(whole, 2, 1)
        assert part.positions.tolist() == [2, 3, 4, 5, 6, 7]
        sums = study.Accumulator(layer)
        sums.add(part)
        query, key = whole.sides[0]
        scores = (query[0] @ key[0].T)[2:-1, 2:-1]
        place = torch.arange(6)
        meet = torch.ones(6, 6, dtype=torch.bool) if window is None else (place[:, None] - place).abs() < window
        scores = (scores - (scores * meet).sum(-1, keepdim=True) / meet.sum(-1, keepdim=True)) * meet
        scores.fill_diagonal_(0)
        expected = float((scores * scores.T).sum() / scores.square().sum())
        assert sums.result(2.0, "excess")[1].symmetry == pytest.approx(expected, abs=1e-9)


def test_intervals_over_layers_hold_what_they_should():
    """Heads of a layer share a third of their variance; 95 % of intervals hold the true rank correlation."""
    draw = np.random.default_rng(1)
    layers = np.repeat(np.arange(6), 12)
    held = 0
    for _ in range(150):
        shared, own = (draw.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=size) for size in (6, 72))
        one, other = (0.3**0.5 * shared[layers] + 0.7**0.5 * own).T
        found = over_layers(one, other, layers)
        held += found.low <= 6 / math.pi * math.asin(0.25) <= found.high
    assert 0.88 <= held / 150 <= 1


def test_what_only_layers_tell_is_told_apart():
    layers = np.repeat(np.arange(5), 4)
    draw = np.random.default_rng(0)
    one, other = layers + 0.1 * draw.random(20), layers + 0.1 * draw.random(20)
    assert over_layers(one, other, layers).mean > 0.9
    assert exchanged(one, other, layers, within=True)["mean"] > 0.9
    assert abs(exchanged(one, other, layers, within=False)["mean"]) < 0.05
    inside = within_layers(one, other, layers)
    assert inside.low < 0 < inside.high
    assert spearman(one, one) == pytest.approx(1)
    assert spearman(one, np.zeros(20)) == 0


def judged(white, *towers):
    rows = [
        {"score": "symmetry", "which": which, "weights and use": list(numbers)}
        for which, numbers in zip(("all tokens", "without ends"), towers[:2], strict=True)
    ]
    return _verdict({"a": {"white": {"symmetry, many": [white, 0, 1]}, "rows": rows}}, "symmetry")[0]


def test_the_rule_of_the_verdict():
    high, some, none = (0.7, 0.6, 0.8), (0.4, 0.2, 0.6), (0.1, -0.1, 0.3)
    assert judged(0.99, high, high) == "confirmed"
    assert judged(0.99, high, some) == "not confirmed"
    assert judged(0.99, high, none) == "refuted"
    assert judged(0.99, (0.4, -0.5, 0.9), (0.4, -0.5, 0.9)) == "not confirmed"
    assert judged(0.8, high, high) == "not testable here"


def test_whisper_is_put_together_from_fused_variables():
    """Every tensor of transformers is there, in its place, and nothing is left over."""
    width = 64
    variables = {
        "encoder/conv1/weight": torch.randn(width, 80, 3),
        "encoder/conv2/weight": torch.randn(width, width, 3),
    }
    variables |= {f"encoder/conv{number}/bias": torch.randn(width) for number in (1, 2)}
    for tower, positions in (("encoder", 1500), ("decoder", 448)):
        variables[f"{tower}/position_encodings/encodings"] = torch.randn(positions, width)
        norms = [f"{tower}/layer_norm"]
        for number in range(4):
            place = f"{tower}/layer_{number}"
            shapes = {"self_attention/linear_0": (3 * width, width), "self_attention/linear_1": (width, width)}
            shapes |= {"ffn/linear_0": (4 * width, width), "ffn/linear_1": (width, 4 * width)}
            norms += [f"{place}/self_attention/layer_norm", f"{place}/ffn/layer_norm"]
            if tower == "decoder":
                shapes |= {"attention/linear_0": (width, width), "attention/linear_1": (2 * width, width)}
                shapes["attention/linear_2"] = (width, width)
                norms.append(f"{place}/attention/layer_norm")
            for name, shape in shapes.items():
                variables[f"{place}/{name}/weight"] = torch.randn(shape)
                variables[f"{place}/{name}/bias"] = torch.randn(shape[0])
        for name in norms:
            variables |= {f"{name}/gamma": torch.randn(width), f"{name}/beta": torch.randn(width)}
    variables["decoder/embeddings/weight"] = torch.randn(50364, width)
    model = whisper_of(variables)
    fused = variables["decoder/layer_2/self_attention/linear_0/weight"]
    attention = model.model.decoder.layers[2].self_attn
    assert torch.equal(torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]), fused)
    crossed = model.model.decoder.layers[1].encoder_attn
    assert torch.equal(crossed.v_proj.bias, variables["decoder/layer_1/attention/linear_1/bias"][width:])
    assert torch.equal(
        model.model.encoder.layers[3].final_layer_norm.bias, variables["encoder/layer_3/ffn/layer_norm/beta"]
    )


def test_chains_have_only_letters_of_amino_acids():
    assert len(set(ANTIBODIES)) == 8
    assert all(set(chain) <= set("ACDEFGHIKLMNPQRSTVWY") and 100 < len(chain) < 125 for chain in ANTIBODIES)


def test_clips_follow_one_another(tmp_path):
    import wave

    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.arange(200_000).astype(np.int16).tobytes())
    one, two = clips(tmp_path / "sound.wav")
    assert len(one) == len(two) == 78_400
    assert two[0] == np.int16(78_400 - 65_536) / 32_768
