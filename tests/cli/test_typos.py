"""Every command with something mistyped: an answer at once, without the network and before a model is loaded."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow
from attnflow.models import loader

TASK = '{"inputs": [1, 2], "labels": [], "mask": {"name": "causal", "parameters": {"n": 2}}}'
CASES = [
    ("mask shw", "did you mean 'show'"),
    ("mask list --jsn", "--json"),
    ("mask show cusal", "did you mean causal"),
    ("mask show causal --set m=3", "causal(n) has no parameter 'm'"),
    ("mask show sliding_window --set windw=3", "did you mean window"),
    ("mask show sliding_window --set window=three", "window must be an integer"),
    ("mask show causal -o causal.swg", "must end in .svg"),
    ("mask show none.json", "cannot read none.json"),
    ("mask check none.json", "cannot read none.json"),
    ("mask check bad.json", "bad.json is not JSON"),
    ("mask check task.json --layers x", "--layers"),
    ("mask exprt causal", "did you mean 'export'"),
    ("mask export cusal --to varlen", "did you mean causal"),
    ("mask export causal --to varlin", "did you mean varlen"),
    ("mask export causal --to varlen -o causal.jsn", "must end in .json"),
    ("mask debug none.npy", "cannot read none.npy"),
    ("mask debug task.json --against casual", "did you mean causal"),
    ("mask debug task.json --set window=3", "--set belongs to the mask of --against"),
    ("mask merge buterfly --tokens 5", "did you mean butterfly"),
    ("mask merge block_two_stream --tokens 8 --set blok=2", "did you mean block"),
    ("mask merge butterfly --tokens five", "--tokens"),
    ("audit nope", "no file or folder 'nope'"),
    ("audit smolm2-135m", "did you mean smollm2-135m?"),
    ("audit butterfly", "butterfly is a mask"),
    ("audit nobody/nothing", "HF_HUB_OFFLINE is set"),
    ("audit smollm2-135m --order casual", "did you mean causal?"),
    ("audit smollm2-135m --order bad.json", "bad.json is not JSON"),
    ("audit smollm2-135m --mode vpj", "--mode"),
    ("audit smollm2-135m --ids 1,x", "--ids must be integers"),
    ("audit smollm2-135m --text hi --ids 1,2", "not both"),
    ("audit smollm2-135m --against none.json", "cannot read none.json"),
    ("audit smollm2-135m --against bad.json", "bad.json is not JSON"),
    ("audit smollm2-135m --against task.json", "task.json holds no measured order"),
    ("audit smollm2-135m --against task.json --tokens 4", "leave out --text, --ids and --tokens"),
    ("audit smollm2-135m --save order.json --against task.json", "--save or --against, not both"),
    ("audit smollm2-135m --save order.txt", "must end in .json"),
    ("audit smollm2-135m --save nowhere/order.json", "there is no folder"),
    ("audit smollm2-135m --sav order.json", "--save"),
    ("audit smollm2-135m --agianst order.json", "--against"),
    ("geometry minlm", "did you mean minilm?"),
    ("geometry ./nothing", "no file or folder './nothing'"),
    ("geometry minilm --attention croos", "--attention"),
    ("geometry minilm --mode exces", "--mode"),
    ("geometry minilm --picture plan", "--picture"),
    ("geometry minilm --gamma two", "--gamma"),
    ("geometry minilm --config heads", "--config takes NAME=VALUE"),
    ("geometry minilm -o scores.pgn", "must end in"),
    ("bias show nope", "nope"),
    ("bias show smollm2-135m --bias nodir", "nodir"),
    ("bias show smollm2-135m --bias nodir --query 5000", "--query 5000"),
    ("bias show smollm2-135m --bias nodir -o map.gif", "must end in"),
    ("bias show smollm2-135m --bias nodir --top-k 2 -o map.png", "graph"),
    ("bias train smolm2-135m --data notes.txt", "did you mean smollm2-135m?"),
    ("bias train smollm2-135m --data none.txt", "none.txt"),
    ("bias train smollm2-135m --data notes.txt --kind guidence", "--kind"),
    ("bias train smollm2-135m --data notes.txt --train gidance", "--train"),
    ("knowledge build store none.txt", "none.txt"),
    ("knowledge build store notes.txt --encoder minlm", "did you mean minilm?"),
    ("knowledge build store --from-model smolm2-135m", "did you mean smollm2-135m?"),
    ("knowledge build store notes.txt --split lines", "--split"),
    ("knowledge search nostore hi", "no store"),
    ("knowledge insert nostore --text hi", "no store"),
    ("knowledge delete nostore 3", "no store"),
    ("knowledge delete nostore three", "valid integer"),
    ("knowledge stats nostore", "no store"),
    ("knowledge reembed nostore", "no store"),
    ("knowledge trace gpt9 hi", "no file or folder 'gpt9'"),
    ("knowledge trace smollm2-135m hi -o trace.gif", "must end in"),
    ("knowledge trace smollm2-135m hi --layer x", "--layer"),
    ("report buterfly -o out.html", "did you mean butterfly?"),
    ("report minlm -o out.html", "did you mean minilm"),
    ("report butterfly -o out.htm", "must end in .html"),
    ("report butterfly --set m=3 -o out.html", "has no parameter 'm'"),
    ("report smollm2-135m --n 3 -o out.html", "--n and --set belong to masks"),
    ("report none.json -o out.html", "cannot read none.json"),
    ("report smollm2-135m -o nowhere/out.html", "there is no folder"),
    ("demo --model smolm2-135m", "did you mean smollm2-135m?"),
    ("demo -o out.htm", "must end in .html"),
    ("doctr", "did you mean 'doctor'"),
    ("doctor --jsn", "--json"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a few files, without a network, where no model is ever loaded."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded, or the network was asked")

    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("one\ntwo\nthree\n")
    Path("bad.json").write_text("{")
    Path("task.json").write_text(TASK)
    monkeypatch.setattr(loader, "load_model", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_a_typo(run: Callable, command: str, message: str) -> None:
    code, out, err = run(*command.split())
    assert (code, out) == (2, "")
    assert err.startswith("attnflow: ")
    assert message.lower() in err.lower()
    assert "unexpected" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["bad.json", "notes.txt", "task.json"]


@pytest.mark.parametrize(
    "command", ["report buterfly -o out.html", "audit nope", "geometry minlm", "knowledge trace gpt9 hi"]
)
def test_a_typo_waits_for_nothing(command: str) -> None:
    """Processor time, not wall time: other work on this machine says nothing about ours."""
    environment = os.environ | {"PYTHONPATH": str(Path(attnflow.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    before = os.times().children_user
    arguments = [sys.executable, "-m", "attnflow", *command.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    assert os.times().children_user - before < 3
