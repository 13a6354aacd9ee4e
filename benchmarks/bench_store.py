"""The store at 1,000,000 entries of width 384: filling, opening, searching and editing it, beside its peer.

Entries lie in 2,000 clusters and have length 1, as sentence embeddings have; queries are drawn from the same clusters.
LanceDB alone, the peer, does a part of the work: it keeps no vectors in memory. What is approximate reads as few lists
as find 99 % of the ten best, and its row has the recall that was measured. `--size N` runs with N entries.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.knowledge import Store
from attnflow.knowledge.store.approximate import recall_of
from benchmarks.harness import OURS, Case, main

SIZE, DIM, K, BATCH, CLUSTERS, RECALL = 1_000_000, 384, 10, 100_000, 2000, 0.99
DATA = f"{CLUSTERS:,} clusters, width {DIM}"
QUERIES = 2**31 - 2  # seeds
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Timed:
    """What is timed, and what it found."""

    run: Callable[[], object]
    note: str

    def __call__(self) -> object:
        return self.run()


def rows(count: int, seed: int) -> Floats:
    """Vectors of length 1 around centres of length 1."""
    centres = np.random.default_rng(0).standard_normal((CLUSTERS, DIM)).astype(np.float32)
    draw = np.random.default_rng(seed)
    made = centres[draw.integers(0, CLUSTERS, count)]
    made += 0.7 * draw.standard_normal((count, DIM)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def batches(size: int) -> Iterator[tuple[int, Floats]]:
    """All entries, some at a time, made as they are needed."""
    for start in range(0, size, BATCH):
        yield start, rows(min(BATCH, size - start), seed=start + 1)


def everything(size: int) -> Floats:
    return np.concatenate([part for _, part in batches(size)])


def place(name: str, size: int) -> Path:
    """Where cases of one run find what an earlier one has made."""
    return Path(tempfile.gettempdir()) / f"attnflow-bench-store-{size}" / name


def fill(size: int) -> None:
    shutil.rmtree(place("ours", size), ignore_errors=True)
    with Store.open(place("ours", size), dim=DIM) as store:
        for start, part in batches(size):
            store.insert(embeddings=part, texts=[f"entry {start + i}" for i in range(len(part))])


def fill_lance(size: int) -> None:
    shutil.rmtree(place("lance", size), ignore_errors=True)
    table = None
    for start, part in batches(size):
        data = arrow_table(np.arange(start, start + len(part)), part)
        if table is None:
            table = lance(place("lance", size)).create_table("t", data)
        else:
            table.add(data)


def ours(size: int) -> Path:
    if not place("ours", size).exists():
        fill(size)
    return place("ours", size)


def lance_table(size: int) -> Any:
    if not place("lance", size).exists():
        fill_lance(size)
    return lance(place("lance", size)).open_table("t")


def lance(directory: Path) -> Any:
    import lancedb

    return lancedb.connect(directory)


def arrow_table(ids: npt.NDArray[np.int64], vectors: Floats) -> Any:
    import pyarrow as arrow

    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(vectors.ravel()), DIM)
    return arrow.table({"id": ids, "text": [f"entry {i}" for i in ids], "vector": lists})


def ingest(size: int, provider: str) -> Callable[[], object]:
    return lambda: (fill if provider == OURS else fill_lance)(size)


def open_store(size: int) -> Callable[[], object]:
    directory = ours(size)
    return lambda: Store.open(directory, read_only=True).close()


def make_index(size: int) -> Callable[[], object]:
    table = lance_table(size)
    return lambda: index_lance(table, size)


def index_lance(table: Any, size: int) -> None:
    from lancedb.index import IvfFlat

    table.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=round(2 * size**0.5)))


def truth(entries: Floats, queries: Floats) -> Floats:
    """The ten best scores of each query."""
    scores = np.full((len(queries), K), -np.inf, dtype=np.float32)
    for start in range(0, len(entries), BATCH):
        block = queries @ entries[start : start + BATCH].T
        scores = -np.partition(-np.concatenate([scores, block], axis=1), K, axis=1)[:, :K]
    return -np.sort(-scores, axis=1)


def search(size: int, mode: Any, count: int) -> Timed:
    """By the store, one batch of queries a call."""
    store = Store.open(ours(size), read_only=mode == "exact")
    sample, queries = rows(256, QUERIES), asked(count)
    recall = recall_of(store.search(sample, K, mode=mode).scores.numpy(), truth(store.vectors().numpy(), sample))
    return Timed(lambda: store.search(next(queries), K, mode=mode), f"{mode}; recall@{K} {recall:.4f}; {DATA}")


def lance_search(size: int) -> Timed:
    table, sample, queries = lance_table(size), rows(256, QUERIES), asked(1)
    if not table.list_indices():
        index_lance(table, size)
    best = truth(everything(size), sample)

    def run(query: Floats, probes: int) -> Any:
        request = table.search(query).distance_type("dot").nprobes(probes).limit(K)
        return request.select(["id", "_distance"]).to_arrow()

    probes, recall = 4, 0.0
    while recall < RECALL and probes < 2 * size**0.5:
        probes *= 2
        found = [1 - run(query, probes)["_distance"].to_numpy() for query in sample]
        recall = recall_of(np.array(found, dtype=np.float32), best)
    note = f"approximate, {probes} lists; recall@{K} {recall:.4f}; {DATA}"
    return Timed(lambda: run(next(queries), probes), note)


def asked(count: int) -> Iterator[Floats]:
    drawn = rows(64 * count, QUERIES + 1).reshape(64, count, DIM)
    return itertools.cycle(drawn[:, 0] if count == 1 else drawn)


def edit(size: int, what: str, count: int, provider: str) -> Callable[[], object]:
    """Each call edits other entries of a copy; ours is seen by the next search."""
    name = "ours" if provider == OURS else "lance"
    source = ours(size) if provider == OURS else (lance_table(size), place("lance", size))[1]
    shutil.rmtree(place("copy", size), ignore_errors=True)
    copy = shutil.copytree(source, place("copy", size))
    fresh = (rows(count, seed=seed) for seed in itertools.count(10**9))
    old = (np.arange(start, start + count) for start in itertools.count(0, count))
    if name == "ours":
        store = Store.open(copy)
        texts = ["new"] * count
        calls: dict[str, Callable[[], object]] = {
            "insert": lambda: store.insert(embeddings=next(fresh), texts=texts),
            "upsert": lambda: store.upsert(ids=next(old), embeddings=next(fresh), texts=texts),
            "delete": lambda: store.delete(next(old)),
        }
        return calls[what]
    table = lance(Path(copy)).open_table("t")
    merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    calls = {
        "insert": lambda: table.add(arrow_table(next(old) + 2 * size, next(fresh))),
        "upsert": lambda: merge.execute(arrow_table(next(old), next(fresh))),
        "delete": lambda: table.delete(f"id IN ({','.join(map(str, next(old)))})"),
    }
    return calls[what]


def cases(size: int) -> list[Case]:
    here = "benchmarks.bench_store"
    alone, indexed = "LanceDB alone", "LanceDB IVF_FLAT"
    listed = [
        Case("store: ingest", OURS, size, here, "ingest", (size, OURS), 1, DATA),
        Case("store: ingest", alone, size, here, "ingest", (size, alone), 1, DATA),
        Case("store: open", OURS, size, here, "open_store", (size,), 3, DATA),
        Case("store: make the index", indexed, size, here, "make_index", (size,), 1, DATA),
    ]
    for count in (1, 128):
        what = f"store: search k = {K}, batch {count}"
        listed += [
            Case(what, OURS, size, here, "search", (size, "exact", count), 50),
            Case(what, f"{OURS}, approximate", size, here, "search", (size, "approximate", count), 500),
        ]
    listed.append(Case(f"store: search k = {K}, batch 1", indexed, size, here, "lance_search", (size,), 200))
    for what, count in itertools.product(("insert", "upsert", "delete"), (1, 1000)):
        name = f"store: {what} of {count:,}"
        listed.append(Case(name, OURS, size, here, "edit", (size, what, count, OURS), 10, "and seen by searches"))
        listed.append(Case(name, alone, size, here, "edit", (size, what, count, alone), 10, "the commit alone"))
    return listed


if __name__ == "__main__":
    chosen = SIZE
    if "--size" in sys.argv:
        where = sys.argv.index("--size")
        chosen = int(sys.argv[where + 1])
        del sys.argv[where : where + 2]
    main(
        lambda device: cases(chosen) if device == "cpu" else [],
        ["torch", "numpy", "lancedb", "pyarrow"],
        time_limit=600,
    )
