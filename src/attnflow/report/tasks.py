"""Pictures of tasks and of their leaks: the mask with its tokens, and the way that each label takes to its position."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from attnflow._core.markup import columns, element, grouped, plural, shorten
from attnflow.report.displays import draws
from attnflow.report.hasse_svg import box, hasse_svg
from attnflow.report.mask_picture import EXACT, mask_svg
from attnflow.report.svg import HOT, MONO, Number, framed, text
from attnflow.tasks.leaks import Leak, LeakReport, check
from attnflow.tasks.task import Task

_LEAKS: Final = 12  # drawn before the rest is only counted
_STOPS: Final = 8  # of a path; of a longer one the first and the last half
_STEP, _ROW = 136.0, 66.0
_STRIP: Final = 520.0


@draws(Task)
def task_svg(task: Task, *, picture: str | None = None, **options: Any) -> str:
    """A token is its id and its position, "7@2", or "5+9@2" for an average; a mask per layer is drawn as its order."""
    picture = picture or ("mask" if task.num_layers is None else "hasse")
    if picture not in ("mask", "hasse", "leaks"):
        raise ValueError(f'picture must be "mask", "hasse" or "leaks", got {picture!r}')
    if picture == "leaks":
        return leak_svg(check(task), **options)
    if "labels" not in options and task.size <= EXACT:
        options["labels"] = [f"{'+'.join(map(str, token.ids))}@{token.position}" for token in task.inputs]
    if picture == "mask":
        return mask_svg(task.mask, **options)
    if "highlight" not in options:
        options["highlight"] = next((leak.witness for leak in check(task).leaks), ())
    return hasse_svg(task.flow.hasse, **options)


@draws(LeakReport)
def leak_svg(report: LeakReport, *, title: str | None = None) -> str:
    """Draws each leak as the path of its label, above a strip where leaking positions are red and dead ones empty."""
    parts, y, width = list[str](), 0.0, _STRIP
    for leak in report.leaks[:_LEAKS]:
        drawn, across = _path(leak, y)
        parts.append(drawn)
        width, y = max(width, across), y + _ROW
    parts += _strip(report, y)
    verdict, *rest = str(report).splitlines()
    facts = [line for line in rest if not line.startswith("  ")]
    if len(report.leaks) > _LEAKS:
        facts.insert(0, f"{plural(len(report.leaks) - _LEAKS, 'more leak')} not drawn.")
    return framed("".join(parts), width, y + 34, [f"{verdict}.", *facts], f"Leaks of a task: {verdict}", title)


def _path(leak: Leak, y: float) -> tuple[str, float]:
    data = "" if leak.label.data_index is None else f" (data token {leak.label.data_index})"
    sentence = f"position {leak.position} must predict token {leak.label.target_id}{data} and can read it:"
    stops: list[tuple[int, int]] = list(enumerate(leak.witness))
    if len(stops) > _STOPS:
        stops = [*stops[: _STOPS // 2], *stops[-_STOPS // 2 :]]
    parts = [_text(sentence, 0, y + 10)]
    for place, (layer, position) in enumerate(stops):
        x = 44 + _STEP * place
        ends = (position == leak.carrier and layer == 0, layer == len(leak.witness) - 1)
        role = "holds it" if ends[0] else "predicts it" if ends[1] else ""
        if place:
            skipped = layer - stops[place - 1][0] - 1
            words = f"layer {layer}" if not skipped else f"… {skipped} more"
            start, end = x - _STEP + 46, x - 48
            parts.append(element("path", d=f"M{start} {y + 36}H{end}", stroke=HOT, stroke_width=2.0, class_="af-hot"))
            head = f"M{end - 2} {y + 32}l7 4l-7 4z"
            parts.append(element("path", d=head, fill=HOT, stroke="none", class_="af-hot"))
            parts.append(_text(words, (start + end) / 2, y + 30, 10.5, "middle"))
        tooltip = f"after layer {layer}" if layer else "in the input"
        words = (grouped(position), role, f"position {position} has the token {tooltip}")
        parts.append(box((x, y + 36, 84.0, 36.0), words, hot=any(ends)))
    return "".join(parts), max(44 + _STEP * (len(stops) - 1) + 44, 6.2 * columns(sentence))


def _strip(report: LeakReport, y: float) -> list[str]:
    leaking, dead = {leak.position for leak in report.leaks}, set(report.dead)
    kinds = ["leaks" if at in leaking else "dead" if at in dead else "fine" for at in range(report.num_positions)]
    side = _STRIP / max(report.num_positions, 1)
    key = ", red can read its label" * bool(leaking) + ", empty is dead" * bool(dead)
    parts = [_text(f"positions 0 to {grouped(max(report.num_positions - 1, 0))}{key}", 0, y + 10)]
    at = 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        look: dict[str, Any] = {"fill": HOT, "class_": "af-hot"} if kind == "leaks" else {"fill": "currentColor"}
        opacity = {"leaks": 1.0, "dead": 0.0, "fine": 0.22}[kind]
        where = f"{at}" if count == 1 else f"{at}–{at + count - 1}"
        title = element("title", f"{'reads its label' if kind == 'leaks' else kind}: {where}")
        frame = {"x": side * at, "y": y + 16, "width": side * count, "height": 16, "stroke": "currentColor"}
        parts.append(element("rect", title, **frame, fill_opacity=opacity, stroke_opacity=0.5, **look))
        at += count
    return parts


def _text(words: str, x: Number, y: Number, size: Number = 11.5, anchor: str = "") -> str:
    return text(shorten(words, 120), x, y, size, anchor, MONO if anchor else "", 0.85)
