"""`attach`: give a transformers model a bias; the handle shows it, switches it, and takes it away without a trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from typing import Final, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.bias.attention import BACKENDS
from attnflow.bias.config import BiasConfig
from attnflow.bias.content import GuidanceConfig
from attnflow.bias.hf.forward import biased
from attnflow.bias.hf.layers import CHILD, Hooks, Layer, layers_of
from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.models.addons import check_unwrapped
from attnflow.models.interception import Interception, base_implementation, check_implementation, intercept
from attnflow.models.loaded import Loaded, split
from attnflow.models.offload import device_of
from attnflow.models.probe import OTHER_SEQUENCE
from attnflow.models.sites import models_around

Train = Literal["guidance", "all"]

_ATTRIBUTE: Final = "_attnflow_bias"  # of the model: the handle, so that copies and pickles of the model have theirs
_log: Final = logging.getLogger("attnflow.bias")


class BiasHandle(Handle):
    """The bias of a model: printed, it says what was added; `enabled` switches it; `remove()` takes it away.

    Attributes:
        model: the model that carries it, without what may have been wrapped around it.
        configs: of the summands.
        layers: path of each attention module with a bias -> its parameters.
        base: all attention layers of the model, with a bias or without.
    """

    def __init__(
        self, model: nn.Module, configs: tuple[BiasConfig, ...], base: Sequence[Layer], interception: Interception
    ) -> None:
        super().__init__(model)
        self.configs, self.base = configs, base
        self.layers: dict[str, int] = {}
        self._interception = interception
        self._frozen: list[nn.Parameter] = []

    @property
    def enabled(self) -> bool:
        """Whether attention uses the bias; without it the model is exactly the base model, at its cost.

        A key-value cache filled with the bias cannot be continued without it, nor the other way round.
        """
        return self.active and all(bias.enabled for _, bias in layer_biases(self.model))

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not self.active:
            raise RuntimeError("this bias was removed; attach it again")
        for _, bias in layer_biases(self.model):
            bias.enabled = value

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the bias has added: what guidance-only training optimises."""
        return [parameter for _, bias in layer_biases(self.model) for parameter in bias.parameters()]

    @property
    def num_parameters(self) -> int:
        """How many numbers they hold."""
        return sum(self.layers.values())

    @property
    def num_trained(self) -> int:
        """Parameters of the whole model that are trained now."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def _restore(self) -> None:
        self._interception.remove(keep_changes=True)
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        for path, bias in list(layer_biases(self.model)):
            bias.hooks.remove()
            delattr(self.model.get_submodule(path.rpartition(".")[0]), CHILD)
        delattr(self.model, _ATTRIBUTE)

    def _summary(self) -> str:
        base = sum(parameter.numel() for parameter in self.model.parameters())
        base -= sum(parameter.numel() for parameter in self.parameters())
        share = 100 * self.num_parameters / base if base else float("nan")
        return (
            f"bias on {len(self.layers)} of {len(self.base)} attention layers: {self.num_parameters:,} parameters "
            f"({share:.2f} % of the base model's {base:,}); {self.num_trained:,} are trained"
        )


def attach(
    model: nn.Module | Loaded,
    config: BiasConfig | Sequence[BiasConfig] = GuidanceConfig(),  # noqa: B008 - frozen
    *,
    train: Train = "all",
    backend: str = "auto",
) -> BiasHandle:
    """Give a transformers model a learned bias on its attention scores; it stays the object that it was.

    With a config that begins at zero (the default of every kind but ALiBi) the model's outputs are unchanged, bit for
    bit (with attention dropout at work, up to which weights are dropped). Everything that works on a `PreTrainedModel`
    keeps working: `Trainer`, `generate` with its caches, PEFT, checkpoints (which then hold the bias as well).

    Args:
        model: a transformers model, one stack of it (`model.get_decoder()`), or what `af.load_model` returned.
        config: what to add: the config of a kind, such as `GuidanceConfig()`, or several, whose sum is added. A
            placement such as "every_other" leaves out layers that attend to the keys of an earlier one (Gemma 3n and
            4); the handle names those that have the bias.
        train: "all" leaves what is trained as it is; "guidance" freezes everything but the bias until it is removed.
        backend: what computes attention in the layers with a bias; see `attention`.

    Returns:
        The handle: prints what was added, has `enabled`, and `remove()`.

    Raises:
        ValueError: a bias is attached already, layers out of range, a model on several devices within one layer, or
            one that is in DistributedDataParallel or sharded already, which would train each process's bias by itself.
        UnsupportedArchitecture: attention that cannot be reached, with what is missing. The model is as it was.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> with attach(model, af.bias.GuidanceConfig(hidden_dim=8)) as handle:
    ...     handle.num_parameters
    289
    """
    model, _ = split(model)
    return attach_to(model, None, (config,) if isinstance(config, BiasConfig) else tuple(config), train, backend)


def attach_to(
    model: nn.Module, layers: Sequence[Layer] | None, configs: Sequence[BiasConfig], train: Train, backend: str
) -> BiasHandle:
    """`attach` for one who has found the layers of the model already; None looks for them."""
    wrong = [one for one in configs if not isinstance(cast(object, one), BiasConfig)]
    if wrong or not configs:
        got = ", ".join(type(one).__name__ for one in wrong) or "none"
        raise TypeError(f"expected the config of a kind, such as af.bias.GuidanceConfig(), or several, got {got}")
    if train not in ("guidance", "all"):
        raise ValueError(f"train must be 'guidance' or 'all', got {train!r}")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if next(layer_biases(model), None) is not None:
        raise ValueError(f"{type(model).__name__} has a bias attached already; remove it by its handle first")
    check_unwrapped(model, "bias")
    layers = layers_of(model) if layers is None else layers
    children = _build(layers, configs, backend)
    around = models_around([layer.site for layer, _ in children])
    modules = [layer.site.module for layer, _ in children]
    for owner in (*around, *(module for module in modules if hasattr(module, "config"))):
        name = base_implementation(cast(PreTrainedConfig, owner.config))
        check_implementation(around[0], name, "the model's attention implementation", "bias")
    interception = intercept(around, dict.fromkeys(modules, biased), role="bias")
    handle = BiasHandle(around[0], tuple(configs), layers, interception)
    if train == "guidance":
        handle._frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in handle._frozen:
            parameter.requires_grad_(False)
    for layer, child in children:
        layer.site.module.add_module(CHILD, child)
        child.hooks.install(layer.site.module)
        handle.layers[layer.site.name] = sum(parameter.numel() for parameter in child.parameters())
    setattr(around[0], _ATTRIBUTE, handle)
    _log.info("%s", handle)
    return handle


def handle_of(model: nn.Module) -> BiasHandle:
    """The handle of the bias that a model carries: wrapped (PEFT, DDP), copied or unpickled, too.

    Raises:
        ValueError: no bias is attached, or one to each half of the model.
    """
    handles: list[BiasHandle] = [vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)]
    if not handles and next(layer_biases(model), None) is not None:
        raise ValueError(f"{type(model).__name__} is a part of the model that the bias was attached to; pass that")
    if not handles:
        raise ValueError(f"{type(model).__name__} has no bias attached; see af.bias.attach")
    if len(handles) > 1:
        raise ValueError(f"{type(model).__name__} has a bias on each half; pass the half that you mean")
    return handles[0]


def placed(layers: Sequence[Layer], configs: Sequence[BiasConfig]) -> dict[int, list[BiasConfig]]:
    """The configs of each layer that gets some, by its index, in the order in which their terms are summed."""
    by_layer: dict[int, list[BiasConfig]] = {}
    for config in configs:
        for index in config.layer_indices(len(layers)):
            if not (isinstance(config.layers, str) and _shares_keys(layers[index])):
                by_layer.setdefault(index, []).append(config)
    return dict(sorted(by_layer.items()))


def _build(layers: Sequence[Layer], configs: Sequence[BiasConfig], backend: str) -> list[tuple[Layer, LayerBias]]:
    """Everything that attaching adds, without touching the model."""
    by_layer = placed(layers, configs)
    if not by_layer:
        raise UnsupportedArchitecture("every chosen layer attends to the keys of an earlier one; choose layers=[...]")
    children: list[tuple[Layer, LayerBias]] = []
    for index, chosen in by_layer.items():
        layer = layers[index]
        module, parameters = layer.site.module, list(layer.site.module.parameters())
        remove_rope = any(config.rope == "remove" for config in chosen)
        if _shares_keys(layer):
            raise UnsupportedArchitecture(
                f"{layer.site.name} attends to the keys of an earlier layer, of which its bias would see nothing; "
                "leave it out of layers=[...]"
            )
        if layer.key is None and any(config.reads in ("unrotated", "per_head") for config in chosen):
            raise UnsupportedArchitecture(
                f"{layer.site.name}: its queries and keys before rotation cannot be read: {layer.missing}"
                # no bias can tell the keys of two sequences apart
                + ("" if OTHER_SEQUENCE in layer.missing else ". reference='rotated' or 'hidden' does without them")
            )
        if remove_rope and "position_embeddings" not in signature(type(module).forward).parameters:
            raise UnsupportedArchitecture(f"{layer.site.name} takes no rotary embedding from outside; use rope='keep'")
        device = device_of(module)
        devices = {str(device if parameter.is_meta else parameter.device) for parameter in parameters}
        if len(devices) > 1:
            raise ValueError(
                f"{layer.site.name} lies on several devices ({', '.join(sorted(devices))}); move it to one"
            )
        # Of quantised weights the config names the type that they compute in.
        dtypes = [parameter.dtype for parameter in parameters if parameter.is_floating_point()]
        dtype = dtypes[0] if dtypes else getattr(layer.site.owner, "dtype", torch.get_default_dtype())
        with torch.device(device):
            kinds = [config.module(layer.shape) for config in chosen]
        child = LayerBias(kinds, layer.shape, [one.reads for one in chosen if one.reads is not None], backend)
        child.to(device, dtype).train(module.training)
        sources = {"query": layer.query, "key": layer.key} if "unrotated" in child.references else {}
        sources = {side: source for side, source in sources.items() if source is not None}
        child.hooks = Hooks(layer.depth, sources, "hidden" in child.references, remove_rope)
        children.append((layer, child))
    return children


def _shares_keys(layer: Layer) -> bool:
    """Whether it attends to the keys of an earlier layer, of which its bias would see nothing."""
    return bool(getattr(layer.site.module, "is_kv_shared_layer", False))
