"""Features of transcoders and sparse autoencoders against plain float64 arithmetic on the model's own hidden states."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import relu

import attnflow as af
from tests.models import ZOO, deep, state
from tests.models.table import in_double

IDS = torch.tensor([[5, 9, 14, 7, 33]])
WIDTH, FEATURES = 32, 40


def model():
    """GPT-2, whose norms compute in float64 if it does."""
    return in_double(deep("GPT2")).eval()


def tensors(*names, seed=0, features=FEATURES, width=WIDTH):
    """Tensors of a dictionary: W_enc and W_dec, and those that are named."""
    draw = torch.Generator().manual_seed(seed)
    sizes = dict.fromkeys(("b_enc", "threshold", "b_gate", "b_mag", "r_mag"), (features,))
    sizes |= {"W_enc": (width, features), "W_dec": (features, width), "b_dec": (width,), "W_skip": (width, width)}
    made = {n: torch.randn(*sizes[n], generator=draw, dtype=torch.float64) / 2 for n in ("W_enc", "W_dec", *names)}
    return {name: one.abs() if name == "threshold" else one for name, one in made.items()}


def around(model, layer, run):
    """The input and the output of a layer's feed-forward part in a run."""
    seen = {}
    mlp = model.transformer.h[layer].mlp
    hook = mlp.register_forward_hook(lambda _, given, output: seen.update(x=given[0][0], y=output[0]))
    run()
    hook.remove()
    return seen["x"].detach(), seen["y"].detach()


def encoded(t, x, k=None, centred=False):
    """What the papers say, feature by feature."""
    weights = torch.zeros(len(x), t["W_enc"].shape[1], dtype=x.dtype)
    centre = t["b_dec"] if centred else torch.zeros(len(t["W_enc"]), dtype=x.dtype)
    for token, row in enumerate(x):
        z = t["W_enc"].T @ (row - centre)
        if "b_gate" in t:
            gate, size = z + t["b_gate"], z * t["r_mag"].exp() + t["b_mag"]
            weights[token] = torch.where(gate > 0, relu(size), 0)
            continue
        z = z + t.get("b_enc", 0)
        if "threshold" in t:
            weights[token] = torch.where(z > t["threshold"], z, 0).clamp(min=0)
        elif k is not None:
            best = z.argsort(descending=True)[:k]
            weights[token, best] = relu(z[best])
        else:
            weights[token] = relu(z)
    return weights


def weights_of(one, features=FEATURES):
    """The weights of a `LayerTrace` as a table [tokens, features]."""
    table = torch.zeros(len(one.ids), features + 1, dtype=one.weights.dtype)
    return table.scatter_(1, one.ids.where(one.ids >= 0, torch.tensor(features)), one.weights)[:, :features]


KINDS = {
    "relu": (("b_enc", "b_dec"), {}),
    "no biases": ((), {}),
    "jumprelu": (("b_enc", "b_dec", "threshold"), {}),
    "topk": (("b_enc", "b_dec"), {"k": 7}),
    "gated": (("b_gate", "b_mag", "r_mag", "b_dec"), {}),
    "skip": (("b_enc", "b_dec", "W_skip"), {}),
    "centred": (("b_enc", "b_dec", "threshold"), {"writes": "mlp", "apply_b_dec_to_input": True}),
    "centred and gated": (("b_gate", "b_mag", "r_mag", "b_dec"), {"writes": "mlp", "apply_b_dec_to_input": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_names_the_features_and_what_they_leave(kind):
    names, options = KINDS[kind]
    gpt, t = model(), tensors(*names)
    with af.knowledge.attach_features(gpt, {1: t}, **options):
        one = af.knowledge.trace(gpt, IDS, top=FEATURES).layer(1)
        x, y = around(gpt, 1, lambda: gpt(IDS))
    read = y if "writes" in options else x
    weights = encoded(t, read, options.get("k"), "apply_b_dec_to_input" in options)
    torch.testing.assert_close(weights_of(one), weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(one.active, (weights != 0).sum(1))
    skip = read @ t["W_skip"].T if "W_skip" in t else torch.zeros_like(y)
    bias = t.get("b_dec", torch.zeros(WIDTH, dtype=y.dtype)).expand(y.shape)
    left = {"error": y - weights @ t["W_dec"] - bias - skip, "bias": bias} | ({"skip": skip} if "W_skip" in t else {})
    assert {part.name for part in one.beside} == set(left)
    for part in one.beside:
        torch.testing.assert_close(part.norms, left[part.name].norm(dim=1), rtol=1e-12, atol=1e-12)
    fired = next(entry for entry in af.knowledge.trace(gpt, IDS).fired(-1, 1))
    assert fired.name.startswith("L1N")  # the handle was removed
    assert one.letter == "F"


def test_parts_of_a_trace_sum_to_what_the_layers_wrote():
    gpt = model()
    with af.knowledge.attach_features(gpt, {n: tensors("b_enc", "b_dec", "W_skip", seed=n) for n in range(3)}):
        trace = af.knowledge.trace(gpt, IDS, top=FEATURES)
        assert "beside features, in norm: error" in str(trace.table())
    assert trace.without == ""
    for one in trace:
        parts = one.direct_effects.sum(1) + sum(part.direct_effects for part in one.beside)
        torch.testing.assert_close(parts, one.direct_effect, rtol=1e-10, atol=1e-12)
    whole = trace.embedding_effect + trace.constant_effect
    whole = whole + sum(one.direct_effect + one.attention_effect for one in trace)
    torch.testing.assert_close(whole, trace.logits, rtol=1e-10, atol=1e-12)
    assert type(trace).from_json(trace.to_json()).layers[0].beside[0].name == "error"


def test_effects_and_removals_are_those_of_the_model_itself():
    gpt, t = model(), tensors("b_enc", "b_dec", "threshold")
    mlp, target = gpt.transformer.h[1].mlp, 11
    x, y = around(gpt, 1, lambda: gpt(IDS))
    weights, written = encoded(t, x), y[None].clone().requires_grad_()
    hook = mlp.register_forward_hook(lambda *_: written)
    logits = gpt(IDS).logits[0, -1]
    hook.remove()
    (slope,) = torch.autograd.grad(logits[target] - logits.mean(), written)
    with af.knowledge.attach_features(gpt, {1: t}), af.explain.reading(gpt, IDS) as reading:
        result = reading.answer(target)
        features = [source for source in result.entries if source.letter == "F"]
        found = {(source.position, source.neuron): source for source in features}
        assert set(found) <= set(map(tuple, weights.nonzero().tolist()))  # the weakest are summed
        assert len(found) > 50
        for (position, entry), source in found.items():
            want = weights[position, entry] * (t["W_dec"][entry] @ slope[0, position])
            assert source.effect == pytest.approx(float(want), rel=1e-9, abs=1e-12)
            assert source.activation == pytest.approx(float(weights[position, entry]), rel=1e-12)
        error = (y - weights @ t["W_dec"] - t["b_dec"]) * slope[0]
        given = [source.effect for source in result.sources if source.kind == "error"]
        assert sum(given) == pytest.approx(float(error.sum()), rel=1e-9)
        first = features[0]
        removed = reading.remove([first]).alone[0]
        fired = reading.entry(first)
    left = y[None].clone()
    left[0, first.position] -= weights[first.position, first.neuron] * t["W_dec"][first.neuron]
    hook = mlp.register_forward_hook(lambda *_: left)
    after = gpt(IDS).logits[0, -1].detach()
    hook.remove()
    logits = logits.detach()
    assert removed == pytest.approx(float(logits[target] - logits.mean() - after[target] + after.mean()), rel=1e-9)
    score = x[first.position].detach() @ t["W_enc"][:, first.neuron] + t["b_enc"][first.neuron]
    assert fired.value == pytest.approx(float(score), rel=1e-9)
    assert fired.answer == first.name == f"L1F{first.neuron}"


def test_features_carry_what_the_neurons_of_their_layer_carried():
    """What a layer writes is held in the same pass, so its parts have the same sum however they are named."""
    gpt, t = model(), tensors("b_enc", "b_dec", "W_skip")
    plain = af.explain.answer(gpt, IDS, 11)
    with af.knowledge.attach_features(gpt, {1: {**t, "b_dec": torch.zeros_like(t["b_dec"])}}):
        result = af.explain.answer(gpt, IDS, 11)
    assert result.layers == pytest.approx(plain.layers, rel=1e-9)
    assert sum(source.carried for source in result.sources) == pytest.approx(plain.value, rel=1e-9)
    parts = result.beside
    assert set(parts) == {"error", "skip"}
    assert "error     of all layers together" in str(result)


PLACES = {
    "GPT2": {}, "OPT": {}, "Mixtral": {}, "GPTNeoX": {"writes": "attention.dense"}, "Llama": {"writes": ""},
    "Gemma2": {"reads": "mlp", "writes": "post_feedforward_layernorm"}, "DeepseekV3": {"reads": "mlp", "writes": "mlp"},
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_sums_stay_exact_wherever_features_stand(name):
    one = ZOO[name].build().double().eval()
    before, logits, keys = state(one), one(IDS).logits, list(one.state_dict())
    leaf = next(one.parameters())
    slope = torch.autograd.grad(logits.sum(), leaf)[0]
    with af.knowledge.attach_features(one, {1: tensors("b_enc", "b_dec")}, **PLACES[name]) as handle:
        again = one(IDS).logits
        assert torch.equal(again, logits)
        assert torch.equal(torch.autograd.grad(again.sum(), leaf)[0], slope)
        assert list(one.state_dict()) == keys
        result = af.explain.answer(one, IDS)
        assert "layer 1 (40)" in str(handle)
    assert sum(source.carried for source in result.sources) == pytest.approx(result.value, abs=1e-9)
    assert any(source.name.startswith("L1F") for source in result.entries)
    assert any(source.kind == "error" and source.carried for source in result.sources)
    assert state(one) == before
    assert not any(hooks for part in one.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks))


def test_thresholds_of_zero_a_full_k_and_half_precision():
    gpt, t = model(), tensors("b_enc", "b_dec")

    def weights(given, **options):
        with af.knowledge.attach_features(gpt, {1: given}, **options):
            return weights_of(af.knowledge.trace(gpt, IDS, top=FEATURES).layer(1))

    plain = weights(t)
    assert torch.equal(weights({**t, "threshold": torch.zeros(FEATURES, dtype=torch.float64)}), plain)
    assert torch.equal(weights(t, k=FEATURES), plain)
    half = {name: one.bfloat16() for name, one in t.items()}
    assert torch.equal(weights(half), weights({name: one.double() for name, one in half.items()}))
    assert not weights({**t, "b_enc": torch.full((FEATURES,), -1e4, dtype=torch.float64)}).any()
    with af.knowledge.attach_features(gpt, {1: {**t, "b_enc": torch.full((FEATURES,), -1e4)}}):
        result = af.explain.answer(gpt, IDS)
    assert sum(source.carried for source in result.sources) == pytest.approx(result.value, rel=1e-9)
    assert not any(source.letter == "F" for source in result.entries)


def test_names_and_orders_of_other_libraries(tmp_path):
    gpt, t = model(), tensors("b_enc", "b_dec", "threshold", "W_skip")
    linear = {
        "encoder.weight": t["W_enc"].T, "encoder.bias": t["b_enc"], "decoder.weight": t["W_dec"].T,
        "b_dec": t["b_dec"], "activation_function.threshold": t["threshold"], "W_skip": t["W_skip"],
    }  # fmt: skip
    gemma = {name.lower(): one for name, one in t.items()} | {"affine_skip_connection": t["W_skip"].T}
    del gemma["w_skip"]
    turned = {**t, "W_enc": t["W_enc"].T, "W_dec": t["W_dec"].T}
    save_file({name: one.contiguous() for name, one in t.items()}, tmp_path / "layer.safetensors")
    np.savez(tmp_path / "layer.npz", **{name: one.numpy() for name, one in t.items()})
    answers = []
    for given in (t, linear, gemma, turned, tmp_path / "layer.safetensors", str(tmp_path / "layer.npz")):
        with af.knowledge.attach_features(gpt, {"transformer.h.1": given}):
            answers.append(af.knowledge.trace(gpt, IDS, top=FEATURES).layer(1))
    for other in answers[1:]:
        torch.testing.assert_close(other.weights, answers[0].weights, rtol=0, atol=0)
        torch.testing.assert_close(other.beside[0].norms, answers[0].beside[0].norms, rtol=1e-14, atol=0)
    square = tensors(features=WIDTH)
    named = {"encoder.weight": square["W_enc"].T, "decoder.weight": square["W_dec"].T}
    with af.knowledge.attach_features(gpt, {1: named}):
        one = af.knowledge.trace(gpt, IDS, top=WIDTH).layer(1)
        x, _ = around(gpt, 1, lambda: gpt(IDS))
    torch.testing.assert_close(weights_of(one, WIDTH), encoded(square, x))


BAD = {
    "W_dec is missing": lambda t: ({1: {"W_enc": t["W_enc"]}}, {}),
    "are not known": lambda t: ({1: {**t, "scaling_factor": t["b_enc"]}}, {}),
    "is square": lambda t: ({1: tensors(features=WIDTH)}, {}),
    "must have an axis of 32": lambda t: ({1: tensors(width=16)}, {}),
    r"b_enc must have shape \[40\] here, got \[39\]": lambda t: ({1: {**t, "b_enc": t["b_enc"][1:]}}, {}),
    "a threshold is negative": lambda t: ({1: {**t, "threshold": -t["b_enc"].abs()}}, {}),
    "W_enc must hold finite": lambda t: ({1: {**t, "W_enc": t["W_enc"] * torch.nan}}, {}),
    "given twice": lambda t: ({1: {**t, "w_enc": t["W_enc"]}}, {}),
    "a gated encoder has": lambda t: ({1: {**t, "b_gate": t["b_enc"]}}, {}),
    "pickles are not opened": lambda t: ({1: "layer.pt"}, {}),
    r"expected the number or path of one layer .*got 7": lambda t: ({7: t}, {}),
    "layers is empty": lambda t: ({}, {}),
    "k must be .* the number of features": lambda t: ({1: t}, {"k": 41}),
    "have thresholds or gates": lambda t: ({1: {**t, "threshold": t["b_enc"].abs()}}, {"k": 3}),
    "no such module": lambda t: ({1: t}, {"writes": "ffn"}),
    "is for autoencoders": lambda t: ({1: t}, {"apply_b_dec_to_input": True}),
    "layer transformer.h.1 has features already": lambda t: ({1: t, "transformer.h.1": t}, {}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused_and_the_model_left_alone(message):
    gpt = model()
    before = state(gpt)
    layers, options = BAD[message](tensors("b_enc", "b_dec"))
    with pytest.raises(ValueError, match=message):
        af.knowledge.attach_features(gpt, layers, **options)
    assert state(gpt) == before


def test_several_parts_a_second_set_and_a_conversion_are_refused():
    t = tensors("b_enc", "b_dec")
    with pytest.raises(af.UnsupportedArchitecture, match="expected one feed-forward part in"):
        af.knowledge.attach_features(ZOO["DeepseekV3"].build(), {1: t})
    gpt = model()
    with pytest.raises(TypeError, match="W_enc"):
        af.knowledge.attach_features(gpt, {1: {"W_enc": [1.0]}})
    with af.knowledge.attach_features(gpt, {1: t}):
        with pytest.raises(ValueError, match="layer 1 has features already"):
            af.knowledge.attach_features(gpt, {1: t})
        with pytest.raises(ValueError, match="convert first"):
            af.knowledge.from_ffn(gpt)


def test_a_converted_model_keeps_its_neurons_in_other_layers():
    gpt = af.knowledge.from_ffn(model())
    t = tensors("b_enc", "b_dec")
    plain = af.explain.answer(gpt, IDS)
    with af.knowledge.attach_features(gpt, {1: t}):
        trace = af.knowledge.trace(gpt, IDS)
        assert [one.letter for one in trace] == ["N", "N", "F"] or [one.letter for one in trace] == ["N", "F", "N"]
        assert trace.without == ""
        assert af.explain.answer(gpt, IDS).layers.keys() == plain.layers.keys()
        report = af.knowledge.entry(gpt, 3, layer=1, texts=[[5, 9, 14, 7, 33]], count=2)
        x, _ = around(gpt, 1, lambda: gpt(IDS))
        assert report.active == int((encoded(t, x)[:, 3] > 0).sum())
        names = [one.name for one in af.knowledge.writers(gpt, 7, count=400).entries]
        assert {name[:3] for name in names} == {"L0N", "L1F", "L2N"}
        with af.knowledge.activity(gpt) as seen:
            gpt(IDS)
        dead = next(one for one in seen.report().layers if one.layer == 1).dead
        assert dead == int((encoded(t, x) == 0).all(0).sum())
    with pytest.raises(ValueError, match="other entries are read as layer 1"):
        af.knowledge.attach_features(gpt, {1: t}, writes="")


def test_copies_of_a_model_have_features_of_their_own():
    gpt = model()
    with af.knowledge.attach_features(gpt, {1: tensors("b_enc", "b_dec")}) as handle:
        other = copy.deepcopy(gpt)
        first = af.knowledge.trace(gpt, IDS).layer(1)
    other.transformer.h[1].knowledge_features.W_enc.mul_(2)
    again = af.knowledge.trace(other, IDS).layer(1)
    assert not handle.active
    torch.testing.assert_close(first.output_norm == again.output_norm, torch.zeros(5, dtype=torch.bool))


def test_a_trained_transcoder_leaves_less_than_a_random_one():
    """ReLU features fitted to one layer: its error becomes the smaller part, and so is what it carries."""
    gpt = model()
    torch.manual_seed(0)
    texts = torch.randint(3, 60, (64, 8))
    seen = []
    hook = gpt.transformer.h[1].mlp.register_forward_hook(lambda _, given, output: seen.append((given[0], output)))
    with torch.no_grad():
        gpt(texts)
    hook.remove()
    x, y = (part.flatten(0, 1) for part in seen[0])
    start = {name: one / 4 for name, one in tensors("b_enc", "b_dec", features=128).items()}
    t = {name: one.clone().requires_grad_() for name, one in start.items()}
    step = torch.optim.Adam(t.values(), lr=1e-2)
    for _ in range(500):
        step.zero_grad()
        features = relu(x @ t["W_enc"] + t["b_enc"])
        ((features @ t["W_dec"] + t["b_dec"] - y).square().sum(1).mean() / y.var(0).sum()).backward()
        step.step()

    def left(given):
        with af.knowledge.attach_features(gpt, {1: {name: one.detach() for name, one in given.items()}}):
            return af.knowledge.trace(gpt, texts[:1]).layer(1).beside[0].norms

    _, written = around(gpt, 1, lambda: gpt(texts[:1]))
    assert (left(t) < 0.5 * written.norm(dim=1)).all()
    assert (left(start) > 2 * left(t)).all()
