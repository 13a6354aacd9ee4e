"""The flow of an answer against oracles that share no code: hand-written transformers with the same holds."""

import dataclasses
import gc
import pickle
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch.nn import functional

import attnflow as af
from attnflow.explain.explanation import Explanation
from attnflow.models.subject import Loaded
from tests.conformance.miniature import named
from tests.models import WIDTH, deep, modular, state, tiny, tokens
from tests.models.saved import word_tokenizer

IDS = torch.tensor([[5, 9, 14, 7, 33, 21, 40]])


@dataclass
class HandWritten:
    """A transformer without attnflow and without transformers' forward: x -> logits at the last position.

    `held` has scales of norms, weights of attention and activations of an earlier run; with it the value is affine.
    """

    model: object
    family: str
    held: dict | None = None
    edge: tuple | None = None  # (layer, head, query, key, factor): what it carries is multiplied
    entry: tuple | None = None  # (layer, token, number, factor)

    def kept(self, name, value):
        return self.notes.setdefault(name, value.detach()) if self.held is None else self.held[name]

    def norm(self, module, x, name):
        if self.family == "Llama":
            square = x.pow(2).mean(-1, keepdim=True)
            return module.weight * x * self.kept(name, (square + module.variance_epsilon) ** -0.5)
        x = x - x.mean(-1, keepdim=True)
        scale = self.kept(name, (x.pow(2).mean(-1, keepdim=True) + module.eps) ** -0.5)
        return module.weight * x * scale + module.bias

    def linear(self, module, x):
        weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight
        return functional.linear(x, weight, module.bias)

    def rotated(self, x):
        half, place = x.shape[-1] // 2, torch.arange(x.shape[1], dtype=torch.float64)
        angle = place[:, None] * self.model.model.rotary_emb.inv_freq.double()
        angle = torch.cat([angle, angle], -1)
        return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()

    def attend(self, number, qkv, causal):
        q, k, v = qkv
        if self.family == "Llama":
            q, k = self.rotated(q), self.rotated(k)
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        weights = self.kept(f"w{number}", scores.softmax(-1))
        if self.edge is not None and self.edge[0] == number:
            weights = weights.clone()
            weights[self.edge[1:4]] *= self.edge[4]
        return (weights @ v).transpose(0, 1).flatten(1)

    def activated(self, number, a):
        a = self.kept(f"a{number}", a)
        if self.entry is not None and self.entry[0] == number:
            a = a.clone()
            a[self.entry[1], self.entry[2]] *= self.entry[3]
        return a

    def heads(self, x, module):
        return x.unflatten(-1, (-1, WIDTH // 4)).transpose(0, 1)

    def __call__(self, x):
        self.notes = {}
        return getattr(self, self.family)(x)

    def Llama(self, x):
        for n, layer in enumerate(self.model.model.layers):
            h, at = self.norm(layer.input_layernorm, x, f"n{n}"), layer.self_attn
            qkv = [self.heads(self.linear(p, h), p) for p in (at.q_proj, at.k_proj, at.v_proj)]
            x = x + self.linear(at.o_proj, self.attend(n, qkv, True))
            h, mlp = self.norm(layer.post_attention_layernorm, x, f"m{n}"), layer.mlp
            a = functional.silu(self.linear(mlp.gate_proj, h)) * self.linear(mlp.up_proj, h)
            x = x + self.linear(mlp.down_proj, self.activated(n, a))
        return self.linear(self.model.lm_head, self.norm(self.model.model.norm, x, "f")[-1])

    def GPT2(self, x):
        for n, layer in enumerate(self.model.transformer.h):
            h = self.norm(layer.ln_1, x, f"n{n}")
            qkv = [self.heads(p, None) for p in self.linear(layer.attn.c_attn, h).chunk(3, -1)]
            x = x + self.linear(layer.attn.c_proj, self.attend(n, qkv, True))
            a = layer.mlp.act(self.linear(layer.mlp.c_fc, self.norm(layer.ln_2, x, f"m{n}")))
            x = x + self.linear(layer.mlp.c_proj, self.activated(n, a))
        return self.linear(self.model.lm_head, self.norm(self.model.transformer.ln_f, x, "f")[-1])

    def Bert(self, x):
        for n, layer in enumerate(self.model.bert.encoder.layer):
            at = layer.attention.self
            qkv = [self.heads(self.linear(p, x), p) for p in (at.query, at.key, at.value)]
            out = self.linear(layer.attention.output.dense, self.attend(n, qkv, False))
            x = self.norm(layer.attention.output.LayerNorm, x + out, f"n{n}")
            a = functional.gelu(self.linear(layer.intermediate.dense, x))
            x = self.norm(layer.output.LayerNorm, x + self.linear(layer.output.dense, self.activated(n, a)), f"m{n}")
        head = self.model.cls.predictions
        z = self.linear(head.transform.dense, x[-1:])
        z = z * self.kept("g", functional.gelu(z) / z)  # the activation of the head keeps its quotient
        return self.linear(head.decoder, self.norm(head.transform.LayerNorm, z, "f")[-1])


def made(family):
    torch.manual_seed(0)
    if family == "Bert":
        model = transformers.BertForMaskedLM(tiny("Bert").config).double().eval()
    else:
        model = tiny(family, torch.float64, **({"num_key_value_heads": 2} if family == "Llama" else {}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def embedded(model, family):
    with torch.no_grad():
        if family == "Llama":
            return model.model.embed_tokens(IDS)[0]
        if family == "GPT2":
            return (model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(7)))[0]
        return model.bert.embeddings(IDS)[0]


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_every_amount_is_what_a_hand_written_model_says(family):
    """A source's share is what the held, affine value loses without it; effects are slopes of the value itself."""
    model = made(family)
    plain, x = HandWritten(model, family), embedded(model, family)

    def value(run, x=x):
        with torch.no_grad():
            logits = run(x)
        return float(logits[7] - logits[[9, 11]].mean())

    whole = value(plain)
    torch.testing.assert_close(plain(x), model(IDS).logits[0, -1], rtol=1e-3, atol=1e-5)  # which has float32 in it
    held = {"held": plain.notes}
    found = af.explain.answer(model, IDS, 7, [9, 11])
    assert found.value == pytest.approx(whole, rel=1e-12)
    assert sum(source.carried for source in found.sources) == pytest.approx(whole, rel=1e-10)
    assert found.error < 1e-12

    def without(factor, **part):
        return value(HandWritten(model, family, **{k: (*v, factor) for k, v in part.items()}, **held))

    def slope(step=1e-4, **part):
        ((kind, place),) = part.items()
        up, down = (value(HandWritten(model, family, **{kind: (*place, 1 + s)})) for s in (step, -step))
        return (up - down) / (2 * step)

    for source in found.tokens:
        zeroed = x.clone()
        zeroed[source.position] = 0
        assert source.carried == pytest.approx(whole - value(HandWritten(model, family, **held), zeroed), abs=1e-11)
    for source in [*found.entries[:6], *found.entries[-3:]]:
        part = {"entry": (source.layer, source.position, source.neuron)}
        assert source.carried == pytest.approx(whole - without(0.0, **part), abs=1e-11)
        assert source.effect == pytest.approx(slope(**part), abs=1e-7)
    for edge in [*found.edges[:8], *found.edges[-3:]]:
        part = {"edge": (edge.layer, edge.head, edge.query, edge.key)}
        assert edge.carried == pytest.approx(whole - without(0.0, **part), abs=1e-11)
        assert edge.effect == pytest.approx(slope(**part), abs=1e-7)
        assert edge.weight == pytest.approx(float(plain.notes[f"w{edge.layer}"][edge.head, edge.query, edge.key]))
    removed = [*found.edges[:3], *found.entries[:3]]
    with af.explain.reading(model, IDS) as reading:
        reading.answer(7, [9, 11])
        lost = reading.remove(removed)
    for item, amount in zip(removed, lost.alone, strict=True):
        kind = "edge" if item in found.edges else "entry"
        place = (item.head, item.query, item.key) if kind == "edge" else (item.position, item.neuron)
        changed = HandWritten(model, family, **{kind: (item.layer, *place, 0.0)})
        assert amount == pytest.approx(whole - value(changed), abs=1e-10)


def test_amounts_are_conserved_from_layer_to_layer():
    found = af.explain.answer(made("Llama"), IDS, 7, 9)
    for layer, (here, after) in enumerate(zip(found.arrived[:-1], found.arrived[1:], strict=True)):
        assert float(after.sum() - here.sum()) == pytest.approx(found.layers[layer], abs=1e-9)
    assert float(found.arrived[-1].sum()) == pytest.approx(found.value, abs=1e-9)  # no biases in its head
    assert float(found.arrived[-1, :-1].abs().sum()) == 0
    edges = [edge for edge in found.edges if edge.layer == 1]
    heads = torch.zeros_like(found.heads[1])
    for edge in edges:
        heads[edge.head] += edge.carried
    torch.testing.assert_close(heads, found.heads[1], rtol=1e-5, atol=1e-7)


CLOSED = [
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Qwen3ForCausalLM", "PhiForCausalLM"),
    *("GPTNeoXForCausalLM", "CohereForCausalLM", "GraniteForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM"),
    *("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "JambaForCausalLM", "FalconH1ForCausalLM", "OPTForCausalLM"),
    *("ModernBertForMaskedLM", "AlbertForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
    *("Llama4ForCausalLM", "Gemma3nForCausalLM", "MarianMTModel", "T5GemmaForConditionalGeneration"),
]


@pytest.mark.parametrize("name", CLOSED)
def test_sources_sum_to_the_value_in_every_family(name):
    """Gates, parallel layers, norms after layers, experts, sinks, softcaps, latent attention, mixers, two halves."""
    model = named(name).double().eval()
    inputs = {"input_ids": IDS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS[:, :4]
    found = af.explain.answer(model, inputs, 17, 19)
    assert found.error < 1e-9
    assert sum(source.carried for source in found.sources) == pytest.approx(found.value, abs=1e-8)
    assert {edge.half for edge in found.edges} == ({"", "cross", "encoder"} if "decoder_input_ids" in inputs else {""})
    assert found.edges
    with af.explain.reading(model, inputs) as reading:
        reading.answer(17, 19)
        if found.entries:  # a removal and the estimate of it have the size of one another
            entry = found.entries[0]
            (lost,) = reading.remove([entry]).alone
            assert lost == pytest.approx(entry.effect, rel=0.5, abs=0.05)


def test_a_model_that_is_no_such_sum_is_refused_with_the_place():
    model = tiny("Llama")
    layer = model.model.layers[1]
    layer.register_forward_hook(lambda _, __, output: output + output.pow(3))
    with pytest.raises(af.UnsupportedArchitecture, match=r"does not add up to the value \(off by .* most of it in"):
        af.explain.answer(model, IDS)


def test_what_passes_a_forbidden_pair_is_a_leak():
    model = deep("Llama").double()
    clean = af.explain.answer(model, IDS)
    assert clean.ok
    assert clean.leaks == ()
    assert clean.reach == (*[1] * 6, 0)

    def peek(_, args, kwargs):
        return args, kwargs | {"attention_mask": torch.zeros(1, 1, 7, 7, dtype=torch.float64)}

    model.model.layers[0].self_attn.register_forward_pre_hook(peek, with_kwargs=True)
    found = af.explain.answer(model, IDS)
    assert not found.ok
    assert {edge.layer for edge in found.leaks} == {0}
    assert all(edge.key > edge.query for edge in found.leaks)
    assert "LEAK: " in repr(found)


def test_answers_by_name_by_default_and_by_class():
    model, tokenizer = tiny("Llama"), word_tokenizer(["[UNK]", *(f"w{i}" for i in range(49))])
    loaded = Loaded(model, tokenizer)
    found = af.explain.answer(loaded, "w4 w5 w6", measure=2)
    logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1].detach()
    assert found.answer_id == int(logits.argmax())
    assert found.value == pytest.approx(float(logits.max() - logits.mean()), rel=1e-5)
    assert found.probability == pytest.approx(float(logits.softmax(0).max()), rel=1e-5)
    assert [edge.removed is not None for edge in found.causes[:3]] == [True, True, False]
    lines = repr(found).splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 80
    assert af.explain.answer(loaded, "w4 w5 w6", "w1", ["w2", 5]).against == ("w2", "w4")
    torch.manual_seed(0)
    classes = transformers.BertForSequenceClassification(tiny("Bert").config).double().eval()
    judged = af.explain.answer(classes, IDS, "LABEL_1", "LABEL_0")
    assert (judged.answer, judged.against, judged.position) == ("LABEL_1", ("LABEL_0",), None)
    assert judged.error < 1e-10
    assert " for '5 9 14 7" in repr(judged)
    for call, message in (
        (lambda: af.explain.answer(loaded, "w4", "w1 w2"), "expected one token, but 'w1 w2' is 2"),
        (lambda: af.explain.answer(loaded, "w4", 7, 7), "is compared with itself"),
        (lambda: af.explain.answer(loaded, "w4", 50), "answer must be"),
        (lambda: af.explain.answer(loaded, "w4", position=3), "position must be"),
        (lambda: af.explain.answer(model, tokens(2, 4)), "one sequence"),
        (lambda: af.explain.answer(classes, IDS, 1, position=2), "whole sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for refused, message in ((tiny("Llama", torch.bfloat16), "call model.float"), (tiny("Bert"), "returns no logits")):
        with pytest.raises(af.UnsupportedArchitecture, match=message):
            af.explain.answer(refused, IDS)


def test_why_an_edge_and_what_made_an_entry_fire():
    model = made("Llama")
    with af.explain.reading(model, IDS) as reading:
        found = reading.answer(7, 9)
        edge = next(edge for edge in found.edges if edge.layer == 1 and edge.query > 2)
        why = reading.why(edge, against=2 if edge.key != 2 else 1)
        total = sum(term.value for term in why.contrast(10**6)) + why.contrast_constant
        assert total == pytest.approx(float(why.scores[0] - why.scores[1]), rel=1e-10)
        assert reading.why(edge).against not in (0, edge.key)
        entry = next(entry for entry in found.entries if entry.layer == 1)
        fired = reading.entry(entry)
        seen = {}
        model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda _, __, out: seen.update(score=out))
        model(IDS)
        score = float(seen["score"][0, entry.position, entry.neuron].detach())
        assert fired.value == pytest.approx(score, rel=1e-5)
        assert sum(source.carried for source in fired.sources) == pytest.approx(fired.value, rel=1e-9)
        graph = reading.graph(nodes=12)
        assert graph.links
        for link in graph.links:
            giver, taker = graph.nodes[link.source], graph.nodes[link.target]
            assert giver.position <= taker.position
            assert -1 if giver.layer is None else giver.layer < taker.layer
    with pytest.raises(RuntimeError, match="was removed"):
        reading.answer()


@pytest.mark.parametrize(
    ("family", "position", "where"),
    [
        ("Bert", 2, " at 14 in '5 9 14 7 33 21 40'"),
        ("Bert", -1, " after '5 9 14 7 33 21 40'"),  # nothing tells it from a next token
        ("Llama", 2, " after '5 9 14'"),
    ],
)
def test_what_is_printed_says_where_the_answer_stands(family, position, where):
    found = af.explain.answer(made(family), IDS, position=position)
    assert repr(found).splitlines()[0].endswith(f"%){where}")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft asks for it
@pytest.mark.parametrize("kind", ["converted", "modular", "store", "bias", "mask", "lora"])
def test_what_attnflow_put_on_a_model_is_part_of_the_flow(kind):
    torch.manual_seed(0)
    model = tiny("Llama")
    plain = af.explain.answer(model, IDS, 7, 9)
    if kind == "converted":
        found = af.explain.answer(af.knowledge.from_ffn(model), IDS, 7, 9)
        assert [e.name for e in found.entries[:20]] == [e.name for e in plain.entries[:20]]
        assert [e.effect for e in found.entries[:20]] == pytest.approx([e.effect for e in plain.entries[:20]])
    elif kind == "modular":
        found = af.explain.answer(modular(), IDS % 24, 7, 9)
        assert found.entries
    elif kind == "store":
        with af.knowledge.Store.open("memory", dim=8) as store:
            store.insert(embeddings=torch.eye(8), texts=[f"fact {i}" for i in range(8)])
            with af.knowledge.attach(model, store) as handle:
                with torch.no_grad():
                    for reader in handle.readers:
                        reader.gate.fill_(0.5)
                found = af.explain.answer(model, IDS, 7, 9)
                assert any(entry.text.startswith("fact ") for entry in found.entries)
                assert abs(found.value - plain.value) > 1e-6
                assert found.value == pytest.approx(
                    float((lambda x: x[7] - x[9])(model(IDS).logits[0, -1].detach())), rel=1e-4
                )
    elif kind == "bias":
        handle = af.bias.attach(model, af.bias.GuidanceConfig())
        with torch.no_grad():
            for parameter in handle.parameters():
                parameter.normal_(0, 0.5)
        found = af.explain.answer(model, IDS, 7, 9)
        assert any(edge.bias for edge in found.edges)
        with af.explain.reading(model, IDS) as reading:
            reading.answer(7, 9)
            (lost,), edge = reading.remove(found.edges[:1]).alone, found.edges[0]
        values, width = {}, WIDTH // 4

        def without(_, args):
            heads = args[0].clone()
            given = edge.weight * values["v"][0, edge.key, edge.head * width :][:width]
            heads[0, edge.query, edge.head * width :][:width] -= given
            return (heads,)

        at = model.model.layers[edge.layer].self_attn
        at.v_proj.register_forward_hook(lambda _, __, out: values.update(v=out))
        at.o_proj.register_forward_pre_hook(without)
        logits = model(IDS).logits[0, -1].detach()
        assert lost == pytest.approx(found.value - float(logits[7] - logits[9]), abs=1e-5)
        weights = af.explain.weights(model, IDS, -1)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    elif kind == "mask":
        with af.masks.attach(model, af.masks.sliding_window(7, window=2)):
            found = af.explain.answer(model, IDS, 7, 9)
            assert all(0 <= edge.query - edge.key < 2 for edge in found.edges)
    else:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        found = af.explain.answer(model.double(), IDS, 7, 9)
    assert found.error < 1e-9


def test_an_explanation_is_data_and_leaves_the_model_alone():
    model = tiny("Llama").train()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    before, flags = state(model), [parameter.requires_grad for parameter in model.parameters()]
    found = af.explain.answer(model, IDS, measure=1)
    assert state(model) == before
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert model.training
    again = pickle.loads(pickle.dumps(found))
    assert again.sources == found.sources
    read = Explanation.from_json(found.to_json())
    assert read.edges == found.edges
    assert read.value == found.value
    assert len(found.rows()) == len(found.sources) + len(found.edges)
    assert dataclasses.is_dataclass(found)
    del model
    gc.collect()
    assert not any(isinstance(held, torch.nn.Module) for held in gc.get_referents(found))
