"""Watching a forward pass: order, nesting, repeated calls, replacement, errors, and hooks that are gone afterwards."""

import contextlib

import pytest
import torch
from torch import nn

from attnflow.models.passes.watching import Watch, calls_of


class Nested(nn.Module):
    """Calls `inner` twice, by position and by name; errors of the first call are caught if `catch`."""

    def __init__(self, inner, catch=False):
        super().__init__()
        self.inner = inner
        self.catch = catch

    def forward(self, hidden):
        if self.catch:
            with contextlib.suppress(ValueError):
                self.inner(hidden)
            return hidden
        return self.inner(hidden=self.inner(hidden))


class Twice(nn.Module):
    def forward(self, hidden):
        return 2 * hidden


class Raising(nn.Module):
    def forward(self, hidden):
        raise ValueError("no")


def hooks(model):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_calls_are_nested_numbered_and_in_order():
    model = Nested(Twice())
    calls = calls_of(dict(model.named_modules()), lambda: model(torch.ones(2)))
    assert [(call.name, call.number, call.caller and call.caller.name) for call in calls] == [
        ("", 0, None),
        ("inner", 0, ""),
        ("inner", 1, ""),
    ]
    assert [call.output[0].item() for call in calls] == [4, 2, 4]
    assert [call.first[0].item() for call in calls] == [1, 1, 2]
    assert [list(call.arguments()) for call in calls] == [["hidden"]] * 3
    assert hooks(model) == 0


def test_inputs_and_outputs_are_replaced():
    model = Nested(Twice())

    def enter(call):
        return ((call.first + 1,), {}) if call.number == 0 else None

    def leave(call, output):
        assert call.first is call.args[0] if call.number == 0 else call.kwargs["hidden"]
        return -output if call.number == 1 else None

    with Watch({"inner": model.inner}, enter, leave):
        assert model(torch.ones(1)).item() == -8
    assert model(torch.ones(1)).item() == 4


def test_nothing_changes_for_gradients_and_none_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    hidden = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    plain = torch.autograd.grad(model(hidden).sum(), list(model.parameters()))
    with Watch(dict(model.named_modules()), lambda call: None, lambda call, output: None):
        watched = torch.autograd.grad(model(hidden).sum(), list(model.parameters()))
    assert all(map(torch.equal, plain, watched))


def test_hooks_are_gone_after_an_error():
    model = Nested(Raising())
    with pytest.raises(ValueError, match="no"), Watch(dict(model.named_modules())):
        model(torch.ones(1))
    assert hooks(model) == 0


def test_a_caught_error_leaves_the_nesting_right():
    outer = nn.Sequential(Nested(Raising(), catch=True), Twice())
    left = []
    with Watch(dict(outer.named_modules()), leave=lambda call, output: left.append(call.name)):
        outer(torch.ones(1))
    assert left == ["0", "1", ""]
    calls = calls_of(dict(outer.named_modules()), lambda: outer(torch.ones(1)))
    assert [(call.name, call.caller and call.caller.name) for call in calls][-1] == ("1", "")
    assert hooks(outer) == 0


def test_pauses_and_restarts():
    module, numbers = Twice(), []
    with Watch({0: module}, lambda call: numbers.append(call.number)) as watch:
        module(torch.ones(1))
        module(torch.ones(1))
        with watch.paused():
            module(torch.ones(1))
        watch.restart()
        module(torch.ones(1))
    assert numbers == [0, 1, 0]


def test_one_module_under_two_names():
    module, seen = Twice(), []
    with Watch({"a": module, "b": module}, lambda call: seen.append(call.name), lambda call, _: seen.append(call.name)):
        module(torch.ones(1))
        module(torch.ones(1))
    assert seen == ["a", "b"] * 4
