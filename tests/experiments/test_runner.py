"""Jobs, studies, the command, and the state of the repository that results come from."""

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnflow._core.progress import Progress
from experiments.runner import command, git
from experiments.runner import study as study_module
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, chosen, repeated, swept
from experiments.runner.study import Origin, Study, check_origin, describe, keep, locked, read_study, take_up
from experiments.runner.training import Diverged
from tests.experiments.toy import TOY, recipe

README = "# A toy\n\n## Predictions\n\nIt goes on.\n\n## What came out\n\nIt did.\n"


def quick(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
    del folder
    progress(1, 2, "half")
    return {"loss": {"a": 1.0, "b": 2.0}[job.arm] * abs((job.rate or 1.0) - 0.3), "name": job.name}


# Jobs


def test_a_sweep_takes_the_best_rate_of_the_first_seed_to_the_others(tmp_path: Path) -> None:
    plan = swept(["a", "b"], [0.1, 0.25, 1.0], [7, 8, 9], lambda run: run["loss"], choosing=1, widen=False)
    assert plan.count == 6 + 4
    Study(tmp_path, Setup(plan, quick), plan, lambda *_: None).run()
    names = {path.stem for path in (tmp_path / "runs").iterdir()}
    assert names == {f"{arm}-{rate}-7" for arm in "ab" for rate in ("0.1", "0.25", "1")} | {
        f"{arm}-0.25-{seed}" for arm in "ab" for seed in (8, 9)
    }


def test_a_rate_that_diverges_is_a_result_and_is_not_chosen(tmp_path: Path) -> None:
    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        if job.rate == 1.0:
            raise Diverged("step 3: loss nan")
        return {"loss": job.rate}

    plan = swept(["a"], [0.5, 1.0], [0, 1], lambda record: record["loss"], choosing=1, widen=False)
    study = Study(tmp_path, Setup(plan, run), plan, lambda *_: None)
    study.run()
    assert study.record(Job("a", 1.0, 0))["diverged"] == "step 3: loss nan"
    assert study.path(Job("a", 0.5, 1)).is_file()
    hopeless = swept(["a"], [1.0], [0, 1], lambda record: record["loss"], choosing=1, widen=False)
    with pytest.raises(ValueError, match="a diverged with every learning rate: step 3: loss nan"):
        Study(tmp_path, Setup(hopeless, run), hopeless, lambda *_: None).run()


def test_a_best_rate_at_an_end_widens_the_range_of_its_arm_alone(tmp_path: Path) -> None:
    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        best = {"low": 0.02, "within": 1.0, "endless": 0.0}[job.arm]
        return {"loss": abs((job.rate or 0.0) - best) + 0.1 * (job.seed or 0)}

    arms, rates, seeds = ["low", "within", "endless"], [0.3, 1.0, 3.0], [0, 1, 2]
    plan = swept(arms, rates, seeds, lambda record: record["loss"], choosing=2)
    study = Study(tmp_path, Setup(plan, run), plan, lambda *_: None)
    study.run()
    runs = {Job(**one["job"]): one for one in read_study_runs(tmp_path)}
    found = {arm: chosen(arm, rates, seeds, runs, lambda record: record["loss"], choosing=2) for arm in arms}
    low, within, endless = (found[arm] for arm in arms)
    assert low is not None
    assert within is not None
    assert endless is not None
    assert (low.rate, low.tried, low.at_end) == (0.027, (0.0081, 0.027, 0.09, 0.3, 1.0, 3.0), False)
    assert (within.tried, list(within.runs)) == ((0.3, 1.0, 3.0), [0, 1, 2])
    assert len(endless.tried) == 6
    assert endless.at_end, "three times is enough, and the results say so"


def test_a_rate_must_work_for_every_seed_that_chooses(tmp_path: Path) -> None:
    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        if (job.rate, job.seed) == (1.0, 1):
            raise Diverged("step 3: loss nan")
        return {"loss": -(job.rate or 0.0)}

    plan = swept(["a"], [0.5, 1.0], [0, 1, 2], lambda record: record["loss"], choosing=2, widen=False)
    study = Study(tmp_path, Setup(plan, run), plan, lambda *_: None)
    study.run()
    assert study.path(Job("a", 0.5, 2)).is_file()
    assert not study.path(Job("a", 1.0, 2)).is_file()


def read_study_runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs").iterdir())]


def test_some_arms_and_what_belongs_to_none() -> None:
    plan = Plan((Job("base"), *repeated(["a", "b"], [0, 1]).first))
    assert [job.name for job in plan.only(["b"]).first] == ["base", "b-0", "b-1"]
    with pytest.raises(ValueError, match="arms must be of a, b; got c"):
        plan.only(["c"])


# Studies


def test_a_study_runs_what_is_missing_and_says_how_long_it_takes(tmp_path: Path) -> None:
    plan, said = repeated(["a", "b"], [0, 1]), list[tuple[int, int, str]]()
    study = Study(tmp_path, Setup(plan, quick), plan, lambda *args: said.append(args))
    study.run()
    path = study.path(Job("a", seed=1))
    first = {each: each.stat().st_mtime_ns for each in (tmp_path / "runs").iterdir() if each != path}
    path.unlink()
    study.run()
    assert {each: each.stat().st_mtime_ns for each in first} == first
    assert json.loads(path.read_text())["name"] == "a-1"
    assert said[0] == (0, 4, "a-0; jobs")
    assert said[1][2].startswith("a-0, step 1 of 2: half")
    assert any(" left; jobs" in what for _, _, what in said)
    assert said[-1][:2] == (4, 4)


def test_runs_are_kept_beside_results_and_taken_up_from_there(tmp_path: Path) -> None:
    work, results, later = (tmp_path / name for name in ("work", "results", "later"))
    for folder in (work, results, later):
        folder.mkdir()
    plan = repeated(["a"], [0, 1])
    made = Setup(plan, quick)
    describe(work, TOY, recipe(), made, "tiny", Origin("0" * 40, "digest"))
    Study(work, made, plan, lambda *_: None).run()
    keep(work, results)
    assert sorted(path.name for path in results.iterdir()) == ["runs.jsonl", "study.json"]
    assert read_study(results) == read_study(work)
    take_up(results, later)
    assert read_study(later) == read_study(work)
    ran: list[str] = []
    more = repeated(["a"], [0, 1, 2])
    Study(later, Setup(more, lambda job, *_: ran.append(job.name) or {}), more, lambda *_: None).run()
    assert ran == ["a-2"]


def test_two_processes_share_a_study(tmp_path: Path) -> None:
    """Locks are per open file, so that two studies of one process exclude each other as two processes do."""
    began, go_on = threading.Event(), threading.Event()
    ran: list[str] = []

    def wait(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        ran.append(f"one {job.name}")
        began.set()
        assert go_on.wait(60)
        return {}

    def other(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        ran.append(f"other {job.name}")
        go_on.set()
        return {}

    plan = repeated(["a", "b"], [0])
    first = threading.Thread(target=Study(tmp_path, Setup(plan, wait), plan, lambda *_: None).run)
    first.start()
    assert began.wait(60)
    Study(tmp_path, Setup(plan, other), plan, lambda *_: None).run()
    first.join()
    assert sorted(ran) == ["one a-0", "other b-0"]
    with locked(tmp_path / "lock", wait=False) as mine, locked(tmp_path / "lock", wait=False) as theirs:
        assert (mine, theirs) == (True, False)


def test_other_settings_are_refused_but_more_seeds_are_welcome(tmp_path: Path) -> None:
    setup = TOY.setup(recipe())
    describe(tmp_path, TOY, recipe(), setup, "tiny", Origin("c+"))
    describe(tmp_path, TOY, replace(recipe(), seeds=(0, 1, 2)), setup, "tiny", Origin("c+"))
    with pytest.raises(ValueError, match=r"other settings \(steps\)"):
        describe(tmp_path, TOY, replace(recipe(), steps=3), setup, "tiny", Origin("c+"))
    with pytest.raises(ValueError, match="no predictions were committed"):
        check_origin(tmp_path, Origin("c", "digest"))
    with pytest.raises(FileNotFoundError, match="no study"):
        check_origin(tmp_path / "nothing", Origin("c"))


# The repository


@pytest.fixture(name="repository")
def _repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean one with the toy's README, where results go."""
    root = tmp_path / "repository"
    (root / "experiments" / "toy").mkdir(parents=True)
    (root / "experiments" / "toy" / "README.md").write_text(README)
    (root / ".gitignore").write_text("/out/\n")
    run_git(root, "init", "-q")
    commit(root, "Begin")
    monkeypatch.setattr(study_module, "REPOSITORY", root)
    monkeypatch.setattr(command, "WORK", root / "out")
    monkeypatch.setattr(command, "find", lambda name: TOY)
    monkeypatch.setattr("experiments.runner.experiment.ROOT", root / "experiments")
    return root


def run_git(root: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *names, "-C", str(root), *arguments], check=True, capture_output=True)


def commit(root: Path, message: str) -> None:
    run_git(root, "add", "-A")
    run_git(root, "commit", "-q", "-m", message)


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = command.main(["toy", *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_results_come_from_a_clean_commit_with_predictions(repository: Path, capsys: Any) -> None:
    readme = repository / "experiments" / "toy" / "README.md"
    readme.write_text(README.replace("It goes on", "It does not"))
    code, said = run_command(capsys)
    assert code == 2
    assert "a clean commit only, and these files differ from it: experiments/toy/README.md" in said
    assert not (repository / "out").exists()
    readme.write_text("# A toy\n\n## Predictions\n\n## What came out\n")
    commit(repository, "Forget")
    code, said = run_command(capsys)
    assert code == 2
    assert 'has no section "## Predictions" in the commit' in said
    readme.write_text(README)
    commit(repository, "Predict")
    code, said = run_command(capsys)
    assert (code, said.splitlines()[-1]) == (0, "4 runs")
    results = repository / "experiments" / "toy" / "results"
    assert json.loads((results / "results.json").read_text()) == {"runs": 4}
    settings = json.loads((results / "study.json").read_text())
    assert settings["origin"]["commit"] == git.head(repository)
    code, said = run_command(capsys, "--resume")
    assert (code, said.splitlines()[-1]) == (0, "4 runs"), "a second process ends after the first has written results"
    assert settings["config"] == {"seeds": [0, 1], "steps": 9, "parts": 2}


def test_predictions_do_not_change_once_a_study_has_begun(repository: Path, capsys: Any) -> None:
    assert run_command(capsys, "--arms", "a", "--seeds", "1")[0] == 0
    code, said = run_command(capsys, "--arms", "b")
    assert code == 2
    assert "1 jobs of it are done: pass --resume to go on" in said
    (repository / "experiments" / "toy" / "README.md").write_text(README.replace("goes on", "had to go on"))
    commit(repository, "Know better")
    for option in ("--resume", "--summary"):
        code, said = run_command(capsys, option)
        assert code == 2
        assert "the predictions have changed since the study" in said
    run_git(repository, "reset", "-q", "--hard", "HEAD~1")
    (repository / "src" / "attnflow").mkdir(parents=True)
    (repository / "src" / "attnflow" / "bias.py").write_text("")
    commit(repository, "Code")
    code, said = run_command(capsys, "--resume")
    assert code == 2
    assert "src/attnflow/bias.py differ now" in said
    run_git(repository, "reset", "-q", "--hard", "HEAD~1")
    assert run_command(capsys, "--resume", "--seeds", "1") == (0, "2 runs\n")


def test_a_trial_needs_no_commit_and_its_results_cannot_be_kept(repository: Path, tmp_path: Path, capsys: Any) -> None:
    (repository / "new.txt").write_text("")
    code, said = run_command(capsys, "--results", str(tmp_path / "trial"), "--seeds", "1")
    assert (code, said) == (0, "2 runs\n")
    assert json.loads((tmp_path / "trial" / "study.json").read_text())["origin"]["commit"].endswith("+")
    commit(repository, "New")
    code, said = run_command(capsys, "--summary")
    assert code == 2
    assert "no predictions were committed before the study" in said


def test_bad_requests(repository: Path, capsys: Any) -> None:
    for arguments, message in [
        (["--scale", "paper"], "toy has the scales tiny, not 'paper'"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--arms", "c"], "arms must be of a, b; got c"),
        (["--summary"], "no study in"),
    ]:
        code, said = run_command(capsys, *arguments)
        assert code == 2
        assert message in said, said
