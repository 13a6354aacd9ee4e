"""A trace as a matplotlib figure (extra `report`): what each layer did at each token, and the strongest entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from attnflow._core.markup import shorten, token_label
from attnflow.knowledge.provenance import Fired, Trace
from attnflow.report.axes import literal, name_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]

_SIGNED: Final = "coolwarm_r"
_UP, _DOWN = "#3b4cc0", "#b40426"  # the ends of it
_PICTURES: Final = dict.fromkeys(range(0x2400, 0x2427), "·")  # of control characters; few fonts have them


def trace_figure(trace: Trace, *, position: int = -1, count: int = 12, title: str | None = None) -> Figure:
    """Layers x tokens: share of active entries and direct effect of all entries; and the strongest entries of a token.

    Without direct effects the second map is the norm of what a layer's entries write.

    Args:
        trace: what `af.knowledge.trace` returned.
        position: of the token whose entries are shown, -1 for the last traced one.
        count: entries shown.
        title: heading; by default the model.

    Raises:
        MissingExtra: matplotlib is not installed.
        ValueError: a position that was not traced.
    """
    found = trace.fired(position, count=count)
    rows, columns = len(trace.layers), len(trace.positions)
    height = max(2.4 + 0.19 * min(rows, 64), 2.2 + 0.27 * len(found))
    figure = new_figure(2 * columns + 34, rows, height=height, purpose="a trace as a figure")
    shares, written, bars = figure.subplots(1, 3, width_ratios=[columns + 4, columns + 4, 18])
    _map(shares, trace, active_shares(trace), "Blues", 0.0, "active entries, share")
    table, what = written_by(trace)
    limit = float(np.abs(table).max(initial=0.0)) or 1.0
    signed = not trace.without
    _map(written, trace, table, _SIGNED if signed else "Purples", -limit if signed else 0.0, what, limit)
    _bars(bars, trace, found, trace.token(trace.row(position)))
    figure.suptitle(literal(title or f"{trace.model}: entries that fired"), fontsize=10)
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


def _map(
    axes: Any, trace: Trace, table: Array, colours: str, least: float, title: str, most: float | None = None
) -> None:
    top = float(table.max(initial=0.0)) or 1.0
    image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap=colours, vmin=least, vmax=most or top)
    names = [trace.token(row) for row in range(len(trace.positions))]
    name_axis(axes.xaxis, names, list(trace.positions), turned=True)
    name_axis(axes.yaxis, [str(one.layer) for one in trace], [one.layer for one in trace], turned=False)
    axes.invert_yaxis()  # what enters is below, what leaves above
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, aspect=30).ax.tick_params(labelsize=8)


def _bars(axes: Any, trace: Trace, found: list[Fired], token: str) -> None:
    sizes = [one.norm if one.effect is None else one.effect for one in found]
    places = list(range(len(found)))
    axes.barh(places, sizes, color=[_UP if size > 0 else _DOWN for size in sizes], height=0.7)
    axes.set_yticks(places, [literal(entry_name(one)) for one in found], fontsize=8)
    reach = max(map(abs, sizes), default=1.0)
    for place, one, size in zip(places, found, sizes, strict=True):
        # Beyond zero on the other side of the bar, where nothing is drawn over it.
        side = "right" if size > 0 and not trace.without else "left"
        at = -0.03 * reach if side == "right" else (0.03 * reach if not trace.without else size + 0.03 * reach)
        axes.text(at, place, literal(entry_words(one)), fontsize=7, va="center", ha=side)
    axes.set_xlim(*((-1.7 * reach, 1.7 * reach) if not trace.without else (0, 1.7 * reach)))
    axes.invert_yaxis()
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(literal(f"entries at {token}: {'norm' if trace.without else 'direct effect'}"), fontsize=9)
