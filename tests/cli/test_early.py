"""A typo, a layer that is not there or a missing file is refused before torch or the weights of a model are loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnflow.cli import _early
from attnflow.cli._output import BadUsage
from attnflow.masks.export import FORMATS
from attnflow.masks.registry import named_masks
from attnflow.models.loading import loader
from attnflow.models.loading.stored_config import stored_config
from attnflow.models.subject import Subject
from attnflow.tasks.derivation import named_families
from tests.models import ZOO

REFUSED = [
    ("mask show casual", "did you mean causal"),
    ("mask show casual --text hi", "did you mean causal"),
    ("mask show minilm", 'attnflow mask show minilm --text "..."'),
    ("mask show causal --text hi", "--text and --ids take a model"),
    ("mask show causal -o x.jpeg", "must end in .svg or .png or .pdf or .html, got '.jpeg'"),
    ("mask show missing.json", "cannot read missing.json: no such file"),
    ("mask export casual --to varlen", "did you mean causal"),
    ("mask export causal --to varlem", "did you mean varlen"),
    ("mask merge causal_ml --tokens 4", "did you mean causal_lm"),
    ("report casual -o x.html", "did you mean causal"),
    ("report causal -o x.pdf", "must end in .html"),
    ("audit MODEL --order casual", "did you mean causal"),
    ("audit MODEL --order missing.json", "cannot read missing.json"),
    ("audit MODEL --against missing.json", "cannot read missing.json"),
    ("audit batch missing.jsonl", "missing.jsonl"),
    ("audit minlm", "did you mean minilm"),
    ("explain minlm hi", "did you mean minilm"),
    ("explain MODEL hi -o x.jpeg", "must end in"),
    ("geometry attribute MODEL hi --layer 99", "layer must be at most 1, got 99"),
    ("geometry attribute MODEL hi --layer 1 --head 99", "head must be at most 3, got 99"),
    ("geometry attribute MODEL hi --layer 1 -o x.jpeg", "must end in"),
    ("knowledge trace MODEL hi --layer 99", "layer must be at most 1, got 99"),
    ("knowledge trace MODEL hi --apply missing.patch", "found no saved edit at missing.patch"),
    ("knowledge trace MODEL hi -o x.jpeg", "must end in"),
    ("knowledge edit MODEL -o x --prompt a --answer b --layers 1,99", "layers must be at most 1, got 99"),
    ("knowledge edit MODEL -o no/where/x --prompt a --answer b", "create it first"),
    ("knowledge edit MODEL -o x --file missing.jsonl", "missing.jsonl does not exist"),
    ("knowledge build store MODEL --apply missing.patch", "found no saved edit"),
    ("knowledge stats nowhere", "found no store at nowhere"),
]
CODE = """
import json, sys
from attnflow.cli import main
for line in json.loads(sys.argv[1]):
    code = main(line.split())
    print(code, "torch" in sys.modules, "transformers" in sys.modules, flush=True)
    print("---", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def outcomes(tiny_model: str) -> dict[str, tuple[str, str]]:
    """What one process without torch prints for each of the commands."""
    lines = json.dumps([line.replace("MODEL", tiny_model) for line, _ in REFUSED])
    done = subprocess.run(
        [sys.executable, "-c", CODE, lines],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    said = done.stderr.split("---\n")
    return {line: pair for (line, _), *pair in zip(REFUSED, done.stdout.splitlines(), said, strict=False)}


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_refused_without_torch(outcomes: dict[str, tuple[str, str]], line: str, message: str) -> None:
    state, said = outcomes[line]
    assert message in said
    assert state == "2 False False"


def test_names_read_off_the_source_are_those_of_the_registries() -> None:
    assert list(_early.mask_names()) == list(named_masks())
    assert set(_early.family_names()) == set(named_families())
    assert set(_early.format_names()) == set(FORMATS)


@pytest.mark.parametrize("name", ZOO)
def test_no_layer_that_is_there_is_refused(name: str, tmp_path: Path) -> None:
    model = ZOO[name].make()
    model.config.save_pretrained(tmp_path)
    last = max(Subject(model).layers.values())
    _early.require_place(str(tmp_path), layer=last, head=0)
    _early.require_place(str(tmp_path), layers=[0, -1, last])
    if name in ("Llama", "GPT2", "Bert", "T5", "Bart", "Gemma3"):
        for place in ("layer", "head"):
            with pytest.raises(BadUsage, match=f"{place} must be at most"):
                _early.require_place(str(tmp_path), **{place: 99})


TOWER = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 4}
BART = {"encoder_layers": 2, "decoder_layers": 4, "encoder_attention_heads": 2, "decoder_attention_heads": 4}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": TOWER},
        {"model_type": "llava", "text_config": {}, "vision_config": TOWER},
        {"model_type": "llava", "vision_config": TOWER},
        {"model_type": "bart", "num_hidden_layers": 2, "encoder_layers": 2, "encoder_attention_heads": 2},
        {"model_type": "t5", "num_layers": 2},
        {"num_hidden_layers": "2", "num_attention_heads": "2"},
        {"num_hidden_layers": None, "num_attention_heads": None},
        {"num_hidden_layers": True, "num_attention_heads": 0},
        {"depths": [2, 2, 18, 2], "num_layers": 4, "num_heads": [3, 6, 12, 24]},
        {"num_attention_heads": 4, "num_attention_heads_per_layer": [4, 24]},
        [], None, "2", 2, [{"num_hidden_layers": 2}],
    ],
    ids=str,
)  # fmt: skip
def test_a_number_that_the_config_leaves_open_refuses_nothing(config: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    _early.require_place(str(tmp_path), layer=20, head=20)


@pytest.mark.parametrize(
    ("config", "layers", "heads"),
    [
        (BART, 6, 4),
        ({**BART, "num_hidden_layers": 2, "num_attention_heads": 2}, 6, 4),
        ({"text_config": TOWER, "vision_config": {**TOWER, "num_hidden_layers": 3}, "model_type": "llava"}, 5, 4),
        ({**TOWER, "quantization_config": {"bits": 4}, "num_key_value_heads": 8}, 2, 4),
    ],
    ids=str,
)
def test_a_number_that_the_config_tells_refuses_what_is_above(
    config: object, layers: int, heads: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    _early.require_place(str(tmp_path), layer=layers - 1, head=heads - 1)
    for place, count in (("layer", layers), ("head", heads)):
        with pytest.raises(BadUsage, match=f"{place} must be at most {count - 1}, got {count}: .* has {count},"):
            _early.require_place(str(tmp_path), **{place: count})


def test_the_sizes_in_the_header_of_a_gguf_file() -> None:
    assert stored_config("smollm2-135m") == {"num_hidden_layers": 30, "num_attention_heads": 9}


def test_what_has_no_config_that_is_known_is_left_to_the_loader(tmp_path: Path) -> None:
    for name, content in (
        ("config.json", "{"),
        ("config.json", "[" * 99_999),
        ("weights.gguf", "GGUF"),
        ("other.gguf", "nothing"),
    ):
        (tmp_path / name).write_text(content)
        assert stored_config(str(tmp_path / name)) == {}
    assert stored_config(str(tmp_path)) == {}
    _early.require_place(str(tmp_path), layer=10**6)


def test_a_device_that_is_not_there_is_refused_before_the_weights(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(loader, "_from_safetensors", lambda *given: read.append(given))
    for device in ("cuda:99", "gpu"):
        with pytest.raises(ValueError, match=f"device must be one of this machine, such as 'cpu', got '{device}'"):
            loader.load_model(tiny_model, device=device)
    assert read == []
