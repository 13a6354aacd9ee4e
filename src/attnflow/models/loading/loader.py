"""`load_model`: a model from a folder, a GGUF file, a package or the hub, without running its code."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import transformers
from huggingface_hub.constants import HF_HUB_OFFLINE
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedConfig as Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from attnflow._core.checks import boolean, preview
from attnflow._core.errors import AttnflowError, MissingExtra, UnsupportedArchitecture
from attnflow._core.files import write_folder
from attnflow._core.version import warn_of_untried
from attnflow.models.loading.names import REGISTRATIONS, resolve
from attnflow.models.placement import present
from attnflow.models.subject import Loaded
from attnflow.models.weights.checkpoints import open_weights
from attnflow.models.weights.checkpoints.files import (
    MERGE,
    BadCheckpoint,
    Folder,
    check_sizes,
    first_line,
    not_reached,
    refuse_adapter,
    shards,
)

_LOG: Final = logging.getLogger("attnflow.models")
_Entry = TypeVar("_Entry", PreTrainedModel, PreTrainedTokenizerBase)
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "float64")
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = re.compile(r"(^|\.)(base_model\.model|base_layer|lora_\w+)\.")
warn_of_untried()


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    tokenizer: bool = True,
    device: torch.device | str = "cpu",
    partial: bool = False,
) -> Loaded:
    """Load a model in evaluation mode, ready for training, saving and `masks.attach`.

    `name_or_path` may be, in this order:

    - a short name of `af.models.MODELS` ("smollm2-135m", "minilm"), which ordinary Python packages ship;
    - a folder that `save_pretrained` wrote;
    - a GGUF file, or a folder with one, whose weights are unpacked and kept in the cache (`cache_folder`);
    - a model of the hub: "owner/name", or "hub:gpt2" for an id of one word. Only this uses the network.

    It runs no code from the model's repository and opens no pickle: weights come only from safetensors or GGUF. Every
    tensor of the model must come from the checkpoint, since transformers draws missing ones at random.

    Args:
        name_or_path: the model to load.
        dtype: a floating-point dtype, its name, or "auto": that of the checkpoint (float32 for GGUF).
        tokenizer: whether to load the tokenizer.
        device: where to put the model.
        partial: load a checkpoint that lacks tensors of the model, or holds tensors that the model has no place for. A
            warning then names them.

    Returns:
        `(model, tokenizer)`. The model's class is the one that the checkpoint names, such as `LlamaForCausalLM`.

    Raises:
        MissingPackage: the package of a short name is not installed; the message has the command.
        MissingExtra: the packages that read a GGUF file are not installed.
        FileNotFoundError: the file, folder or model does not exist, or the hub cannot be reached.
        ValueError: the file or folder is not a model or has no safetensors weights; no such dtype or device.
        BadCheckpoint: a file of the model is damaged or hostile, tensors are missing, or the folder holds an adapter.
            The message names the file, the tensors and the place.
        UnsupportedArchitecture: the model needs code from its repository.

    Cost: the time and memory of the weights. A GGUF file is unpacked once, in some 20 s and a little over twice the
    memory for 135 million parameters; from the cache it takes about 2 s.
    """
    kind, tokenizer, partial = _dtype(dtype), boolean("tokenizer", tokenizer), boolean("partial", partial)
    place, (folder, gguf) = present(device), _locate(os.fspath(name_or_path))
    gaps: list[str] = []
    with quiet():
        if gguf is None:
            model = _from_safetensors(folder, kind, partial, gaps)
            tokens = _tokenizer(folder) if tokenizer else None
        else:
            single = torch.float32 if isinstance(kind, str) else kind
            model, tokens = _load_gguf(Path(folder) / gguf, single, tokenizer, partial, gaps)
    for gap in gaps:
        warnings.warn(gap, stacklevel=2)
    nn.Module.to(model.eval(), place)  # the method of transformers is typed for its own decorator alone
    return Loaded(model, tokens)


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, as `load_model` does, or that of a folder without a model."""
    place = resolve(os.fspath(name_or_path))
    with quiet():
        if isinstance(place, str) or (place.is_dir() and not any(place.glob("*.gguf"))):
            return _tokenizer(str(place))
        folder, gguf = _locate(str(place))
        return _tokenizer(folder) if gguf is None else _gguf_tokenizer(file := Path(folder) / gguf, _key(file))


def _dtype(dtype: object) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be a torch dtype or one of {', '.join(_DTYPES)}, got {dtype!r}")
    return "auto" if dtype == "auto" else cast(torch.dtype, getattr(torch, cast(str, dtype)))


def _locate(name: str) -> tuple[str, str | None]:
    """Return (folder or hub id, name of the GGUF file in it or None)."""
    place = resolve(name)
    if isinstance(place, str):
        return place, None
    if place.is_dir():
        refuse_adapter(place)
        if (place / "config.json").is_file():
            return str(place), None
        files = sorted(place.glob("*.gguf"))
        if len(files) != 1:
            what = f"{len(files)} GGUF files, pass one of them" if files else "no config.json and no GGUF file"
            raise ValueError(f"{place} is not a model folder: it holds {what}")
        place = files[0]
    with place.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{place} is not a GGUF file: for other formats pass the folder that holds config.json")
    return str(place.parent), place.name


def _config(folder: str) -> Config:
    try:
        kind = Config.get_config_dict(folder)[0].get("model_type")
        if kind in REGISTRATIONS:
            REGISTRATIONS[kind]()
        config = cast(Config, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except OSError as error:
        if Path(folder).is_dir():
            raise BadCheckpoint(f"{folder} has no config that can be read: {first_line(error)}") from error
        raise not_reached(folder, error, HF_HUB_OFFLINE) from error
    except ImportError:
        raise
    except Exception as error:  # every config checks its values in its own way
        if "trust_remote_code" in str(error):
            raise UnsupportedArchitecture(
                f"{folder} brings its own code, which is not run here, and transformers {transformers.__version__} "
                "does not know its model_type: load it with trust_remote_code=True where you trust it, and pass the "
                "model itself"
            ) from error
        raise BadCheckpoint(
            f"{folder} has no config of a model that transformers knows: {first_line(error)}"
        ) from error
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        kernel = str(getattr(part, "_attn_implementation", None) or "")
        if "/" in kernel:
            raise UnsupportedArchitecture(
                f"{folder} asks for the attention kernel {kernel!r} of the hub, which is code that is not fetched or "
                "run here; take attn_implementation out of its config.json"
            )
    check_sizes(folder, config.to_dict(), sum(map(_tensors_in, Path(folder).glob("*.safetensors"))))
    return config


def _from_safetensors(folder: str, dtype: torch.dtype | str, partial: bool, gaps: list[str]) -> PreTrainedModel:
    config = _config(folder)
    if (Path(folder) / _INDEX).is_file():
        shards(Folder(Path(folder)), _INDEX)
    make = _class_of(config, folder)
    try:
        made: Any = make.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except OSError as error:
        if Path(folder).is_dir():
            raise ValueError(
                f"{folder} holds no safetensors weights, and pickled weights (.bin, .pt) are not opened: convert them "
                "with save_pretrained on a machine that trusts them"
            ) from error
        raise not_reached(folder, error, HF_HUB_OFFLINE) from error
    except Exception as error:  # safetensors raises a class of its own for a damaged file
        if type(error).__name__ == "SafetensorError":
            raise BadCheckpoint(f"the weights in {folder} are damaged: {error}") from error
        if isinstance(error, MemoryError | AttnflowError) or not Path(folder).is_dir():
            raise
        if isinstance(error, ImportError):  # its config names an attention kernel or a package that is not here
            raise UnsupportedArchitecture(f"{folder} cannot be built here: {first_line(error)}") from error
        why = first_line(error)
        if "ignore_mismatched_sizes" in why:  # which no caller of this function can set
            why = "tensors of its weights have other shapes than its config asks for"
        elif "CONVERSION" in why:  # a report that is silenced here
            why = "tensors that are stored in parts, such as the experts of a layer, lack some of these"
        raise BadCheckpoint(f"{folder} holds no model that can be built: {why}") from error
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Iterable[str]]]", made)
    gaps += _missing_tensors(model, report, folder, partial)
    return model


def _missing_tensors(
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
    if "knowledge.entries" in extra:
        raise BadCheckpoint(
            f"{place} holds a model that knowledge.from_ffn converted, with entries in place of feed-forward weights: "
            f"load its state dict into from_ffn(model), where model is the {kind} that it was made of, and save that"
        )
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


def _tensors_in(file: Path) -> int:
    """Count the tensors of a safetensors file; 0 if it is damaged, which is reported when it is read."""
    try:
        with safe_open(file, "pt") as opened:
            return len(opened.keys())
    except (SafetensorError, OSError):
        return 0


def _class_of(config: Config, folder: str) -> Any:
    names = cast(object, getattr(config, "architectures", None) or [""])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[object], names)):
        raise BadCheckpoint(f"{folder}: architectures of its config must be a list of names, got {names!r:.80}")
    name = cast(list[str], names)[0]
    made = getattr(transformers, name, None) if name else None
    if isinstance(made, type) and issubclass(made, PreTrainedModel):
        return made
    if name and getattr(config, "auto_map", None):
        raise UnsupportedArchitecture(
            f"{folder} is a {name}, a class of its own code, which is not run here: load it with transformers and "
            "trust_remote_code=True where you trust it, and pass the model itself"
        )
    # For classes that are not transformers' own.
    return AutoModelForCausalLM if name.endswith("ForCausalLM") else AutoModel


def _tokenizer(folder: str, **gguf_file: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer: object = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf_file)
        return cast(PreTrainedTokenizerBase, tokenizer)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # damaged files fail anywhere, with any class of error
        place = "/".join([folder, *gguf_file.values()])
        raise BadCheckpoint(f"{place} has no tokenizer: {first_line(error)}; pass tokenizer=False") from error


def _load_gguf(
    file: Path, dtype: torch.dtype, tokenizer: bool, partial: bool, gaps: list[str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a GGUF file's model and, on request, its tokenizer; the cache has it in float32."""
    key = _key(file)
    model = _cached(
        f"{key}-model", AutoModelForCausalLM, lambda: _unpack(file, partial, gaps), gaps, dtype=torch.float32
    )
    model.config._name_or_path = model.name_or_path = str(file.parent)
    model.config.dtype = dtype
    nn.Module.to(model, dtype)
    return model, _gguf_tokenizer(file, key) if tokenizer else None


def _gguf_tokenizer(file: Path, key: str) -> PreTrainedTokenizerBase:
    folder = str(file.parent)
    words = _cached(f"{key}-tokenizer", AutoTokenizer, lambda: _tokenizer(folder, gguf_file=file.name), ())
    words.name_or_path = folder
    return words


def _key(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:32]
    return f"gguf-{digest}-transformers-{transformers.__version__}"


def _cached(key: str, kind: Any, unpack: Callable[[], _Entry], gaps: Sequence[str], **options: object) -> _Entry:
    """Load an entry of the cache by transformers' class `kind`; unpack and store it if missing or damaged."""
    entry = cache_folder() / key
    if entry.is_dir():
        try:
            return kind.from_pretrained(entry, **options)
        except Exception as error:  # whatever a damaged file makes transformers raise
            _LOG.warning("%s cannot be loaded and is made again: %s", entry, first_line(error))
    value = unpack()
    if gaps:  # the next caller may not know that it is partial
        return value
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with write_folder(entry) as part:
            value.save_pretrained(part)
    except OSError as error:
        _LOG.warning("%s cannot be kept for the next time: %s", key, error)
    return value


def _unpack(file: Path, partial: bool, gaps: list[str]) -> PreTrainedModel:
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise MissingExtra(module, "hf", "reading a GGUF file")
    weights = open_weights(file)  # reads the header alone, which transformers trusts
    check_sizes(str(file), weights.config, len(weights.shapes))
    try:
        with redirect_stderr(io.StringIO()):  # the one bar of transformers that asks nobody whether it may show
            made: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a truncated or unknown file fails anywhere in the parser
        raise BadCheckpoint(f"transformers cannot read a model from {file}: {first_line(error)}") from error
    model, report = cast("tuple[Any, Mapping[str, Iterable[str]]]", made)
    gaps += _missing_tensors(model, report, str(file), partial)
    model.hf_quantizer.remove_quantization_config(model)  # its weights are unpacked, and can be trained and saved
    return model


def cache_folder() -> Path:
    """Return the cache folder: `$ATTNFLOW_CACHE`, or `attnflow` in `$XDG_CACHE_HOME` (by default `~/.cache`)."""
    if chosen := os.environ.get("ATTNFLOW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnflow"


@contextmanager
def quiet() -> Generator[None]:
    """Silence transformers and the hub, since exceptions report all errors."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
