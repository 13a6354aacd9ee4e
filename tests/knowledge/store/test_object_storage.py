"""A store on object storage: a real S3 server (moto's) on the loopback, one writer and many readers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import StoreError
from tests.knowledge.store import readers_and_writer
from tests.knowledge.store.test_store import contents
from tests.processes import ROOT

pytestmark = pytest.mark.slow

EYE = torch.eye(4)


@pytest.fixture
def options():
    """A server of its own with an empty bucket, as `storage_options`; it ends with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                assert server.poll() is None, "the server has ended"
                try:
                    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=5)
                    break
                except OSError:
                    time.sleep(0.1)
            yield {
                "endpoint": endpoint,
                "allow_http": "true",
                "region": "us-east-1",
                "aws_access_key_id": "test",
                "aws_secret_access_key": "test",
            }
        finally:
            server.kill()


def test_a_store_on_object_storage(options):
    place = "s3://bucket/some/facts"
    with pytest.raises(StoreError, match="there is nothing to read"):
        Store.open(place, dim=4, read_only=True, storage_options=options)
    with Store.open(place, dim=4, num_thresholds=1, storage_options=options) as writer:
        writer.insert(embeddings=EYE, texts=list("abcd"), thresholds=[[0], [0], [5], [0]], encoder="mini 1.0")
        writer.snapshot("first")
        first = contents(writer)
        one, two = (Store.open(place, read_only=True, storage_options=options) for _ in range(2))
        assert contents(one) == contents(two) == first
        assert (one.dim, one.num_thresholds, one.stats().bytes_on_disk) == (4, 1, None)
        writer.upsert(ids=[1], embeddings=3 * EYE[:1], texts=["changed"])
        writer.delete([3])
        for mode in ("exact", "approximate"):
            assert writer.search(EYE[0], 2, mode=mode).ids.tolist() == [1, 0]
        one.refresh()
        assert contents(one) == contents(writer) != first
        assert one.search(EYE[0], 1, threshold_column=0).ids.tolist() == [2]
        assert contents(two) == first
        assert writer.insert(embeddings=EYE[:1]).tolist() == [4]
        writer.restore("first")
        writer.compact()
        for reader in (one, two):
            reader.refresh()
            assert contents(reader) == contents(writer) == first
            assert reader.snapshots() == ["first"]
            reader.close()
    with Store.open(place, storage_options=options) as writer:
        assert writer.insert(embeddings=EYE[:1]).tolist() == [5]
        assert len(writer) == 5


def test_a_server_that_is_gone_is_an_error_of_the_store():
    options = {"endpoint": "http://127.0.0.1:9", "allow_http": "true", "region": "us-east-1", "client_max_retries": "0"}
    options |= {"aws_access_key_id": "test", "aws_secret_access_key": "test", "timeout": "2s"}
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open("s3://bucket/facts", dim=4, storage_options=options)


def test_eight_processes_read_while_one_writes_and_compacts(options, tmp_path):
    """The server, the writer and six readers."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    names = ["writer", *map(str, range(readers_and_writer.READERS))]
    module = [sys.executable, "-m", readers_and_writer.__name__, str(tmp_path)]
    running = [
        subprocess.Popen(
            [*module, name, json.dumps(options)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        for name in names
    ]
    try:
        errors = [process.communicate(timeout=280)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(names), "\n".join(errors)
    last = readers_and_writer.GENERATIONS - 1
    for name in names[1:]:
        seen = json.loads((tmp_path / f"result-{name}").read_text())["seen"]
        assert seen[0] <= 3
        assert seen == sorted(seen)
        assert seen[-1] == last
    with Store.open(readers_and_writer.PLACE, read_only=True, storage_options=options) as store:
        assert readers_and_writer.look(store) == last
        assert store.ids().tolist() == readers_and_writer.ids_of(last)


def test_a_second_writer_takes_over(options):
    place = "s3://bucket/facts"
    with Store.open(place, dim=4, storage_options=options) as first:
        first.insert(embeddings=EYE[:2], texts=["a", "b"])
        first.snapshot("taken")
        with Store.open(place, storage_options=options) as second:
            assert second.insert(embeddings=EYE[2:3], texts=["c"]).tolist() == [2]
            writes = [
                lambda: first.insert(embeddings=EYE[:1]),
                lambda: first.upsert(ids=[0], embeddings=EYE[:1]),
                lambda: first.delete([0]),
                lambda: first.restore("taken"),
                lambda: first.snapshot(),
                lambda: first.drop_snapshot("taken"),
                lambda: first.compact(),
            ]
            for write in writes:
                with pytest.raises(StoreError, match=r"another process has opened the store .* to write"):
                    write()
            assert second.insert(embeddings=EYE[3:], texts=["d"]).tolist() == [3]
            first.refresh()  # it may still read
            assert contents(first) == contents(second)
            assert [entry.text for entry in first.get(first.ids())] == list("abcd")
    with Store.open(place, storage_options=options) as third:
        assert third.insert(embeddings=EYE[:1]).tolist() == [4]
        assert third.snapshots() == ["taken"]


def test_two_inserts_at_the_same_moment_write_one_of_them(options, monkeypatch):
    place = "s3://bucket/facts"
    with Store.open(place, dim=4, storage_options=options) as first:
        first.insert(embeddings=EYE[:1], texts=["a"])
        second = Store.open(place, storage_options=options)
        monkeypatch.setattr(first._table, "require_writer", lambda: None)  # it has asked just before
        assert second.insert(embeddings=EYE[1:2], texts=["b"]).tolist() == [1]
        with pytest.raises(StoreError, match=r"written some of these ids .* at the same moment"):
            first.insert(embeddings=EYE[2:], texts=["c", "d"])
        for store in (first, second):
            store.refresh()
            assert [(entry.id, entry.text) for entry in store.get(store.ids())] == [(0, "a"), (1, "b")]
        assert second.insert(embeddings=EYE[2:], texts=["c", "d"]).tolist() == [2, 3]
        assert [entry.text for entry in second.get(second.ids())] == list("abcd")
        second.close()
