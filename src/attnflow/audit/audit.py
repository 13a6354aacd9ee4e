"""`check`: one audit of a model, from its call to its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.progress import Progress
from attnflow.audit.beside import mixed_beside
from attnflow.audit.declared import Order, relation_of
from attnflow.audit.decoding import DecodingComparison, DecodingPath, SteppedRunner, decoding_paths, step_lengths
from attnflow.audit.fields import Fields, ProbePlan, batch_sets, plan
from attnflow.audit.functions import Function, as_function, is_function
from attnflow.audit.inputs import Inputs, read
from attnflow.audit.passes import Recording, Runner, Watched, on_ranks
from attnflow.audit.perturb import Prober
from attnflow.audit.received import received
from attnflow.audit.replay import asked_and_done, missing_pairs, remarks
from attnflow.audit.report import AuditReport, Mode, ModuleResult, Violation, few
from attnflow.audit.rows import OutputLayout
from attnflow.audit.shards import Shard, Shards
from attnflow.audit.survey import survey
from attnflow.masks.catalogue import causal
from attnflow.models.passes.evaluation import evaluating, precision, unchanged
from attnflow.models.passes.processes import sharded_over, together, world
from attnflow.models.subject import Loaded, Subject, own_name

_DRAWS: Final = 4  # of the sequences that a function is tested for crosstalk with
_CHEAP: Final = 4e9  # multiply-adds of all passes together that nobody waits for


def check(
    model: nn.Module | Loaded | Callable[..., object],
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    order: Order = None,
    mode: Mode = "perturb",
    *,
    shard: Shard = None,
    against: nn.Module | Loaded | Callable[..., object] | None = None,
    cache: bool | Sequence[int] = False,
    both_sides: bool | None = None,
    passes: int = 32,
    watch: Watched = "modules",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit a model, a loss or any function of token ids: does an output change with an input it must not read?

    After layer l, position i may depend on row i of F_l = A_l x ... x A_1 with A = allow | I (order.md). The audit
    changes sets of inputs at once, chosen so that few passes test most forbidden pairs. A change against F_l is traced
    to one source, one target and the first module whose inputs are still clean.

    For a function, only its return value is watched: element i of a score per token may depend on tokens up to its own
    label. State kept between calls is found by calling the function, and a copy of it, in another order.

    On several processes (torch.distributed) every rank calls `check` with the same inputs, and all get the same report.
    A function is then a parallel step: it returns what this rank has, and all of it is audited. A model whose
    parameters are sharded (FSDP2, tensor parallelism) runs on its ranks together. An error of one rank reaches all.

    Args:
        model: a module that takes token ids or embeddings, a result of `af.load_model`, or a function of token ids. A
            module is run in eval mode; its training flags, parameters, hooks and the random generators are restored.
            A function (a loss, an evaluation, a procedure that trains) is called with gradients on. It returns n rows
            for the tokens, n - 1 numbers for the labels 1 to n - 1, or n numbers for the labels 0 to n - 1 (1 to n
            if the last never changes).
        inputs: keyword arguments of the model's forward, token ids [batch, n] or [n], or a text if the model came with
            its tokenizer. Keyword arguments (`use_cache`, `position_ids`, `attention_mask`, `pixel_values`, ...) are
            passed unchanged, so the audit is of this very call. A function gets ids as its one argument; labels or
            targets that repeat the ids, or follow them by one place, change with them.
        order: one mask for all layers, one mask per layer call, or a `Flow`. A mask may be `af.masks.batch([...])`, one
            for each sequence, or `per_head([...])`, the union of its heads. "mask" takes the pairs of the
            `attention_mask` among the inputs. None takes what the inputs and the model declare (see
            `declared_order`), and causal for a function. Positions of an encoder-decoder are numbered encoder first.
        shard: of a step on several processes, the positions that this rank returns: a slice or indices of the last axis
            of the ids, "contiguous", "zigzag" (rank r of W has chunks r and 2 W - 1 - r), or (rows, positions) where
            ranks have rows of their own. None if each rank returns all positions, as the stages of a pipeline do.
        against: a step's reference on one process: a module or a function of the same inputs. Positions where outputs
            differ by more than rounding are violations. It finds what no order forbids, as positions that restart.
        mode: "perturb" changes inputs and watches every module; "quick" changes a few, watches only layers, and
            continues with "perturb" only if something changed.
        cache: also audit prefill and decoding by perturbation, and compare them with the full forward: True for a
            prefill and four single tokens, or the step lengths. True also compares chunks, several draft tokens at
            once, rejected drafts, left padding and a static cache, where the model supports them.
        both_sides: what to do about allowed pairs that nothing uses: report them (True), look at a few positions and
            add a note (None), or ignore them (False). Only layers of attention are tested, and not in mode "quick".
        passes: number of perturbations; see `AuditReport.coverage`. n - 1 are exhaustive for a causal order. The first
            and last positions and the borders of blocks of 64 and 16 rows, where kernels go wrong, come first. Those
            of the first and last blocks are always tested, by up to sixteen perturbations more than given.
        watch: "layers" watches only layers and the model's output, which takes little memory.
        dtype: audit in this precision (torch.float64 finds weaker leaks); parameters are restored afterwards.
        seed: seed of the replacement tokens.
        progress: called as `progress(done, total, what)`.

    Raises:
        UnsupportedArchitecture: no order is given or declared, or no output has a sequence axis.
        ValueError: the inputs are empty, the order has another size, or a length looks like a width.
        TypeError: inputs, order or arguments have a wrong type.
        RankFailed: the step failed on some ranks, or a rank did not call `check`.

    Cost: passes + 5 + 2 log2(batch) forward passes, 5 more for missing pairs (3 n with `both_sides=True`), and
    log2(n) + 4 for each violation, at most 17 more where a choice of the model differs. Memory holds the outputs of all
    watched modules, as in training. Mode "quick" takes three forward passes of a large model, up to n of a tiny one.
    """
    began = time.perf_counter()
    if mode not in ("perturb", "quick"):
        raise ValueError(f"mode must be 'perturb' or 'quick', got {mode!r}")
    if watch not in ("modules", "layers"):
        raise ValueError(f"watch must be 'modules' or 'layers', got {watch!r}")
    checks.integer("passes", passes, 1)
    if is_function(model):
        if cache is not False or mode == "quick" or both_sides:
            raise ValueError("a function is audited by what it returns: leave out cache=, both_sides= and mode='quick'")
        ranks, (model, inputs) = world(), as_function(model, inputs)
    else:
        ranks = sharded_over(Subject.of(cast("nn.Module | Loaded", model)).model)
        if shard is not None or against is not None:
            raise ValueError("shard= and against= are of a step: pass a function of the inputs in place of the model")
    subject = Subject.of(cast("nn.Module | Loaded", model)).inside
    options = AuditOptions(mode, cache, both_sides, passes, watch, seed, progress or _in_silence)
    with together(ranks, "audit.check") as processes:
        if processes is not None:
            processes.require_same("inputs", subject.named(inputs))
            more = order, mode, cache, both_sides, passes, watch, str(dtype), seed, shard is None, against is None
            processes.require_same("arguments", more)
        with unchanged(subject.model), evaluating(subject.model), precision(subject.model, dtype):
            call = read(subject, inputs).in_precision(dtype)
            if not isinstance(subject.model, Function):
                call = on_ranks(call, processes)
            elif ranks or shard is not None or against is not None:
                subject.model.on(Shards(processes, shard if ranks or shard is not None else slice(None)))
            report = audited(call, order, options)
            if isinstance(subject.model, Function) and subject.model.shards is not None:
                report = _of_all_ranks(report, subject.model, call, against, seed)
    return replace(report, seconds=time.perf_counter() - began)


def _of_all_ranks(report: AuditReport, step: Function, call: Inputs, against: Any, seed: int) -> AuditReport:
    """The report of a step with ranks' names, what the reference does otherwise, and what no rank returned."""
    shards, notes = cast(Shards, step.shards), report.notes
    violations = report.violations
    if against is not None:
        reference = against.model if isinstance(against, Loaded) else against
        violations += tuple(step.beside(reference, call.kwargs, seed))
        notes += ("outputs were compared with a reference on one process",)
    named = tuple(shards.named(violation, bool(step.ahead)) for violation in violations)
    return replace(report, violations=named, untested=report.untested + tuple(shards.doubts), notes=notes)


def _in_silence(done: int, total: int, what: str) -> None:
    pass


@dataclass(frozen=True)
class AuditOptions:
    mode: Mode = "perturb"
    cache: bool | Sequence[int] = False
    both_sides: bool | None = False
    passes: int = 32
    watch: Watched = "modules"
    seed: int = 0
    progress: Progress = _in_silence


def audited(inputs: Inputs, order: Order, options: AuditOptions) -> AuditReport:
    mode, cache, seed = options.mode, options.cache, options.seed
    silent: tuple[str, ...] = ()
    if isinstance(inputs.model, Function):
        order, silent = causal(inputs.size) if order is None else order, inputs.model.align(inputs, seed)
    if inputs.kwargs.get("target_mapping") is not None:
        silent += ("the stream of queries that target_mapping asks for has rows for its targets, not for positions",)
    seen = survey(inputs, seed if mode == "quick" else None)
    call, relation = seen.inputs, relation_of(seen, order)
    fields, notes = Fields(relation, call.batch), remarks(seen, order)
    work = Auditor(call, fields, options, [*notes])
    if seen.runner is not None and not work.quick(seen.runner, seen.base):  # what moves, the long way
        work, mode = Auditor(call, fields, options, [*notes]), "perturb"
    if mode == "perturb":
        work.perturb(Runner(call, options.watch, seed), "forward")
        if cache is not False and not any(violation.kind == "state" for violation in work.violations):
            steps = DecodingPath("cached", step_lengths(call, cache))
            work.perturb(SteppedRunner(call, options.watch, seed, steps), "cached")
            work.compare_paths()
        if options.both_sides is not False:
            violations, notes = missing_pairs(seen, relation, seed, thorough=bool(options.both_sides))
            work.violations += violations if options.both_sides else []
            work.notes += notes
    work.violations += asked_and_done(seen, relation.disputed, seed)
    silent += relation.unsure + (tuple(call.unplaced_padding()) if order is None else ())
    silent += (f"what {call.unlike} computes, which differs between ranks",) * bool(call.unlike)
    report = work.report(relation.name, mode)
    return replace(report, untested=report.untested + silent)


@dataclass
class Auditor:
    call: Inputs
    fields: Fields
    options: AuditOptions
    notes: list[str]
    violations: list[Violation] = field(default_factory=list[Violation])
    dirty: set[str] = field(default_factory=set[str])
    forward_passes: int = 0
    noise: float = 0.0
    base: Recording | None = None
    layer_calls: int = 0
    plan: ProbePlan | None = None
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    layouts: dict[str, OutputLayout] = field(default_factory=dict[str, OutputLayout])
    moved: set[str] = field(default_factory=set[str])  # outputs without positions that moved at all
    apart: bool = False  # whether all sequences were changed, and none moved another one
    short: dict[str, str] = field(default_factory=dict[str, str])  # what pools a sequence without its end, and why

    def __post_init__(self) -> None:
        self.pads = ~self.call.real
        sets = batch_sets(self.call.batch // self.call.group, self.call.size)
        self.crossing = [sequences.repeat_interleave(self.call.group, 0) for sequences in sets]

    def quick(self, runner: Runner, base: Recording | None) -> bool:
        prober = Prober(runner, self.fields, self.options.seed, base)
        self._accept(runner, prober.base)
        size = sum(parameter.numel() for parameter in self.call.model.parameters()) * self.call.batch * self.call.size
        cheap = size * self.call.size < _CHEAP
        passes = min(self.options.passes, self.call.size) if cheap else 2
        order = self._sets(passes, beyond=cheap)
        if not cheap and self.crossing:  # every other sequence whole: what crosses shows in those between
            half = self.crossing[:2]
            order = [s | half[p % 2] for p, s in enumerate(order or half)]
        tried = [*self.crossing, *order] if cheap else order
        if self._beside(prober) or any(prober.probe(selected) is not None for selected in tried):
            return False
        self._look_at_ends(prober)
        self.apart = cheap and bool(self.crossing)
        self.moved |= prober.moved
        self.forward_passes += runner.passes
        if self.options.cache is not False:
            self.compare_paths()
        return not self.violations

    def perturb(self, runner: Runner, what: str) -> None:
        self.options.progress(0, 1, f"{what}: base pass")
        prober = Prober(runner, self.fields, self.options.seed)
        if not isinstance(runner, SteppedRunner):
            self._accept(runner, prober.base)
        sets, order = self.crossing, self._sets()
        if isinstance(self.call.model, Function) and order:  # a choice that it makes may turn on few other tokens
            sets, order = sets * _DRAWS, list(islice(cycle(order), max(len(order), self.options.passes)))
        total = len(sets) + len(order)
        violations: list[Violation] = []
        prober.settle()
        if prober.stateful is not None:
            violations.append(prober.state_violation())
            self.notes.append("outputs depend on earlier calls, so the order was not tested: repair that first")
            sets, order = [], []
        crosstalk = False
        for done, selected in enumerate([*sets, *order]):
            self.options.progress(done, total, f"{what}: perturbation")
            rows = None
            if done >= len(sets) and crosstalk:  # one sequence at a time, so that the others cannot move it
                rows = [done % self.call.batch]
                selected = torch.zeros_like(selected).index_copy_(0, torch.tensor(rows), selected[rows])
            hit = prober.probe(selected, rows)
            if hit is not None and hit.moved.event.blame not in {v.module for v in violations}:
                violations.append(prober.violation(hit))
                crosstalk |= violations[-1].kind == "batch"
        if not isinstance(runner, SteppedRunner):
            violations += self._beside(prober)
            if prober.stateful is None:
                self._look_at_ends(prober)
                self.apart = bool(sets) and not crosstalk
        if prober.rounding:
            change = f"changes up to {prober.rounding:.2g}"
            self.notes.append(f"{change} were rounding (they scale with the precision), not leaks")
        if prober.noise:
            difference = f"two equal runs differ by up to {prober.noise:.2g}"
            self.notes.append(f"{difference}: what leaks less than that is not seen; make the model deterministic")
        if any(violation.confirmed is None and violation.kind != "state" for violation in violations):
            self.notes.append("it does not run in another precision, so small changes may be rounding")
        unshown = list(dict.fromkeys(violation.module for violation in violations if violation.confirmed is False))
        if unshown:
            doubt = f"float64 does not show what {few(unshown)} does in this precision, and it is no rounding"
            self.notes.append(f"{doubt}: a kernel may take another code path there")
        places = {blame: i for i, blame in enumerate(dict.fromkeys(event.blame for event in prober.base.values()))}
        self.violations += sorted(violations, key=lambda violation: places.get(violation.module, len(places)))
        self.forward_passes += runner.passes
        self.noise = max(self.noise, prober.noise)
        self.dirty |= prober.dirty
        self.moved |= prober.moved
        self.options.progress(total, total, f"{what}: done")

    def _beside(self, prober: Prober) -> list[Violation]:
        """What moves against the order with other inputs: with their padding, or between rows of another tower."""
        mixed, notes = mixed_beside(prober.runner, prober.base, self.layouts)
        self.notes += notes
        return prober.padding_read() + mixed

    def compare_paths(self) -> None:
        comparison = DecodingComparison(self.call, self.options.watch, self.options.seed)
        for path in decoding_paths(self.call, self.options.cache):
            self.options.progress(0, 1, f"cached: {path.name}")
            different = comparison.of(path)
            if isinstance(different, str):
                self.notes.append(f"{path.name} not compared: {different}")
            elif different is not None and different.module not in {v.module for v in self.violations}:
                self.violations.append(different)
        self.forward_passes += comparison.passes

    def _look_at_ends(self, prober: Prober) -> None:
        if not any(layout.pools for layout in self.layouts.values()):
            return
        ends = ~self.pads & ((~self.pads).flip(-1).cumsum(-1).flip(-1) == 1)
        for path, (row, *_) in prober.unmoved(ends).items():
            self.short[path] = f"does not move with the last real token of row {row}, at {int(ends[row].nonzero())}"

    def report(self, order: str, mode: Mode) -> AuditReport:
        untested, unsure = self._outputs()
        breaks, plan = {violation.module for violation in self.violations}, self._plan()
        if self.apart and not plan.forbidden:
            unsure.append("no sequence moves with another one")
        dirty = set(map(own_name, self.dirty))
        modules: dict[str, ModuleResult] = {}
        for key, event in (self.base or {}).items():
            if key.side == "out":
                name = own_name(key.module) or self.call.subject.kind
                status = "breaks" if name in breaks else "carries" if own_name(key.module) in dirty else "clean"
                modules.setdefault(name, ModuleResult(name, event.layer, status))
        return AuditReport(
            violations=tuple(self.violations),
            order=order,
            mode=mode,
            layers=self.layer_calls,
            positions=self.call.size,
            batch=self.call.batch,
            forward_passes=self.forward_passes + 1,  # with the survey
            coverage=plan.coverage,
            forbidden=plan.forbidden,
            noise=self.noise,
            modules=tuple(modules.values()),
            skipped=tuple((own_name(name), why) for name, why in self.skipped.items() if own_name(name) not in modules),
            untested=tuple(untested),
            notes=(*self.notes, *unsure),
        )

    def _outputs(self) -> tuple[list[str], list[str]]:
        relation = self.fields.relation
        field = self.fields.at(-1 if relation.repeat else len(relation.layers))
        whole = bool((field | self.pads[:, :, None] | self.pads[:, None, :]).all())  # only padding is forbidden
        mixed = any(violation.kind == "batch" for violation in self.violations)
        return received(self.call, self.layouts, self.short, self.moved, apart=self.apart, mixed=mixed, whole=whole)

    def _accept(self, runner: Runner, base: Recording) -> None:
        self.base, self.layer_calls, self.skipped = base, runner.layer_calls, runner.skipped
        self.layouts = runner.layouts
        relation = self.fields.relation
        if not relation.repeat and len(relation.layers) != runner.layer_calls:
            raise ValueError(
                f"expected one mask per layer call, {runner.layer_calls} of them "
                f"({few(list(runner.layer_names), limit=2)}), got an order with {len(relation.layers)}"
            )
        watched = {key.module for key, event in base.items() if key.side == "out" and not event.pooled}
        if not watched and not isinstance(self.call.model, Function):
            received = "; ".join(self._outputs()[0])
            raise UnsupportedArchitecture(
                f"no module of {self.call.subject.kind} returned a tensor of shape [{self.call.batch}, "
                f"{self.call.slots[0].length}, ...], and {received}: nothing to audit"
            )
        unwatched = [name for name in runner.layer_names if name not in watched]
        if unwatched and len(unwatched) == len(runner.layer_names):
            raise UnsupportedArchitecture(
                f"no layer of {self.call.subject.kind} returned a tensor with one axis of positions "
                f"({few(unwatched)}): nothing to audit. Try other lengths, or a batch of another size"
            )

    def _sets(self, passes: int | None = None, beyond: bool = True) -> list[Tensor]:
        padding = [self.pads] if self.pads.any() and any(layout.pools for layout in self.layouts.values()) else []
        return [*padding, *self._plan(passes, beyond).passes]

    def _plan(self, passes: int | None = None, beyond: bool = True) -> ProbePlan:
        if self.plan is None:
            assert self.base is not None
            seen: dict[int, Tensor] = {}
            for event in (event for event in self.base.values() if not event.pooled):
                depth = max(event.depth, 1) if self.layer_calls else -1
                rows = seen.setdefault(depth, torch.zeros(self.call.size, dtype=torch.bool))
                rows[event.offset : event.offset + event.values.shape[1]] = True
            runs = [(slot.offset, slot.offset + slot.length) for slot in self.call.slots]
            passes = passes or self.options.passes
            self.plan = plan(self.fields, seen, passes, runs, beyond) if seen else ProbePlan((), 0.0, 0)
        return self.plan
