"""Drift of stored embeddings, and embedding them anew: interrupted by kill -9, it goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnflow.knowledge.monitor.reembedding import Encoder, Reembedded, drift, reembed
from attnflow.knowledge.store import Store

TEXTS = [f"line {number} of the text" for number in range(40)]


class Letters:
    """Counts of letters, turned by an angle that stands for the weights of an encoder."""

    dim = 26

    def __init__(self, angle=0.0):
        self.angle = angle
        self.texts = 0

    @property
    def version(self):
        return f"letters@{self.angle:g}"

    def __call__(self, texts):
        self.texts += len(texts)
        counts = torch.tensor(
            [[text.count(chr(97 + i)) + 0.1 * (hash_of(text) == i) for i in range(26)] for text in texts]
        )
        turned = counts.roll(1, dims=1)
        return counts * torch.cos(torch.tensor(self.angle)) + turned * torch.sin(torch.tensor(self.angle))


def hash_of(text):
    return sum(map(ord, text)) % 26


def filled(uri="memory", encoder=None):
    store, encoder = Store.open(uri, 26), encoder or Letters()
    store.insert(embeddings=encoder(TEXTS), texts=TEXTS, sources=["test"] * len(TEXTS), encoder=encoder.version)
    return store


def test_letters_are_an_encoder():
    assert isinstance(Letters(), Encoder)


def test_nothing_drifts_by_itself():
    with filled() as store:
        found = drift(store, Letters())
    version = found.versions[0]
    assert found.ok
    assert (version.encoder, version.current, version.entries, version.compared) == ("letters@0", True, 40, 40)
    assert version.minimum == pytest.approx(1.0)


def test_another_version_has_drifted_by_its_cosine():
    old, new = Letters(), Letters(0.3)
    with filled() as store:
        store.upsert(ids=[0, 1], embeddings=new(TEXTS[:2]), encoder=new.version)
        found = drift(store, new)
        cosines = torch.cosine_similarity(old(TEXTS[2:]), new(TEXTS[2:]))
    assert [(one.encoder, one.entries, one.current) for one in found.versions] == [
        ("letters@0", 38, False),
        ("letters@0.3", 2, True),
    ]
    assert not found.ok
    assert found.versions[0].mean == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert found.versions[0].minimum == pytest.approx(float(cosines.min()), abs=1e-5)
    assert found.versions[0].worst[0] == 2 + int(cosines.argmin())
    assert not found.versions[1].drifted
    assert type(found).from_json(found.to_json()) == found
    assert found.rows()[0]["drifted"] is True
    lines = str(found).splitlines()
    assert lines[0] == "against letters@0.3"
    assert lines[2].split()[:3] == ["letters@0", "38", "38"]
    assert lines[2].endswith("drifted")


def test_a_text_that_was_changed_without_its_embedding_is_found():
    encoder = Letters()
    with filled() as store:
        store.upsert(ids=[7], embeddings=store.vectors([7]), texts=["zzzzzz"], encoder=encoder.version)
        found = drift(store, encoder)
    assert not found.ok
    assert found.versions[0].worst[0] == 7


def test_a_sample_is_of_every_version():
    encoder = Letters()
    with filled() as store:
        store.insert(embeddings=torch.ones(3, 26), encoder="other")
        store.upsert(ids=[5], embeddings=encoder(TEXTS[5:6]), encoder="rare")
        found = drift(store, encoder, sample=10)
    numbers = {one.encoder: (one.entries, one.compared, one.without_text) for one in found.versions}
    assert numbers == {"letters@0": (39, 10, 0), "other": (3, 0, 3), "rare": (1, 1, 0)}
    assert next(one for one in found.versions if one.encoder == "other").mean is None


def test_entries_of_other_versions_are_embedded_anew():
    new = Letters(0.3)
    with Store.open("memory", 26, num_thresholds=1) as store:
        store.insert(
            embeddings=Letters()(TEXTS),
            texts=TEXTS,
            sources=["test"] * 40,
            thresholds=[[float(i)] for i in range(40)],
            encoder="letters@0",
        )
        store.upsert(ids=[3], embeddings=new(TEXTS[3:4]), encoder=new.version)
        bare = store.insert(embeddings=torch.ones(2, 26), encoder="letters@0").tolist()
        before, steps = new.texts, []
        found = reembed(store, new, batch_size=16, progress=lambda *now: steps.append(now))
        assert new.texts - before == 39
        assert (found.total, found.done, found.current, found.without_text) == (42, 39, 1, tuple(bare))
        assert steps == [(16, 42, "entries"), (32, 42, "entries"), (42, 42, "entries")]
        torch.testing.assert_close(store.vectors(range(40)), new(TEXTS))
        entry = store.get([9])[0]
        assert (entry.text, entry.source, entry.version, entry.encoder) == (TEXTS[9], "test", 2, new.version)
        assert entry.thresholds.tolist() == [9.0]
        assert [entry.encoder for entry in store.get(bare)] == ["letters@0"] * 2
        assert "2 have no text and were left as they are: [40, 41]" in str(found)
        assert reembed(store, new).done == 0
        assert Reembedded.from_json(found.to_json()) == found


def test_an_encoder_of_another_width_is_refused():
    with Store.open("memory", 8) as store:
        for act in (drift, reembed):
            with pytest.raises(ValueError, match="makes embeddings of width 26, and the store holds 8: build a new"):
                act(store, Letters())


CHILD = """
import sys
from attnflow.knowledge.monitor.reembedding import reembed
from attnflow.knowledge.store import Store
from tests.knowledge.test_reembedding import Letters

with Store.open(sys.argv[1]) as store:
    reembed(store, Letters(0.3), batch_size=1, progress=lambda done, total, what: print(done, flush=True))
"""


def test_killed_at_any_moment_it_goes_on(tmp_path):
    pytest.importorskip("lancedb")
    new, place = Letters(0.3), str(tmp_path / "store")
    filled(place).close()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    command = [sys.executable, "-c", CHILD, place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as child:
        assert any(line.strip() == "12" for line in child.stdout)
        child.send_signal(signal.SIGKILL)  # in the middle of some later write
    assert child.returncode == -signal.SIGKILL
    with Store.open(place) as store:
        done = [entry.id for entry in store.get(store.ids()) if entry.encoder == new.version]
        rest = sorted(set(range(40)) - set(done))
        assert set(done) >= set(range(12))
        assert rest
        torch.testing.assert_close(store.vectors(done), new([TEXTS[i] for i in done]))
        torch.testing.assert_close(store.vectors(rest), Letters()([TEXTS[i] for i in rest]))
        left = reembed(store, new, batch_size=4)
        assert (left.done, left.current) == (len(rest), len(done))
        torch.testing.assert_close(store.vectors(), new(TEXTS))
        assert drift(store, new).ok
        assert store.stats().encoders == {new.version: 40}
        assert set(store.stats().versions) == {2}
