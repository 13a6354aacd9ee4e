"""What a miniature is run on: token ids, alone, packed, padded, beside a decoder's, and with an image in place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conformance.miniature import LOWEST, NotBuilt

LENGTH = 12
HIGHEST = 60  # of the ids of ordinary tokens, exclusive
Inputs = dict[str, Tensor]


def ids(length: int = LENGTH, seed: int = 0, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LOWEST, HIGHEST, (batch, length), generator=generator)


def is_text(model: PreTrainedModel) -> bool:
    """Whether the class reads token ids."""
    try:
        named = "input_ids" in inspect.signature(model.forward).parameters  # which a model of images names it, too
        return named and model.main_input_name == "input_ids" and model.get_input_embeddings() is not None
    except NotImplementedError:
        return False


def text(model: PreTrainedModel, length: int = LENGTH, batch: int = 1) -> Inputs:
    """Sequences of one length; source and target for a model of two stacks; beside them what the model asks for."""
    inputs = {"input_ids": ids(length, batch=batch)}
    inputs |= beside(model, batch)
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids(length - 2, seed=1, batch=batch)
    return inputs


def beside(model: PreTrainedModel, batch: int = 1) -> Inputs:
    found: Inputs = model.__dict__.get("beside", {})
    return {name: value.repeat(batch, *[1] * (value.dim() - 1)) for name, value in found.items()}


def others(model: PreTrainedModel) -> Iterator[Inputs]:
    """What a model may ask for beside its ids, for one sequence: nothing, boxes, an image, features."""
    taken = set(inspect.signature(model.forward).parameters)
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(1, LENGTH, 2, generator=generator) / 2
    images = [pixels for pixels in _pixels(model) if all(len(value) == 1 for value in pixels.values())]
    audio = getattr(model.config, "audio_config", None)
    features = (1, getattr(audio, "num_mel_bins", 1), 8 * LENGTH)
    for inputs in (
        {},
        {"bbox": torch.cat([corners, corners + 0.5], dim=-1)},
        *images,
        *({**pixels, "image_attention_mask": torch.ones(1, LENGTH, 1)} for pixels in images),
        {
            "visual_feats": torch.rand(1, 4, getattr(model.config, "visual_feat_dim", 4)),
            "visual_pos": torch.rand(1, 4, 4),
        },
        {"input_features": torch.rand(features, generator=generator)},
    ):
        if set(inputs) <= taken:
            yield inputs


def packed() -> Inputs:
    """Documents of 4 and 8 tokens, as transformers' own collator packs them: positions that restart, no mask."""
    return {"input_ids": ids(12), "position_ids": torch.cat([torch.arange(4), torch.arange(8)])[None]}


def padded(model: PreTrainedModel) -> Inputs:
    """Two sequences, the second with three tokens of padding before it."""
    inputs = {"input_ids": ids(batch=2), "attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    inputs["attention_mask"][1, :3] = 0
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    inputs["input_ids"][1, :3] = pad if isinstance(pad, int) and 0 <= pad < LOWEST else 0
    return inputs


def with_image(model: PreTrainedModel) -> Inputs:
    """Text around one image: the placeholders as many as the model asks for."""
    config = model.config
    names = ("image_token_id", "image_token_index", "img_token_id", "video_token_index")
    token = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
    if token is None:
        raise NotBuilt("no id of an image's placeholder in the configuration")
    reasons: list[str] = []
    taken = set(inspect.signature(model.forward).parameters)
    for pixels in _pixels(model):
        if not set(pixels) <= taken:
            continue
        counts = [getattr(config, "num_query_tokens", None) or 1]
        for count in counts:
            inputs = {name: value for name, value in (_placed(token, count) | pixels).items() if name in taken}
            try:
                with torch.no_grad():
                    model(**inputs)
                return inputs
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])
                if len(counts) == 1:
                    counts += _asked(str(error), model.get_input_embeddings().weight.shape[-1])
    raise NotBuilt(" | ".join(dict.fromkeys(reasons)))


def _placed(token: int, count: int) -> Inputs:
    before, after = ids(3), ids(4, seed=1)
    image = torch.full((1, count), token)
    is_image = torch.cat([torch.zeros_like(before), torch.ones_like(image), torch.zeros_like(after)], dim=1)
    placed = torch.cat([before, image, after], dim=1)
    types = {"mm_token_type_ids": is_image, "token_type_ids": is_image}
    return {"input_ids": placed, **types, "qformer_input_ids": ids(5, seed=2)}


def _asked(message: str, width: int) -> list[int]:
    """How many placeholders the error may want: 'tokens: 1, features: 16', in tokens or in numbers."""
    match = re.search(r"features[^0-9]{0,24}(\d+)", message)
    return sorted({int(match[1]), int(match[1]) // width} - {0, 1}) if match else []


def _pixels(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    vision = getattr(model.config, "vision_config", None) or model.config
    size = getattr(vision, "image_size", 32) or 32
    size = size if isinstance(size, int) else size[0]
    patch = getattr(vision, "patch_size", 8) or 8
    patch = patch if isinstance(patch, int) else patch[0]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = getattr(vision, "temporal_patch_size", None) or 1
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    merge = getattr(vision, "spatial_merge_size", None) or 2
    side = 2 * merge
    grid = torch.tensor([[1, side, side]])
    flat = noise(side * side, channels * frames * patch * patch)
    square = noise(1, channels, size, size)
    sizes = torch.tensor([[size, size]])
    yield {"pixel_values": square}
    yield {"pixel_values": flat, "image_grid_thw": grid}
    yield {"pixel_values": flat, "image_grid_hws": grid[:, 1:]}
    yield {"pixel_values": flat.view(-1, channels, patch, patch) if frames == 1 else flat, "grid_thws": grid}
    yield {"pixel_values": square, "image_sizes": sizes}
    yield {"pixel_values": torch.cat([square, square]), "image_sizes": sizes}
    yield {"pixel_values": square, "high_res_pixel_values": square}
    yield {"pixel_values": square[None], "image_grid_thw": grid}
    yield {"pixel_values": square[None], "image_sizes": sizes}
    yield {"pixel_values": square[None]}
    yield {"pixel_values": square[None], "pixel_attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool)}
    yield {"pixel_values": torch.cat([square, square])[None], "image_sizes": sizes}
    yield {"pixel_values": torch.cat([square] * 5)[None], "image_sizes": sizes}
    yield {
        "pixel_values": flat[None],
        "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.long),
        "spatial_shapes": grid[:, 1:],
    }
    yield {
        "pixel_values": flat[None],
        "image_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side))[None],
    }
