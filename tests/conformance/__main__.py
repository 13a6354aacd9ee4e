"""`python -m tests.conformance`: every architecture against every feature, and every pair of features, into docs/."""

from __future__ import annotations

import argparse
import sys
import time

from tests.conformance import matrix, page, pairs
from tests.conformance.cells import FEATURES
from tests.conformance.miniature import architectures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--name", nargs="*", default=None, help="only these classes or model types")
    parser.add_argument("--feature", nargs="*", choices=list(FEATURES), default=list(FEATURES), help="only these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="only what the file lacks")
    parser.add_argument("--pairs", nargs="*", choices=pairs.FEATURES, help="only the table of pairs, of these features")
    options = parser.parse_args()
    if options.pairs is not None:
        return _pairs(options.pairs, options.resume)
    rows = matrix.read()
    before = dict(rows)
    chosen = [a for a in architectures() if not options.name or {a.name, a.model_type} & set(options.name)]
    if options.resume:
        chosen = [
            a for a in chosen if (a.key, "build") not in rows and any((a.key, f) not in rows for f in options.feature)
        ]
    start = time.monotonic()
    for count, new in enumerate(matrix.run(chosen, options.workers, options.feature), 1):
        done = {"build", *options.feature}
        rows = {key: row for key, row in rows.items() if key[0] != new[0].architecture.key or key[1] not in done}
        rows |= {(row.architecture.key, row.feature): row for row in new}
        matrix.write(rows)
        left = (time.monotonic() - start) / count * (len(chosen) - count)
        print(f"{count}/{len(chosen)}  {left / 60:4.0f} min left  {new[0].architecture.name}", file=sys.stderr)
    page.write(rows)
    lost = [key for key, row in rows.items() if key in before and matrix.worse(before[key].cell, row.cell)]
    for key in lost:
        print(*key, f"{before[key].cell.code} -> {rows[key].cell.code}: {rows[key].cell.reason}")
    bad = 0 if options.name or len(options.feature) < len(FEATURES) else _pairs([], options.resume)
    return 1 if lost or bad else 0


def _pairs(names: list[str], resume: bool) -> int:
    bad = pairs.main(names, resume, lambda line: print(line, file=sys.stderr))
    print(*bad, sep="\n", end="\n" if bad else "")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
