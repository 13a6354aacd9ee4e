"""Figures belong to a commit: a tree with changes appends nothing to the project's file."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import FIELDS, RESULTS, Case, destination

ROOT = Path(__file__).parents[2]


def timed():
    return lambda: sum(range(1000))


def cases(device):
    return [Case("sum", "attnflow", 1000, __name__, "timed", repeats=1)] if device == "cpu" else []


@pytest.fixture
def repository(tmp_path):
    """A clean tree with one commit, which holds a source and a file of figures."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "benchmarks").mkdir()
    (tmp_path / RESULTS).write_text(",".join(FIELDS) + "\n")
    (tmp_path / "source.py").write_text("x = 1\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_a_clean_tree_appends_to_the_file_of_the_project(repository):
    assert destination(repository) == repository / RESULTS
    assert not harness._commit(repository).endswith("-dirty")


def test_rows_that_were_just_appended_are_no_change(repository):
    (repository / RESULTS).write_text("more\n")
    assert destination(repository) == repository / RESULTS
    assert not harness._commit(repository).endswith("-dirty")


@pytest.mark.parametrize("name", ["source.py", "new.py"])
def test_a_changed_or_new_file_is_refused_by_name(repository, name):
    (repository / name).write_text("x = 2\n")
    with pytest.raises(SystemExit, match=rf"the tree has changes(?s:.*){name}(?s:.*)--force FILE"):
        destination(repository)
    assert harness._commit(repository).endswith("-dirty")


def test_a_dirty_tree_leaves_no_trace_in_the_figures(repository, monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "ROOT", repository)
    (repository / "source.py").write_text("x = 2\n")
    before = (repository / RESULTS).read_text()
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit, match="the tree has changes"):
        harness.main(cases, ["torch"])
    assert (repository / RESULTS).read_text() == before
    monkeypatch.setattr(harness, "_run", lambda case, limit: {"p50": "1.0", "note": ""})
    monkeypatch.setattr(sys, "argv", ["bench", "--force", str(tmp_path / "mine.csv")])
    harness.main(cases, ["torch"])
    assert (repository / RESULTS).read_text() == before
    with (tmp_path / "mine.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["commit"].endswith("-dirty")
    assert row["ratio"] == "1.00"


def test_every_committed_figure_belongs_to_a_commit():
    with (ROOT / RESULTS).open(newline="") as file:
        commits = {row["commit"] for row in csv.DictReader(file)}
    assert commits
    assert not [commit for commit in commits if commit.endswith("-dirty") or not commit]


def test_records_say_what_claim_k26_says_of_table_2_of_the_knowledge_paper():
    """Folding saves less than the printed (N + d) / N; an approximate search pays for one token, not for 128."""
    with (ROOT / RESULTS).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"].startswith("read of E")]
    took = {(row["what"], row["size"], row["provider"]): float(row["p50"]) for row in rows}
    for tokens, sizes in ((1, ("4096", "65536", "524288")), (128, ("4096", "65536"))):
        for size in sizes:
            naive, folded, searched = (
                took[f"read of E, N={tokens}", size, name] for name in ("naive", "folded", "query-side, approximate")
            )
            saves, took_more = ((19.5, 34.5), (0.45, 0.95)) if tokens == 1 else ((2.75, 2.95), (3.5, 11.5))
            assert saves[0] < naive / folded < saves[1] < (tokens + 512) / tokens
            assert took_more[0] < searched / folded < took_more[1]
