"""`attnflow geometry`: scores of models in text, JSON and files, and what happens to models that cannot be scored."""

import io
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import attnflow as af
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.score import GeometrySurvey
from tests.models import tiny
from tests.report.reading import parse_page, parse_svg


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny-t5")
    tiny("T5", torch.float32).save_pretrained(folder)
    return str(folder)


def test_one_model_is_listed_by_layer(run: Callable, tiny_model: str) -> None:
    out = run.ok("geometry", tiny_model)
    scores = af.geometry.score(tiny_model, per_head=False)
    for row in scores:
        assert f"{row.symmetry:z.3f}" in out
    assert "2 layers" in out
    assert "heads" not in out
    assert "gamma 2 and mode excess" in out
    assert "Ignored: biases, rotary position embeddings" in out
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_several_models_are_one_table(run: Callable, tiny_model: str, t5: str) -> None:
    out = run.ok("geometry", tiny_model, t5, tiny_model)
    assert out.count("2 layers") == 3  # the Llama once, T5's encoder and decoder
    assert "encoder, self: 2 layers" in out
    assert "norm" not in out.splitlines()[0]


def test_json_is_what_the_library_says(run: Callable, tiny_model: str) -> None:
    out = run.ok("geometry", tiny_model, "--json", "--per-head", "--gamma", "1.5", "--mode", "norm")
    found = json.loads(out)
    assert (found["attnflow"], found["unscored"]) == ("GeometrySurvey", {})
    (back,) = GeometrySurvey.from_json(out).models
    assert back.matrices == af.geometry.score(tiny_model, 1.5, "norm").matrices
    assert (back.model, back.gamma, back.mode) == (tiny_model, 1.5, "norm")


def test_the_parts_of_a_job_array_are_the_whole(run: Callable, tiny_model: str, t5: str, tmp_path: Path) -> None:
    copies = [shutil.copytree(t5, tmp_path / f"copy{number}") for number in range(2)]
    models = [tiny_model, t5, *map(str, copies)]
    parts = [GeometrySurvey.from_json(run.ok("geometry", *models, "--shard", f"{i}/3", "--json")) for i in (1, 2, 3)]
    assert [[model.model for model in part.models] for part in parts] == [
        [models[0], models[3]],
        [models[1]],
        [models[2]],
    ]
    whole = GeometrySurvey.from_json(run.ok("geometry", *models, "--json"))
    merged = GeometrySurvey(tuple(model for part in parts for model in part.models), {})
    assert sorted(map(str, merged.rows())) == sorted(map(str, whole.rows()))
    code, out, _ = run("geometry", tiny_model, str(tmp_path / "nothing"), "--shard", "2/2", "--json")
    empty = GeometrySurvey.from_json(out)
    assert (code, empty.models, list(empty.unscored)) == (2, (), [str(tmp_path / "nothing")])
    for bad, message in (("0/3", "I from 1 to N"), ("4/3", "I from 1 to N"), ("2", "I from 1"), ("9/9", "at most 4")):
        assert message in run.refused("geometry", *models, "--shard", bad)


def test_cross_attention(run: Callable, t5: str) -> None:
    (model,) = GeometrySurvey.from_json(run("geometry", t5, "--attention", "all", "--json").out).models
    kinds = [(s.tower, s.kind, s.count) for s in model.summaries]
    assert kinds == [("encoder", "self", 2), ("decoder", "self", 2), ("decoder", "cross", 2)]


def test_a_bad_model_does_not_stop_the_others(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    poisoned = tmp_path / "poisoned"
    poisoned.mkdir()
    for source in Path(tiny_model).glob("*.json"):
        (poisoned / source.name).write_bytes(source.read_bytes())
    weights = {k: v.clone() for k, v in af.models.load_model(tiny_model).model.state_dict().items()}
    weights["model.layers.1.self_attn.q_proj.weight"][0, 0] = math.nan
    save_file(weights, poisoned / "model.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((Path(tiny_model) / "model.safetensors").read_bytes()[:-100])
    pickled = tmp_path / "pickled.bin"
    torch.save(torch.nn.Linear(2, 2), pickled)
    bad = [str(tmp_path / "nothing"), str(poisoned), str(cut), str(pickled)]
    code, out, err = run("geometry", *bad[:2], tiny_model, *bad[2:], "--json")
    found = json.loads(out)
    assert code == 1
    assert [model["model"] for model in found["models"]] == [tiny_model]
    assert list(found["unscored"]) == bad
    assert "layers.1" in found["unscored"][str(poisoned)]
    assert "NaN or Inf" in found["unscored"][str(poisoned)]
    assert "unexpected" not in err
    lines = err.splitlines()
    assert [line.split(": ")[1] for line in lines] == bad


def test_a_defect_does_not_stop_the_others(run: Callable, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["attnflow.geometry.score"]
    score = vars(module)["score"]

    def broken(source, *arguments, **options):
        if source == "broken":
            raise KeyError("no such thing")
        return score(source, *arguments, **options)

    monkeypatch.setattr(module, "score", broken)
    code, out, err = run("geometry", "broken", tiny_model)
    assert code == 1
    assert "2 layers" in out
    assert "broken: unexpected KeyError: 'no such thing'" in err


@pytest.mark.parametrize("picture", ["plane", "layers", "heads"])
def test_figures(run: Callable, tiny_model: str, tmp_path: Path, picture: str) -> None:
    target = tmp_path / "figure.svg"
    out = run.ok("geometry", tiny_model, "-o", str(target), "--picture", picture)
    assert f"written: {target}" in out
    assert parse_svg(target.read_text()).tag == "svg"


def test_report_shows_heads_and_failures(run: Callable, tiny_model: str, t5: str, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    code, _, _ = run("geometry", tiny_model, t5, str(tmp_path / "nothing"), "-o", str(target))
    page = parse_page(target.read_text())
    assert code == 1
    assert {attributes.get("id") for attributes in page.of("section")} >= {"geometry", "layers", "heads"}
    assert f"{tmp_path / 'nothing'} could not be shown" in page.text


def test_what_no_config_says_is_an_option(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes((Path(tiny_model) / "model.safetensors").read_bytes())
    err = run.refused("geometry", str(own))
    assert "--config num_attention_heads=12 on the command line" in err
    out = run.ok("geometry", str(own), "--config", "num_attention_heads=4", "--json")
    scores = GeometrySurvey.from_json(out).models[0]
    expected = af.geometry.score(tiny_model, per_head=False)
    assert [row.directionality for row in scores] == [row.directionality for row in expected]
    assert [row.norm for row in scores] == [row.norm for row in expected]


WORDS = "I the of my I"


def test_why_lists_the_leading_terms_and_they_sum_to_the_score(run: Callable, tiny_model: str) -> None:
    out = run.ok("geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--head", "2", "--count", "3")
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())
    found = af.geometry.attribute(af.load_model(tiny_model), WORDS, 1, 2)
    key = int(found.weights.argmax())
    assert f"({found.query}) looks at “{found.tokens[key].strip()}” ({key}) with weight {found.weights[key]:.3f}" in out
    terms = [line.split("  ")[0] for line in out.splitlines() if line[:1] in "+-" and "×" in line]
    values = found.centred[key].flatten()
    assert [float(term) for term in terms] == pytest.approx(
        values[values.abs().topk(3).indices].tolist(), abs=0.51 * 10.0 ** -len(terms[0].partition(".")[2])
    )
    (others,) = [line for line in out.splitlines() if "other terms" in line]
    (total,) = [line for line in out.splitlines() if "sum: its score, less the row's mean" in line]
    assert others.split()[1] == "6"  # of nine pairs of three components
    expected = float(found.scores[key] - found.weights @ found.scores)
    assert float(total.split()[0]) == pytest.approx(expected, abs=1e-2 * abs(expected) + 1e-6)


def test_why_in_json_is_what_the_library_says(run: Callable, tiny_model: str) -> None:
    out = run("geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--head", "0", "--query", "2", "--json").out
    back = ScoreAttribution.from_json(out)
    found = af.geometry.attribute(af.load_model(tiny_model), WORDS, 1, 0, 2)
    assert torch.equal(back.raw, found.raw)
    assert (back.model, back.query, back.head) == (tiny_model, 2, 0)


def test_why_reads_the_text_from_stdin(run: Callable, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--layer", "1", "--head", "0", "--json")
    expected = run("geometry", "attribute", tiny_model, WORDS, *words).out
    monkeypatch.setattr("sys.stdin", io.StringIO(WORDS + "\n"))
    assert run("geometry", "attribute", tiny_model, "-", *words).out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the text is empty" in run("geometry", "attribute", tiny_model, "-", *words).err


def test_why_chooses_the_head_that_looks_at_another_token(run: Callable, tiny_model: str) -> None:
    out = run.ok("geometry", "attribute", tiny_model, WORDS, "--layer", "0")
    weights = af.geometry.attribute(af.load_model(tiny_model), WORDS, 0).weights
    best = int(weights[:, 1:-1].amax(1).argmax())
    other = 1 + int(weights[best, 1:-1].argmax())
    words = "which has the most weight on a token besides the first and the query: “"
    assert out.startswith(f"{tiny_model}, layer 0 head {best}, {words}")
    assert out.splitlines()[0].endswith(f"” ({other})")


def test_why_of_a_key_raw_and_by_ids(run: Callable, tiny_model: str) -> None:
    words = ("--layer", "1", "--head", "1", "--key", "1", "--raw")
    out = run.ok("geometry", "attribute", tiny_model, "--ids", "5,6,7", *words)
    found = af.geometry.attribute(af.load_model(tiny_model), [5, 6, 7], 1, 1)
    assert "looks at “6” (1)" in out
    assert "centred" not in out
    (total,) = [line for line in out.splitlines() if line.endswith("sum: its score")]
    score = float(found.scores[1])
    assert float(total.split()[0]) == pytest.approx(score, abs=1e-2 * abs(score) + 1e-6)
    assert next(line for line in out.splitlines() if line.startswith("key")).split() == [
        "key", "token", "weight", "score",
    ]  # fmt: skip


def test_why_lists_the_key_that_is_explained_beside_the_largest(run: Callable, tiny_model: str) -> None:
    found = af.geometry.attribute(af.load_model(tiny_model), WORDS, 1, 1)
    least = int(found.weights.argmin())
    out = run(
        "geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--head", "1", "--key", str(least), "--count", "1"
    ).out
    rows = out.split("above mean\n")[1].split("\n\n")[0].splitlines()
    assert [int(row.split()[0]) for row in rows] == [int(found.weights.argmax()), least]


def test_why_of_a_query_with_one_key_says_that_there_is_nothing_to_explain(run: Callable, tiny_model: str) -> None:
    words = ("geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--query", "0")
    out = run(*words).out
    assert "The query can attend to no other token, so that this weight is 1 whatever the score." in out
    assert "×" not in out
    assert "which has the most weight" not in out
    assert "×" in run(*words, "--raw").out


def test_why_advises_another_key_where_one_has_nearly_all_of_the_weight(run: Callable, tiny_model: str) -> None:
    words = ("geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--head", "1")
    module = sys.modules["attnflow.report.attribution_rows"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST", 0.0)
        out = run(*words).out
    (advice,) = (line for line in out.splitlines() if line.startswith("This key has nearly all of the weight"))
    weights = af.geometry.attribute(af.load_model(tiny_model), WORDS, 1, 1).weights
    second = int(weights.argsort(descending=True)[1])
    assert advice.endswith(f"For example: --key {second}, or --raw.")
    assert f"({second}) with weight" in run(*words, "--key", str(second)).out
    assert "This key has" not in run(*words).out


def test_a_typo_in_the_name_of_a_command_is_not_read_as_a_model(run: Callable, tiny_model: str) -> None:
    code, _, err = run("geometry", "atribute", tiny_model, WORDS, "--layer", "1")
    assert (code, err) == (2, "attnflow: no command or model 'atribute': did you mean attribute?\n")


def test_why_of_cross_attention(run: Callable, t5: str) -> None:
    out = run.ok("geometry", "attribute", t5, "--ids", "5,6,7", "--layer", "1", "--attention", "cross")
    assert "encoder" in out


@pytest.mark.parametrize("suffix", [".svg", ".html", ".csv", ".json"])
def test_why_writes_files(run: Callable, tiny_model: str, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"why{suffix}"
    out = run.ok("geometry", "attribute", tiny_model, WORDS, "--layer", "1", "--head", "2", "-o", str(target))
    assert f"written: {target}" in out
    assert target.stat().st_size > 200


def test_why_writes_a_page_about_the_key_that_is_asked_for(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    target = tmp_path / "why.html"
    words = ("--layer", "1", "--head", "2", "--key", "1", "--raw", "-o", str(target))
    assert run("geometry", "attribute", tiny_model, WORDS, *words).code == 0
    text = target.read_text("utf-8")
    assert "(1) with weight" in text
    assert "less its mean" not in text


def test_score_is_what_geometry_does_without_a_name(run: Callable, tiny_model: str) -> None:
    assert run("geometry", "--per-head", tiny_model) == run("geometry", "score", tiny_model, "--per-head")
    assert "MODEL" in run("geometry").err
