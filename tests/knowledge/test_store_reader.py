"""Readers of a store in any decoder: the model as it was, then what the formula says; caches, masks, files."""

import copy
import math

import pytest
import torch

import attnflow as af
from attnflow._core.errors import UnsupportedArchitecture, WrongBase
from attnflow.knowledge import Retrieval, Store
from attnflow.knowledge.store import StoreError
from tests.knowledge.readers import DIM, opened, store_of
from tests.models import outputs, tiny, tokens

DECODERS = [
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "GPT2", "GPTNeoX", "Phi3", "OPT", "Mixtral", "Olmo2"),
    *("Cohere2", "GptOss", "DeepseekV3", "Jamba", "FalconH1", "MBartDecoder", "Gemma", "Phi", "StableLm", "Qwen3Next"),
]


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_is_as_it_was_until_the_gate_opens_and_after_the_handle_is_removed(name):
    model, ids, store = tiny(name, torch.float32), tokens(2, 7), store_of()
    own = outputs(model, input_ids=ids)
    modules, names = [type(module) for module in model.modules()], set(model.state_dict())
    with af.knowledge.attach(model, store) as handle:
        assert torch.equal(outputs(model, input_ids=ids), own)
        opened(handle)
        read = outputs(model, input_ids=ids)
        assert not torch.allclose(read, own, atol=1e-4)
        new = handle.insert(embeddings=3 * torch.tensor([[1.0], [-1.0]]).expand(-1, DIM), texts=["new", "opposite"])
        assert not torch.equal(outputs(model, input_ids=ids), read)
        store.delete(new)
        assert torch.equal(outputs(model, input_ids=ids), read)
    assert torch.equal(outputs(model, input_ids=ids), own)
    assert [type(module) for module in model.modules()] == modules
    assert set(model.state_dict()) == names
    assert not any(module._forward_hooks for module in model.modules())


def written_out(reader, hidden, values, entries):
    """The formula with loops, for causal attention: pooled values are means."""
    attention, heads = reader.attention, reader.attention.num_heads
    result = torch.zeros_like(hidden)
    for batch in range(hidden.shape[0]):
        for token in range(hidden.shape[1]):
            pooled = values[batch, :, : token + 1].mean(dim=1).flatten()
            h = hidden[batch, token]
            said = pooled / (pooled.square().mean() + torch.finfo(pooled.dtype).eps).sqrt()
            x = reader.own * h / (h.square().mean() + torch.finfo(h.dtype).eps).sqrt() + reader.pooled_map.weight @ said
            for head in range(heads):
                query = x @ attention.query[head]
                scores = torch.stack([query @ (entry @ attention.key[0, head]) for entry in entries])
                exponents = (scores / math.sqrt(attention.key_dim) + attention.constant[0, head]).exp()
                weights = exponents / (1 + exponents.sum())
                result[batch, token] += (weights @ entries) @ attention.value[head]
    return reader.gate * math.sqrt(hidden.shape[-1]) * result


def test_values_and_gradients_are_those_of_the_formula():
    model, store, ids = tiny("GPT2"), store_of(6), tokens(2, 5)
    handle = opened(af.knowledge.attach(model, store, layers=[0], key_dim=3))
    reader = handle.readers[0]
    seen = {}
    layer = model.transformer.h[0]
    attention = layer.attn

    def keep_values(module, args, output):
        value = output[..., 2 * 32 :]
        seen["values"] = value.unflatten(-1, (4, 8)).transpose(1, 2)

    hooks = [
        attention.c_attn.register_forward_hook(keep_values),
        layer.register_forward_hook(lambda *call: seen.update(after=call[2]), prepend=False),
        layer.register_forward_hook(lambda *call: seen.update(before=call[2]), prepend=True),
    ]
    model(input_ids=ids)
    tensor = {name: one[0] if isinstance(one, tuple) else one for name, one in seen.items()}
    entries = store.vectors().double()
    expected = written_out(reader, tensor["before"], tensor["values"], entries)
    torch.testing.assert_close(tensor["after"] - tensor["before"], expected, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(expected)
    parameters = list(reader.parameters())
    ours = torch.autograd.grad((tensor["after"] * direction).sum(), parameters, retain_graph=True)
    theirs = torch.autograd.grad((expected * direction).sum(), parameters)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    for hook in hooks:
        hook.remove()


def test_an_empty_store_gives_nothing_and_a_threshold_is_one_of_scores():
    model, ids, store = tiny("Llama", torch.float32), tokens(1, 5), store_of()
    own = outputs(model, input_ids=ids)
    handle = opened(af.knowledge.attach(model, store, layers=[1], retrieval=Retrieval(threshold=-1e3)))
    every, handle.readers[0].retrieval = outputs(model, input_ids=ids), None
    torch.testing.assert_close(every, outputs(model, input_ids=ids))
    store.delete(store.ids())
    assert torch.equal(outputs(model, input_ids=ids), own)
    handle.readers[0].retrieval = Retrieval(k=2, search="exact")
    assert torch.equal(outputs(model, input_ids=ids), own)
    handle.insert(embeddings=torch.ones(3, DIM))
    handle.readers[0].observer = (readings := []).append
    outputs(model, input_ids=ids)
    with pytest.raises(ValueError, match="unlike this layer"):
        handle.readers[0].error_bound(readings[0])
    handle.remove()


def test_a_trace_names_the_entries():
    model, store = tiny("Llama", torch.float32), store_of()
    with opened(af.knowledge.attach(model, store)):
        trace = af.knowledge.trace(model, [3, 1, 4], top=20)
    layer = trace.layers[0]
    assert layer.ids.shape == (3, 20)
    assert set(layer.ids.flatten().tolist()) <= set(store.ids().tolist())
    assert trace.texts[int(layer.ids[0, 0])].startswith("entry ")


def test_a_reader_is_saved_alone_and_comes_back_for_any_store_of_its_encoder(tmp_path):
    model, ids = tiny("Llama", torch.float32), tokens(2, 5)
    again = copy.deepcopy(model)
    handle = opened(af.knowledge.attach(model, store_of(), layers=[1], key_dim=4, num_heads=3))
    folder = handle.save(tmp_path / "reader")
    assert sorted(path.name for path in folder.iterdir()) == ["reader.safetensors", "reader_config.json"]
    assert (folder / "reader.safetensors").stat().st_size < 40_000
    back = af.knowledge.attach(again, store_of(), reader=folder)
    assert torch.equal(outputs(again, input_ids=ids), outputs(model, input_ids=ids))
    other = store_of(5, seed=4)
    back.remove()
    with af.knowledge.attach(again, other, reader=folder) as exchanged:
        assert "5 entries" in str(exchanged)
        assert not torch.equal(outputs(again, input_ids=ids), outputs(model, input_ids=ids))
    handle.save(tmp_path / "reader")  # in place of the old one


def test_what_does_not_fit_is_refused_and_the_model_is_as_it_was(tmp_path):
    model, ids = tiny("Llama", torch.float32), tokens(1, 5)
    own, names = outputs(model, input_ids=ids), set(model.state_dict())
    reader = opened(af.knowledge.attach(copy.deepcopy(model), store_of())).save(tmp_path / "reader")

    def refused(kind, match, model, store, **arguments):
        with pytest.raises(kind, match=match):
            af.knowledge.attach(model, store, **arguments)

    refused(ValueError, "has no entries to read", model, Store.open("memory", dim=DIM))
    refused(ValueError, "width 8, but those of memory have 4", model, store_of(dim=4), reader=reader)
    refused(ValueError, "of x@1, but those of memory are of y@2", model, store_of(encoder="y@2"), reader=reader)
    mixed = store_of()
    mixed.insert(embeddings=torch.ones(1, DIM), encoder="z@3")
    refused(ValueError, r"come from 2 \(", model, mixed, reader=reader)
    refused(
        WrongBase, "model_type is llama there and gpt2 here", tiny("GPT2", torch.float32), store_of(), reader=reader
    )
    refused(WrongBase, "other weights", tiny("Llama", torch.float32), store_of(), reader=reader)
    refused(FileNotFoundError, "holds no saved reader", model, store_of(), reader=tmp_path / "nothing")
    refused(ValueError, "reader or layers, not both", model, store_of(), reader=reader, layers=[0])
    refused(ValueError, "layer must be", model, store_of(), layers=[2])
    refused(ValueError, "each layer once", model, store_of(), layers=[1, 1])
    refused(UnsupportedArchitecture, "attention interface", tiny("Bloom", torch.float32), store_of())
    refused(ValueError, "several stacks", tiny("Bart", torch.float32), store_of())
    weights = reader / "reader.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\7")
    refused(ValueError, "damaged", model, store_of(), reader=reader)
    assert torch.equal(outputs(model, input_ids=ids), own)
    assert set(model.state_dict()) == names
    assert not any(module._forward_hooks for module in model.modules())
    handle = af.knowledge.attach(model, store_of())
    with pytest.raises(ValueError, match="reads entries"):
        af.knowledge.attach(model, store_of(), layers=[0])
    handle.readers[0].gate.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"NaN or infinity in layers\.1\.gate"):
        handle.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    model.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="a layer ran without its reader"):
        outputs(model, input_ids=ids)


def test_a_store_that_is_closed_while_the_model_runs():
    model, ids, store = tiny("Llama", torch.float32), tokens(1, 5), store_of()
    own = outputs(model, input_ids=ids)
    handle = opened(af.knowledge.attach(model, store))
    store.close()
    with pytest.raises(StoreError, match="is closed: open it again"):
        outputs(model, input_ids=ids)
    handle.remove()
    assert torch.equal(outputs(model, input_ids=ids), own)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_repeats_its_own_pass_or_says_that_it_cannot():
    model, ids, other = tiny("Llama"), tokens(1, 5), tokens(1, 5)
    handle = opened(af.knowledge.attach(model, store_of()))
    mine = list(handle.readers[0].parameters())
    model.train()
    expected = torch.autograd.grad(model(input_ids=ids).logits.square().mean(), mine)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):
        loss = model(input_ids=ids).logits.square().mean()
        with torch.no_grad():
            model(input_ids=other)
        torch.testing.assert_close(torch.autograd.grad(loss, mine), expected)
    first, _ = (model(input_ids=one).logits.square().mean() for one in (ids, other))
    try:
        ours = torch.autograd.grad(first, mine)
    except RuntimeError as error:  # releases of transformers in which the hooks of a layer are repeated with it
        assert "2 forward passes with gradients" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(ours, expected)


@pytest.mark.compiled
def test_a_compiled_model_sees_edits():
    model, ids, store = tiny("Llama", torch.float32), tokens(1, 5), store_of()
    handle = opened(af.knowledge.attach(model, store))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)
            handle.insert(embeddings=torch.ones(2, DIM))


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers' own
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_flex_attention(tmp_path):
    model, ids = tiny("Llama", torch.float32, head_dim=16), tokens(1, 5)
    handle = opened(af.knowledge.attach(model, store_of()))
    expected = outputs(model, input_ids=ids).detach()
    folder = handle.save(tmp_path)
    handle.remove()
    model.set_attn_implementation("flex_attention")
    af.knowledge.attach(model, store_of(), reader=folder)
    with torch.no_grad():
        torch.testing.assert_close(outputs(model, input_ids=ids), expected, rtol=1e-4, atol=1e-4)
