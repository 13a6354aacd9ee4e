"""Every command with something mistyped: one message and exit code 2; no network, no file, no model before its turn."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af
from attnflow.models.loading import loader

TASK = '{"inputs": [1, 2], "labels": [], "mask": {"name": "causal", "parameters": {"n": 2}}}'
CASES = [
    ("mask shw", "did you mean 'show'"),
    ("mask show cusal", "did you mean causal"),
    ("mask show sliding_window --set windw=3", "did you mean window"),
    ("mask show sliding_window --set window=three", "window must be an integer"),
    ("mask check none.json", "cannot read none.json"),
    ("mask check bad.json", "bad.json is not JSON"),
    ("mask check nine.json", "unknown name"),
    ("mask exprt causal", "did you mean 'export'"),
    ("mask export causal --to varlin", "did you mean varlen"),
    ("mask debug none.npy", "cannot read none.npy"),
    ("mask merge buterfly --tokens 5", "did you mean butterfly"),
    ("mask merge block_two_stream --tokens 8 --set blok=2", "did you mean block"),
    ("mask merge butterfly", "--tokens"),
    ("mask merge butterfly --tokens 10001", "--tokens"),
    ("mask merge causal_lm --tokens 5 --set block=2", "has no parameter 'block'"),
    ("mask merge block_two_stream --tokens 10 --set block=4", "must be a multiple of block = 4, got 10; pad to 12"),
    ("mask merge block_two_stream --tokens 8 --set block=2 --set block=4", "--set block=... is given twice"),
    ("audit nope", "no file or folder 'nope'"),
    ("audit smolm2-135m", "did you mean smollm2-135m?"),
    ("audit butterfly", "butterfly is a mask"),
    ("audit nobody/nothing", "HF_HUB_OFFLINE is set"),
    ("audit smollm2-135m --order casual", "did you mean causal?"),
    ("audit smollm2-135m --order bad.json", "bad.json is not JSON"),
    ("audit smollm2-135m --ids 1,x", "--ids must be integers"),
    ("audit smollm2-135m --text hi --ids 1,2", "not both"),
    ("audit smollm2-135m --against bad.json", "bad.json is not JSON"),
    ("audit smollm2-135m --against task.json", "task.json holds no measured order"),
    ("audit smollm2-135m --against task.json --tokens 4", "leave out --text, --ids and --tokens"),
    ("audit smollm2-135m --save order.json --against task.json", "--save or --against, not both"),
    ("audit smollm2-135m --save order.txt", "must end in .json"),
    ("geometry minlm", "did you mean minilm?"),
    ("geometry ./nothing", "no file or folder './nothing'"),
    ("geometry minilm --attention croos", "--attention"),
    ("geometry minilm --config heads", "--config takes NAME=VALUE"),
    ("geometry attribute minlm hi --layer 1", "did you mean minilm?"),
    ("geometry attribute minilm hi", "--layer"),
    ("geometry attribute minilm hi --layer one", "--layer"),
    ("geometry attribute minilm --layer 1", "give either a TEXT or --ids"),
    ("geometry attribute minilm hi --ids 1,2 --layer 1", "give either a TEXT or --ids"),
    ("geometry attribute minilm hi --layer 1 --attention croos", "--attention"),
    ("geometry attribute minilm hi --layer 1 -o why.gif", "must end in"),
    ("bias show nope", "nope"),
    ("bias show smollm2-135m --bias nodir", "nodir holds no saved bias"),
    ("bias show smollm2-135m --bias nodir -o map.gif", "must end in"),
    ("knowledge build store ./none", "no file or folder"),
    ("knowledge build store smolm2-135m", "did you mean smollm2-135m?"),
    ("knowledge stats nostore", "found no store at nostore: make one with `attnflow knowledge build nostore MODEL`"),
    ("knowledge trace smollm2-135m hi -o nowhere/trace.svg", "nowhere"),
    ("knowledge trace smollm2-135m hi --ids 1", "give either a TEXT or --ids"),
    ("knowledge trace smollm2-135m hi --position 99", "--position 99 lies outside a text"),
    ("knowledge trace gpt9 hi", "no file or folder 'gpt9'"),
    ("report buterfly -o out.html", "did you mean butterfly?"),
    ("report butterfly -o out.htm", "must end in .html"),
    ("report butterfly --set m=3 -o out.html", "has no parameter 'm'"),
    ("report smollm2-135m --n 3 -o out.html", "--n and --set apply only to masks"),
    ("", "Missing command"),
    ("mask show causal --n -1", "--n"),
    ("mask show zzzz", "unknown mask 'zzzz' (`attnflow mask list` shows all)"),
    ("mask show sliding_window", "needs window; for example: attnflow mask show sliding_window --set window=4"),
    ("mask show sliding_window --n 4 --set window=3 --set n=5", "n is given twice"),
    ("mask show sliding_window --set window=3 --set window=4", "--set window=... is given twice"),
    ("mask show sliding_window --set window", "--set takes NAME=VALUE"),
    ("mask show causal --n 1000000000000", "n is at most 4,194,304 by name"),
    ("mask show document --n 4 --set lengths=3", "has no parameter n"),
    ("mask show document", "such as lengths=5,3,4, got none"),
    ("mask show block_causal --n 10 --set block=4", "n must be a multiple of block = 4, got 10; pad to 12"),
    ("mask show task.json --n 3", "apply only to masks of the catalogue"),
    ("mask show causal -o mask", "the name must end in"),
    ("mask show causal -o folder.svg", "it exists and is not a plain file"),
    ("report butterfly --text the -o x.html", "--text applies only to models"),
    ("report none.json --n 3 -o x.html", "apply only to masks of the catalogue"),
    ("report buterfly --n 3 -o x.html", "'buterfly' is not one: did you mean butterfly?"),
    ("audit ''", "the model's name is empty"),
    ("studio causal --bias .", "--bias applies only to models"),
    ("studio smollm2-135m --bias no-such-folder", "no-such-folder does not exist"),
    ("geometry minilm --config heads=four", "must be a whole number, got 'four'"),
    ("geometry minilm smollm2-135m -o out.svg --picture heads", "--picture heads shows one model, got 2"),
]

# Refused once a tiny model is read, which TINY names.
OF_A_MODEL = [
    ("audit TINY --ids 1,99", "lie in [0, 21), the vocabulary; got 1 to 99"),
    ("audit TINY --ids 1,-2", "lie in [0, 21), the vocabulary; got -2 to 1"),
    ("audit TINY --ids 1", "expected at least 2 tokens, got 1"),
    ("audit TINY --text ''", "expected at least 2 tokens, got 0"),
    ("audit TINY --tokens 8 --order nine.json", "expected an order over 8 positions"),
    ("audit empty", "no config.json"),
    ("geometry TINY --gamma nan", "gamma must be finite"),
    ("geometry attribute TINY 'I the of' --layer 7", "layer must be at most 1, got 7"),
    ("geometry attribute TINY 'I the of' --layer 1 --head 9", "head must be at most 3, got 9"),
    ("geometry attribute TINY 'I the of' --layer 1 --query 3", "query must be at most 2, got 3"),
    (
        "geometry attribute TINY 'I the of' --layer 1 --head 0 --key 3",
        "key must be a position that query 2 may attend to, 0 to 2",
    ),
    ("geometry attribute TINY --ids 5,6,700 --layer 1", "the model's vocabulary"),
    ("geometry attribute TINY 'I the of' --layer 1 --attention cross", "has no cross-attention"),
    ("bias show TINY --bias BIAS --text 'I the of' --layer 7", "layer must be at most 1, got 7"),
    (
        "bias show TINY --bias BIAS --text 'I the of' --query 99",
        "queries must be positions from -3 to 2 for 3 tokens, got [99]",
    ),
    ("bias show TINY --bias BIAS --text 'I the of' --head 9", "head must be at most 3, got 9"),
    ("bias show TINY --bias BIAS --text 'I the of' --query -4", "query must be one of the captured positions"),
    ("bias show TINY", "has no bias: give its folder with --bias DIR"),
    ("bias show no-such-model --bias empty", "holds no saved bias"),
    ("knowledge build memory TINY", "a store in memory is lost when the command ends"),
    ("knowledge build notes.txt TINY", "notes.txt"),
    ("knowledge trace TINY 'I the of' --layer 2", "layer must be at most 1, got 2"),
    ("knowledge trace TINY 'I the of' --position 9", "position must be from -3 to 2"),
    ("knowledge trace TINY ''", "the text is empty"),
    ("knowledge trace TINY", "give either a TEXT or --ids"),
    ("knowledge trace TINY --ids a", "--ids must be integers"),
    ("knowledge edit TINY -o edited", "give --prompt and --answer"),
    ("knowledge edit TINY --prompt the -o edited", "give --prompt and --answer"),
    (
        "knowledge edit TINY --prompt 'the thy' --answer be --keep nothing.txt -o edited",
        "the file nothing.txt does not exist",
    ),
    ("knowledge edit TINY --prompt 'the thy' --answer be --subject me -o edited", "must contain the subject 'me'"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a few files, without a network."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("one\ntwo\nthree\n")
    Path("bad.json").write_text("{")
    Path("task.json").write_text(TASK)
    Path("nine.json").write_text('{"name": "causal", "parameters": {"n": 9}}')
    Path("empty").mkdir()
    Path("folder.svg").mkdir()
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded, or the network was asked")


def is_refused(run: Callable, words: list[str], message: str) -> None:
    before = sorted(Path().iterdir())
    err = run.refused(*words)
    assert err.startswith("attnflow: ")
    assert message.lower() in err.lower()
    assert "unexpected error" not in err.lower()
    assert "defect" not in err
    assert "Traceback" not in err
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_a_typo(run: Callable, monkeypatch: pytest.MonkeyPatch, command: str, message: str) -> None:
    monkeypatch.setattr(loader, "load_model", refuse)
    is_refused(run, shlex.split(command), message)


@pytest.mark.parametrize(("command", "message"), OF_A_MODEL, ids=[command for command, _ in OF_A_MODEL])
def test_what_a_model_refuses(run: Callable, tiny_model: str, saved: str, command: str, message: str) -> None:
    named = {"TINY": tiny_model, "BIAS": saved}
    is_refused(run, [named.get(word, word) for word in shlex.split(command)], message)


@pytest.mark.parametrize(
    "command", ["report buterfly -o out.html", "audit nope", "geometry minlm", "knowledge trace gpt9 hi"]
)
def test_a_typo_waits_for_nothing(command: str) -> None:
    """Processor time, not wall time: other work on this machine says nothing about ours."""
    environment = os.environ | {"PYTHONPATH": str(Path(af.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    before = os.times().children_user
    arguments = [sys.executable, "-m", "attnflow", *command.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    assert os.times().children_user - before < 3
