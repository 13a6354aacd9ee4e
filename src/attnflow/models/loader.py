"""`load_model`: a model from a folder, a GGUF file, a package or the hub, without running code that comes with it."""

from __future__ import annotations

import copy
import logging
import os
import re
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedConfig as Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from attnflow._core.errors import MissingExtra, UnsupportedArchitecture
from attnflow.models.loaded import Loaded
from attnflow.models.packages import MODELS

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "float64")


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    tokenizer: bool = True,
    device: torch.device | str = "cpu",
) -> Loaded:
    """Load a model in evaluation mode, ready for training, saving and `masks.attach`.

    In this order, `name_or_path` is one of the short names in `af.models.MODELS` ("smollm2-135m", "minilm"), which
    ordinary Python packages ship; a folder that `save_pretrained` wrote; a GGUF file (or a folder with one), whose
    weights are unpacked; or a model id on the hub. No code from the model's repository is run and no pickle is
    opened: weights come from safetensors or GGUF alone. Nothing is printed.

    A model read from GGUF by transformers counts as quantised: it refuses to be saved or trained. Its weights are
    therefore copied into a fresh model of the same class; the logits are identical.

    Args:
        name_or_path: which model.
        dtype: a floating-point dtype, its name, or "auto": that of the checkpoint (float32 for GGUF).
        tokenizer: whether to load the tokenizer, too.
        device: where to put the model.

    Returns:
        `(model, tokenizer)`. The class is the one that the checkpoint names, such as `LlamaForCausalLM`.

    Raises:
        MissingPackage: the package of a short name is not installed; the message has the command.
        MissingExtra: a GGUF file, and the packages that read it are not installed.
        FileNotFoundError: no such file, folder or model, or the hub cannot be reached.
        ValueError: something is there, but it is no model, or one without safetensors weights; an unknown dtype.
        UnsupportedArchitecture: the model needs code from its repository.

    Cost: the time and memory of the weights; a GGUF file takes seconds to parse and, for a moment, twice the memory.
    """
    kind = _dtype(dtype)
    folder, gguf = _resolve(os.fspath(name_or_path))
    with _quiet():
        config = _config(folder, gguf)
        model = _from_gguf(folder, gguf, kind) if gguf else _from_safetensors(folder, config, kind)
        tokens = _tokenizer(folder, gguf) if tokenizer else None
    nn.Module.to(model.eval(), device)  # the method of transformers is typed for its own decorator alone
    return Loaded(model, tokens)


def _dtype(dtype: object) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be a torch dtype or one of {', '.join(_DTYPES)}, got {dtype!r}")
    return "auto" if dtype == "auto" else cast(torch.dtype, getattr(torch, cast(str, dtype)))


def _resolve(name: str) -> tuple[str, str | None]:
    """(folder or hub id, name of the GGUF file in it or None)."""
    if name in MODELS:
        return _local(MODELS[name].path())
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if _HUB_ID.fullmatch(name) is None or name.startswith(".") or name.endswith((".gguf", ".safetensors", ".bin")):
        raise FileNotFoundError(f"no file or folder {name!r}{_known()}")
    return name, None


def _local(path: Path) -> tuple[str, str | None]:
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is no GGUF file; for other formats pass the folder that holds config.json")
        return str(path.parent), path.name
    if (path / "config.json").is_file():
        return str(path), None
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        what = f"{len(found)} GGUF files, pass one of them" if found else "no config.json and no GGUF file"
        raise ValueError(f"{path} is no model folder: it holds {what}")
    return _local(found[0])


def _config(folder: str, gguf: str | None) -> Config:
    if gguf:
        for module in ("gguf", "accelerate"):
            if find_spec(module) is None:
                raise MissingExtra(module, "hf", "reading a GGUF file")
        return Config()  # transformers takes it from the file, together with the weights
    import_module("attnflow.knowledge.hf.modular.model")  # makes modular models known to the Auto classes
    try:
        return cast(Config, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except OSError as error:
        raise _not_found(folder, error) from error
    except (ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedArchitecture(
                f"{folder} brings its own code, which is not run here; models that transformers "
                f"{transformers.__version__} knows can be loaded"
            ) from error
        raise ValueError(f"{folder} has no config of a model that transformers knows: {_first_line(error)}") from error


def _from_safetensors(folder: str, config: Config, dtype: torch.dtype | str) -> PreTrainedModel:
    name = (getattr(config, "architectures", None) or [""])[0]
    other = (
        AutoModelForCausalLM if name.endswith("ForCausalLM") else AutoModel
    )  # classes that are not transformers' own
    maker = cast(Any, getattr(transformers, name, other) if name else AutoModel)
    try:
        return cast(
            PreTrainedModel,
            maker.from_pretrained(folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False),
        )
    except OSError as error:
        if Path(folder).is_dir():
            raise ValueError(
                f"{folder} holds no safetensors weights; pickled weights (.bin, .pt) are not opened, convert them "
                "with save_pretrained on a machine that trusts them"
            ) from error
        raise _not_found(folder, error) from error
    except Exception as error:  # safetensors raises a class of its own for a damaged file
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"the weights in {folder} are damaged: {error}") from error


def _from_gguf(folder: str, gguf: str, dtype: torch.dtype | str) -> PreTrainedModel:
    kind = torch.float32 if isinstance(dtype, str) else dtype
    try:
        packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a truncated or unknown file fails anywhere in the parser
        raise ValueError(f"{Path(folder) / gguf} is no model that transformers reads: {_first_line(error)}") from error
    config = copy.deepcopy(packed.config)
    config.__dict__.pop("quantization_config", None)
    config.dtype = kind
    with torch.random.fork_rng(devices=[]):  # its initial values are drawn, then overwritten
        model = cast(PreTrainedModel, type(packed)(config))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    nn.Module.to(model, kind)
    return model


def _tokenizer(folder: str, gguf: str | None) -> PreTrainedTokenizerBase:
    source = {"gguf_file": gguf} if gguf else {}
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no tokenizer: {_first_line(error)}; pass tokenizer=False") from error


def _not_found(name: str, error: Exception) -> FileNotFoundError:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    why = "HF_HUB_OFFLINE is set and it is not in the local cache" if offline else _first_line(error)
    return FileNotFoundError(f"{name!r} is no local model, and it cannot be had from the hub ({why}){_known()}")


def _known() -> str:
    return f"; short names are {', '.join(MODELS)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Transformers without log lines and progress bars; what fails is raised, and what is raised says it all."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _without_gguf_bar():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _without_gguf_bar() -> Generator[None, None, None]:
    """The one bar of transformers that asks nobody whether it may show."""
    try:
        reader = cast(Any, import_module("transformers.modeling_gguf_pytorch_utils"))
    except ModuleNotFoundError:
        yield
        return
    bar = getattr(reader, "tqdm", None)

    def no_bar(items: Iterable[object], **_: object) -> Iterable[object]:
        return items

    reader.tqdm = no_bar
    try:
        yield
    finally:
        reader.tqdm = bar
