"""What the caller of an audited model receives: which outputs were tested, and notes on the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attnflow.audit.inputs import Inputs
from attnflow.audit.rows import OutputLayout


def received(
    call: Inputs,
    layouts: Mapping[str, OutputLayout],
    short: Mapping[str, str],
    moved: Collection[str],
    *,
    apart: bool,
    mixed: bool,
    whole: bool,
) -> tuple[list[str], list[str]]:
    """(outputs that were not tested, so that nothing is clean; notes on other outputs).

    `short` are outputs that pool a sequence without its end, `moved` those without positions that moved. `apart` says
    that no sequence moved another one, `mixed` that one did, and `whole` that the order allows every real pair.
    """
    turned = {layout.shape[::-1] for layout in layouts.values() if layout.form == "related columns"}
    positions = any(layout.aligned for layout in layouts.values())
    untested, notes = list[str](), list[str]()
    for path, layout in layouts.items():
        name, shape = path.lstrip(".") or "the output", layout.shape
        if layout.form == "pooled" and shape in turned and shape[0] != shape[1]:  # others may be square
            layout = layout._replace(form="related")
        if layout.related and not mixed and max(shape) > 1:
            words = f"relates rows by design: {_rows_of(call, layout)}; an entry may depend on both of its rows"
            notes.append(f"{name} {list(shape)} {words}, and on no other")
        if path in short:
            (notes if positions else untested).append(f"{name} {short[path]}: it is pooled from earlier ones")
        elif layout.aligned and layout.rows > 1 and layout.rows not in {slot.length for slot in call.slots}:
            first = min(layout.offset - slot.offset for slot in call.slots if slot.offset <= layout.offset)
            place = f"i + {first}" if first else "i"
            notes.append(f"{name} has {layout.rows} rows: row i was read as position {place}")
        if path in short or layout.aligned or (layout.pooled and layout.sure and whole):
            continue
        moves = path in moved or not layout.sure
        kept = "; sequences were kept apart" if apart else ""
        why = layout.why or f"has shape {list(shape)}, without an axis of positions{kept}"
        summary = layout.sure and (not shape or layout.pooled or layout.related)
        if not positions or (moves and not summary):
            untested.append(f"{name} {why}")
        elif moves and layout.form == "unknown":
            notes.append(f"not tested: {name} {why}")
    if not layouts:
        untested.append(f"{call.subject.kind} returns no tensor")
    return untested, notes


def _rows_of(call: Inputs, layout: OutputLayout) -> str:
    here, beside = call.slots[-1].title, call.beside.items()
    if layout.form == "pairs":
        return f"[rows of {here}, rows of {here}]"
    rows = layout.shape[layout.form == "related"]
    other = " or ".join(name for name, value in beside if len(value) == rows)
    names = (here, other) if layout.form == "related" else (other, here)
    return "[{}]".format(", ".join(f"rows of {name}" for name in names))
