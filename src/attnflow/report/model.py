"""`model_page`: everything about a model on one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from attnflow import audit, bias, geometry, knowledge
from attnflow._core.errors import AttnflowError
from attnflow._core.progress import Progress
from attnflow.bias.layer import layer_biases
from attnflow.models.loaded import Loaded, split
from attnflow.report.page import Page
from attnflow.report.registry import page

_ERRORS = (AttnflowError, ImportError, NotImplementedError, TypeError, ValueError)


def model_page(
    model: nn.Module | Loaded,
    inputs: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    title: str | None = None,
    details: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Page:
    """The order that a model declares, its audit, its bias if there is one, its geometry, and which entries fired.

    Args:
        model: any model, or what `af.load_model` returned.
        inputs: a text, token ids, or the model's inputs by name.
        title: heading; by default the model's name.
        details: more rows for the provenance.
        progress: called as progress(done, total, what) before each step.

    Returns:
        The page. What cannot be found out about this model is among its problems, with the reason; the rest is shown.

    Cost: an audit of the model, one pass over its queries and keys, and about four forward passes.
    """
    from attnflow.models.inputs import model_inputs, model_name  # with transformers, which other pages do without

    module, tokenizer = split(model)
    name = title or model_name(module)
    named = model_inputs(module, inputs, tokenizer, 0)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("Order", lambda: audit.declared_order(module, named)),
        ("Audit", lambda: audit.check(module, named)),
        ("Geometry", lambda: replace(geometry.score(module), model=name)),
        ("Knowledge", lambda: replace(knowledge.trace(module, named, tokenizer=tokenizer), model=name)),
    ]
    if any(layer_biases(module)):
        steps.insert(2, ("Bias", lambda: replace(bias.capture(module, named, tokenizer=tokenizer), model=name)))
    results: list[object] = []
    problems: dict[str, str] = {}
    for done, (step, find) in enumerate(steps):
        if progress is not None:
            progress(done, len(steps), step.lower())
        try:
            results.append(find())
        except _ERRORS as error:
            problems[step] = str(error)
    labels = None
    if tokenizer is not None:  # an encoder's tokens before the decoder's, as in its order
        rows = [ids[0].tolist() for key, ids in named.items() if key in ("input_ids", "decoder_input_ids")]
        labels = [str(tokenizer.decode([token])) for row in rows for token in row]
    return page(*results, title=name, labels=labels, details=details, problems=problems)
