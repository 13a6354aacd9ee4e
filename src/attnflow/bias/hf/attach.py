"""`attach`: gives a transformers model a bias; its handle describes it, switches it on and off, and removes it."""

from __future__ import annotations

import logging
import warnings
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
from attnflow.bias.hf.layers import CHILD, BiasedLayer, Hooks, layers_of
from attnflow.bias.kind import LayerBias, layer_biases
from attnflow.models.anatomy.sites import models_around
from attnflow.models.passes.interception import Interception, base_implementation, check_implementation, intercept
from attnflow.models.subject import Loaded, Subject
from attnflow.models.weights.probe import OTHER_SEQUENCE

Train = Literal["guidance", "all"]

_ATTRIBUTE: Final = "_attnflow_bias"  # of the model: the handle, so that copies and pickles of the model have theirs
_log: Final = logging.getLogger("attnflow.bias")


class BiasHandle(Handle):
    """The handle of a model's bias: it prints what was added; `enabled` switches it, and `remove()` removes it.

    Attributes:
        model: the model with the bias, without wrappers.
        configs: the configs of the added biases.
        layers: the parameters of each attention module with a bias, by the module's path.
        base: all attention layers of the model, with or without a bias.
        loaded: whether `load` attached it; until training starts, it then says nothing of trained parameters.
    """

    def __init__(
        self, model: nn.Module, configs: tuple[BiasConfig, ...], base: Sequence[BiasedLayer], interception: Interception
    ) -> None:
        super().__init__(model)
        self.configs, self.base = configs, base
        self.layers: dict[str, int] = {}
        self.loaded = False
        self._interception = interception
        self._frozen: list[nn.Parameter] = []
        self._looking = model.register_forward_pre_hook(self._look)

    def _look(self, model: nn.Module, args: object) -> None:
        """Warn once if a pass trains the model, and nothing of its bias: PEFT freezes what was attached before it."""
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled() and self.active):
            return
        own = self.parameters()
        if own and not any(p.requires_grad for p in own) and any(p.requires_grad for p in model.parameters()):
            self._looking.remove()
            warnings.warn(
                "this pass trains the model, but every parameter of its bias is frozen, as get_peft_model leaves a "
                "bias that was attached before it: attach it afterwards, or set requires_grad of handle.parameters()",
                stacklevel=2,
            )

    @property
    def enabled(self) -> bool:
        """Whether attention uses the bias; without it the model is exactly the base model, at its cost.

        A key-value cache filled with the bias cannot be continued without it, and vice versa.
        """
        return self.active and all(bias.enabled for _, bias in layer_biases(self.model))

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not self.active:
            raise RuntimeError("this bias was removed: attach it again")
        for _, bias in layer_biases(self.model):
            bias.enabled = value

    @property
    def backend(self) -> dict[str, str]:
        """What computed the last call of each layer with its bias, or ""; for tiles, why fused attention could not.

        "sdpa" is the model's own attention, which a decoded token gives B as its mask.

        A bias of zero that is not trained runs nothing, and a compiled graph does not say.
        """
        return {path.rpartition(".")[0]: bias.ran for path, bias in layer_biases(self.model)}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the bias added, which guidance-only training optimises."""
        return [parameter for _, bias in layer_biases(self.model) for parameter in bias.parameters()]

    @property
    def num_parameters(self) -> int:
        """The number of parameters that the bias added."""
        return sum(self.layers.values())

    @property
    def num_trained(self) -> int:
        """The number of parameters of the whole model that require gradients."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def _restore(self) -> None:
        self._interception.remove(keep_changes=True)
        self._looking.remove()
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
        trained = f"; {self.num_trained:,} parameters are trained"
        return (
            f"bias on {len(self.layers)} of {len(self.base)} attention layers: {self.num_parameters:,} parameters "
            f"({share:.2f} % of the base model's {base:,}){'' if self.loaded and not self.model.training else trained}"
        )


def attach(
    model: nn.Module | Loaded,
    config: BiasConfig | Sequence[BiasConfig] = GuidanceConfig(),  # noqa: B008 - frozen
    *,
    train: Train = "all",
    backend: str = "auto",
) -> BiasHandle:
    """Give a transformers model a learned bias on its attention scores, in place.

    With a config that starts at zero (the default of every kind but ALiBi), outputs stay unchanged bit for bit. Under
    attention dropout, the random choice of dropped weights may differ. Whatever works on a `PreTrainedModel` keeps
    working: `Trainer`, `generate` with its caches, PEFT, and checkpoints (which then contain the bias).

    Args:
        model: a transformers model, one stack of it (`model.get_decoder()`), or what `af.load_model` returned.
        config: the config of a kind, such as `GuidanceConfig()`, or several, whose biases are summed. A placement such
            as "every_other" skips layers that attend to the keys of an earlier layer (Gemma 3n and 4); the handle lists
            the layers with a bias.
        train: "all" does not change which parameters are trained; "guidance" freezes all but the bias's until removal.
        backend: computes attention in the layers with a bias; see `attention`.

    Returns:
        The handle: it prints what was added, and has `enabled` and `remove()`.

    Raises:
        ValueError: a bias is attached already, a layer does not exist or lies on several devices, or the model is
            already sharded or in DistributedDataParallel, which would train a separate bias in each process.
        UnsupportedArchitecture: the attention cannot be reached (it says why). The model stays unchanged.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> with attach(model, af.bias.GuidanceConfig(hidden_dim=8)) as handle:
    ...     handle.num_parameters
    289
    """
    configs = (config,) if isinstance(config, BiasConfig) else tuple(config)
    return attach_to(Subject.of(model), None, configs, train, backend)


def attach_to(
    subject: Subject,
    layers: Sequence[BiasedLayer] | None,
    configs: Sequence[BiasConfig],
    train: Train,
    backend: str,
    loaded: bool = False,
) -> BiasHandle:
    wrong = [one for one in configs if not isinstance(cast(object, one), BiasConfig)]
    if wrong or not configs:
        got = ", ".join(type(one).__name__ for one in wrong) or "none"
        raise TypeError(f"config must be that of a kind, such as af.bias.GuidanceConfig(), or several, got {got}")
    if train not in ("guidance", "all"):
        raise ValueError(f"train must be 'guidance' or 'all', got {train!r}")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of 'auto', {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    model = subject.model
    if next(layer_biases(model), None) is not None:
        raise ValueError(f"{subject.kind} has a bias attached already: remove it with its handle first")
    subject.require_unwrapped("bias")
    layers = layers_of(subject) if layers is None else layers
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
    handle.loaded = loaded
    _log.info("%s", handle)
    return handle


def handle_of(model: nn.Module) -> BiasHandle:
    """Return the handle of a model's bias, also if the model is wrapped (PEFT, DDP), copied or unpickled."""
    handles: list[BiasHandle] = [vars(module)[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in vars(module)]
    if not handles and next(layer_biases(model), None) is not None:
        raise ValueError(f"{type(model).__name__} is a part of the model that the bias was attached to: pass that")
    if not handles:
        raise ValueError(f"{type(model).__name__} has no bias attached: call af.bias.attach first")
    if len(handles) > 1:
        raise ValueError(f"{type(model).__name__} has a bias on each half: pass one half")
    return handles[0]


def placed(layers: Sequence[BiasedLayer], configs: Sequence[BiasConfig]) -> dict[int, list[BiasConfig]]:
    by_layer: dict[int, list[BiasConfig]] = {}
    for config in configs:
        for index in config.layer_indices(len(layers)):
            if not (isinstance(config.layers, str) and _shares_keys(layers[index])):
                by_layer.setdefault(index, []).append(config)
    return dict(sorted(by_layer.items()))


def _build(
    layers: Sequence[BiasedLayer], configs: Sequence[BiasConfig], backend: str
) -> list[tuple[BiasedLayer, LayerBias]]:
    by_layer = placed(layers, configs)
    if not by_layer:
        raise UnsupportedArchitecture(
            "every chosen layer attends to the keys of an earlier one: choose other layers=[...]"
        )
    children: list[tuple[BiasedLayer, LayerBias]] = []
    for index, chosen in by_layer.items():
        layer = layers[index]
        module, parameters = layer.site.module, list(layer.site.module.parameters())
        remove_rope = any(config.rope == "remove" for config in chosen)
        if _shares_keys(layer):
            raise UnsupportedArchitecture(
                f"{layer.site.name} attends to the keys of an earlier layer, which its bias could not read: "
                "leave it out of layers=[...]"
            )
        if layer.key is None and any(config.reads in ("unrotated", "per_head") for config in chosen):
            raise UnsupportedArchitecture(
                f"the queries and keys of {layer.site.name} before rotation cannot be read: {layer.missing}"
                # no bias can distinguish the keys of two sequences
                + ("" if OTHER_SEQUENCE in layer.missing else ". reference='rotated' or 'hidden' does not need them")
            )
        if remove_rope and "position_embeddings" not in signature(type(module).forward).parameters:
            raise UnsupportedArchitecture(f"{layer.site.name} takes no rotary embedding from outside: use rope='keep'")
        device = Subject(module).device
        devices = {str(device if parameter.is_meta else parameter.device) for parameter in parameters}
        if len(devices) > 1:
            raise ValueError(
                f"{layer.site.name} lies on several devices ({', '.join(sorted(devices))}): move it to one"
            )
        # For quantised weights, the config names the dtype of computation.
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


def _shares_keys(layer: BiasedLayer) -> bool:
    return bool(getattr(layer.site.module, "is_kv_shared_layer", False))
