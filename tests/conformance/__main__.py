"""`python -m tests.conformance`: every architecture against every feature, and every pair of features, into docs/."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.conformance import matrix, page, pairs
from tests.conformance.cells import FEATURES
from tests.conformance.miniature import architectures

OUT = Path(__file__).parents[2] / "out"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--name", nargs="*", default=None, help="only these classes or model types")
    parser.add_argument("--feature", nargs="*", choices=list(FEATURES), default=list(FEATURES), help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="only what the file lacks")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="only part I of N, into a file of its own in out/")
    parser.add_argument("--merge", nargs="+", type=Path, help="run nothing; take the files of all parts into the table")
    parser.add_argument("--pairs", nargs="*", choices=pairs.FEATURES, help="only the table of pairs, of these features")
    options = parser.parse_args(arguments)
    if options.shard and (options.pairs is not None or len(options.feature) < len(FEATURES)):
        parser.error("--shard runs every feature of its classes, and no pairs: leave out --pairs and --feature")
    if options.pairs is not None:
        return _pairs(options.pairs, options.resume)
    before = matrix.read(matrix.FILE)
    if options.merge:
        merged = [matrix.read(path) for path in options.merge]
        fresh = {key for rows in merged for key, _ in rows}
        rows = {key: row for key, row in before.items() if key[0] not in fresh}
        return _finish(before, rows | {key: row for part in merged for key, row in part.items()})
    path, rows = matrix.FILE, dict(before)
    chosen = [a for a in architectures() if not options.name or {a.name, a.model_type} & set(options.name)]
    if options.shard:
        first, count = options.shard
        path, chosen = OUT / f"conformance-{first}-of-{count}.csv", chosen[first - 1 :: count]
        path.parent.mkdir(exist_ok=True)
        rows = matrix.read(path) if options.resume else {}
    if options.resume:
        chosen = [
            a for a in chosen if (a.key, "build") not in rows and any((a.key, f) not in rows for f in options.feature)
        ]
    start = time.monotonic()
    for count, new in enumerate(matrix.run(chosen, options.workers, options.feature), 1):
        done = {"build", *options.feature}
        rows = {key: row for key, row in rows.items() if key[0] != new[0].architecture.key or key[1] not in done}
        rows |= {(row.architecture.key, row.feature): row for row in new}
        matrix.write(rows, path)
        left = (time.monotonic() - start) / count * (len(chosen) - count)
        print(f"{count}/{len(chosen)}  {left / 60:4.0f} min left  {new[0].architecture.name}", file=sys.stderr)
    if options.shard:
        print(path)
        return 0
    bad = _finish(before, rows)
    if not options.name and len(options.feature) == len(FEATURES):
        bad |= _pairs([], options.resume)
    return bad


def _shard(text: str) -> tuple[int, int]:
    first, count = map(int, text.split("/"))
    if not 1 <= first <= count:
        raise ValueError(text)
    return first, count


def _finish(before: Mapping[tuple[str, str], matrix.Row], rows: Mapping[tuple[str, str], matrix.Row]) -> int:
    """Write table and page; 1 if a cell got worse."""
    matrix.write(rows, matrix.FILE)
    page.write(rows, page.FILE)
    lost = [key for key, row in rows.items() if key in before and matrix.worse(before[key].cell, row.cell)]
    for key in lost:
        print(*key, f"{before[key].cell.code} -> {rows[key].cell.code}: {rows[key].cell.reason}")
    return 1 if lost else 0


def _pairs(names: list[str], resume: bool) -> int:
    bad = pairs.main(names, resume, lambda line: print(line, file=sys.stderr))
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
