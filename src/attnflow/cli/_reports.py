"""Reports as the command makes them: of a mask, of a task, of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attnflow.cli import _audits, _models
from attnflow.cli._catalogue import close_to, entries, make_mask, settings_from
from attnflow.cli._output import BadUsage
from attnflow.cli._spec import mask_from, read_json, task_from

if TYPE_CHECKING:
    from attnflow.audit.fields import Relation
    from attnflow.cli._output import Spinner
    from attnflow.masks import Mask
    from attnflow.report import Report


@dataclass(frozen=True)
class Made:
    """A report with what it is about, and whether it has no leak to report."""

    kind: Literal["mask", "task", "model"]
    page: Report
    ok: bool


def make(subject: str, n: int | None, settings: Sequence[str], text: str | None, tokens: int, spinner: Spinner) -> Made:
    """The report on whatever `subject` names."""
    from attnflow.report import mask_report

    is_file = subject == "-" or subject.endswith(".json")
    if (is_file or subject in entries()) and text is not None:
        raise BadUsage(f"--text belongs to models; {subject} is a mask")
    if is_file:
        if n is not None or settings:
            raise BadUsage(f"--n and --set belong to masks of the catalogue; {subject} is a file that says it all")
        return _of_file(subject, spinner)
    if subject in entries():
        mask = make_mask(subject, n, settings_from(settings))
        spinner(f"analysing {mask.name}")
        return Made("mask", mask_report(mask), ok=True)
    if n is not None or settings:
        raise BadUsage(f"--n and --set belong to masks, and {subject!r} is none{close_to(subject, entries())}")
    return _of_model(subject, text, tokens, spinner)


def _of_file(path: str, spinner: Spinner) -> Made:
    from attnflow.report import mask_report
    from attnflow.tasks import check

    spec = read_json(path)
    if "inputs" not in spec:
        mask = mask_from(spec.get("mask", spec), path)
        spinner(f"analysing {mask.name}")
        return Made("mask", mask_report(mask), ok=True)
    task = task_from(spec, path)
    spinner(f"checking {task.size} positions")
    found = check(task)
    return Made("task", mask_report(task.flow, task=task, check=found, title=path), found.ok)


def _of_model(name: str, text: str | None, tokens: int, spinner: Spinner) -> Made:
    from attnflow.audit.declared import relation_of
    from attnflow.audit.inputs import read
    from attnflow.report import model_report

    loaded = _models.load(name)
    ids = loaded.ids(text, None, tokens)
    inputs = loaded.inputs(ids)
    audit = _audits.run(loaded, ids, None, "perturb", 32, cache=False, double=False, spinner=spinner)
    spinner("writing the report")
    relation = relation_of(loaded.model, read(loaded.model, inputs), None)
    flow = _masks(relation)
    page = model_report(name, audit, flow=flow, labels=loaded.texts(inputs), details={"Model": loaded.line})
    return Made("model", page, audit.ok)


def _masks(relation: Relation) -> Mask | list[Mask]:
    """What the model declares: one mask for all layers, or one per layer."""
    from attnflow.masks import from_dense

    layers = [from_dense(layer[0], relation.name) for layer in relation.layers]
    return layers[0] if relation.repeat else layers
