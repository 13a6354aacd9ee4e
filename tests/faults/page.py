"""The counts of the fault suite as a table, and as a page of the documentation."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tests.faults.runner import ROOT, Outcome

TABLE = ROOT / "docs" / "reliability.csv"
PAGE = ROOT / "docs" / "reliability.md"
_SHOWN = 20  # losses of a kind that are listed one by one


@dataclass(frozen=True)
class Row:
    """One kind of fault: its trials, how many were lost, the losses in words, seconds of all trials."""

    kind: str
    promise: str
    trials: int
    lost: int
    losses: str
    seconds: float
    date: str


def row(kind: str, promise: str, outcomes: Sequence[Outcome], date: str) -> Row:
    losses = [outcome for outcome in outcomes if outcome.lost is not None]
    words = [f"trial {outcome.seed}: {' '.join((outcome.lost or '').split())[:300]}" for outcome in losses[:_SHOWN]]
    seconds = round(sum(outcome.seconds for outcome in outcomes), 1)
    return Row(kind, promise, len(outcomes), len(losses), "\n".join(words), seconds, date)


def read(path: Path = TABLE) -> dict[str, Row]:
    """The rows of earlier runs by kind."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            cells["kind"]: Row(
                **{
                    **cells,
                    "trials": int(cells["trials"]),
                    "lost": int(cells["lost"]),
                    "seconds": float(cells["seconds"]),
                }
            )
            for cells in csv.DictReader(file)
        }


def write(rows: Mapping[str, Row], kinds: Iterable[str], table: Path = TABLE, page: Path = PAGE) -> None:
    """Both files; a row whose kind is gone goes, too."""
    order = [rows[kind] for kind in kinds if kind in rows]
    missing = [kind for kind in kinds if kind not in rows]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in order)
    page.write_text("\n".join(_lines(order, missing)) + "\n")


def _lines(rows: Sequence[Row], missing: Sequence[str]) -> list[str]:
    lost = sum(row.lost for row in rows)
    lines = [
        "# What holds when things break",
        "",
        "Faults are injected on purpose, and what was promised is checked after each. `make faults` runs every trial",
        "and writes this page and [its table](reliability.csv); `make test` runs a few of each kind. A trial that",
        "raises what was not promised counts as lost, and so does one that ends its process.",
        "",
        f"**{sum(row.trials for row in rows):,} trials, {lost:,} lost.**",
        "",
        "| fault | trials | lost | what is promised | run |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        count = f"**{row.lost:,}**" if row.lost else "0"
        name = row.kind.replace("_", " ")
        lines.append(f"| {name} | {row.trials:,} | {count} | {_plain(row.promise)} | {row.date} |")
    if missing:
        lines += ["", f"Not run yet: {', '.join(kind.replace('_', ' ') for kind in missing)}."]
    for row in rows:
        if row.lost:
            lines += ["", f"## Lost: {row.kind.replace('_', ' ')}", ""]
            lines += [f"- {_plain(loss)}" for loss in row.losses.splitlines()]
            if row.lost > _SHOWN:
                lines.append(f"- and {row.lost - _SHOWN:,} more")
    return lines


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")
