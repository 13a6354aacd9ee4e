"""Searches and changes at the same time."""

import threading

import pytest
import torch

from attnflow.knowledge.index import EntryIndex, entry_index
from attnflow.knowledge.index.readers_writer import ReadersWriter
from tests.knowledge.index.data import MODES, built, clustered


@pytest.mark.parametrize("mode", MODES)
def test_searches_during_changes_see_whole_states(mode):
    """Every row of generation g scores g; a search that mixed two generations would find both."""
    count, dim = 600, 8
    base = clustered(count, dim)
    base[:, 0] = 0

    def generation(number):
        rows = base.clone()
        rows[:, 0] = float(number)
        return rows

    index = EntryIndex(dim, search=mode)
    index.build(generation(0))
    query = torch.zeros(2, dim)
    query[:, 0] = 1.0
    stop, wrong, searched = threading.Event(), [], [0] * 3

    def search(worker):
        while not stop.is_set():
            try:
                hits = index.search(query, 5) if worker else index.range(query, -1.0)
                kinds = set(hits.scores.flatten().tolist())
                if len(kinds) != 1 or -torch.inf in kinds:
                    wrong.append(kinds)
            except Exception as error:  # whatever a thread raises is the test's failure
                wrong.append(error)
            searched[worker] += 1

    threads = [threading.Thread(target=search, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        if number % 3 == 0:
            index.build(generation(number))
        elif number % 3 == 1:
            index.replace(torch.arange(len(index)), generation(number)[: len(index)])
        else:
            index.remove(torch.arange(0, len(index), 7))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(searched) > 0


@pytest.mark.parametrize("change", ["build", "add", "replace", "remove", "calibrate"])
def test_a_change_waits_for_the_search_under_way(monkeypatch, change):
    index = built(torch.eye(3), search="exact")
    begun, finish, done, hits = threading.Event(), threading.Event(), threading.Event(), []
    search = entry_index.best

    def slow(*arguments):
        begun.set()
        assert finish.wait(30)
        return search(*arguments)

    def alter():
        getattr(index, change)(*{"replace": (slots, -rows), "remove": (slots,)}.get(change, (-rows,)))
        done.set()

    slots, rows = torch.arange(3), torch.eye(3)
    monkeypatch.setattr(entry_index, "best", slow)
    threads = [
        threading.Thread(target=lambda: hits.append(index.search(torch.ones(3), 3))),
        threading.Thread(target=alter),
    ]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    assert not done.wait(0.05)
    finish.set()
    for thread in threads:
        thread.join()
    assert done.is_set()
    assert hits[0].scores.tolist() == [1.0] * 3


def test_readers_share_and_writers_do_not():
    lock, order, inside = ReadersWriter(), [], threading.Barrier(2, timeout=30)

    def read():
        with lock.reading():
            inside.wait()  # both are in at once, or this fails
            order.append("read")

    def write():
        with lock.writing():
            order.append("write")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    with lock.reading():
        writer = threading.Thread(target=write)
        writer.start()
        while not lock._waiting:
            pass
        late = threading.Thread(target=lambda: [lock.reading().__enter__(), order.append("late")])
        late.start()
        assert order == ["read", "read"]
    writer.join()
    late.join()
    assert order == ["read", "read", "write", "late"]
