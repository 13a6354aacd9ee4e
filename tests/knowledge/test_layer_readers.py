"""Converted layers and modular blocks look the same: what they read, and what that adds up to."""

import pytest
import torch

import attnflow as af
from attnflow.knowledge import Retrieval
from attnflow.knowledge.layered import EntryValues, readers
from attnflow.knowledge.reader import KnowledgeReader
from tests.models import modular, outputs, tiny, tokens

CONVERTED = ["Llama", "GPT2", "Phi3", "Bert"]
EXACT = Retrieval(k=6, search="exact")


def converted(name, dtype=torch.float64):
    return af.knowledge.from_ffn(tiny(name, dtype))


def made(name):
    if name == "modular":
        return modular()
    if name == "gated modular":
        return modular(gated=True, knowledge_activation="silu", threshold="coordinate")
    return converted(name)


@pytest.mark.parametrize(
    ("name", "retrieval"),
    [(name, None) for name in CONVERTED]
    + [(name, one) for name in ("modular", "gated modular") for one in (None, EXACT, Retrieval(threshold=0.05))]
    + [("modular", Retrieval(k=1, search="dense"))],
    ids=str,
)
def test_readings_add_up_to_the_output_of_the_layer(name, retrieval):
    torch.manual_seed(0)
    model, ids = made(name), tokens(2, 7)
    before = outputs(model, input_ids=ids)
    layers = readers(model)
    assert [reader.layer for reader in layers] == [0, 1]
    readings, written = [], []
    for reader in layers:
        assert reader.retrieval is None
        assert reader.observer is None
        reader.retrieval, reader.observer = retrieval, readings.append
    hooks = [
        module.register_forward_hook(lambda _, __, output: written.append(output))
        for module in model.modules()
        if isinstance(module, KnowledgeReader | EntryValues)
    ]
    found = outputs(model, input_ids=ids)
    for reader, reading, output in zip(layers, readings, written, strict=True):
        everything = torch.arange(reader.num_entries)
        assert reading.layer == reader.layer
        values = reader.values(everything)
        if reading.ids is None:
            sums = torch.einsum("bthn,hnd->btd", reading.weights, values)
        else:
            picked = reading.ids.clamp(min=0)
            weights = torch.zeros(*picked.shape[:-1], len(everything), dtype=torch.float64)
            weights = weights.scatter_add(-1, picked, reading.weights.detach())
            sums = torch.einsum("bthn,hnd->btd", weights, values)
        bias = 0 if reader.output_bias is None else reader.output_bias
        torch.testing.assert_close(sums + bias, output, rtol=1e-8, atol=1e-8)
        assert reader.thresholds(everything).shape[1:] == values.shape[:2]
    if retrieval is None or retrieval.search == "dense":
        torch.testing.assert_close(found, before, rtol=1e-9, atol=1e-9)
    else:
        assert not torch.allclose(found, before)
    for hook in hooks:
        hook.remove()
    for reader in layers:
        reader.retrieval = reader.observer = None
    count = len(readings)
    torch.testing.assert_close(outputs(model, input_ids=ids), before, rtol=0, atol=0)
    assert len(readings) == count


def test_a_converted_layer_reads_all():
    model = converted("Llama")
    with pytest.raises(ValueError, match="a converted layer reads all its entries"):
        readers(model)[0].retrieval = EXACT


def test_models_without_entries():
    with pytest.raises(ValueError, match=r"reads no knowledge base; af\.knowledge\.from_ffn opens"):
        readers(tiny("Llama"))
