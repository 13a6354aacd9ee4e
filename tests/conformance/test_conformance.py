"""The families that most people run: no cell gets worse than it is in the committed matrix, none is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import __main__ as main
from tests.conformance.cells import FEATURES, Cell, cell
from tests.conformance.matrix import FILE, Row, read, rows_of, worse
from tests.conformance.miniature import Architecture, architectures, named

SUBSET = (
    *("llama", "qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3"),
    *("falcon_h1", "bamba", "lfm2", "olmo3", "qwen2_5_vl", "paligemma", "modernbert", "bert", "t5", "bart", "doge"),
)


def chosen() -> list[Architecture]:
    names = {architecture.model_type: architecture for architecture in reversed(list(architectures()))}
    return [names[name] for name in SUBSET]


@pytest.mark.parametrize("architecture", chosen(), ids=lambda architecture: architecture.model_type)
@pytest.mark.slow
def test_no_cell_is_worse_than_in_the_committed_matrix(architecture: Architecture) -> None:
    committed = read()
    for row in rows_of(architecture):
        before = committed[architecture.key, row.feature]
        assert not worse(before.cell, row.cell), f"{row.feature}: {before.cell} -> {row.cell}"


def test_the_committed_matrix_has_every_feature_of_every_class_that_was_built() -> None:
    committed = read()
    built = {key for key, feature in committed if feature != "build"}
    assert {architecture.key for architecture in chosen()} <= built
    assert all((key, feature) in committed for key in built for feature in FEATURES)


def test_the_parts_of_a_job_array_merge_to_the_whole_matrix(tmp_path, monkeypatch, capsys):
    def ran(chosen, workers, features):
        for architecture in chosen:
            yield [Row(architecture, feature, Cell("works", f"run by {number}")) for feature in features]

    whole = read()
    monkeypatch.setattr(main.matrix, "run", ran)
    monkeypatch.setattr(main, "OUT", tmp_path)
    monkeypatch.setattr(main.matrix, "FILE", tmp_path / "conformance.csv")
    monkeypatch.setattr(main.page, "FILE", tmp_path / "conformance.md")
    (tmp_path / "conformance.csv").write_text(FILE.read_text())
    paths = []
    for number in (1, 2, 3):
        assert main.main(["--shard", f"{number}/3"]) == 0
        paths.append(capsys.readouterr().out.strip())
        assert (tmp_path / "conformance.csv").read_text() == FILE.read_text(), "a part leaves the table alone"
    keys = [{key for key, _ in read(Path(path))} for path in paths]
    assert sorted(key for part in keys for key in part) == sorted(a.key for a in architectures()), "each once"
    assert main.main(["--merge", *paths]) == 0
    merged = read(tmp_path / "conformance.csv")
    assert {key for key, _ in merged} >= {key for key, _ in whole}
    assert {row.cell.reason for row in merged.values()} == {"run by 1", "run by 2", "run by 3"}
    assert "classes have been run" in (tmp_path / "conformance.md").read_text()
    for bad in ("0/3", "4/3", "two"):
        with pytest.raises(SystemExit):
            main.main(["--shard", bad])


def test_miniatures_have_every_kind_of_layer() -> None:
    config = named("Qwen3NextForCausalLM").config
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert config.hidden_size == 64


UNUSUAL = {
    # parallel residual streams; scores of later blocks that are masked after the module that makes them
    ("DeepseekV4ForCausalLM", "audit"): ("works", "clean: causal"),
    # raw scores of pairs, masked by the caller
    ("SqueezeBertForMaskedLM", "padded"): ("works", "clean: bidirectional"),
    # embeddings that mix neighbours: padding reaches real tokens before the first layer, and no mask rules there
    ("MobileBertForMaskedLM", "padded"): ("works", "leak: bidirectional"),
    ("MobileBertForMaskedLM", "mask"): ("refused", "moves information between positions beside its attention"),
    # text attention that does not call the interface beside an image's that does
    ("GitForCausalLM", "mask"): ("refused", "reads text by attention that does not call"),
    ("GitForCausalLM", "bias"): ("refused", "reads text by attention that does not call"),
    # a model that pads its own inputs, or makes streams of them: documents cannot be read
    ("LongformerForMaskedLM", "packed"): ("refused", "unknown; its inputs tell documents of 12 positions apart"),
    ("ProphetNetForCausalLM", "audit"): ("refused", "unknown; its layers get 36 positions for 12 tokens"),
    ("ProphetNetForConditionalGeneration", "cached"): ("refused", "does not decode in steps of"),
    # a window for each layer in the configuration
    ("NeoMMEForMaskedLM", "audit"): ("works", "clean: bidirectional; window 5"),
    # a cache that the head hands on without naming it, an encoder's output that is read by name
    ("GraniteMoeForCausalLM", "cached"): ("works", "clean: causal"),
    ("T5GemmaForConditionalGeneration", "cached"): ("works", "clean: encoder-decoder"),
    # several tokens that end a text
    ("GlmForCausalLM", "mask"): ("works", "2 layers"),
    # one attention over a decoder's own keys and its encoder's
    ("T5Gemma2ForConditionalGeneration", "bias"): ("refused", "it attends to another sequence in the same call"),
    # stacks inside a model that has one of its own, and two lists in one model
    ("EvollaForProteinText2Text", "bias"): ("works", ""),
    ("Phi4MultimodalForCausalLM", "bias"): ("works", ""),
    ("Phi4MultimodalForCausalLM", "mask"): ("works", "2 layers"),
    ("HrmTextForCausalLM", "bias"): ("refused", "in several lists of layers (model.L_module.layers, model.H_"),
    # a sink for each query
    ("Inkling2ForCausalLM", "bias"): ("refused", "has a sink for each query, [1, 4, 12, 1]"),
    # keys that an indexer chooses for each query, and blocks of keys
    ("Dots3NoteForCausalLM", "bias"): ("works", ""),
    ("MiniMaxM3VLForCausalLM", "bias"): ("works", ""),
    # an image tower that is no model of its own, and a stack that reads text before the one that holds it
    ("IdeficsForVisionText2Text", "mask"): ("works", "6 layers"),
    ("BridgeTowerModel", "mask"): ("refused", "several stacks of self-attention: BridgeTowerTextModel"),
    # blocks of tokens beside the tokens
    ("DeepseekV4ForCausalLM", "bias"): ("refused", "or to blocks of tokens (as in DeepSeek V4)"),
    # under padding, rotations that differ and cancel
    ("MossTranscribeDiarizeForConditionalGeneration", "cached"): ("works", "clean: causal"),
    # no float64
    ("XGLMForCausalLM", "cached"): ("refused", "does not run in torch.float64"),
}


@pytest.mark.parametrize(("name", "feature"), UNUSUAL)
@pytest.mark.slow
def test_models_that_do_what_others_do_not(name: str, feature: str) -> None:
    code, words = UNUSUAL[name, feature]
    result = cell(FEATURES[feature], named(name))
    assert result.code == code
    assert words in result.reason
