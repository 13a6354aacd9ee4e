"""A trial runs a few tokens through a model to learn about it, and leaves the model exactly as before.

with trial(model, {site: look for site in sites}, role="pool"):
    read(model, [[5, 6]])
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.wrappers import class_of
from attnflow.models.anatomy.sites import Site, models_around
from attnflow.models.passes.evaluation import REFUSALS, evaluating, refusal, unchanged
from attnflow.models.passes.interception import Interceptor, Role, intercept, without_masks
from attnflow.models.subject import Subject

_NONE: Final[Mapping[Site, Interceptor]] = MappingProxyType({})


class DoesNotRun(UnsupportedArchitecture):
    """A model refused the tokens of a trial; `why` gives its error in one line."""

    def __init__(self, model: nn.Module, error: Exception) -> None:
        self.why = f"{type(error).__name__}: {refusal(error)}"
        super().__init__(f"{class_of(model).__name__} does not run on a few tokens ({self.why})")


@contextmanager
def trial(
    model: nn.Module,
    interceptors: Mapping[Site, Interceptor] = _NONE,
    *,
    role: Role = "pool",
    implementation: str | None = None,
    replaces_mask: bool = False,
) -> Generator[None]:
    """Run the model inside in eval mode, eagerly and without gradients; nothing of that stays.

    Masks that are attached sleep: they may be for other lengths. BigBird-Pegasus replaces its attention on short
    inputs, and models keep rotary tables in buffers; a run costs a copy of these. `DoesNotRun` if the model refuses.
    """
    with without_masks(), unchanged(model), evaluating(model), torch.no_grad():
        around = models_around(list(interceptors))
        by_module = {site.module: interceptor for site, interceptor in interceptors.items()}
        interception = intercept(
            around, by_module, role=role, implementation=implementation, replaces_mask=replaces_mask
        )
        try:
            yield
        except REFUSALS as error:
            raise DoesNotRun(model, error) from error
        finally:
            interception.remove()


def read(model: PreTrainedModel, ids: Sequence[Sequence[int]], **options: object) -> Any:
    """Run a model on token ids [batch, tokens], without a cache; both halves of an encoder-decoder read them."""
    subject = Subject(model)
    tokens = torch.tensor(ids, device=subject.device)
    if subject.encodes_and_decodes and subject.accepts("decoder_input_ids"):
        options["decoder_input_ids"] = tokens
    return model(tokens, **subject.sparing, **options)
