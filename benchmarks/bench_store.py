"""The store of entries on disk: filling, opening, searching and editing it, against faiss and LanceDB alone.

Entries lie in clusters, 128 wide, float32. Searches of approximate indexes are timed at recall@32 >= 0.99, which is
checked before. Peers do a part of the work each: faiss IndexFlatIP keeps vectors in memory alone, LanceDB searches its
own index (IVF_FLAT) on disk. `--size N` runs with N entries instead of 1,000,000 and keeps no rows.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.knowledge.store import Store
from benchmarks import harness
from benchmarks.harness import Case, main

SIZE, DIM, K, BATCH = 1_000_000, 128, 32, 100_000
RECALL = 0.99
Floats = npt.NDArray[np.float32]


def rows(size: int, count: int, seed: int) -> Floats:
    """`count` rows in clusters of about 500, as a store of `size` entries has them."""
    centres = np.random.default_rng(0).standard_normal((max(size // 500, 1), DIM)).astype(np.float32)
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal((count, DIM)).astype(np.float32)
    return centres[draw.integers(0, len(centres), count)] + 0.35 * noise


def batches(size: int) -> Any:
    """All entries, some at a time, made as they are needed."""
    for start in range(0, size, BATCH):
        yield start, rows(size, min(BATCH, size - start), seed=start + 1)


def place(name: str, size: int) -> Path:
    """Where cases of one run find what an earlier one has made."""
    return Path(tempfile.gettempdir()) / f"attnflow-bench-store-{size}" / name


def fill_store(directory: Path, size: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with Store.open(directory, dim=DIM) as store:
        for start, part in batches(size):
            store.insert(embeddings=part, texts=[f"entry {start + i}" for i in range(len(part))])


def fill_lance(directory: Path, size: int) -> None:
    import pyarrow as arrow

    shutil.rmtree(directory, ignore_errors=True)
    table = None
    for start, part in batches(size):
        ids = np.arange(start, start + len(part))
        data = arrow.table({"id": ids, "text": [f"entry {i}" for i in ids], "vector": _lists(part)})
        table = _lance(directory).create_table("t", data) if table is None else (table.add(data), table)[1]


def our_ingest(size: int) -> Callable[[], object]:
    return lambda: fill_store(place("ours", size), size)


def lance_ingest(size: int) -> Callable[[], object]:
    return lambda: fill_lance(place("lance", size), size)


def lance_ingest_and_index(size: int) -> Callable[[], object]:
    def run() -> None:
        fill_lance(place("lance", size), size)
        _index(_lance(place("lance", size)).open_table("t"), size)

    return run


def faiss_ingest(size: int) -> Callable[[], object]:
    import faiss

    def run() -> object:
        index = faiss.IndexFlatIP(DIM)
        for _, part in batches(size):
            index.add(part)
        return index

    return run


def our_open(size: int) -> Callable[[], object]:
    _store(size).close()
    return lambda: Store.open(place("ours", size), read_only=True).close()


def lance_open(size: int) -> Callable[[], object]:
    return lambda: _lance(place("lance", size)).open_table("t").count_rows()


def our_search(size: int, count: int) -> Callable[[], object]:
    store, queries = _store(size), _queries(size, count)
    recall = store.recall(rows(size, 512, seed=-1 % 2**32), K)
    assert recall >= RECALL, f"recall {recall:.4f}"
    return lambda: store.search(next(queries), K)


def faiss_search(size: int, count: int) -> Callable[[], object]:
    index, queries = faiss_ingest(size)(), _queries(size, count)
    return lambda: index.search(np.atleast_2d(next(queries)), K)


def lance_search(size: int, count: int) -> Callable[[], object]:
    if not place("lance", size).exists():
        lance_ingest_and_index(size)()
    table, queries = _lance(place("lance", size)).open_table("t"), _queries(size, count)
    sample = rows(size, 128, seed=-1 % 2**32)
    truth = faiss_ingest(size)().search(sample, K)[1]

    def search(query: Floats, probes: int) -> Any:
        request = table.search(query).distance_type("dot").nprobes(probes).limit(K)
        return request.select(["id", "_distance"]).to_arrow()

    for probes in (2**i for i in range(20)):
        found = [search(query, probes)["id"].to_numpy() for query in sample]
        hits = [len(set(a) & set(b)) for a, b in zip(found, truth.tolist(), strict=True)]
        if np.mean(hits) / K >= RECALL:
            break
    return lambda: search(next(queries), probes)


def our_edit(size: int, what: str, count: int) -> Callable[[], object]:
    """Each call edits other entries, and searches for one of them."""
    directory = _copy("ours", size)
    store = Store.open(directory)
    fresh = (rows(size, count, seed=seed) for seed in itertools.count(10**9))
    old = (np.arange(start, start + count) for start in itertools.count(0, count))

    def run() -> object:
        if what == "delete":
            gone = next(old)
            store.delete(gone)
            return gone[0] in store
        new = next(fresh)
        if what == "upsert":
            store.upsert(ids=next(old), embeddings=new, texts=["new"] * count)
        else:
            store.insert(embeddings=new, texts=["new"] * count)
        return store.search(new[0], 1)

    return run


def lance_edit(size: int, what: str, count: int) -> Callable[[], object]:
    """The commit alone."""
    import pyarrow as arrow

    table = _lance(_copy("lance", size)).open_table("t")
    fresh = (rows(size, count, seed=seed) for seed in itertools.count(10**9))
    old = (np.arange(start, start + count) for start in itertools.count(0, count))

    def run() -> object:
        ids = next(old) + (2 * size if what == "insert" else 0)
        if what == "delete":
            return table.delete(f"id IN ({','.join(map(str, ids))})")
        data = arrow.table({"id": ids, "text": ["new"] * count, "vector": _lists(next(fresh))})
        if what == "insert":
            return table.add(data)
        return table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(data)

    return run


def our_single_inserts(count: int) -> Callable[[], object]:
    directory = place("single", count)
    shutil.rmtree(directory, ignore_errors=True)
    store, new = Store.open(directory, dim=DIM), rows(count, count, seed=1)
    return lambda: [store.insert(embeddings=new[i : i + 1], texts=["new"]) for i in range(count)]


def our_one_batch(count: int) -> Callable[[], object]:
    directory = place("batch", count)
    shutil.rmtree(directory, ignore_errors=True)
    store, new = Store.open(directory, dim=DIM), rows(count, count, seed=1)
    return lambda: store.insert(embeddings=new, texts=["new"] * count)


def lance_single_inserts(count: int) -> Callable[[], object]:
    import pyarrow as arrow

    shutil.rmtree(place("single-lance", count), ignore_errors=True)
    new = rows(count, count, seed=1)
    tables = [
        arrow.table({"id": np.array([i]), "text": ["new"], "vector": _lists(new[i : i + 1])}) for i in range(count)
    ]
    table = _lance(place("single-lance", count)).create_table("t", schema=tables[0].schema)
    return lambda: [table.add(data) for data in tables]


def _store(size: int) -> Store:
    if not place("ours", size).exists():
        fill_store(place("ours", size), size)
    return Store.open(place("ours", size), read_only=True)


def _copy(name: str, size: int) -> Path:
    if not place(name, size).exists():
        _store(size).close() if name == "ours" else fill_lance(place(name, size), size)
    shutil.rmtree(place("copy", size), ignore_errors=True)
    return Path(shutil.copytree(place(name, size), place("copy", size)))


def _queries(size: int, count: int) -> Any:
    drawn = rows(size, 512 * count, seed=-2 % 2**32).reshape(512, count, DIM)
    return itertools.cycle(drawn[:, 0] if count == 1 else drawn)


def _lance(directory: Path) -> Any:
    import lancedb

    return lancedb.connect(directory)


def _index(table: Any, size: int) -> None:
    from lancedb.index import IvfFlat

    table.create_index("vector", config=IvfFlat(distance_type="dot", num_partitions=round(size**0.5)))


def _lists(values: Floats) -> Any:
    import pyarrow as arrow

    return arrow.FixedSizeListArray.from_arrays(arrow.array(values.ravel()), DIM)


def cases(size: int) -> list[Case]:
    here = "benchmarks.bench_store"
    flat, alone, indexed = "faiss IndexFlatIP (in memory)", "LanceDB alone", "LanceDB IVF_FLAT"
    listed = [
        Case("store: ingest in batches", "attnflow", size, here, "our_ingest", (size,), 1),
        Case("store: ingest in batches", indexed, size, here, "lance_ingest_and_index", (size,), 1),
        Case("store: ingest in batches", flat, size, here, "faiss_ingest", (size,), 1),
        Case("store: open", "attnflow", size, here, "our_open", (size,), 3),
        Case("store: open", f"{alone}, vectors stay on disk", size, here, "lance_open", (size,), 3),
    ]
    for count in (1, 128):
        what, at = f"store: search k = {K}, batch {count}", f"recall@{K} >= {RECALL}"
        listed += [
            Case(what, "attnflow", size, here, "our_search", (size, count), 500, at),
            Case(what, flat, size, here, "faiss_search", (size, count), 50, "exact"),
        ]
    what = f"store: search k = {K}, batch 1"
    listed.append(Case(what, indexed, size, here, "lance_search", (size, 1), 500, f"recall@{K} >= {RECALL}"))
    for edit, count in itertools.product(("insert", "upsert", "delete"), (1, 1000)):
        what, seen = f"store: {edit} of {count}", "" if edit == "delete" else "and a search that sees it"
        listed.append(Case(what, "attnflow", size, here, "our_edit", (size, edit, count), 30, seen))
        listed.append(Case(what, alone, size, here, "lance_edit", (size, edit, count), 30))
    what = "store: 2,000 single inserts"
    listed += [
        Case(what, "attnflow", 2000, here, "our_single_inserts", (2000,), 1, "compacts as it goes"),
        Case(what, "attnflow, one batch", 2000, here, "our_one_batch", (2000,), 1),
        Case(what, f"{alone}, never compacted", 2000, here, "lance_single_inserts", (2000,), 1),
    ]
    return listed


if __name__ == "__main__":
    chosen = SIZE
    if "--size" in sys.argv:
        where = sys.argv.index("--size")
        chosen = int(sys.argv[where + 1])
        del sys.argv[where : where + 2]
        harness.RESULTS = Path(os.devnull)
    main(
        lambda device: cases(chosen) if device == "cpu" else [],
        ["torch", "numpy", "faiss-cpu", "lancedb", "pyarrow"],
        time_limit=600,
    )
    if not any(option.startswith("--run") for option in sys.argv):
        shutil.rmtree(place("", chosen).parent, ignore_errors=True)
