"""Every result of the package: frozen, documented, shown by `report`, and read back as it was written."""

import csv
import dataclasses
import functools
import gc
import importlib
import inspect
import io
import pickle
import pkgutil
import types

import pytest
import torch

import attnflow
from attnflow._core.results import Result
from tests.report.reading import parse_svg, texts
from tests.results_samples import sample

LONGEST = 2_000  # characters of what is printed


def kinds(base=Result):
    """All subclasses of `base` in the package, after every module of it was imported."""
    for info in pkgutil.walk_packages(attnflow.__path__, "attnflow."):
        if info.name != "attnflow.__main__":
            importlib.import_module(info.name)
    waiting, subclasses = [base], set()
    while waiting:
        more = waiting.pop().__subclasses__()
        subclasses.update(more)
        waiting += more
    return sorted(
        (kind for kind in subclasses if kind.__module__.startswith("attnflow.")), key=lambda kind: kind.__name__
    )


EVERY = kinds()
every_kind = pytest.mark.parametrize("kind", EVERY, ids=[kind.__name__ for kind in EVERY])


def test_there_are_results():
    assert len(EVERY) > 20
    assert len({kind.__name__ for kind in EVERY}) == len(EVERY)  # a saved result is known by the name of its class


@every_kind
def test_it_is_frozen(kind):
    result = sample(kind)
    name = dataclasses.fields(kind)[0].name if dataclasses.is_dataclass(kind) else "masks"
    with pytest.raises(AttributeError):
        setattr(result, name, None)


@every_kind
def test_it_is_documented(kind):
    text = inspect.getdoc(kind) or ""
    assert text
    assert not text.startswith(f"{kind.__name__}("), "the docstring that dataclasses make up"


@every_kind
def test_it_draws_itself(kind, tmp_path):
    path = sample(kind).save(tmp_path / "picture.svg")
    drawn = parse_svg(path.read_text())
    assert texts(drawn) or list(drawn.iter("path"))


@every_kind
def test_it_is_read_back_as_it_was_written(kind):
    result = sample(kind)
    again = kind.from_json(result.to_json())
    assert type(again) is kind
    assert again.to_json() == result.to_json()
    assert kind.from_dict(result.to_dict()).to_json() == result.to_json()


@every_kind
def test_its_table_has_one_set_of_columns(kind):
    result = sample(kind)
    rows = list(result.rows())
    assert len({tuple(row) for row in rows}) <= 1
    assert len(list(csv.DictReader(io.StringIO(result.to_csv())))) == len(rows)
    assert len(result.to_pandas()) == len(rows)


@every_kind
def test_it_prints_a_summary_and_shows_itself_in_a_notebook(kind):
    result = sample(kind)
    assert 0 < len(str(result)) <= LONGEST
    assert 0 < len(repr(result)) <= LONGEST
    assert isinstance(result._repr_html_(), str)


@every_kind
def test_a_verdict_is_a_property(kind):
    if hasattr(kind, "ok"):
        assert sample(kind).ok in (True, False, None)  # None: nothing is wrong, but not all of it was measured


@pytest.fixture
def weights():
    """The parameters of all models that are made during a test."""
    made = []
    hook = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: made.append(parameter)
    )
    yield made
    hook.remove()


CODE = (types.FunctionType, types.MethodType, functools.partial)


def reached(value):
    """All objects that hang on a value, but for classes and what hangs on a model or a function."""
    waiting, found = [value], {}
    while waiting:
        here = waiting.pop()
        if id(here) not in found and not isinstance(here, type | types.ModuleType):
            found[id(here)] = here
            waiting += [] if isinstance(here, (torch.nn.Module, *CODE)) else gc.get_referents(here)
    return list(found.values())


@every_kind
def test_it_is_data_on_which_no_model_hangs(kind, weights):
    here = reached(sample(kind))
    assert {type(one).__name__ for one in here if isinstance(one, (torch.nn.Module, *CODE))} == set()
    memory = {one.untyped_storage().data_ptr() for one in weights if one is not None and one.numel()}
    tensors = [one for one in here if isinstance(one, torch.Tensor)]
    assert not any(one.requires_grad or one.untyped_storage().data_ptr() in memory for one in tensors)


@every_kind
def test_it_pickles(kind):
    result = sample(kind)
    assert pickle.loads(pickle.dumps(result)).to_json() == result.to_json()
