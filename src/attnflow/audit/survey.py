"""One forward pass that shows a model's stacks of layers, their inputs, and the masks that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.beside import with_other_rows
from attnflow.audit.inputs import Inputs, Slot, StackEntry, fresh
from attnflow.audit.passes import Recording, Runner, entering, frame_of
from attnflow.audit.rows import leaves
from attnflow.models.passes.evaluation import REFUSALS, evaluating, seed_all, unchanged
from attnflow.models.passes.watching import Call, Watch

if TYPE_CHECKING:
    from attnflow.models.passes.mask_request import Asked, MaskRequest


@dataclass
class LayerCall:
    name: str  # its path
    index: int  # its number in its list
    shape: tuple[int, ...]  # of the first tensor that it is called with
    spread: float = 0.0  # standard deviation of that tensor, of the first call of a stack
    # what the model asked transformers for when it made the mask that reaches the layer; None if it made none that way
    asked: MaskRequest | None = None
    masked: bool = False  # whether any mask reaches it
    made: int = 0  # how many masks had been asked for, by any stack, when it returned

    @property
    def stack(self) -> str:
        """The path of the module that holds the layer's list; lists side by side are one stack."""
        return self.name.rpartition(".")[0].rpartition(".")[0]


@dataclass
class CallSurvey:
    inputs: Inputs  # the call, with slots for the positions that enter stacks of layers
    calls: list[LayerCall]  # the layer calls of these stacks, in order of execution
    unused: list[str] = field(default_factory=list[str])  # arguments that hold a mask of pairs which no module received
    runner: Runner | None = None  # at the layers, if it was asked for
    base: Recording | None = None  # what that runner saw of the survey's own pass, if that can serve as a base pass

    def slot_of(self, call: LayerCall) -> Slot:
        return next(slot for slot in self.inputs.slots if call.name in slot.layers)

    @property
    def config(self) -> Any:
        """The configuration of the stack: of the innermost model around its layers, else of the text model."""
        subject, name = self.inputs.subject, self.calls[-1].name if self.calls else ""
        while name:
            name = name.rpartition(".")[0]
            config = getattr(self.inputs.model.get_submodule(name), "config", None)
            if name and hasattr(config, "model_type"):
                return config
        return subject.text_config

    def own_modules(self) -> list[nn.Module]:
        """The modules of the model without the layers of other stacks, which may have another direction."""
        stacks = {call.stack for call in self.calls}
        others = [f"{n}." for n in self.inputs.subject.layers if n.rsplit(".", 2)[0] not in stacks] if stacks else []
        return [m for n, m in self.inputs.model.named_modules() if not f"{n}.".startswith(tuple(others))]


# A possible mask at a module inside a layer call: (number of the call, or -1; depth of the module; mask).
_Arrival = tuple[int, int, Any]


@contextmanager
def surveying(inputs: Inputs) -> Generator[Callable[[], CallSurvey]]:
    """Watch a pass of these inputs, which the caller runs inside; the function then says what it showed."""
    listening: AbstractContextManager[Asked | None] = nullcontext()
    if "transformers" in sys.modules:  # else the model is not one of its own
        from attnflow.models.passes.mask_request import asking

        listening = asking()
    model, layers = inputs.model, inputs.subject.layers
    calls: list[LayerCall] = []
    seen: list[_Arrival] = []
    inside: list[int] = []

    def enter(call: Call) -> None:
        if call.name in layers:
            first = entering(call.args, call.kwargs)
            layer = LayerCall(call.name, layers[call.name], () if first is None else tuple(first.shape))
            if first is not None and not (calls and calls[-1].stack == layer.stack):
                layer.spread = float(first.detach().double().std())
            inside.append(len(calls))
            calls.append(layer)
        masks = [tensor for _, tensor in leaves((call.args, call.kwargs)) if tensor.ndim == 4]
        masks += [value for value in (*call.args, *call.kwargs.values()) if type(value).__name__ == "BlockMask"]
        seen.extend((inside[-1] if inside else -1, call.name.count("."), mask) for mask in masks)

    def leave(call: Call, output: object) -> None:
        if call.name in layers:
            calls[inside.pop()].made = len(asked.made) if asked else 0

    names = [n for n, _ in model.named_modules() if n in layers or any(n.startswith(f"{each}.") for each in layers)]
    with listening as asked, Watch({name: model.get_submodule(name) for name in names}, enter, leave):
        yield lambda: _surveyed(inputs, asked, calls, seen)


def _surveyed(passed: Inputs, asked: Asked | None, calls: list[LayerCall], seen: list[_Arrival]) -> CallSurvey:
    inputs = _positions(passed, calls)
    inputs = replace(inputs, slots=tuple(_placed(passed, slot) for slot in inputs.slots))
    result = CallSurvey(inputs, [call for call in calls if call.name in inputs.layers])
    if asked is not None:
        _assign(result, calls, asked, seen)
    masks = {n: v for n, v in inputs.kwargs.items() if getattr(v, "ndim", 0) > 2 and n.endswith("attention_mask")}
    reached = {tuple(mask.shape[-2:]) for _, _, mask in seen if isinstance(mask, Tensor)}
    result.unused = [n for n, mask in masks.items() if tuple(mask.shape[-2:]) not in reached]
    return result


def survey(inputs: Inputs, seed: int | None = None) -> CallSurvey:
    model, layers = inputs.model, inputs.subject.layers
    whole = replace(inputs, slots=tuple(replace(slot, layers=frozenset(layers)) for slot in inputs.slots))
    first = None if seed is None else Runner(whole, "layers", seed)
    events, intact = None, False
    seed_all(0)
    with torch.no_grad(), surveying(inputs) as surveyed:
        if first is None:
            model(**fresh(inputs.kwargs))
        else:
            events, intact = first.distinct(inputs.base)
    result = surveyed()
    if first is not None:
        result.runner = Runner(result.inputs, "layers", first.seed)
        if intact and result.inputs.layers == frozenset(layers) and frame_of(result.inputs) == frame_of(whole):
            result.runner.layer_calls, result.runner.skipped = first.layer_calls, first.skipped
            result.runner.layouts = first.layouts
            result.base = events
    return result


def _positions(inputs: Inputs, calls: list[LayerCall]) -> Inputs:
    """The inputs with slots for the audited stacks: those that their positions enter, else the last to run."""
    source = next((slot for slot in inputs.slots if not slot.prefix), None)
    target = next((slot for slot in inputs.slots if slot.prefix), None)
    parts = [(source, calls)]
    if inputs.subject.encodes_and_decodes and target is not None:
        above = [call for call in calls if "decoder" in call.stack.split(".")]
        from attnflow.models.anatomy.sites import half  # needs transformers

        above = above or [call for call in calls if half(inputs.model, call.stack) == "decoder"]
        if not above:
            raise UnsupportedArchitecture(f"no stack of layers of {inputs.subject.kind} is named decoder: pass order=")
        parts = [(source, [call for call in calls if call not in above]), (target, above)]
    slots: list[Slot] = []
    for slot, stack in parts:
        entered = _entered(inputs, slot, stack)
        if entered is not None:
            given = next(map(len, _vectors_given(inputs).values()), 0)
            several = given and not inputs.slots and entered[1] % given == 0
            inputs = replace(inputs, batch=entered[1], group=entered[1] // given if several else 1)
            slots.append(replace(entered[0], offset=sum(before.length for before in slots)))
    if not slots:
        raise UnsupportedArchitecture(
            f"no stack of layers in {inputs.subject.kind} takes vectors [batch, positions, width], and no input holds "
            "a value per position: pass input_ids or inputs_embeds"
        )
    if len({slot.length for slot in slots}) < len(slots):
        raise ValueError(
            f"encoder and decoder sequences both have length {slots[0].length}; pass different lengths, so that the "
            "audit can tell which of them an output of the model belongs to"
        )
    return replace(inputs, slots=tuple(slots))


def _vectors_given(inputs: Inputs) -> dict[str, Tensor]:
    """The images, pairs or sounds of a call, by the names of their arguments: rows of numbers."""
    tensors = {name: value for name, value in inputs.kwargs.items() if isinstance(value, Tensor) and value.ndim > 1}
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def _placed(passed: Inputs, slot: Slot) -> Slot:
    """The slot with the places of the tokens among its positions, where its layers get more: what moves with them."""
    tokens = next((named.length for named in passed.slots if named.prefix == slot.prefix), slot.length)
    if slot.entry is None or tokens == slot.length:
        return slot
    entered = _vectors_entering(passed, [slot.entry.layer])[slot.entry.layer]
    if slot.entry.positions_first:
        entered = [vectors.transpose(0, 1) for vectors in entered]
    if len(entered) != 2 or entered[0].shape != entered[1].shape or entered[0].ndim != 3:
        return slot
    moves = (entered[0] != entered[1]).any(-1).cpu()
    known = bool((moves == moves[:1]).all()) and int(moves[0].sum()) == tokens
    return replace(slot, places=tuple(moves[0].nonzero()[:, 0].tolist())) if known else slot


def _vectors_entering(
    passed: Inputs, names: Iterable[str], changed: Mapping[str, Any] | None = None
) -> dict[str, list[Tensor]]:
    """What enters these layers first, in the call and in a changed one (all positions); no mask hides any."""
    entered: dict[str, list[Tensor]] = {name: [] for name in names}

    def enter(call: Call) -> None:
        vectors = entering(call.args, call.kwargs)
        if call.number == 0 and vectors is not None:
            entered[call.name].append(vectors)

    masks = {name: mask for name, mask in passed.kwargs.items() if name.endswith("attention_mask")}
    whole = {name: torch.ones_like(mask) for name, mask in masks.items() if isinstance(mask, Tensor) and mask.ndim == 2}
    if changed is None:
        every = torch.ones(passed.batch, passed.size, dtype=torch.bool)
        changed = passed.changed(every, passed.draw(torch.Generator().manual_seed(0))).kwargs
    with unchanged(passed.model), evaluating(passed.model), torch.no_grad():
        for kwargs in (passed.kwargs, changed):  # with whole masks: padding must move, too
            seed_all(0)
            with Watch({name: passed.model.get_submodule(name) for name in entered}, enter):
                passed.model(**fresh({**kwargs, **whole}))
    return entered


def _entered(inputs: Inputs, named: Slot | None, calls: Sequence[LayerCall]) -> tuple[Slot, int] | None:
    """(slot, batch) of the stack that an input's positions enter, else of the last stack to run."""
    fits: list[tuple[LayerCall, tuple[int, int, int, bool]]] = []
    for merged in (False, True):  # whether the model adds several rows up to one sequence, as of codebooks
        fits = fits or [(c, axes) for c in calls if (axes := _axes(c.shape, inputs, named, merged)) is not None]
    fits = [(c, axes) for c, axes in fits if named is not None and axes[1] == named.length] or fits
    starts = {call.stack: call.name for call, _ in reversed(fits)}
    if named is not None and len(starts) > 1:  # towers side by side: those that the named positions reach
        vectors = _vectors_entering(inputs, starts.values())
        still = {stack for stack, name in starts.items() if len(vectors[name]) == 2 and torch.equal(*vectors[name])}
        fits = [(c, axes) for c, axes in fits if c.stack not in still] or fits
    if not fits or not inputs.batched:
        return None if named is None else (replace(named, layers=frozenset(call.name for call in calls)), inputs.batch)
    last, (_, length, *_) = fits[-1]
    fits = [(call, axes) for call, axes in fits if (call.stack, axes[1]) == (last.stack, length)]
    first, (batch, _, axis, positions_first) = fits[0]
    if named is None and _batch_comes_second(inputs, last):
        batch, length, positions_first = length, batch, True
    entry = StackEntry(first.name, first.shape[-1], first.spread or 1.0, axis, positions_first)
    name = named.name if named is not None and (named.length, inputs.batch) == (length, batch) else None
    return Slot(name, length, 0, entry, frozenset(call.name for call, _ in fits)), batch


def _batch_comes_second(inputs: Inputs, call: LayerCall) -> bool:
    """Whether a layer of a model of images gets [positions, batch, width], not several sequences for each image.

    Of [a, b, width] for b images it does, unless what moves with the first image are the first a / b of all a alone.
    """
    given, changed = _vectors_given(inputs), inputs
    (many, rows), images = call.shape[:2], next(map(len, given.values()), 0)
    if many == images or rows != images or rows == 1 or many % rows:
        return many != images == rows
    for name in (name for name, value in given.items() if len(value) == rows):
        changed = with_other_rows(changed, name, torch.arange(rows) == 0)
    try:
        before, after = _vectors_entering(inputs, [call.name], changed.kwargs)[call.name]
        moves = (before != after).flatten(1).any(1)
    except REFUSALS:  # of the changed image
        return True
    return not bool(moves.any()) or bool(moves[many // rows :].any())


def _axes(
    shape: tuple[int, ...], inputs: Inputs, named: Slot | None, merged: bool
) -> tuple[int, int, int, bool] | None:
    """(batch, length, axis, positions first) of a layer's first argument: the last axes [batch, n], or the first."""
    if named is not None:
        size = inputs.batch, named.length
        places = [p for p in range(len(shape) - 2) if shape[p : p + 2] == size]
        if places:
            return *size, places[-1], False
        if shape[:2] == size[::-1] and len(shape) == 3:
            return *size, 0, True
    fits = not inputs.slots or shape[:1] == (inputs.batch,)
    if merged and named is not None and len(shape) == 3:
        fits = inputs.batch % shape[0] == 0 and shape[1] == named.length
    return (shape[0], shape[1], 0, False) if fits and len(shape) == 3 else None


def _assign(result: CallSurvey, calls: list[LayerCall], asked: Asked, seen: Sequence[_Arrival]) -> None:
    for number, call in enumerate(calls):
        if call not in result.calls:
            continue
        length = result.slot_of(call).length
        arrivals = [(depth, mask) for inside, depth, mask in seen if inside == number]
        call.masked = any(tuple(mask.shape[-2:]) == (length, length) for _, mask in arrivals)
        for depth in sorted({depth for depth, _ in arrivals}, reverse=True):  # the attention itself knows best
            requests = [asked.request(mask) for at, mask in arrivals if at == depth]
            fits = [r for r in requests if r is not None and r.num_keys == length and r.num_queries in (1, length)]
            if len(set(map(id, fits))) == 1:
                call.asked = fits[0]
                break
        else:
            call.asked = None if call.masked else _unmasked(asked, calls[: number + 1], length)


def _unmasked(asked: Asked, calls: Sequence[LayerCall], length: int) -> MaskRequest | None:
    """The last request without a mask that can be of the last call: made for its stack, unless directions differ."""
    from attnflow.models.passes.mask_request import asks_causal

    call = calls[-1]
    before = next((other.made for other in reversed(calls) if other.stack != call.stack), 0)
    for start in (before, 0):
        made = [r for m, r in asked.made[start : call.made] if m is None and r.num_queries == r.num_keys == length]
        if made:
            return made[-1] if len(set(map(asks_causal, made))) == 1 else None
    return None
