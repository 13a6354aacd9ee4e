"""The matrix as data: run, read, compare."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests.conformance.cells import FEATURES, Cell, cell, within
from tests.conformance.miniature import Architecture, NotBuilt, architectures, build

FILE = Path(__file__).parents[2] / "docs" / "conformance.csv"
SECONDS = 300  # for one feature of one class
RANK = {"works": 0, "none": 1, "refused": 1, "unclear": 2, "wrong": 3}
COLUMNS = ("model_type", "class", "kind", "feature", "code", "reason")


@dataclass(frozen=True)
class Row:
    """One line of the file: a feature on a class; the feature "build" for what could not be built."""

    architecture: Architecture
    feature: str
    cell: Cell


def rows_of(architecture: Architecture, features: Iterable[str] = FEATURES) -> list[Row]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try:
        model = build(architecture)
    except NotBuilt as error:
        return [Row(architecture, "build", Cell("none", " ".join(str(error).split())[:200]))]
    rows: list[Row] = []
    for name in features:
        with within(SECONDS):
            rows.append(Row(architecture, name, cell(FEATURES[name], model)))
    return rows


def run(chosen: Iterable[Architecture], workers: int, features: Iterable[str] = FEATURES) -> Iterator[list[Row]]:
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(rows_of, architecture, tuple(features)) for architecture in chosen]
        for future in as_completed(futures):
            yield future.result()


def read(path: Path = FILE) -> dict[tuple[str, str], Row]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [
            Row(Architecture(line["model_type"], line["class"], line["kind"]), line["feature"],
                Cell(line["code"], line["reason"]))  # type: ignore[arg-type]
            for line in csv.DictReader(file)
        ]  # fmt: skip
    return {(row.architecture.key, row.feature): row for row in rows}


def write(rows: Mapping[tuple[str, str], Row], path: Path = FILE) -> None:
    """The whole matrix, in the order of the installed architectures."""
    order = {architecture.key: place for place, architecture in enumerate(architectures())}
    features = {"build": -1} | {name: place for place, name in enumerate(FEATURES)}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows.values(), key=lambda r: (order.get(r.architecture.key, 1 << 30), features[r.feature])):
            a = row.architecture
            writer.writerow([a.model_type, a.name, a.kind, row.feature, row.cell.code, row.cell.reason])


def worse(before: Cell, after: Cell) -> bool:
    """Whether a cell has lost: from works to anything else, or from a clear refusal to an unclear or wrong one."""
    return RANK[after.code] > RANK[before.code]
