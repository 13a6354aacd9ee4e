from collections.abc import Callable
from typing import NamedTuple

import pytest

import attnflow as af
from attnflow.cli import main
from attnflow.models.loading import loader
from attnflow.models.subject import Loaded
from tests.models.saved import save_tiny_llama


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`attnflow ARGUMENTS` in this process, 80 columns, no terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATTNFLOW_TRACEBACK", raising=False)

    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama with a word-level tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def masked(monkeypatch: pytest.MonkeyPatch) -> Callable[[af.masks.Mask], None]:
    """masked(mask): from now on every model is loaded with this mask on it."""
    load = loader.load_model

    def place(mask: af.masks.Mask) -> None:
        def loaded(name: str, **options: object) -> Loaded:
            model = load(name, **options)
            af.masks.attach(model, mask)
            return model

        monkeypatch.setattr(loader, "load_model", loaded)

    return place
