"""Charts of a trace: what each layer did at each token, and the strongest entries of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import shorten, token_label
from attnflow.knowledge.provenance import Fired, Trace
from attnflow.report.charts import NEGATIVE, POSITIVE, SOFT, blank, chart, heat_map, literal, name_axis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]

_WIDEST: Final = 96  # tokens of a map; of a longer text the last ones
_PICTURES: Final = dict.fromkeys(range(0x2400, 0x2427), "·")  # of control characters; few fonts have them


@chart
def trace_chart(
    trace: Trace,
    *,
    picture: Literal["all", "layers", "entries"] = "all",
    position: int = -1,
    count: int = 12,
    title: str | None = None,
) -> Figure:
    """Layers by tokens: share of active entries and direct effect of all entries; and the strongest entries of a token.

    Without direct effects the second map is the norm of what a layer's entries write. The first layer is at the top.

    Args:
        trace: what `af.knowledge.trace` returned.
        picture: "layers" (both maps), "entries" (the bars), or all of it.
        position: of the token whose entries are shown, -1 for the last traced one.
        count: entries shown.
        title: heading; by default the model.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: a position that was not traced, or no such picture.
    """
    if picture not in ("all", "layers", "entries"):
        raise ValueError(f'picture must be "all", "layers" or "entries", got {picture!r}')
    strongest = trace.fired(position, count=count)
    rows, columns = len(trace.layers), min(len(trace.positions), _WIDEST)
    maps, bars = 1.6 + 0.19 * min(rows, 64), 1.2 + 0.25 * len(strongest)
    if picture == "entries":
        figure = blank(7.6, bars)
        _bars(figure.add_subplot(), trace, strongest, trace.token(trace.row(position)))
        return figure
    wide = min(9.0, 2.2 + 0.17 * columns)
    if picture == "layers":
        figure = blank(2 * wide, maps)
        panels = list(figure.subplots(1, 2))
    else:
        figure = blank(min(16.0, 2 * wide + 5.5), max(maps, bars))
        panels = list(figure.subplots(1, 3, width_ratios=[wide, wide, 5.5]))
        _bars(panels.pop(), trace, strongest, trace.token(trace.row(position)))
    table, what = written_by(trace)
    _map(panels[0], trace, active_shares(trace), "active entries, share", signed=False)
    _map(panels[1], trace, table, what, signed=not trace.without)
    figure.suptitle(literal(title or f"{trace.model}: entries that fired"))
    return figure


def active_shares(trace: Trace) -> Array:
    """Active entries of each layer and token as a share of those that the layer could read, [layers, positions]."""
    return np.stack([np.asarray(one.active, dtype=np.float64) / max(one.num_entries, 1) for one in trace])


def written_by(trace: Trace) -> tuple[Array, str]:
    """(what each layer's entries do at each token, [layers, positions]; in words)."""
    if trace.without:
        return np.stack([np.asarray(one.output_norm, dtype=np.float64) for one in trace]), "norm of what entries write"
    return np.stack([np.asarray(one.effect, dtype=np.float64) for one in trace]), "direct effect on the target"


def entry_name(one: Fired) -> str:
    """Layer and id of an entry, and its head if it is not the first."""
    return f"{one.layer} · {one.entry}" + (f" · head {one.head}" if one.head else "")


def entry_words(one: Fired, limit: int = 28) -> str:
    """The entry's text, or the tokens that it promotes (with a negative weight: suppresses)."""
    if one.text:
        return shorten(one.text, limit)
    words = " ".join(token_label(word) for word in one.promotes[:3])
    return shorten(words if one.weight > 0 or not words else f"not {words}", limit).translate(_PICTURES)


def _map(axes: Any, trace: Trace, table: Array, title: str, *, signed: bool) -> None:
    first = max(0, len(trace.positions) - _WIDEST)
    table = table[:, first:]
    heat_map(axes, table, float(np.abs(table).max(initial=0.0)) or 1.0, signed=signed)
    names = [trace.token(row) for row in range(first, len(trace.positions))]
    name_axis(axes.xaxis, names, list(trace.positions[first:]), turned=True)
    name_axis(axes.yaxis, [str(one.layer) for one in trace], [one.layer for one in trace])
    axes.set_ylabel("layer")
    axes.set_title(f"{title} (the last {_WIDEST} tokens)" if first else title, fontsize=9)


def _bars(axes: Any, trace: Trace, strongest: list[Fired], token: str) -> None:
    sizes = [one.norm if one.effect is None else one.effect for one in strongest]
    places = list(range(len(strongest)))
    axes.barh(places, sizes, color=[POSITIVE if size > 0 else NEGATIVE for size in sizes], height=0.7)
    axes.set_yticks(places, [literal(entry_name(one)) for one in strongest])
    reach = max(map(abs, sizes), default=1.0)
    for place, one, size in zip(places, strongest, sizes, strict=True):
        # Beyond zero on the other side of the bar, where nothing is drawn over it.
        side = "right" if size > 0 and not trace.without else "left"
        at = -0.03 * reach if side == "right" else (0.03 * reach if not trace.without else size + 0.03 * reach)
        axes.text(at, place, literal(entry_words(one)), fontsize=7.5, va="center", ha=side)
    axes.set_xlim(*((-1.7 * reach, 1.7 * reach) if not trace.without else (0, 1.7 * reach)))
    axes.invert_yaxis()
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_title(literal(f"entries at {token}: {'norm' if trace.without else 'direct effect'}"), fontsize=9)
