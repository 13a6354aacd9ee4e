"""A few trials of each kind of fault; and the suite itself: it counts, and a killed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import page, runner

SAMPLE = """
import os
from pathlib import Path

PROMISE = "even seeds hold"
TRIALS = 12
SHORT = 1
HERE = Path(__file__).parent

def trial(seed, folder):
    assert list(folder.iterdir()) == []
    (folder / "left").write_text("behind")
    with (HERE / "ran").open("a") as file:
        file.write(f"{seed}\\n")
    if seed == 3:
        raise KeyError("raised")
    if seed == 6 and (HERE / "deadly").exists():
        os._exit(7)
    return "odd | seed" if seed % 2 else None
"""


@pytest.mark.parametrize("name", runner.names())
@pytest.mark.slow
def test_a_few_trials(name: str, tmp_path: Path) -> None:
    kind = runner.load(name)
    for seed in range(kind.SHORT):
        folder = tmp_path / str(seed)
        folder.mkdir()
        assert kind.trial(seed, folder) is None, f"{name}, seed {seed}: {kind.PROMISE}"


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """The name of a kind of fault that lies in `tmp_path`, whose odd seeds are lost."""
    (tmp_path / "sample_fault.py").write_text(SAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "sample_fault"
    sys.modules.pop("sample_fault", None)


def journal(tmp_path, source="sources"):
    return runner.Journal(tmp_path / "sample.jsonl", source)


def test_losses_are_counted_and_exceptions_are_losses(sample, tmp_path):
    seen = []
    log = journal(tmp_path)
    log.begin(resume=False)
    outcomes = runner.run(sample, 5, log, package="", progress=lambda *counts: seen.append(counts))
    assert [outcome.lost for outcome in outcomes[:3]] == [None, "odd | seed", None]
    assert outcomes[3].lost is not None
    assert outcomes[3].lost.startswith("KeyError at sample_fault.py:")
    assert seen == [(1, 5, 0), (2, 5, 1), (3, 5, 1), (4, 5, 2), (5, 5, 2)]
    row = page.row(sample, "even seeds hold", outcomes, "2030-01-01")
    page.write({sample: row}, [sample, "other"], tmp_path / "table.csv", tmp_path / "page.md")
    assert page.read(tmp_path / "table.csv") == {sample: row}
    text = (tmp_path / "page.md").read_text()
    assert "**5 trials, 2 lost.**" in text
    assert "- trial 1: odd \\| seed" in text
    assert "Not run yet: other." in text


def test_a_run_goes_on_only_from_the_same_sources(sample, tmp_path):
    log = journal(tmp_path)
    assert not log.begin(resume=True)
    runner.run(sample, 2, log, package="")
    log.path.write_bytes(log.path.read_bytes() + b'{"seed": 2, "lo')  # torn by a kill
    assert log.begin(resume=True)
    runner.run(sample, 3, log, package="")
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2"]
    assert journal(tmp_path, "changed").begin(resume=True) is False
    assert log.outcomes() == {}


@pytest.mark.slow
def test_a_trial_that_ends_its_process_is_lost_and_no_other(sample, tmp_path):
    (tmp_path / "deadly").touch()
    log = journal(tmp_path)
    log.begin(resume=False)
    outcomes = runner.run(sample, 8, log, workers=2, package="")
    assert [outcome.seed for outcome in outcomes] == list(range(8))
    assert [outcome.lost is None for outcome in outcomes] == [True, False] * 3 + [False, False]
    assert outcomes[6].lost == "it ended its process"


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    (tmp_path / "slow_fault.py").write_text(
        SAMPLE + "\nimport time\n_trial = trial\n"
        "def trial(seed, folder):\n    time.sleep(0.2)\n    return _trial(seed, folder)\n"
    )
    code = (
        "import sys; from pathlib import Path; from tests.faults import runner\n"
        f"log = runner.Journal(Path({str(tmp_path)!r}) / 'slow.jsonl', 's'); log.begin(True)\n"
        "print(len(runner.run('slow_fault', 12, log, package='')))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(runner.ROOT), str(tmp_path)])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "ran").exists() or len((tmp_path / "ran").read_text().split()) < 4:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    done = [json.loads(line) for line in (tmp_path / "slow.jsonl").read_text().splitlines()]
    assert sum(1 for line in done if "seed" in line) >= 3
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert finished.stdout == "12\n"
    ran = (tmp_path / "ran").read_text().split()
    assert set(ran) == {str(seed) for seed in range(12)}
    assert len(ran) <= 13  # at most the trial that the kill interrupted runs again
