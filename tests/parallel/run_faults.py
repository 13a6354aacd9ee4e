"""Audits every fault and its clean twin on the processes of a launch; rank 0 writes what the reports say as JSON."""

import json
import re
import sys
from functools import cache
from pathlib import Path

import torch.distributed as dist

import attnflow as af
from tests.parallel.faults import CASES
from tests.parallel.layers import IDS, gaps, rank, ranks
from tests.parallel.losses import LOSSES, OTHERS
from tests.processes import leave


def value(given):
    return given() if callable(given) else given


def of_outputs(case, step):
    return checked(step, case.order, case.shard, case.against)


@cache
def checked(step, order, shard, against):
    report = af.audit.check(step, IDS[:, : order.num_queries], order, shard=value(shard), against=against, passes=12)
    return {"ok": report.ok, "kinds": [each.kind for each in report.violations], "text": str(report)}


def of_loss(case, step):
    report = af.audit.check_loss(step, value(case.batch), shard=value(case.shard))
    return {"ok": report.ok, "kinds": [each.kind for each in report.mistakes], "text": str(report)}


def refused(case):
    try:
        return of_loss(case, case.faulty)
    except Exception as error:
        return {"ok": False, "kinds": [type(error).__name__], "text": str(error)}


def main():
    dist.init_process_group("gloo")
    found = {"layers": gaps()}
    for audit, cases in ((of_outputs, CASES), (of_loss, LOSSES)):
        for cause, case in cases.items():
            if ranks() in case.launches:
                found[cause] = {twin: audit(case, getattr(case, twin)) for twin in ("faulty", "clean")}
    found |= {cause: refused(case) for cause, case in OTHERS.items() if ranks() in case.launches}
    everyone = [None] * ranks()
    dist.all_gather_object(everyone, found)
    if rank() == 0:
        found["unequal"] = [cause for cause, each in found.items() if cause != "layers" and not alike(cause, everyone)]
        Path(sys.argv[1]).write_text(json.dumps(found))


def alike(cause, everyone):
    """Whether all ranks got one report, but for its time."""
    return len({re.sub(r"in [\d.]+ s", "", json.dumps(found[cause])) for found in everyone}) == 1


if __name__ == "__main__":
    main()
    leave()
