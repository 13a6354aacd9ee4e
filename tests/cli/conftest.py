from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import attnflow as af
from attnflow.bias.kind import layer_biases
from attnflow.cli import main
from attnflow.models.loading import loader
from attnflow.models.subject import Loaded
from tests.models.saved import save_tiny_llama


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Run:
    """`attnflow ARGUMENTS` in this process, 80 columns, no terminal."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self.capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *self.capsys.readouterr())

    def ok(self, *arguments: str) -> str:
        """What a command prints that succeeds and complains of nothing."""
        code, out, err = self(*arguments)
        assert (code, err) == (0, "")
        return out

    def refused(self, *arguments: str) -> str:
        """What a command that cannot be run complains of."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, "")
        return err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("ATTNFLOW_TRACEBACK", raising=False)
    return Run(capsys)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny random Llama with a word-level tokenizer."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def saved(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a bias of the tiny model, large enough to matter."""
    model = loader.load_model(tiny_model).model
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, layers="every", init="kaiming"))
        for _, bias in layer_biases(model):
            for parameter in bias.parameters():
                parameter.mul_(3.0)
    return str(af.bias.save(model, tmp_path_factory.mktemp("bias") / "mine"))


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
