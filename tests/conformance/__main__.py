"""`python -m tests.conformance`: the matrix over every architecture of the installed transformers, into docs/."""

from __future__ import annotations

import argparse
import sys
import time

from tests.conformance import matrix, page
from tests.conformance.cells import FEATURES
from tests.conformance.miniature import KINDS, architectures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS), help="which classes")
    parser.add_argument("--name", nargs="*", default=None, help="only these classes or model types")
    parser.add_argument("--feature", nargs="*", choices=FEATURES, default=list(FEATURES), help="which columns")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="only what the file lacks")
    options = parser.parse_args()
    rows = matrix.read()
    before = dict(rows)
    chosen = [a for a in architectures() if a.kind in options.kind]
    if options.name:
        chosen = [a for a in chosen if {a.name, a.model_type} & set(options.name)]
    if options.resume:
        chosen = [
            a for a in chosen if (a.key, "build") not in rows and any((a.key, f) not in rows for f in options.feature)
        ]
    start = time.monotonic()
    for count, new in enumerate(matrix.run(chosen, options.feature, options.workers), 1):
        for row in new:
            rows[row.architecture.key, row.feature] = row
        matrix.write(rows)
        left = (time.monotonic() - start) / count * (len(chosen) - count)
        print(f"{count}/{len(chosen)}  {left / 60:4.0f} min left  {new[0].architecture.name}", file=sys.stderr)
    page.write(rows)
    lost = [key for key, row in rows.items() if key in before and matrix.worse(before[key].cell, row.cell)]
    for key in lost:
        print(*key, f"{before[key].cell.code} -> {rows[key].cell.code}: {rows[key].cell.reason}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
