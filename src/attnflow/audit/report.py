"""`AuditReport` and `Violation`: the result of an audit, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from attnflow._core.errors import LeakFound
from attnflow._core.markup import aligned, plural
from attnflow._core.results import Result
from attnflow.audit.choices import Through

_AROUND = 4  # ids shown on each side of those that differ
_SHOWN = 215  # characters: pytest cuts a message at 240, the last line included
Kind = Literal["order", "batch", "cache", "state", "missing", "sum", "request", "padding", "alone", "reference"]
Verdict = Literal["clean", "leak", "nothing tested"]
Mode = Literal["perturb", "quick"]

_MEANING: dict[Kind, str] = {
    "order": "the target moves with a source that the declared order forbids",
    "batch": "the target moves with another sequence of the batch",
    "cache": "decoding along this path differs from one full forward",
    "state": "the output depends on earlier calls of the model",
    "sum": "exp(score) over all choices of the target's token is more than one: the score knows its own token",
    "missing": "the order lets the target read the source, and nothing of the source arrives in this layer",
    "request": "the mask that the model asks for is not the one that its configuration and the inputs describe",
    "padding": "the target moves with padding of another input, which a mask among the inputs hides",
    "alone": "the row or document that begins or holds the target has other outputs alone (`check_alone`)",
    "reference": "the target has other values than the reference on one process (`against=`)",
}


@dataclass(frozen=True)
class Violation:
    """One place where information flows against the declared order.

    Attributes:
        kind: "order", "batch" (across sequences of the batch), "cache" (cached decoding differs from the full
            forward), "state" (an earlier call of the model leaves a trace), "missing" (a pair that the order allows
            and nothing passes; `check(both_sides=True)`), "sum" (probabilities above one; `check_scores`), "request"
            (the model asks transformers for another mask than its configuration and the inputs describe), "padding"
            (padding of another input, such as encoder states, is read) or "alone" (a row or document reads in its
            batch what it does not have alone; `guard`) or "reference" (a step on several processes returns other
            values than its reference on one; `check(against=)`).
        layer: index of the layer that holds `module`; None before the first layer, after the last and between layers.
        module: dotted name of the innermost module whose inputs are clean and whose output breaks the order. For the
            model's own output it is the model's class, with the name of an output that has no axis of positions.
        source: the position whose input is changed; None for kinds "cache" and "state".
        target: the position that changes although it must not.
        change: largest absolute change of the target's vector in that module.
        source_row: row of the batch that is changed.
        target_row: row of the batch that moves with it.
        path: "forward", or the decoding path: "cached", "chunks", "drafts", "crop", "left padding", "static cache".
        confirmed: whether the change kept its size in the other floating-point precision, as a leak does and
            rounding does not; None if that run failed or was not needed. False if float64 does not show the change,
            and it is no rounding: it is too large, or the module computes something else in float64.
        tokens: the two sequences of ids that show the violation, if the target is one number (a score).
        values: the target's value in each of them.
        why: what disagrees with a request, or which other input is read, in words.
        through: "choices" if the target moves only with what the model chooses (a top-k, a comparison), "values" if it
            also moves with these choices held, "values and choices" if either moves it alone; "" if no choice differs.
        vote: the first choice that moves the target alone: its operator, and the file and line that called it.
        ranks: the ranks that hold target and source, in words, of a step on several processes.
    """

    kind: Kind
    layer: int | None
    module: str
    source: int | None
    target: int
    change: float
    source_row: int | None = 0
    target_row: int = 0
    path: str = "forward"
    confirmed: bool | None = None
    tokens: tuple[tuple[int, ...], ...] = ()
    values: tuple[float, ...] = ()
    why: str = ""
    through: Through = ""
    vote: str = ""
    ranks: str = ""

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"missing: {self.module} (layer {self.layer}): position {self.target} never moves with {self.source}"
        if self.kind == "sum":
            return f"sum: {self.module}: probabilities at position {self.target} sum to {1 + self.change:.6g}"
        where = self.module if self.layer is None else f"{self.module} (layer {self.layer})"
        if self.kind == "alone":
            return f"alone: {where}: row {self.target_row} from position {self.target} on is another alone: {self.why}"
        if self.kind == "request":
            pair = f"position {self.target} and key {self.source}, sequence {self.target_row}"
            return f"request: {where}: {self.why}; first {pair}"
        if self.kind == "reference":
            return f"reference: {where}: differs by up to {self.change:.3g} at {self.why}{self._on_ranks()}"
        rows = "" if self.source_row == self.target_row or self.source_row is None else f" of row {self.source_row}"
        row = f" of row {self.target_row}" if self.kind == "batch" else ""
        cause = "" if self.source is None else f" with position {self.source}{rows}"
        cause = f"{cause} of {self.why}" if cause and self.why else cause or (self.why and f" with {self.why}")
        way = f" through {self.through}" * (self.through != "") + f": {self.vote}" * (self.vote != "")
        moves = f"position {self.target}{row} moves{cause} by {self.change:.3g}{way}"
        return f"{self.kind}: {where}: {moves} [{self.path}]{self._on_ranks()}"

    def _on_ranks(self) -> str:
        return f" ({self.ranks})" * bool(self.ranks)

    def shown(self) -> list[str]:
        """The two contexts and the numbers, one line each; none unless the target is one number."""
        places = [i for i, pair in enumerate(zip(*self.tokens, strict=False)) if len(set(pair)) > 1]
        first, last = max(0, min(places, default=0) - _AROUND), max(places, default=-1) + _AROUND
        lines: list[str] = []
        for ids, value in zip(self.tokens, self.values, strict=True):
            words = [f"[{v}]" if i in places else f"{v}" for i, v in enumerate(ids[: last + 1])][first:]
            words = words if len(words) <= 4 * _AROUND else [*words[: 2 * _AROUND], "...", *words[-2 * _AROUND :]]
            lines.append(f"position {self.target} is {value:.6g} with ids {first}..: {' '.join(words)}")
        return lines


@dataclass(frozen=True)
class ModuleResult:
    """The outputs of one module in the audit: "clean", "breaks" (a violation starts here) or "carries" one on."""

    module: str
    layer: int | None
    status: Literal["clean", "breaks", "carries"]


@dataclass(frozen=True, repr=False)
class AuditReport(Result):
    """The result of an audit: whether information flows that the order forbids, and where such a leak starts.

    Attributes:
        verdict: "clean", "leak", or "nothing tested" if the order forbids no observed pair, or if an output that the
            caller receives could not be matched with positions (see `untested`).
        ok: whether the verdict is "clean": forbidden pairs were tested and none of them leaks.
        violations: the places where the flow breaks the order, in order of execution.
        order: the order that was tested, in words.
        mode: "perturb" or "quick".
        layers: number of layer calls in one forward.
        positions: number of positions (encoder and decoder together).
        batch: number of sequences.
        forward_passes: number of forward passes that were run.
        coverage: share of the forbidden pairs (target, source) that were tested; 1.0 if none is forbidden.
        forbidden: number of forbidden pairs over the whole batch, and over several depths where fields grow from
            layer to layer (sliding windows).
        noise: largest difference between two runs on the same inputs; 0.0 where the model is deterministic.
        modules: every module whose output has a sequence axis, in order of execution.
        skipped: modules that could not be watched, each with the reason.
        untested: outputs that depend on the inputs but could not be matched with positions, each with the reason. A
            single number or a pooled vector beside a matched output does not count.
        notes: remarks to read before relying on the result.
        seconds: wall time.
    """

    violations: tuple[Violation, ...]
    order: str
    mode: Mode
    layers: int
    positions: int
    batch: int
    forward_passes: int
    coverage: float
    forbidden: int
    noise: float
    modules: tuple[ModuleResult, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    untested: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The verdict of the audit; it is never "clean" if the order forbids nothing or outputs were not tested."""
        tested = self.forbidden and self.coverage and not self.untested
        return "leak" if self.violations else "clean" if tested else "nothing tested"

    @property
    def ok(self) -> bool:
        """Whether forbidden pairs were tested and no violation was found."""
        return self.verdict == "clean"

    def raise_if_leaks(self) -> None:
        """Raise `LeakFound` with the first violation, if there is one; "nothing tested" does not raise (see `ok`)."""
        if self.violations:
            first = self.violations[0]
            raise LeakFound(str(first), () if first.source is None else (first.source, first.target))

    def rows(self) -> list[dict[str, object]]:
        """One row for each violation."""
        return [vars(violation).copy() for violation in self.violations]

    def __repr__(self) -> str:
        """One line; of a leak a small table, short enough that pytest shows `assert report.ok, report` uncut."""
        size = f"{self.batch} x {self.positions} positions"
        if not self.violations:
            return f"<AuditReport {self.verdict}; {self.order}; {size}>"
        lines = [f"<AuditReport LEAK; {_cut(self.order, 40)}; {size}"]
        table = self._table(["layer", "module", "sequence", "source", "target", "change"], 44)
        for line in table:
            if len(lines) > 2 and sum(map(len, lines)) + len(lines) + len(line) > _SHOWN:
                lines.append(f"and {len(table) - len(lines)} more; print(report)")
                break
            lines.append(line)
        return "\n".join(lines) + ">"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """What it prints; with a `width`, the table leaves out columns so that the modules' names stay whole in it."""
        tested = f"{self.coverage:.1%} of {self.forbidden:,} forbidden pairs tested"
        tested = tested if self.forbidden else "this order forbids no pair"
        verdict = "LEAK" if self.violations else self.verdict
        lines = [
            f"{verdict}: {self.order}; {self.batch} x {self.positions} positions, {self.layers} layers",
            f"mode {self.mode}: {self.forward_passes} forward passes in {self.seconds:.1f} s; "
            f"{len(self.modules)} module output{'s' * (len(self.modules) != 1)} watched; {tested}; "
            f"noise {self.noise:.2g}",
        ]
        if self.violations:
            head = ["kind", "layer", "module", "sequence", "source", "target", "change", "path"]
            table = self._table(head, 80)
            for spared in ("path", "sequence", "kind"):
                if width is not None and max(map(len, table)) > width:
                    head.remove(spared)
                    table = self._table(head, 80)
            lines += table
            kinds = {violation.kind: _MEANING[violation.kind] for violation in self.violations}
            lines += [f"{kind}: {meaning}" for kind, meaning in kinds.items()]
            lines += [line for violation in self.violations for line in violation.shown()]
            lines += [str(violation) for violation in self.violations if violation.why or violation.ranks]
            carried = sum(result.status == "carries" for result in self.modules)
            lines += [f"{carried} later module outputs carry it on"] if carried else []
        if self.skipped:
            names = [name for name, _ in self.skipped]
            lines.append(f"{plural(len(names), 'module')} not watched: {few(names)}")
        if self.untested:
            lines.append(f"not tested, of what the caller receives: {few(self.untested)}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _table(self, columns: Sequence[str], limit: int) -> list[str]:
        rows: list[Sequence[str]] = [columns]
        for v in self.violations:
            cells: dict[str, object] = {name: "" if value is None else value for name, value in vars(v).items()}
            cells |= {"module": _cut(v.module, limit), "change": f"{v.change:.3g}", "sequence": v.target_row}
            if v.source_row not in (None, v.target_row):
                cells["sequence"] = f"{v.source_row}->{v.target_row}"
            rows.append([str(cells[name]) for name in columns])
        return aligned(rows, range(len(columns))).splitlines()


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"...{text[3 - limit :]}"


def few(names: Sequence[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
