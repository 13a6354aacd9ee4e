"""Zooming into a component: each part against its removal from the model by hooks, with norms held by hand."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import attnflow as af
from attnflow.geometry.attribution import ComponentZoom
from attnflow.models.evaluation import precision
from tests.models import deep, tiny
from tests.models.table import in_double

IDS = torch.randint(3, 40, (1, 9), generator=torch.Generator().manual_seed(1))
TARGET, HEAD = 2, 1


def disturbed(model: nn.Module) -> nn.Module:
    """In float64, and no bias or gain is 0 or 1 throughout."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return in_double(model).eval()


@dataclass(frozen=True)
class Family:
    """Where the modules are, and what its norms compute: gain * (x - mean) / length."""

    layers: str
    attention: str
    feed_forward: str
    before: str  # norm before attention
    after: tuple[str, str] | None = None  # norms after attention and feed-forward
    out: str = "o_proj"
    last: str = "down_proj"
    centred: bool = False
    one_more: bool = False


FAMILIES = {
    "Llama": Family("model.layers", "self_attn", "mlp", "input_layernorm"),
    "GptOss": Family("model.layers", "self_attn", "mlp", "input_layernorm"),
    "Gemma2": Family(
        "model.layers",
        "self_attn",
        "mlp",
        "input_layernorm",
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
        one_more=True,
    ),
    "GPT2": Family("transformer.h", "attn", "mlp", "ln_1", out="c_proj", last="c_proj", centred=True),
}


class Written:
    """One pass of a model, and the same pass with less in one component, seen through hooks."""

    @torch.no_grad()
    def __init__(self, name: str) -> None:
        self.family = FAMILIES[name]
        self.model = disturbed(deep(name, **({"num_key_value_heads": 2} if name == "Llama" else {})))
        self.layers = self.model.get_submodule(self.family.layers)
        self.model.set_attn_implementation("eager")
        with precision(self.model, torch.float64):
            self.weights = [one[0] for one in self.model(IDS, output_attentions=True).attentions]
        self.model.set_attn_implementation("sdpa" if name == "Llama" else "eager")
        self.query, self.key, self.value, self.scaling = self.states(TARGET)
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        hooks = [module.register_forward_hook(self._keep) for module in self.model.modules()]
        with precision(self.model, torch.float64):
            self.model(IDS)
        for hook in hooks:
            hook.remove()

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            self.inputs[module] = inputs[0].detach()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            self.outputs[module] = first.detach()

    def part(self, layer: int, name: str) -> nn.Module:
        return self.layers[layer].get_submodule(name)

    @torch.no_grad()
    def states(self, layer: int, change: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, float]:
        """Queries, keys and values that reach attention, and its scaling, with a change of the module's input."""
        seen: list[tuple[Tensor, Tensor, Tensor, float]] = []
        target = self.part(layer, self.family.attention)

        def attend(module, query, key, value, mask, **kwargs):
            if module is target:
                seen.append((query[0], key[0], value[0], kwargs["scaling"]))
            return sys.modules[type(module).__module__].eager_attention_forward(
                module, query, key, value, mask, **kwargs
            )

        def replaced(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            new = hidden if change is None else hidden + change
            return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})

        AttentionInterface.register("tests_zoom", attend)
        AttentionMaskInterface.register("tests_zoom", eager_mask)
        before, hook = (
            self.model.config._attn_implementation,
            target.register_forward_pre_hook(replaced, with_kwargs=True),
        )
        self.model.set_attn_implementation("tests_zoom")
        try:
            with precision(self.model, torch.float64):
                self.model(IDS)
        finally:
            hook.remove()
            self.model.set_attn_implementation(before)
        return seen[0]

    def held(self, norm: nn.Module, vector: Tensor, position: int) -> Tensor:
        """What a norm makes of a summand of its input at a position, by its scale there."""
        x = self.inputs[norm][0, position]
        eps = next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))
        if self.family.centred:
            x, vector = x - x.mean(), vector - vector.mean()
        return vector * (norm.weight + self.family.one_more) / (x.pow(2).mean() + eps).sqrt()

    def contribution(self, vector: Tensor, layer: int, feed_forward: bool, side: str, query: int, key: int):
        """What a vector that a sublayer wrote makes of the score, as (centred over the row, raw)."""
        position = query if side == "query" else key
        if self.family.after is not None:
            vector = self.held(self.part(layer, self.family.after[feed_forward]), vector, position)
        change = torch.zeros_like(self.inputs[self.part(TARGET, self.family.before)])
        change[0, position] = -self.held(self.part(TARGET, self.family.before), vector, position)
        less_query, less_key, *_ = self.states(TARGET, change)
        group = len(self.query) // len(self.key)
        kv = HEAD // group
        scores = self.scaling * self.key[kv] @ self.query[HEAD, query]
        if side == "key":
            lost = self.scaling * (self.key[kv] - less_key[kv])[key] @ self.query[HEAD, query]
            return float(lost), float(lost)
        lost = self.scaling * self.key[kv] @ (self.query[HEAD] - less_query[HEAD])[query]
        cap = getattr(self.model.config, "attn_logit_softcapping", None)
        slope = torch.ones_like(scores) if cap is None else 1 - torch.tanh(scores / cap) ** 2
        return float(slope[key] * lost[key] - (self.weights[TARGET][HEAD, query] * slope) @ lost), float(lost[key])

    def of_head(self, layer: int, head: int, source: int, position: int) -> Tensor:
        """What a head brought from a token: its weight, times the value through its part of the output matrix."""
        _, _, values, _ = self.states(layer)
        out = self.part(layer, self.family.attention).get_submodule(self.family.out)
        matrix = out.weight.T if isinstance(out, nn.Linear) else out.weight  # [heads * head_dim, width]
        value = values[head * len(values) // len(self.weights[layer])][source]
        return self.weights[layer][head, position, source] * value @ matrix.unflatten(0, (-1, len(value)))[head]

    @torch.no_grad()
    def of_entry(self, layer: int, entry: int, position: int) -> Tensor:
        """What the layer writes less without an entry, which a hook sets to zero."""
        module = self.part(layer, self.family.feed_forward)
        given, found = self.inputs[module], []

        def without(x):
            return x.index_fill(-1, torch.tensor([entry]), 0.0)

        with precision(self.model, torch.float64):
            found.append(module(given))
            if hasattr(module, "experts"):  # GPT-OSS: one function makes the weights of all experts
                gate = module.experts._apply_gate
                module.experts._apply_gate = lambda x: without(gate(x))
                found.append(module(given))
                del module.experts._apply_gate
            else:
                hook = module.get_submodule(self.family.last).register_forward_pre_hook(lambda _, x: (without(x[0]),))
                found.append(module(given))
                hook.remove()
        found = [one[0] if isinstance(one, tuple) else one for one in found]
        return (found[0] - found[1]).reshape(-1, found[0].shape[-1])[position]


@pytest.fixture(scope="module", params=FAMILIES)
def written(request):
    return Written(request.param)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_part_is_what_the_score_loses_without_it(written, layer, side):
    """A head's weighted value of one token, an entry that a hook sets to zero, and all that the component wrote."""
    result = af.geometry.attribute(written.model, IDS, TARGET, HEAD)
    key = result.keys[len(result.keys) // 2]
    position = result.query if side == "query" else key
    for kind in ("attention", "feed-forward"):
        zoom = result.zoom(f"layer {layer} {kind}", side=side, key=key, count=None)
        assert (zoom.kind, zoom.component_layer, zoom.position, zoom.num_others) == (kind, layer, position, 0)
        feed_forward = kind == "feed-forward"
        chosen = [*zoom.parts[:6], *zoom.parts[6::9]]
        for part in chosen:
            if feed_forward:
                vector = written.of_entry(layer, part.entry, position)
            else:
                vector = written.of_head(layer, part.head, part.source, position)
                assert part.weight == pytest.approx(float(written.weights[layer][part.head, position, part.source]))
                assert part.token == str(int(IDS[0, part.source]))
            expected = written.contribution(vector, layer, feed_forward, side, result.query, key)
            assert (part.value, part.raw) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        module = written.part(layer, written.family.feed_forward if feed_forward else written.family.attention)
        whole = written.outputs[module].reshape(-1, written.outputs[module].shape[-1])[position]
        expected = written.contribution(whole, layer, feed_forward, side, result.query, key)
        assert (zoom.total.value, zoom.total.raw) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert sum(part.raw for part in zoom.parts) + zoom.rest.raw == pytest.approx(zoom.total.raw, abs=1e-9)
        assert sum(part.value for part in zoom.parts) + zoom.rest.value == pytest.approx(zoom.total.value, abs=1e-9)
        assert max(abs(part.raw) for part in zoom.parts) > 1e-4


@pytest.mark.parametrize(
    "name", ["Bert", "ModernBert", "Cohere", "DeepseekV3", "Qwen2Moe", "Qwen3Moe", "Mixtral", "FalconH1", "T5", "Bart"]
)
def test_totals_are_the_margins_of_the_attribution(name):
    """Without biases; with norms after the sublayer, shared and routed experts, parallel blocks, two halves."""
    model = in_double(deep(name)).eval()
    inputs = {"input_ids": IDS}
    two = model.config.is_encoder_decoder
    if two:
        inputs["decoder_input_ids"] = IDS.flip(1)[:, :6]
    for attention in ("self", "cross") if two else ("self",):
        result = af.geometry.attribute(model, inputs, -1, HEAD, attention=attention)
        assert not result.constants["biases"].abs().max() > 1e-9
        column = int(result.weights.argmax())
        for side, names in (("query", result.components), ("key", result.key_components)):
            split = 0
            margins = {raw: getattr(result, f"by_{side}_component")(raw=raw)[column] for raw in (True, False)}
            for index, component in enumerate(names):
                if "embedding" in component or "mixer" in component:
                    continue
                zoom, split = result.zoom(component, side=side), split + 1
                assert zoom.total.raw == pytest.approx(float(margins[True][index]), abs=1e-9)
                assert zoom.total.value == pytest.approx(float(margins[side == "key"][index]), abs=1e-9)
                assert len(zoom.parts) == 10 or not zoom.num_others
                listed = sum(part.raw for part in zoom.parts) + zoom.others.raw
                assert listed + zoom.rest.raw == pytest.approx(zoom.total.raw, abs=1e-9)
                source = "decoder_input_ids" if two and "encoder" not in component and "cross" not in component else ""
                for part in zoom.parts if zoom.kind == "attention" else ():
                    assert part.token == str(int(inputs[source or "input_ids"][0, part.source]))
            assert split >= 2


def test_a_part_leads_to_the_next_question():
    model = deep("Llama", num_key_value_heads=2).double().eval()
    zoom = af.geometry.attribute(model, IDS, TARGET, HEAD).zoom("layer 1 attention")
    part = zoom.top(1)[0]
    again = af.geometry.attribute(model, IDS, zoom.component_layer, head=part.head, query=zoom.position)
    assert part.weight == pytest.approx(float(again.weights[again.keys.index(part.source)]), abs=1e-9)
    assert again.tokens[again.keys.index(part.source)] == part.token


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_entries_have_the_numbers_and_weights_of_a_trace(name):
    model = deep(name).float().eval()
    zoom = af.geometry.attribute(model, IDS, TARGET, HEAD).zoom("layer 1 feed-forward", count=None)
    size = model.config.intermediate_size
    experts = getattr(model.config, "num_local_experts", 1)
    fired = af.knowledge.trace(af.knowledge.from_ffn(model), IDS, top=size).fired(zoom.position)
    weights = {one.entry: one.weight for one in fired if one.layer == 1}
    for part in zoom.top(5):
        number = experts * size + (part.expert or 0) * size + part.entry
        assert weights[number] == pytest.approx(part.weight, rel=1e-4)


def test_a_layer_that_writes_nothing_has_no_entries():
    model = deep("Llama").double().eval()
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    zoom = af.geometry.attribute(model, IDS, TARGET, HEAD).zoom("layer 0 feed-forward")
    assert (zoom.parts, zoom.num_others, zoom.total.raw) == ((), 0, 0.0)
    af.report.figure(zoom)


def test_a_model_with_sinks_gives_results_without_a_graph():
    result = af.geometry.attribute(deep("GptOss"), IDS, TARGET)
    assert not result.weights.requires_grad
    assert not result.centred.requires_grad


def attributed(name="Llama", head=HEAD, **options):
    return af.geometry.attribute(tiny(name), IDS, -1, head, **options)


def crossed():
    return af.geometry.attribute(tiny("T5"), {"input_ids": IDS, "decoder_input_ids": IDS}, -1, HEAD, attention="cross")


REFUSED = {
    "unknown component": (attributed, {"component": "layer 7 attention"}, ValueError, "must be one of"),
    "component of the other side": (
        crossed,
        {"component": "layer 0 attention", "side": "key"},
        ValueError,
        "encoder embedding.* on the side of the key, got 'layer 0 attention'",
    ),
    "side": (attributed, {"side": "both"}, ValueError, 'side must be "query" or "key", got \'both\''),
    "key": (lambda: attributed(keys=[1, 2]), {"key": 5}, ValueError, r"key must be one of the positions .*got 5"),
    "no head": (lambda: attributed(head=None), {}, ValueError, r"is of 4 heads: name the one to zoom into"),
    "another head": (attributed, {"head": 3}, ValueError, r"head must be one of the attributed .*got 3"),
    "count": (attributed, {"count": 0}, ValueError, "count must be at least 1, got 0"),
    "from a file": (
        lambda: af.geometry.attribution.ScoreAttribution.from_json(attributed().to_json()),
        {},
        ValueError,
        r"call af\.geometry\.attribute again",
    ),
    "embedding": (attributed, {"component": "embedding"}, af.UnsupportedArchitecture, "one vector of each token"),
    "mixer": (
        lambda: attributed("FalconH1"),
        {"component": "layer 0 mixer"},
        af.UnsupportedArchitecture,
        "a recurrence or convolution",
    ),
    "experts in one matrix": (
        lambda: af.geometry.attribute(in_double(deep("Dbrx")), IDS, 1, HEAD),
        {"component": "layer 0 feed-forward"},
        af.UnsupportedArchitecture,
        "parts do not add up to its share",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_words(what):
    make, options, kind, message = REFUSED[what]
    result = make()
    options = {"component": "layer 0 attention", **options}
    with pytest.raises((kind, TypeCheckError)) as caught:
        result.zoom(options.pop("component"), **options)
    assert isinstance(caught.value, TypeCheckError) or re.search(message, str(caught.value))


def test_a_zoom_is_written_and_read_again():
    zoom = attributed().zoom("layer 0 feed-forward")
    again = ComponentZoom.from_json(zoom.to_json())
    assert again.parts == zoom.parts
    assert [row["entry"] for row in again.rows()] == [part.entry for part in zoom.parts]
    figure = af.report.figure(zoom)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0].startswith(f"entry {zoom.parts[0].entry}, ")
    assert labels[-2:] == [f"{zoom.num_others} other parts", "sum of all"]
