"""One pass that is asked much: under any mode of PyTorch, in models whose layers run twice, and after changes."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import attnflow as af
from attnflow.explain.amounts import Strongest
from attnflow.explain.entries import Entries
from attnflow.models.subject import Subject
from tests.conformance.miniature import named
from tests.explain.test_answer import IDS, made
from tests.models import deep, tiny


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_answers_where_gradients_are_off(mode):
    model = made("GPT2")
    wanted = af.explain.answer(model, IDS, 7, 9)
    with mode():
        with af.explain.reading(model, IDS.clone()) as reading:
            found = reading.answer(7, 9)
            fired = reading.entry(found.entries[0])
            reading.graph(6)
        assert af.explain.weights(model, IDS, 0).sum() == pytest.approx(28)
    assert found.sources == wanted.sources
    assert fired.error < 1e-12


def test_a_model_that_changed_since_its_pass_is_refused():
    for change in ("weights", "hook"):
        model = made("Llama")
        with af.explain.reading(model, IDS) as reading:
            found = reading.answer(7, 9)
            reading.remove(found.edges[:1])
            if change == "weights":
                with torch.no_grad():
                    model.model.layers[0].mlp.up_proj.weight.mul_(2)
            else:
                model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 2 * output)
            with pytest.raises(RuntimeError, match="the model changed since the pass"):
                reading.remove(found.edges[:1])
            if change == "weights":
                with pytest.raises(RuntimeError, match="the model changed since the pass"):
                    reading.answer(7, 9)


@pytest.mark.parametrize("family", ["GPT2", "Bert", "GptOssForCausalLM"])
def test_the_bias_of_an_entry_is_a_constant_of_its_score(family):
    model = made(family) if family in ("GPT2", "Bert") else named(family).double().eval()
    with af.explain.reading(model, IDS) as reading:
        entry = reading.answer(7, 9).entries[0]
        fired = reading.entry(entry)
    if family != "GptOssForCausalLM":  # whose gate is limited
        act = functional.gelu if family == "Bert" else model.transformer.h[0].mlp.act
        assert float(act(torch.tensor(fired.value, dtype=torch.float64))) == pytest.approx(entry.activation, rel=1e-6)
    assert sum(source.carried for source in fired.sources) == pytest.approx(fired.value, rel=1e-9)
    assert sum(source.carried for source in fired.sources if source.kind == "constant") != 0
    lines = repr(fired).splitlines()
    assert lines[0].startswith(f"{entry.name!r} after ")
    assert lines[1].startswith(f"score {fired.value:+.3g}: carried")
    assert "nan" not in str(af.report.page(fired))


def test_entries_of_a_layer_that_runs_twice_have_the_score_of_their_run():
    model = named("AlbertForMaskedLM").double().eval()
    with af.explain.reading(model, IDS) as reading:
        found = reading.answer(7, 9)
        for layer in (0, 1):
            entry = next(entry for entry in found.entries if entry.layer == layer)
            score = torch.tensor(reading.entry(entry).value, dtype=torch.float64)
            assert float(functional.gelu(score, approximate="tanh")) == pytest.approx(entry.activation, rel=1e-6)
        assert reading.graph(12).links


def test_what_is_not_of_the_pass_and_what_is_named_twice():
    with af.explain.reading(made("Llama"), IDS) as reading:
        found = reading.answer(7, 9)
        edge, entry = found.edges[0], found.entries[0]
        once, twice = (reading.remove(items) for items in ([edge, entry], [edge, entry, edge, entry]))
        assert twice.together == pytest.approx(once.together, rel=1e-12)
        for change in ({"layer": 9}, {"head": 9}, {"key": 9}, {"query": -1}):
            with pytest.raises(ValueError, match="expected an edge of this pass"):
                reading.remove([dataclasses.replace(edge, **change)])
        for change in ({"layer": 9}, {"position": 9}, {"neuron": 999}):
            for ask in (reading.entry, lambda wrong: reading.remove([wrong])):
                with pytest.raises(ValueError, match="expected an entry of this pass"):
                    ask(dataclasses.replace(entry, **change))


def bert(kind, labels):
    torch.manual_seed(0)
    options = {name: value for name, value in tiny("Bert").config.to_dict().items() if "label" not in name}
    config = transformers.BertConfig(**options, num_labels=labels)
    return getattr(transformers, f"BertFor{kind}")(config).double().eval()


def test_classes_have_their_names_and_are_told_by_the_tokens_that_the_head_reads():
    tokens = bert("TokenClassification", 5)
    found = af.explain.answer(tokens, IDS, "LABEL_1", "LABEL_0", 2)
    assert (found.answer, found.against, found.position) == ("LABEL_1", ("LABEL_0",), 2)
    with pytest.raises(ValueError, match=r"against must be a class of the model, .*LABEL_0.*got 'good'"):
        af.explain.answer(tokens, IDS, 1, "good")
    whole = bert("SequenceClassification", 3)
    found = af.explain.answer(whole, IDS, 1)
    assert found.reach == (0, *[1] * 6)  # the head reads the first token
    assert "above the mean of all classes" in repr(found)
    config = transformers.LlamaConfig(**{**tiny("Llama").config.to_dict(), "pad_token_id": 0})
    last = transformers.LlamaForSequenceClassification(config).double().eval()
    padded = {"input_ids": torch.tensor([[5, 9, 14, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert af.explain.answer(last, padded).reach == (1, 1, 0, -1, -1)


def test_a_single_number_is_compared_with_zero():
    model = bert("SequenceClassification", 1)
    found = af.explain.answer(model, IDS)
    assert found.value == pytest.approx(float(model(IDS).logits.detach()), rel=1e-5)
    assert sum(source.carried for source in found.sources) == pytest.approx(found.value, rel=1e-9)
    assert repr(found).splitlines()[1].startswith(f"logit {found.value:+.3g} above '0': ")


@pytest.mark.parametrize("shape", [(3,), (4, 7, 7), (3, 40, 40)])
def test_the_largest_of_many_tables_are_among_the_places_found(shape):
    strongest, tables = Strongest(100), [factor * torch.rand(shape) for factor in (1.0, 0.2, 3.0, 1.5)]
    found = [(number, place) for number, t in enumerate(tables) for place in strongest.places(t).tolist()]
    every = torch.stack([table.flatten() for table in tables])
    wanted = every.flatten().topk(min(100, every.numel())).indices.tolist()
    assert {divmod(place, every.shape[1]) for place in wanted} <= set(found)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_an_entry_promotes_what_its_value_raises_behind_the_final_norm(family):
    model = made(family)
    norm = model.model.norm if family == "Llama" else model.transformer.ln_f
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.down_proj" in name or "mlp.c_proj.w" in name:
                parameter.add_(1.0)  # a mean, which a centred norm takes away
        entry = af.explain.answer(model, IDS, 7, 9).entries[0]
        layer = (model.model.layers if family == "Llama" else model.transformer.h)[entry.layer].mlp
        value = layer.down_proj.weight[:, entry.neuron] if family == "Llama" else layer.c_proj.weight[entry.neuron]
        value = value * torch.tensor(entry.activation).sign()
        table = model.get_output_embeddings().weight
        plain = (table @ (norm.weight * value)).topk(3).indices.tolist()
        value = value if family == "Llama" else value - value.mean()
        best = (table @ (norm.weight * value)).topk(3).indices.tolist()
    assert (best == plain) == (family == "Llama")
    assert [int(text) for text in entry.promotes] == best


def test_threads_may_ask_one_pass():
    model = tiny("Llama")
    wanted = {token: af.explain.answer(model, IDS, token, 9).sources for token in range(10, 18)}
    reading = af.explain.reading(model, IDS)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            found = list(pool.map(lambda token: reading.answer(token, 9).sources, wanted))
            assert found == list(wanted.values())


def test_what_is_taken_out_is_of_one_run_of_a_layer_that_runs_twice():
    """ALBERT's one layer runs twice: by hooks of our own, the entry and the head lose their value in one run alone."""
    model = named("AlbertForMaskedLM").double().eval()
    layer = model.albert.encoder.albert_layer_groups[0].albert_layers[0]
    with af.explain.reading(model, IDS) as reading:
        found = reading.answer(17, 19)
        items = [next(e for e in found.entries if e.layer == run) for run in (0, 1)]
        items += [next(e for e in found.edges if e.layer == run) for run in (0, 1)]
        lost = reading.remove(items).alone
        weights = {(a.layer, a.kind): a.weights for a in reading._held.attentions}
    for item, amount in zip(items, lost, strict=True):
        run, values = {"ffn": -1, "dense": -1}, {}

        def entry(_, args, item=item, run=run):
            run["ffn"] += 1
            changed = args[0].clone()
            if run["ffn"] == item.layer:
                changed[0, item.position, item.neuron] = 0
            return (changed,)

        def head(_, args, item=item, run=run, values=values):
            run["dense"] += 1
            changed, width = args[0].clone(), args[0].shape[-1] // 4
            part = slice(item.head * width, (item.head + 1) * width)
            if run["dense"] == item.layer:
                weight = weights[item.layer, ""][item.head, item.query, item.key]
                changed[0, item.query, part] -= weight * values["v"][0, item.key, part]
            return (changed,)

        hooks = [layer.attention.value.register_forward_hook(lambda _, __, out, values=values: values.update(v=out))]
        target, hook = (layer.ffn_output, entry) if hasattr(item, "neuron") else (layer.attention.dense, head)
        hooks.append(target.register_forward_pre_hook(hook))
        with torch.no_grad():
            logits = model(IDS).logits[0, -1]
        for handle in hooks:
            handle.remove()
        assert amount == pytest.approx(found.value - float(logits[17] - logits[19]), abs=1e-7)


@pytest.mark.parametrize("family", ["AlbertForMaskedLM", "LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_converted_model_has_the_entries_of_the_plain_one_and_keeps_them_after_removals(family):
    model = named(family).double().eval()
    plain = af.explain.answer(model, IDS, 17, 19)
    with af.explain.reading(af.knowledge.from_ffn(model), IDS) as reading:
        found = reading.answer(17, 19)
        assert [e.name for e in found.entries[:30]] == [e.name for e in plain.entries[:30]]
        assert [e.carried for e in found.entries[:30]] == pytest.approx([e.carried for e in plain.entries[:30]])
        reading.remove([*found.edges[:1], *found.entries[:2]])
        again = reading.answer(17, 19)  # a removal reads other entries, which are not those of the pass
    assert again.sources == found.sources


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3"])
def test_the_last_logits_alone_give_what_all_of_them_give(family):
    model = deep(family).double()
    alone = af.explain.answer(model, [5, 9, 14, 7, 33])
    with af.explain.reading(model, [5, 9, 14, 7, 33]) as handle:
        assert handle.answer(position=2).position == 2
        every = handle.answer(position=4)
    assert alone.position == every.position == 4
    assert alone.answer == every.answer
    assert alone.reach == every.reach
    for name in ("sources", "edges"):
        for one, other in zip(getattr(alone, name), getattr(every, name), strict=True):
            assert one.name == other.name
            assert one.carried == pytest.approx(other.carried, rel=1e-9, abs=1e-12)
            assert one.effect == pytest.approx(other.effect, rel=1e-9, abs=1e-12)


def test_one_pass_of_the_model_gives_an_answer_its_order_and_its_weights():
    model = deep("Llama").double()
    calls = []
    hook = model.lm_head.register_forward_hook(lambda _, given, logits: calls.append(logits.shape[1]))
    result = af.explain.answer(model, [5, 9, 14, 7, 33])
    hook.remove()
    assert calls == [1]
    assert len(result.reach) == 5


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_weights_are_those_that_the_model_returns(kind):
    model = deep("Llama").double()
    ids = torch.tensor([[5, 9, 14, 7, 33]])
    model.set_attn_implementation("eager")
    wanted = model(ids, output_attentions=True).attentions  # whose softmax is in float32
    model.set_attn_implementation(kind)
    for layer, weights in enumerate(wanted):
        torch.testing.assert_close(af.explain.weights(model, ids, layer), weights[0].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing", "ignore:.*fan_in_fan_out")  # peft asks for it
@pytest.mark.parametrize(
    ("family", "maps"), [("Llama", ["up_proj", "down_proj"]), ("Llama", ["gate_proj"]), ("GPT2", ["c_fc", "c_proj"])]
)
def test_layers_in_adapters_have_the_entries_of_the_merged_model(family, maps):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=maps, init_lora_weights=False, lora_dropout=0.5)
    model = peft.get_peft_model(deep(family), config).double().train()

    def asked(subject):
        with af.explain.reading(subject, IDS) as reading:
            found = reading.answer(17, 19)
            first = found.entries[:2]
            return found, [reading.entry(first[0]).value, *reading.remove(first).alone]

    (found, numbers), (wanted, others) = asked(model), asked(model.merge_and_unload())
    assert [source.name for source in found.sources] == [source.name for source in wanted.sources]
    assert [s.carried for s in found.sources] == pytest.approx([s.carried for s in wanted.sources], rel=1e-9, abs=1e-12)
    assert numbers == pytest.approx(others, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["layer", "experts", "converted experts", "store"])
def test_entries_that_are_not_what_their_module_wrote_are_refused_by_its_name(kind):
    torch.manual_seed(0)
    family = {"experts": "MixtralForCausalLM", "converted experts": "GptOssForCausalLM"}.get(kind, "LlamaForCausalLM")
    model = named(family).double().eval()
    model = af.knowledge.from_ffn(model) if kind.startswith("converted") else model
    with af.knowledge.Store.open("memory", dim=8) as store:
        if kind == "store":
            store.insert(embeddings=torch.eye(8))
            for reader in af.knowledge.attach(model, store).readers:
                nn.init.constant_(reader.gate, 0.5)
        path = max(Entries.of(Subject.of(model)).writers, key=lambda path: ("reader" in path, path))
        af.explain.answer(model, IDS, 17, 19)
        with af.explain.reading(model, IDS) as reading:  # packed experts with a hook are no known layer from here on
            hook = model.get_submodule(path).register_forward_hook(lambda module, given, output: 1.5 * output)
            with pytest.raises(af.UnsupportedArchitecture, match=f"entries of {path} do not add up to what it wrote"):
                reading.answer(17, 19)
            hook.remove()


@pytest.mark.parametrize("family", ["GptOssForCausalLM", "MixtralForCausalLM"])
def test_the_biases_of_experts_are_constants(family):
    model = named(family).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                parameter.normal_(0, 0.5)
    plain = af.explain.answer(model, IDS, 17, 19)
    found = af.explain.answer(af.knowledge.from_ffn(model), IDS, 17, 19)
    assert found.sources[-1].kind == plain.sources[-1].kind == "constant"
    assert found.sources[-1].carried == pytest.approx(plain.sources[-1].carried, rel=1e-9, abs=1e-12)
