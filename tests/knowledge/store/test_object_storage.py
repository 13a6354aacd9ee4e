"""A store on object storage: a real S3 server (moto's) on the loopback, one writer and two readers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store import StoreError
from tests.knowledge.store.test_store import contents

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
