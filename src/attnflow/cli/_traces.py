"""Traces as commands make, write and print them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.errors import MissingExtra
from attnflow._core.markup import token_label
from attnflow.cli import _models, _stores
from attnflow.cli._output import BadUsage, output_path

if TYPE_CHECKING:
    from attnflow.cli._output import Spinner
    from attnflow.knowledge.provenance import Trace

_SUFFIXES: Final = (".svg", ".png", ".html", ".csv", ".json")


@dataclass(frozen=True)
class View:
    """What is traced and shown.

    Attributes:
        layer: number of a layer, or None for all.
        position: of the token whose entries are listed, negative from the end.
        top: entries kept for each token and layer.
        count: entries listed.
        target: token whose logit the effects are about, or None for the next one.
    """

    layer: int | None
    position: int
    top: int
    count: int
    target: str | None


def target_path(path: Path) -> Path:
    """Where the result goes, if it can be written there: checked before the work.

    Raises:
        BadUsage: another suffix, or no such folder.
        MissingExtra: matplotlib is not installed.
    """
    found = output_path(path, _SUFFIXES)
    if found.suffix.lower() in (".svg", ".png") and find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "report", "a trace as a figure")
    return found


def look(model: str, text: str, store: str | None, view: View, spinner: Spinner) -> Trace:
    """The trace of a text: loads the model, opens its feed-forward layers if it has no entries yet, and runs it.

    Raises:
        BadUsage: no such model or store, a store of another model, or a layer, position or target that does not exist.
    """
    from attnflow.knowledge.hf.trace import trace

    if not text:
        raise BadUsage("the text is empty: nothing can fire")
    loaded = _models.load(model)
    spinner("opening its feed-forward layers")
    with ExitStack() as stack:
        held = None if store is None else stack.enter_context(_stores.opened(store, search="exact"))
        try:
            reading = _with_entries(loaded.model, held)
            spinner("tracing")
            found = trace(
                reading,
                text,
                layers=None if view.layer is None else [view.layer],
                top=view.top,
                targets=view.target,
                texts=held,
                tokenizer=loaded.tokenizer,
            )
            found.row(view.position)
        except (ValueError, TypeError) as error:
            raise BadUsage(str(error)) from error
    return replace(found, model=model)


def write(found: Trace, view: View, path: Path, store: str | None) -> None:
    """Write what the suffix of `path` asks for; whole or not at all."""
    from attnflow._core.files import write_atomically
    from attnflow.report import figure, save_figure, trace_report

    suffix = path.suffix.lower()
    if suffix == ".html":
        trace_report(found, details={} if store is None else {"Store": store}).save(path)
    elif suffix in (".svg", ".png"):
        save_figure(figure(found, position=view.position), path)
    else:
        text = found.to_csv() if suffix == ".csv" else found.to_json()
        with write_atomically(path) as file:
            file.write(text.encode())


def facts(found: Trace, view: View) -> dict[str, object]:
    """The numbers of a trace as JSON holds them: by layer, and the strongest entries of one token."""
    row = found.row(view.position)
    layers = [
        {
            "layer": one.layer,
            "name": one.name,
            "entries": one.num_entries,
            "active": one.active[row],
            "explained": one.explained[row],
            "norm": one.output_norm[row],
            "effect": None if one.effect is None else one.effect[row],
            "attention_effect": None if one.attention_effect is None else one.attention_effect[row],
        }
        for one in found
    ]
    return {
        "tokens": found.tokens,
        "position": found.positions[row],
        "target": found.targets[row] if found.targets else None,
        "logit": None if found.logits is None else found.logits[row],
        "no_effects_because": found.without or None,
        "layers": layers,
        "entries": [asdict(one) for one in found.fired(view.position, count=min(view.count, found.top))],
    }


def lines(found: Trace, view: View) -> list[str]:
    """What fired at one token."""
    row = found.row(view.position)
    said = [f"token {token_label(found.tokens[found.positions[row]])} at position {found.positions[row]}"]
    if found.targets and found.logits is not None:
        logit = float(found.logits[row])
        said[0] += f", target {token_label(found.targets[row])}: logit {logit:.3g} above the mean"
    else:
        said.append(f"no direct effects: {found.without}")
    active = sum(int(one.active[row]) for one in found)
    said.append(f"{active:,} of {sum(one.num_entries for one in found):,} entries are active")
    return [*said, "", found.table(view.position, count=min(view.count, found.top))]


def _with_entries(model: Any, store: Any) -> Any:
    """The model with entries to watch: its own, or those of a store."""
    from attnflow.knowledge.hf.connect import connect
    from attnflow.knowledge.hf.convert import from_ffn
    from attnflow.knowledge.hf.modular.model import ModularModel
    from attnflow.knowledge.hf.sync import load_entries

    if any(isinstance(module, ModularModel) for module in model.modules()):
        if store is not None:
            connect(model, store)
        return model
    made = from_ffn(model)
    if store is not None:
        load_entries(made, store)
    return made
