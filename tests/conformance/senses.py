"""What models of pixels, sounds, time series and several towers are run on: the first form that they take, of two rows
or else of one.

No table of families: a form is proposed by the names of what `forward` takes and sizes of the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conformance.inputs import LENGTH, Inputs, ids, with_image
from tests.conformance.miniature import NotBuilt

ROWS = 2
TRIES = 2000  # forms of one class, at most
# What is tried together, the fullest first; what a class demands beside it is added.
_TOGETHER = [
    *(("input_ids", "pixel_values"), ("input_ids", "pixel_values_videos"), ("input_ids", "input_features")),
    *(("input_ids", "input_values"), ("input_ids", "qformer_input_ids", "pixel_values"), ("input_ids",)),
    *(("input_ids", "input_features", "is_longer"), ("input_features", "input_features_mask")),
    ("states", "actions", "rewards", "returns_to_go", "timesteps", "attention_mask"),
    ("pixel_values", "input_points"),
    *(("pixel_values", "prompt_pixel_values", "prompt_masks"), ("query_embeds", "encoder_hidden_states")),
    ("state", "noise", "timestep", "input_ids", "pixel_values", "attention_mask", "pixel_attention_mask"),
    ("input_ids", "pixel_values", "image_embeds_position_mask"),
    ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"),
    *(("input_values", "input_features"), ("pixel_values", "task_inputs"), ("pixel_values_videos",)),
    *(("pixel_values", "grid_thw"), ("pixel_values", "image_grid_thw"), ("hidden_states", "grid_thw")),
    *(("pixel_values", "image_sizes"), ("pixel_values", "spatial_shapes", "pixel_attention_mask")),
    *(("pixel_values", "pixel_position_ids"), ("pixel_values", "target_sizes"), ("pixel_values",)),
    *(("flattened_patches",), ("input_features",), ("input_values",), ("audio_mel", "audio_mel_mask"), ("latents",)),
    *(("past_values",), ("hidden_states",), ("inputs",), ("states",), ("query_embeds",), ("inputs_embeds",), ()),
    ("noise_embeds", "attention_mask"),
]
_NEVER = {"labels", "encoder_outputs", "past_key_values", "inference_session", "mm_encoder_outputs"}


def runs_on(model: PreTrainedModel) -> Inputs:
    """The first inputs of two rows, or else of one, that the model answers."""
    if list(inspect.signature(model.forward).parameters) == ["input"]:
        raise NotBuilt("the class defines no forward of its own")
    if objects := [name for name in _demanded(model) if name in _NEVER]:
        raise NotBuilt(f"its forward asks for {objects[0]}, an object that keeps a state, and no tensor")
    reasons: list[str] = []
    forms = list(islice(_forms(model), TRIES))
    alone = ({name: value[:1] for name, value in form.items() if isinstance(value, Tensor)} for form in forms)
    for inputs in chain(forms, alone):  # some classes run on a batch of one row alone
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:90])
    few = list(dict.fromkeys(reasons))[:3]
    raise NotBuilt(f"none of {len(reasons)} forms of inputs runs: {' | '.join(few)}")


def _forms(model: PreTrainedModel) -> Iterator[Inputs]:
    taken = inspect.signature(model.forward).parameters
    demanded = _demanded(model)
    if {"input_ids", "pixel_values"} <= set(taken):
        with suppress(NotBuilt):
            yield {name: value.repeat(ROWS, *[1] * (value.dim() - 1)) for name, value in with_image(model).items()}
    options = _options(model)
    decoder = ["decoder_input_ids"] if "decoder_input_ids" in taken else []
    for (start, stop), together in product(((0, 60), (60, 600)), _TOGETHER):
        names = list(dict.fromkeys([*together, *demanded, *decoder]))
        if not set(together) <= set(taken) or not names or set(names) & _NEVER or set(names) - set(options):
            continue
        forms = (dict(zip(names, chosen, strict=True)) for chosen in product(*(options[name] for name in names)))
        yield from islice(filter(_agree, forms), start, stop)


def _demanded(model: PreTrainedModel) -> list[str]:
    taken = inspect.signature(model.forward).parameters.values()
    return [p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def _agree(form: Inputs) -> bool:
    """Whether a mask is as long as its features, and no image stands for both rows."""
    if "input_features_mask" in form:
        return form["input_features_mask"].shape[1] in form["input_features"].shape[1:]
    return "spatial_shapes" not in form or len(form["pixel_values"]) == ROWS


def _sizes(model: PreTrainedModel, *names: str) -> list[int]:
    """The sizes that the configurations of a model and of its parts give under these names."""
    configs: list[Any] = [model.config]
    for config in configs:
        configs += [value for value in vars(config).values() if hasattr(value, "to_diff_dict")]
    found = [getattr(config, name, None) for name in names for config in configs]
    found = [value[0] if isinstance(value, list | tuple) and value else value for value in found]
    return list(dict.fromkeys(v for v in found if isinstance(v, int) and not isinstance(v, bool) and v > 0))


def _options(model: PreTrainedModel) -> dict[str, list[Any]]:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels = (_sizes(model, "num_channels", "in_channels") or [3])[0]
    channels = channels if channels <= 4 else 3
    patch = (_sizes(model, "patch_size") or [8])[0]
    frames = (_sizes(model, "num_frames", "frames_per_clip") or [4])[0]
    thick = (_sizes(model, "temporal_patch_size") or [1])[0]
    sizes = list(dict.fromkeys([*_sizes(model, "image_size"), 32, 64, 128, 256]))
    side = 2 * (_sizes(model, "spatial_merge_size", "merge_size") or [2])[0]
    flat = channels * thick * patch * patch
    mels = list(dict.fromkeys([*_sizes(model, "num_mel_bins", "feature_size", "input_feat_size", "input_dim",
                                       "n_mels", "input_feat_per_channel", "input_size",
                                       "feature_projection_input_dim"), 80, 128, 160, 320, 560]))  # fmt: skip
    widths = _sizes(model, "hidden_size", "d_model", "hidden_dim")
    squares = [noise(ROWS, channels, size, size) for size in sizes]
    counts = dict.fromkeys((frames, 8, 2))
    videos = [noise(ROWS, count, channels, size, size) for size in sizes[:3] for count in counts]
    configs = model.config, getattr(model.config, "vision_config", None)
    shapes = [getattr(config, "image_size", None) for config in configs]
    squares += [noise(ROWS, channels, *shape[:2]) for shape in shapes if isinstance(shape, list | tuple)]
    grid = torch.tensor([[1, side, side]] * ROWS)
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(ROWS, -1, -1)
    patches = [noise(ROWS * side * side, flat), noise(1, ROWS * side * side, flat), noise(ROWS, side * side, flat)]
    patches += [noise(ROWS * side * side, channels, patch, patch), noise(ROWS * side * side, 2 * flat)]
    patches += [noise(ROWS * side * side, side // 2 * patch, side // 2 * patch, channels)]
    sounds = [noise(ROWS, mel, time) for time in (8 * LENGTH, 512, 3000, 256) for mel in mels]
    sounds += [noise(ROWS, time, mel) for time in (8 * LENGTH, 512) for mel in mels] + [
        noise(ROWS, 1, 1024, mel) for mel in mels
    ]
    waves = [noise(ROWS, *one, time) for time in (3200, 16000, 1920 * 4, 8 * LENGTH * 320) for one in ((), (1,))]
    series = (_sizes(model, "context_length") or [32])[0]
    lags = getattr(model.config, "lags_sequence", None) or [0]
    ahead, features = (_sizes(model, "prediction_length") or [8])[0], getattr(model.config, "num_time_features", 0) or 0
    inputs = (_sizes(model, "num_input_channels", "input_size") or [1])[0]
    past = series + max(lags)
    return {
        "input_ids": [ids(LENGTH, batch=ROWS), ids(16, batch=ROWS), *_delayed(model)],
        "decoder_input_ids": [ids(LENGTH - 2, seed=1, batch=ROWS), *_delayed(model)],
        "qformer_input_ids": [ids(5, seed=2, batch=ROWS)],
        "task_inputs": [ids(5, seed=2, batch=ROWS), torch.ones(ROWS, 77, dtype=torch.long)],
        "inputs": [ids(LENGTH, batch=ROWS), *sounds[:4], *waves[:2], *squares[:1]],
        "pixel_values": [*squares, *patches, *videos, *(square[:, None] for square in squares[:2])],
        "pixel_values_videos": videos,
        "prompt_pixel_values": squares,
        "prompt_masks": squares,
        "hidden_states": [*patches, *(noise(ROWS, width, 64) for width in widths), noise(ROWS, 1, 3200)],
        "grid_thw": [grid, grid[:, 1:]],
        "image_grid_thw": [grid],
        "image_sizes": [torch.tensor([[size, size]] * ROWS) for size in sizes[:2]],
        "target_sizes": [grid[:, 1:].to(torch.int32)],
        "spatial_shapes": [grid[:, 1:]],
        "pixel_attention_mask": [torch.ones(ROWS, side * side).long(), torch.ones(ROWS, 1).bool()],
        "pixel_position_ids": [cells],
        "flattened_patches": [torch.cat([1.0 + cells, noise(ROWS, side * side, width)], -1) for width in (flat, 768)],
        "input_points": [8 + 8 * torch.rand(ROWS, 1, 1, 2, generator=generator)],
        "image_embeds_position_mask": [(torch.arange(LENGTH) < count).expand(ROWS, -1) for count in (4, 8, LENGTH)],
        "encoder_hidden_states": [noise(ROWS, LENGTH, size) for size in _sizes(model, "encoder_hidden_size")],
        "merge_sizes": [torch.tensor([side // 2] * ROWS), torch.tensor([1] * ROWS)],
        "input_features": sounds,
        "input_values": [*waves, *(noise(ROWS, 1024, mel) for mel in mels)],
        "input_features_mask": [torch.ones(ROWS, time, dtype=torch.long) for time in (8 * LENGTH, 512, 3000, 256)],
        "audio_mel": [noise(ROWS, 8 * LENGTH, mel) for mel in mels],
        "audio_mel_mask": [torch.zeros(ROWS, 8 * LENGTH, dtype=torch.bool)],
        "padding_mask": [torch.ones(ROWS, time, dtype=torch.bool) for time in (3200, 16000)],
        "is_longer": [torch.zeros(ROWS, 1, dtype=torch.bool)],
        "latents": [noise(ROWS, width, LENGTH) for width in widths] + [noise(ROWS, LENGTH, width) for width in widths],
        "query_embeds": [noise(ROWS, 4, width) for width in widths],
        "inputs_embeds": [noise(ROWS, LENGTH, width) for width in widths],
        "noise_embeds": [noise(ROWS, LENGTH, width) for width in widths],
        "context_hidden_states": [noise(ROWS, LENGTH, count * width) for width in widths for count in (1, 2)],
        "past_values": [
            *(noise(ROWS, past, inputs)[..., 0] if lags != [0] else noise(ROWS, past, inputs),),
            *(noise(ROWS, past), noise(ROWS, 32)),
        ],
        "past_values_padding": [torch.zeros(ROWS, past).long()],
        "past_time_features": [noise(ROWS, past, features)],
        "past_observed_mask": [torch.ones(ROWS, past)],
        "future_values": [noise(ROWS, ahead)],
        "future_time_features": [noise(ROWS, ahead, features)],
        "freq": [torch.zeros(ROWS, 1, dtype=torch.long)],
        "states": [noise(ROWS, LENGTH, size) for size in _sizes(model, "state_dim")],
        "actions": [noise(ROWS, LENGTH, size) for size in _sizes(model, "act_dim")],
        "rewards": [noise(ROWS, LENGTH, 1)],
        "returns_to_go": [noise(ROWS, LENGTH, 1)],
        "timesteps": [torch.arange(LENGTH).expand(ROWS, -1)],
        "attention_mask": [torch.ones(ROWS, time, dtype=torch.long) for time in (LENGTH, 2 * LENGTH)],
        "patch_attention_mask": [torch.ones(ROWS, size // patch, size // patch, dtype=torch.bool) for size in sizes],
        "state": [noise(ROWS, size) for size in _sizes(model, "max_state_dim")],
        "noise": [noise(ROWS, 4, size) for size in _sizes(model, "max_action_dim")],
        "timestep": [torch.full((ROWS,), 0.5)],
        "fine": [True],
    }


def _delayed(model: PreTrainedModel) -> list[Tensor]:
    books = _sizes(model, "num_channels", "num_codebooks")
    return [ids(LENGTH * count, batch=ROWS).view(ROWS, LENGTH, count) for count in books if count > 4]
