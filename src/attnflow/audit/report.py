"""`AuditReport` and `Violation`: the result of an audit, as data and as a table."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from attnflow._core.errors import LeakFound
from attnflow._core.results import Result

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_SHOWN = 215  # characters: pytest cuts a message at 240, the last line included
Kind = Literal["order", "batch", "cache", "state", "missing"]
Verdict = Literal["clean", "leak", "nothing tested"]
Mode = Literal["perturb", "quick"]

_MEANING: dict[Kind, str] = {
    "order": "the target moves with a source that the declared order forbids",
    "batch": "the target moves with another sequence of the batch",
    "cache": "this way of decoding differs from one full forward",
    "state": "the output depends on earlier calls of the model",
    "missing": "the order lets the target read the source, and nothing of the source arrives in this layer",
}


@dataclass(frozen=True)
class Violation:
    """One place where information flows against the declared order.

    Attributes:
        kind: "order", "batch" (across sequences of the batch), "cache" (cached decoding differs from the full
            forward), "state" (an earlier call of the model leaves a trace) or "missing" (a pair that the order allows
            and nothing passes; `check(both_sides=True)`).
        layer: index of the layer that holds `module`; None before the first layer, after the last and between layers.
        module: dotted name of the innermost module whose inputs are clean and in which the flow breaks the order.
        source: the position that is changed; None for kinds "cache" and "state".
        target: the position that moves and must not.
        change: largest absolute change of the target's vector there.
        source_row: row of the batch that is changed.
        target_row: row of the batch that moves.
        path: "forward", or the way of decoding: "cached", "chunks", "drafts", "crop", "left padding", "static cache".
        confirmed: whether the change kept its size in the other floating-point precision, as a leak does and
            rounding does not; None if that run failed or was not needed.
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

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"missing: {self.module} (layer {self.layer}): position {self.target} never moves with {self.source}"
        where = self.module if self.layer is None else f"{self.module} (layer {self.layer})"
        rows = "" if self.source_row == self.target_row or self.source_row is None else f" of row {self.source_row}"
        row = f" of row {self.target_row}" if self.kind == "batch" else ""
        cause = "" if self.source is None else f" with position {self.source}{rows}"
        return f"{self.kind}: {where}: position {self.target}{row} moves{cause} by {self.change:.3g} [{self.path}]"


@dataclass(frozen=True)
class ModuleResult:
    """What the audit saw of one module's outputs: "clean", "breaks" (a violation starts here) or "carries" one on."""

    module: str
    layer: int | None
    status: Literal["clean", "breaks", "carries"]


@dataclass(frozen=True, repr=False)
class AuditReport(Result):
    """Whether anything flows in a model that its order forbids, and where it starts.

    Attributes:
        verdict: "clean", "leak", or "nothing tested" where the order forbids no pair of what was seen.
        ok: the verdict is "clean": forbidden pairs were tested and nothing moved that must not.
        violations: the places where the flow breaks the order, first in the order of execution first.
        order: the order that was tested, in words.
        mode: "perturb" or "quick".
        layers: number of layer calls in one forward.
        positions: number of positions (encoder and decoder together).
        batch: number of sequences.
        forward_passes: forward passes that were run.
        coverage: share of the forbidden pairs (target, source) that were put to the test; 1.0 if none is forbidden.
        forbidden: number of forbidden pairs over the whole batch, and over several depths where fields grow from
            layer to layer (sliding windows).
        noise: largest difference between two runs on the same inputs; 0.0 where the model is deterministic.
        modules: every module whose output has a sequence axis, in order of execution.
        skipped: modules that could not be watched, each with the reason.
        notes: remarks that a reader should know before believing the result.
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
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """What the audit says: never "clean" of an order that forbids nothing."""
        return "leak" if self.violations else "clean" if self.forbidden and self.coverage else "nothing tested"

    @property
    def ok(self) -> bool:
        """Whether forbidden pairs were tested and no violation was found."""
        return self.verdict == "clean"

    def raise_if_leaks(self) -> None:
        """Raise `LeakFound` with the first violation, if there is any; not where nothing was tested (see `ok`)."""
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
        cells = [("layer", "module", "sequence", "source", "target", "change"), *map(_brief, self.violations)]
        widths = [max(map(len, column)) for column in zip(*cells[:4], strict=True)]
        lines = [f"<AuditReport LEAK; {_cut(self.order, 40)}; {size}"]
        for row in cells:
            line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            if len(lines) > 2 and sum(map(len, lines)) + len(lines) + len(line) > _SHOWN:
                lines.append(f"and {len(cells) - len(lines)} more; print(report)")
                break
            lines.append(line)
        return "\n".join(lines) + ">"

    def __str__(self) -> str:
        from rich.console import Console

        buffer = io.StringIO()
        Console(file=buffer, width=110, color_system=None, force_terminal=False).print(self)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        styles = {"clean": "bold green", "leak": "bold red", "nothing tested": "bold yellow"}
        verdict = Text("LEAK" if self.violations else self.verdict, style=styles[self.verdict])
        head = Text.assemble(
            verdict, f": {self.order}; {self.batch} x {self.positions} positions, {self.layers} layers"
        )
        tested = f"{self.coverage:.1%} of {self.forbidden:,} forbidden pairs tested"
        if not self.forbidden:
            tested = "this order forbids no pair" + ("; sequences were kept apart" if self.batch > 1 else "")
        work = Text(
            f"mode {self.mode}: {self.forward_passes} forward passes in {self.seconds:.1f} s; "
            f"{len(self.modules)} module outputs watched; {tested}; noise {self.noise:.2g}"
        )
        parts: list[Text | Table] = [head, work]
        if self.violations:
            parts += [self._table(), *(Text(f"{kind}: {_MEANING[kind]}", style="dim") for kind in self._kinds())]
            carried = sum(result.status == "carries" for result in self.modules)
            if carried:
                parts.append(Text(f"{carried} later module outputs carry it on", style="dim"))
        if self.skipped:
            parts.append(Text(f"{len(self.skipped)} modules not watched: {few([n for n, _ in self.skipped])}", "dim"))
        return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in self.notes))

    def _table(self) -> Table:
        from rich.table import Table

        table = Table("kind", "layer", "module", "sequence", "source", "target", "change", "path")
        for v in self.violations:
            source = "" if v.source is None else str(v.source)
            if v.source is not None and v.source_row != v.target_row:
                source += f" (sequence {v.source_row})"
            layer = "" if v.layer is None else str(v.layer)
            table.add_row(v.kind, layer, v.module, str(v.target_row), source, str(v.target), f"{v.change:.3g}", v.path)
        return table

    def _kinds(self) -> list[Kind]:
        return list(dict.fromkeys(violation.kind for violation in self.violations))


def _brief(violation: Violation) -> tuple[str, ...]:
    v = violation
    rows = f"{v.source_row}->{v.target_row}" if v.source_row not in (None, v.target_row) else str(v.target_row)
    layer = "" if v.layer is None else str(v.layer)
    return layer, _cut(v.module, 44), rows, "" if v.source is None else str(v.source), str(v.target), f"{v.change:.3g}"


def _cut(text: str, limit: int) -> str:
    """`text` with its end, which tells modules apart."""
    return text if len(text) <= limit else f"...{text[3 - limit :]}"


def few(names: Sequence[str], limit: int = 4) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
