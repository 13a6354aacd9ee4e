"""What is damaged, incomplete or in a form that is not opened gives a clear error, and no numbers."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.score import score
from attnflow.models.checkpoints import BadCheckpoint
from tests.models import ZOO
from tests.models.checkpoints import repack, same_weights, write_gguf


def test_missing_shards(llama, tmp_path):
    model, _ = llama
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    next((tmp_path / "shards").glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(BadCheckpoint, match=r"lacks 1 of \d+ shards"):
        score(tmp_path / "shards")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
def test_truncated_safetensors(llama, keep):
    _, folder = llama
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(BadCheckpoint, match=r"truncated|no safetensors file"):
        score(folder)


@pytest.mark.parametrize("keep", [3, 20, 3000, 0.5, 0.9])
def test_truncated_gguf(tmp_path, keep):
    tensors = {f"blk.0.attn_{letter}.weight": torch.randn(32, 32) for letter in "qk"}
    file = write_gguf(tmp_path / "m.gguf", "llama", tensors, kv_heads=4)
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(BadCheckpoint, match="truncated"):
        score(file)


@pytest.mark.parametrize("keep", [0, 10, 0.5])
@pytest.mark.parametrize("legacy", [False, True])
def test_truncated_torch_files(llama, tmp_path, keep, legacy):
    model, _ = llama
    file = tmp_path / "m.bin"
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=not legacy)
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(BadCheckpoint, match=r"m\.bin"):
        score(file, config={"num_attention_heads": 4})


class _Sets:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return exec, ("import builtins; builtins.attnflow_was_here = True",)


def test_pickles_are_not_run(tmp_path):
    import builtins

    for legacy in (False, True):
        torch.save({"q": _Sets()}, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(BadCheckpoint, match="pickle can run any code"):
            score(tmp_path / "m.bin")
    assert not hasattr(builtins, "attnflow_was_here")


def test_damaged_headers(llama):
    _, folder = llama
    file = folder / "model.safetensors"
    header = json.dumps({"a.q_proj.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 60]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    with pytest.raises(BadCheckpoint, match="takes 64 bytes, not 60"):
        score(folder)
    file.write_bytes((9).to_bytes(8, "little") + b'{"a": 1}' + bytes(60))
    with pytest.raises(BadCheckpoint, match="damaged header"):
        score(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"config\.json is no JSON"):
        score(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(llama, value):
    model, _ = llama
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = value
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.self_attn: 1 of \d+ key weights are NaN or Inf"):
        score(model)


def test_zero_matrices_score_zero_and_are_flagged(llama):
    model, _ = llama
    model.model.layers[0].self_attn.q_proj.weight.data[:8] = 0
    model.model.layers[1].self_attn.q_proj.weight.data.zero_()
    zero = [row for row in score(model) if "zero" in row.flags]
    assert [(row.layer, row.head) for row in zero] == [(0, 0), (1, "all"), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert all(row.symmetry == row.directionality == 0 for row in zero)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "32 query rows, where the config says 5 heads"),
        ({"head_dim": 16}, "32 query rows, where the config says 4 heads of 16"),
        ({"num_key_value_heads": 4}, "16 key rows, where the config says 4 KV heads of 8"),
    ],
)
def test_shapes_that_are_not_those_of_the_config(llama, change, message):
    _, folder = llama
    with pytest.raises(UnsupportedArchitecture, match=message):
        score(folder, config=change)


def test_a_query_without_its_key(llama):
    _, folder = llama
    repack(folder, lambda tensors: {k: v for k, v in tensors.items() if "1.self_attn.k_proj" not in k})
    with pytest.raises(UnsupportedArchitecture, match="no key beside it"):
        score(folder)


def test_quantised_weights_that_are_not_read(llama):
    _, folder = llama
    repack(folder, lambda t: {k: v.to(torch.int8) if "q_proj" in k else v for k, v in t.items()})
    with pytest.raises(UnsupportedArchitecture, match="quantised"):
        score(folder)


def test_no_heads_are_guessed(llama):
    model, folder = llama
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedArchitecture, match="how many heads"):
        score(folder)
    same_weights(folder, model, config={"num_attention_heads": 4})


def test_widths_of_heads_are_not_guessed():
    """Of an unknown family: four heads of four, on 32 channels, could as well be two of eight."""
    model = nn.Module()
    model.attention = nn.ModuleDict({"q_proj": nn.Linear(32, 16), "k_proj": nn.Linear(32, 16)})
    model.config = {"model_type": "new", "num_attention_heads": 4}
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
    _, folder = llama
    with pytest.raises(BadCheckpoint, match="holds no weights"):
        score(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadCheckpoint, match="holds no weights"):
        score(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError, match="no such"):
        score(tmp_path / "no such" / "model")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "model.safetensors").rename(folder / "another.safetensors")
    with pytest.raises(BadCheckpoint, match="2 safetensors files and no index"):
        score(folder)
    with pytest.raises(TypeError, match="int"):
        score(3)


def test_models_without_attention():
    with pytest.raises(UnsupportedArchitecture, match="no name speaks of attention"):
        score(nn.Linear(4, 4))
    with torch.device("meta"):
        model = ZOO["Llama"].build()
    with pytest.raises(BadCheckpoint, match="meta device"):
        score(model)


def test_arguments_that_make_no_sense(llama):
    model, _ = llama
    for options, message in (
        ({"attention": "both"}, "attention"),
        ({"mode": "sum"}, "mode"),
        ({"gamma": float("nan")}, "gamma"),
    ):
        with pytest.raises((ValueError, TypeCheckError), match=message):
            score(model, **options)
    with pytest.raises(UnsupportedArchitecture, match="no cross-attention"):
        score(model, attention="cross")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft asks for an old name
def test_adapters_have_to_be_merged(llama):
    peft = pytest.importorskip("peft")
    model, _ = llama
    # In one layer alone: the others must not pass for the whole model.
    config = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    with pytest.raises(UnsupportedArchitecture, match="merge them"):
        score(adapted)
    merged = adapted.merge_and_unload()
    assert len(score(merged, per_head=False)) == 2


def test_keys_of_earlier_layers(llama):
    _, folder = llama
    with pytest.raises(UnsupportedArchitecture, match="keys of earlier"):
        score(folder, config={"num_kv_shared_layers": 1})
