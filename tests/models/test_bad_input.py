"""What is damaged, hostile, incomplete or in a form that is not opened gives a clear error, and no numbers."""

from __future__ import annotations

import builtins
import json
import shutil
import struct

import pytest
import torch
from jaxtyping import TypeCheckError
from safetensors.torch import save_file
from torch import nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.score import score
from attnflow.models.loading.loader import load_model
from attnflow.models.weights.checkpoints import BadCheckpoint, open_weights
from tests.models import ZOO
from tests.models.checkpoints import repack, same_weights, write_gguf

FOUR_HEADS = {"num_attention_heads": 4}


def cut(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    return file


def pickled(folder):
    torch.save({"q": _Sets()}, folder / "pytorch_model.bin")
    return folder


def queries_and_keys():
    return {f"blk.0.attn_{letter}.weight": torch.randn(32, 32) for letter in "qk"}


def header(folder, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(64))
    return folder


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]} | changes}


def gguf(folder):
    return write_gguf(folder / "m.gguf", "llama", queries_and_keys(), kv_heads=4)


def safe(folder):
    save_file(queries_and_keys(), folder / "model.safetensors")
    return folder / "model.safetensors"


NESTED = struct.pack("<IQ", 9, 1) * 5000


def gguf_list(folder, content):
    """A file of version 3, without tensors, with the one key "a", a list (9)."""
    (folder / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 9) + content)
    return folder


def scaled(folder, size):
    tensors = {"a": torch.ones(4, 4).to(torch.float8_e4m3fn), "a_scale": torch.ones(2, 2)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": size}}))
    return folder


def configured(folder, text):
    safe(folder)
    (folder / "config.json").write_text(text)
    return folder


class _Sets:
    def __reduce__(self):
        return exec, ("import builtins; builtins.attnflow_was_here = True",)


HEADER = r"model\.safetensors is not a safetensors file, or is truncated or damaged"
BAD_FILES = {
    **{f"gguf cut at {k}": (lambda d, k=k: cut(gguf(d), k), "truncated") for k in (3, 20, 3000, 0.5, 0.9)},
    **{f"safetensors cut at {k}": (lambda d, k=k: cut(safe(d), k), HEADER) for k in (0, 5, 40, 0.5, 0.99)},
    "code": (pickled, r"pytorch_model\.bin; a pickle can run any code and is not opened"),
    "a pickle alone": (lambda d: pickled(d) / "pytorch_model.bin", "is not opened"),
    "header of another size": (lambda d: header(d, entry(data_offsets=[0, 60])), HEADER),
    "header that is deep": (lambda d: header(d, b"[" * 100_000), HEADER),
    "header of a list": (lambda d: header(d, [1]), HEADER),
    "negative shape": (lambda d: header(d, entry(shape=[-4, -4])), HEADER),
    "lists in lists": (
        lambda d: gguf_list(d, NESTED),
        r"m\.gguf has a damaged header: Recursion",
    ),
    "endless list": (lambda d: gguf_list(d, struct.pack("<IQ", 0, 2**60) + bytes(100)), r"m\.gguf is truncated"),
    **{
        f"config {text[:9]}": (lambda d, text=text: configured(d, text), r"config\.json")
        for text in ("[" * 100_000, "{", '"a"', '{"a": "\\ud800')
    },
    **{
        f"scales {size}": (lambda d, size=size: scaled(d, size), "weight_block_size of the config must be two sizes")
        for size in ([0, 0], [2], "no", [2, -2])
    },
}


def read_first(path):
    weights = open_weights(path)
    return weights.read(min(weights.shapes), None)


@pytest.mark.parametrize("what", BAD_FILES)
def test_files_that_are_refused(what, tmp_path):
    make, message = BAD_FILES[what]
    with pytest.raises(BadCheckpoint, match=message):
        read_first(make(tmp_path))
    assert not hasattr(builtins, "attnflow_was_here")


def test_empty_tensors_are_read(tmp_path):
    save_file({"a": torch.zeros(0, 4), "b": torch.zeros(4, 0)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    assert weights.read("a", None).shape == (0, 4)
    assert weights.read("b", (1, 3)).shape == (2, 0)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if name not in key}


def eight_bit(tensors):
    return {key: value.to(torch.int8) if "q_proj" in key else value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (None, {"num_attention_heads": 5}, "32 query rows, where the config says 5 heads"),
        (None, {"head_dim": 16}, "32 query rows, where the config says 4 heads of 16"),
        (None, {"num_key_value_heads": 4}, "16 key rows, where the config says 4 KV heads of 8"),
        (None, {"num_kv_shared_layers": 1}, "keys of earlier"),
        (without("1.self_attn.k_proj"), None, "no key beside it"),
        (eight_bit, None, "quantised"),
    ],
)
def test_checkpoints_that_do_not_fit_their_config(llama, change, config, message):
    _, folder = llama
    if change is not None:
        repack(folder, change)
    with pytest.raises(UnsupportedArchitecture, match=message):
        score(folder, config=config)


def test_no_heads_are_guessed(llama):
    model, folder = llama
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedArchitecture, match="how many heads"):
        score(folder)
    same_weights(folder, model, config=FOUR_HEADS)


def test_widths_of_heads_are_not_guessed():
    """Of an unknown family: four heads of four, on 32 channels, could as well be two of eight."""
    model = nn.Module()
    model.attention = nn.ModuleDict({"q_proj": nn.Linear(32, 16), "k_proj": nn.Linear(32, 16)})
    model.config = {"model_type": "new", **FOUR_HEADS}
    with pytest.raises(UnsupportedArchitecture, match="16 query rows"):
        score(model)


def test_convolutions_of_unknown_families_are_not_passed_over():
    attention = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)})
    model = nn.ModuleList([attention])
    assert len(score(model, per_head=False, config={"num_attention_heads": 2})) == 1
    attention["k_conv"] = nn.Conv1d(8, 8, 3)
    with pytest.raises(UnsupportedArchitecture, match="k_conv"):
        score(model, config={"num_attention_heads": 2})


def test_unknown_fused_weights_are_no_guess(llama):
    _, folder = llama
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "novel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "discovered" in score(folder).matrices[0].flags
    repack(folder, lambda t: {k.replace("q_proj", "query_key_value"): v for k, v in t.items() if "k_proj" not in k})
    with pytest.raises(UnsupportedArchitecture, match="order of its rows is not known"):
        score(folder)


def test_folders_and_files_without_a_model(tmp_path, llama):
    model, folder = llama
    with pytest.raises(BadCheckpoint, match="holds no weights"):
        score(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadCheckpoint, match="holds no weights"):
        score(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="no such"):
        score(tmp_path / "no such" / "model")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "model.safetensors").rename(folder / "another.safetensors")
    with pytest.raises(BadCheckpoint, match=r"2 \.safetensors files and no index"):
        score(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    next((tmp_path / "shards").glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of \d+ shards"):
        score(tmp_path / "shards")
    with pytest.raises(TypeError, match="int"):
        score(3)


def test_one_shard_is_not_scored_as_if_it_were_the_model(tmp_path):
    folder, part = tmp_path / "model", tmp_path / "part"
    ZOO["Llama"].build().save_pretrained(folder, max_shard_size="20KB")
    part.mkdir()
    for file in (folder / "config.json", next(folder.glob("*00001-of-*"))):
        shutil.copy(file, part)
    (tmp_path / "model-00001-of-00002.gguf").touch()
    for shard in (*folder.glob("*.safetensors"), part, tmp_path / "model-00001-of-00002.gguf"):
        with pytest.raises(BadCheckpoint, match=r"is one of \d+ shards: pass the folder"):
            score(shard)
    ZOO["Llama"].build().save_pretrained(tmp_path / "whole")
    alone = (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    assert len(score(alone, per_head=False)) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(llama, value):
    model, _ = llama
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = value
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.self_attn: the key weights .* 1 of \d+ are NaN or Inf"):
        score(model)


def test_zero_matrices_score_zero_and_are_flagged(llama):
    model, _ = llama
    model.model.layers[0].self_attn.q_proj.weight.data[:8] = 0
    model.model.layers[1].self_attn.q_proj.weight.data.zero_()
    zero = [row for row in score(model) if "zero" in row.flags]
    assert [(row.layer, row.head) for row in zero] == [(0, 0), (1, "all"), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all(row.symmetry == row.directionality == 0 for row in zero)


def test_models_without_attention():
    with pytest.raises(UnsupportedArchitecture, match="no name speaks of attention"):
        score(nn.Linear(4, 4))
    with torch.device("meta"):
        model = ZOO["Llama"].build()
    with pytest.raises(BadCheckpoint, match="meta device"):
        score(model)


@pytest.mark.parametrize("options", [{"attention": "both"}, {"mode": "sum"}, {"gamma": float("nan")}], ids=str)
def test_arguments_that_make_no_sense(llama, options):
    with pytest.raises((ValueError, TypeCheckError), match=next(iter(options))):
        score(llama[0], **options)
    with pytest.raises(UnsupportedArchitecture, match="no cross-attention"):
        score(llama[0], attention="cross")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft asks for an old name
def test_adapters_have_to_be_merged(llama):
    peft = pytest.importorskip("peft")
    # In one layer alone: the others must not pass for the whole model.
    config = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights=False)
    adapted = peft.get_peft_model(llama[0], config)
    with pytest.raises(UnsupportedArchitecture, match="merge them"):
        score(adapted)
    assert len(score(adapted.merge_and_unload(), per_head=False)) == 2


# ---- what load_model refuses


@pytest.fixture
def saved(tmp_path):
    ZOO["Llama"].build().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors"])
def test_an_index_that_leaves_its_folder(saved, name):
    file = saved / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "weight_map": dict.fromkeys(index["weight_map"], name)}))
    for read in (open_weights, load_model):
        with pytest.raises(BadCheckpoint, match="outside of its folder"):
            read(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"hidden_size": -4},
        {"hidden_size": "a"},
        {"vocab_size": None},
        {"rope_parameters": 3},
        {"num_hidden_layers": 10**6},
        {"num_hidden_layers": -1},
        {"hidden_size": 2**40},
        {"architectures": [3]},
        {"architectures": "LlamaForCausalLM"},
        *("{", "[" * 100_000, "[]"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configs_that_are_refused(saved, change):
    file = saved / "config.json"
    text = change if isinstance(change, str) else json.dumps({**json.loads(file.read_text()), **change})
    file.write_text(text)
    with pytest.raises(BadCheckpoint, match="model"):
        load_model(saved, tokenizer=False)


def test_a_config_asks_for_no_class_that_is_no_model(saved):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    for name in ("Trainer", "AutoConfig", "no such class"):
        file.write_text(json.dumps({**config, "architectures": [name]}))
        assert type(load_model(saved, tokenizer=False).model).__name__ == "LlamaModel"


def test_weights_of_another_model(tmp_path):
    for name in ("Llama", "GPT2"):
        ZOO[name].build().save_pretrained(tmp_path / name)
    shutil.copy(tmp_path / "Llama" / "model.safetensors", tmp_path / "GPT2")
    with pytest.raises(BadCheckpoint, match="weights of another model than its config describes"):
        load_model(tmp_path / "GPT2", tokenizer=False)


def test_pickled_weights_are_not_loaded(saved):
    for file in saved.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"no safetensors weights, and pickled weights .* are not opened"):
        load_model(pickled(saved))
    assert not hasattr(builtins, "attnflow_was_here")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"[]", b"\xff"])
def test_tokenizers_that_are_no_json(saved, name, text):
    (saved / name).write_bytes(text)
    with pytest.raises(BadCheckpoint, match="has no tokenizer"):
        load_model(saved)
