"""Which tensors of a model its checkpoint lacks, and which it holds that the model has no place for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn
from transformers import PreTrainedModel

from attnflow._core.checks import preview
from attnflow.models.checkpoints.files import MERGE, BadCheckpoint

_ADAPTER: Final = re.compile(r"(^|\.)(base_model\.model|base_layer|lora_\w+)\.")


def missing_tensors(
    model: PreTrainedModel, report: Mapping[str, Iterable[str]], place: str, partial: bool
) -> list[str]:
    """Say which tensors found no counterpart; `BadCheckpoint` unless `partial`, or if only an encoder's pooler lacks.

    Transformers leaves tied weights out of its report, and what a family lists as computed or for training alone.
    """
    state, kind = model.state_dict(), type(model).__name__
    # Integers of a state are counters and positions, which initialisation sets rather than draws.
    missing = sorted(name for name in report["missing_keys"] if state[name].is_floating_point())
    extra = sorted(report["unexpected_keys"])
    if adapters := [name for name in extra if _ADAPTER.search(name)]:
        raise BadCheckpoint(f"{place} holds an adapter that is not merged ({preview(adapters, 1)}): {MERGE}")
    if 2 * len(missing) > len(state) or len(extra) > len(state) - len(missing):
        raise BadCheckpoint(
            f"{place} holds the weights of another model than its config describes: {len(missing)} of {len(state)} "
            f"tensors of a {kind} are missing, and {len(extra)} do not belong to it"
        )
    if missing:
        count = f"{len(missing)} of {len(state)} tensors of a {kind}"
        gap = f"{place} lacks {count}, which transformers draws at random: {preview(missing, 3)}"
        if model.base_model is model and all("pooler." in name for name in missing):
            return [f"{gap}; only its pooler_output depends on them"]
        if not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
            base = type(model.base_model).__name__
            gap += f'. To load it without its head, set "architectures": ["{base}"] in config.json'
    elif dropped := _dropped(extra, dict(model.named_modules())):
        gap = f"{place} holds {len(dropped)} tensors for which its config has no place: {preview(dropped, 3)}"
    else:
        return []
    if not partial:
        raise BadCheckpoint(f"{gap}. Download or save it again, or pass partial=True")
    return [gap]


def _dropped(extra: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    def matters(name: str) -> bool:
        owner = modules.get(name.rpartition(".")[0])
        layers = ((modules.get(name[: part.start()]), int(part[1])) for part in re.finditer(r"\.(\d+)(?=\.)", name))
        return (owner is not None and next(owner.children(), None) is None) or any(
            isinstance(module, nn.ModuleList) and number >= len(module) for module, number in layers
        )

    return [name for name in extra if matters(name)]
