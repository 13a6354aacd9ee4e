"""The published table, what is wrong in it, and how a model finds its record."""

import pytest
from scipy.stats import binomtest

from attnflow.geometry.published import published_of, published_scores
from attnflow.geometry.table import GeometryScores, MatrixScores


def scores_of(model, layers, tower="", kind="self", **reading):
    rows = tuple(MatrixScores(i, "all", kind, 0.1, -0.2, 1.0, 0, 0, tower) for i in range(layers))
    return GeometryScores(model, rows, **reading)


def faults(name):
    return [record.fault for record in published_of(name)]


def test_the_table_is_whole():
    table = published_scores()
    assert len(table) == 210
    assert len({(r.model, r.tower, r.symmetry, r.directionality) for r in table}) == len(table)
    for record in table:
        for quartiles in (record.symmetry, record.directionality):
            assert quartiles.q25 <= quartiles.median <= quartiles.q75
        assert abs(record.symmetry.median) <= 1
        assert record.num_layers > 0
        assert record.fault or abs(record.directionality.median) <= 1
    (bert,) = published_of("bert-base-uncased")[:1]
    assert (bert.num_layers, bert.symmetry.median) == (12, 0.510055)
    assert {r.modality for r in table if "beit" in r.model} == {"vision-models"}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("mistralai/Mistral-7B-v0.1", "h mod n_kv"),
        ("facebook/MobileLLM-125M", "h mod n_kv"),
        ("meta-llama/Llama-2-70b-hf", "h mod n_kv"),
        ("answerdotai/ModernBERT-base", "transpose"),
        ("microsoft/Phi-3-mini-128k-instruct", "transpose"),
        ("EleutherAI/pythia-1b", "interleaved"),
        ("microsoft/deberta-base", "interleaved"),
        ("meta-llama/Llama-3.2-1B", "random"),
        ("microsoft/Phi-3-mini-4k-instruct", "random"),
        ("EleutherAI/gpt-j-6B", "outside [-1, 1]"),
    ],
)
def test_records_that_are_wrong_say_why(model, words):
    assert any(words in fault for fault in faults(model))


RIGHT = """bert-large-uncased meta-llama/Llama-2-7b-hf gpt2 microsoft/deberta-v2-xlarge microsoft/phi-2
    meta-llama/Llama-3.2-11B-Vision facebook/bart-base microsoft/beit-base-patch16-224"""


@pytest.mark.parametrize("model", RIGHT.split())
def test_other_records_are_left_alone(model):
    assert faults(model)
    assert set(faults(model)) == {""}


def test_two_records_of_one_model_have_reasons_of_their_own():
    reasons = {record.record: record.fault for record in published_of("meta-llama/Meta-Llama-3-8B")}
    assert "random" in reasons["new"]
    assert "h mod n_kv" in reasons["old"]


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.1-8B",
        "/data/models/Llama-3.1-8B/",
        "llama-3.1-8b.Q4_K_M.gguf",
        "Llama-3.1-8B-f16.gguf",
        "/cache/models--meta-llama--Llama-3.1-8B/snapshots/0123abc",
        r"C:\models\Llama-3.1-8B",
    ],
)
def test_models_are_found_by_the_names_of_their_files(name):
    assert {record.model for record in published_of(name)} == {"meta-llama/Llama-3.1-8B", "llama3.1-8b"}


@pytest.mark.parametrize("name", ["Llama-3.1-8B-Instruct", "minilm", "", "smollm2-135m", "/"])
def test_other_models_have_no_record(name):
    assert published_of(name) == ()
    assert scores_of(name, 2).compare() == ()


def test_comparison_of_the_same_part():
    (found,) = [c for c in scores_of("facebook/bart-base", 6, "decoder").compare() if c.published.tower == "decoder"]
    assert found.ours is not None
    assert (found.ours.symmetry.median, found.reasons) == (0.1, ())
    assert "facebook/bart-base (decoder, self): symmetry 0.029" in str(found)
    assert "ours 0.100 [0.100, 0.100] and -0.200" in str(found)


def test_comparison_says_what_differs():
    encoder, *_ = [c for c in scores_of("facebook/bart-base", 6, "decoder").compare() if c.published.tower == "encoder"]
    assert encoder.ours is None
    assert encoder.reasons == ("this part of the model was not scored",)
    (short,) = [c for c in scores_of("gpt2", 3).compare() if c.published.record == "new"]
    assert short.reasons == ("the published record has 12 layers, but this model has 3",)
    (other,) = [c for c in scores_of("gpt2", 12, mode="norm").compare() if c.published.record == "new"]
    assert "mode excess, not 2, norm" in other.reasons[0]
    assert "h mod n_kv" in scores_of("mistralai/Mistral-7B-v0.1", 32).compare()[0].reasons[0]


def test_cross_attention_is_compared_with_cross_attention():
    (musicgen,) = [c for c in scores_of("facebook/musicgen-small", 24, "decoder", "cross").compare() if c.ours]
    assert musicgen.published.kind == "cross"
    assert "cross-attention" in musicgen.reasons[0]
    alone = scores_of("facebook/musicgen-small", 24, "decoder").compare()
    assert all(c.ours is None for c in alone)


ENCODERS = """ALBERT BERT ROBERTA DEBERTA BARTEncoder T5Encoder
    HUBERT MusicGenEncoder SpeechT5Encoder mms s2t unispeech wavlm whisper-encoder whisperv2-encoder whisperv3-encoder
    BEiT DEIT DETR-Encoder DINO GIT-images LLAMA ViT-21k ViT-MAE ViT"""


def test_columns_dominate_in_published_encoders_against_corollary_s1_13():
    """Its rows and columns are alike, so that D is as often above 0 as below. Equal records count once.

    All records of MusicGen's encoder are that of T5-base, which it reads text with: they count as text.
    """
    of = {}
    for record in published_scores():
        if (
            record.family in ENCODERS.split()
            and not record.fault
            and (record.tower == "vision") == (record.family == "LLAMA")
        ):
            text = "language-models" if record.family == "MusicGenEncoder" else record.modality
            of.setdefault(text, {})[record.symmetry, record.directionality] = record.directionality.median
    counts = {name: (sum(d < 0 for d in ds.values()), len(ds)) for name, ds in of.items()}
    assert counts == {"language-models": (30, 36), "audio-models": (22, 24), "vision-models": (28, 32)}
    assert all(binomtest(*count).pvalue < 1e-3 for count in counts.values())
