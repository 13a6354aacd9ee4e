"""One shard of a model is never scored as if it were the model."""

import shutil

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.models.checkpoints import BadCheckpoint

SIZE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 50}


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SIZE)).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(af.geometry.score(tmp_path / "model", per_head=False)) == 3
    return tmp_path / "model"


def test_one_file_of_several(folder):
    for shard in folder.glob("*.safetensors"):
        with pytest.raises(BadCheckpoint, match=r"is one of \d+ shards: pass the folder"):
            af.geometry.score(shard)


def test_a_folder_with_one_shard_and_no_index(folder, tmp_path):
    (tmp_path / "part").mkdir()
    for file in (folder / "config.json", next(folder.glob("*00001-of-*"))):
        shutil.copy(file, tmp_path / "part")
    with pytest.raises(BadCheckpoint, match=r"is one of \d+ shards"):
        af.geometry.score(tmp_path / "part")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model-00001-of-00002.gguf"])
def test_other_formats(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(BadCheckpoint, match="is one of 00002 shards"):
        af.geometry.score(tmp_path / name)


def test_one_shard_of_one(folder, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZE))
    model.save_pretrained(tmp_path / "whole")
    path = tmp_path / "whole" / "model-00001-of-00001.safetensors"
    (tmp_path / "whole" / "model.safetensors").rename(path)
    assert len(af.geometry.score(path, per_head=False)) == 3
