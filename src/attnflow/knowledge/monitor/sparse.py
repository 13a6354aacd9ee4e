"""`sparsity`: thresholds that leave a wanted share of entries active, and a term for the loss that keeps them there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnflow._core.checks import number
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow.knowledge.attention import CONSTANT, GeneralizedCrossAttention, sparsemax
from attnflow.knowledge.layered import EntryScores, readers
from attnflow.knowledge.memory_layer.reader import KnowledgeReader
from attnflow.models.evaluation import evaluating

_TEMPERATURE: Final = 0.1  # of the soft count, in standard deviations of a layer's scores
_BLOCK: Final = 1 << 22  # scores that are held at once when thresholds are set


def sparsity(model: nn.Module, share: float = 0.05, *, temperature: float = _TEMPERATURE) -> Sparsity:
    """Watch which share of their entries the layers of a model have active, and push it down to a wanted one.

    An entry is active for a token where its score (of gated layers, its gate score) is positive; Gaussian scores with
    threshold zero leave half of the entries active. The term for the loss is the sum over layers of
    max(0, p_l - share) with p_l = mean of sigmoid(score / (temperature * s_l)), s_l the standard deviation of the
    layer's scores, held still: it does not depend on the scale of scores, so the gradient moves thresholds and turns
    keys and queries rather than shrinking them.

    Args:
        model: a modular one, or converted by `from_ffn` (without experts); it computes what it did before.
        share: wanted, of a layer's entries for a token, in (0, 1).
        temperature: width of the soft count.

    Returns:
        A handle: `penalty()` of the latest forward pass, `shares()`, and `set_thresholds(inputs)`, which starts the
        thresholds of a modular model at the wanted share.

    Raises:
        ValueError: a model without entries, whose entries come from a store, of experts, or whose weights (sparsemax)
            do not come from the signs of scores; a share or a temperature out of range.

    Cost: of a modular model the scores once more, for tokens x heads x entries of memory a layer; of a converted one
        a comparison and a sigmoid of each score.

    >>> from attnflow.knowledge import ModularConfig, ModularForCausalLM
    >>> model = ModularForCausalLM(ModularConfig(
    ...     vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_entries=100))
    >>> ids = torch.arange(20).view(1, 20)
    >>> with sparsity(model, 0.1) as handle:
    ...     handle.set_thresholds(input_ids=ids)
    ...     _ = model(ids)
    ...     [round(share, 3) for share in handle.shares()]
    [0.1, 0.1]
    """
    if not 0 < number("share", share) < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    if not number("temperature", temperature) > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return Sparsity(model, float(share), float(temperature))


class Sparsity(Handle):
    """What `sparsity` put on a model: hooks that see scores, and change nothing.

    Attributes:
        share: the wanted one.
    """

    def __init__(self, model: nn.Module, share: float, temperature: float) -> None:
        super().__init__(model)
        self.share, self._temperature = share, temperature
        self._soft: dict[int, Tensor] = {}  # of the latest forward pass, by layer
        self._shares: dict[int, Tensor] = {}
        layers = readers(model)
        self._modular = [one for one in layers if isinstance(one, KnowledgeReader)]
        scores = [one for one in model.modules() if isinstance(one, EntryScores)]
        if len(self._modular) < len(layers) and {one.layer for one in scores} != {one.layer for one in layers}:
            raise ValueError(
                f"{type(model).__name__} has experts, or readers of a store beside its layers: a share is defined for "
                "modular models and for converted feed-forward layers"
            )
        if any(one.attention.activation is sparsemax for one in self._modular):
            raise ValueError("sparsemax sets its own threshold for each token: there is no share to ask for")
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin)]
        self._hooks += [cast(nn.Module, one).register_forward_hook(self._see_reader) for one in self._modular]
        gates = [one for one in scores if one.parts[0] == one.values.layout.parts[0]]
        self._hooks += [one.register_forward_hook(self._see_scores) for one in gates]

    def penalty(self) -> Float[Tensor, ""]:
        """The sum over layers of what their soft share exceeds the wanted one by, in the latest forward pass.

        To be added to the loss of that pass, times a factor of your choice. Padding counts like other tokens.

        Raises:
            ValueError: no forward pass.
        """
        terms = [(soft - self.share).clamp(min=0) for _, soft in sorted(self._latest(self._soft).items())]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def shares(self) -> tuple[float, ...]:
        """The share of pairs of token and entry (and head) that were active, layer by layer, in the latest pass."""
        return tuple(float(share) for _, share in sorted(self._latest(self._shares).items()))

    def set_thresholds(self, **inputs: Any) -> None:
        """Start the thresholds of a modular model so that the wanted share of its entries is active on these inputs.

        Layer by layer in one forward pass, since what a layer writes depends on its thresholds. Thresholds that are
        one network or one constant for all entries are shifted for each head so that the share holds over tokens and
        entries together; those of each entry alone ("per_entry") so that each is active for that share of the tokens,
        and none is dead.

        Args:
            **inputs: of a forward pass, such as `input_ids`; the more tokens, the closer on others.

        Raises:
            ValueError: thresholds that are coordinates of the entries, which all layers share; a converted model; too
                few tokens for the share; scores that are not finite. The thresholds are then as they were.

        Cost: one forward pass, and the scores once more, in blocks; memory of the share of them that is active.
        """
        if not self._modular:
            raise ValueError("the thresholds of a converted model were trained: there is nothing to start")
        before = [[(p, p.detach().clone()) for p in _parameters(one.attention)] for one in self._modular]

        def start(reader: KnowledgeReader, _: nn.Module, args: tuple[Any, ...]) -> None:
            start_thresholds(reader.attention, args[0], _tensor(args[1]), self.share)

        hooks = [one.register_forward_pre_hook(partial(start, one)) for one in self._modular]
        try:
            with evaluating(self.model), torch.no_grad():
                cast(Callable[..., object], self.model)(**inputs)
        except BaseException:
            with torch.no_grad():
                for parameter, value in (pair for pairs in before for pair in pairs):
                    parameter.copy_(value)
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def _latest(self, seen: dict[int, Tensor]) -> dict[int, Tensor]:
        if not seen:
            raise ValueError("no forward pass of the model has run since: there is nothing to count")
        return seen

    def _begin(self, *_: object) -> None:
        self._soft, self._shares = {}, {}

    def _see_reader(self, module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        reader = cast(KnowledgeReader, module)
        attention, entries = reader.attention, _tensor(args[1])
        self._see(reader.layer, attention.score(args[0], entries, attention.thresholds(entries))[0])

    def _see_scores(self, module: nn.Module, _: object, scores: Tensor) -> None:
        part = cast(EntryScores, module)
        self._see(part.layer, scores if len(part.parts) == 1 else scores.chunk(len(part.parts), dim=-1)[0])

    def _see(self, layer: int, scores: Tensor) -> None:
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        width = self._temperature * scores.detach().std().clamp(min=torch.finfo(scores.dtype).tiny)
        self._soft[layer] = (scores / width).sigmoid().mean()
        self._shares[layer] = (scores.detach() > 0).to(scores.dtype).mean()

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _summary(self) -> str:
        layers = len(self._modular) or len(readers(self.model))
        return f"{plural(layers, 'layer')} of {type(self.model).__name__}, {100 * self.share:g} % of the entries wanted"


@torch.no_grad()
def start_thresholds(
    attention: GeneralizedCrossAttention,
    hidden: Float[Tensor, "*tokens model_dim"],
    entries: Float[Tensor, "entries entry_dim"],
    share: float,
) -> None:
    """Shift a layer's (gate) thresholds so that this share of the scores of these tokens is positive.

    The shift is minus the middle between the last score that becomes active and the next one.
    """
    if attention.threshold == "coordinate":
        raise ValueError("these thresholds are coordinates of the entries, which all layers share: none is a layer's")
    thresholds = attention.thresholds(entries)
    tokens, each = hidden.shape[:-1].numel(), attention.threshold == "per_entry"
    pool = tokens if each else tokens * len(entries)
    count = round(share * pool)
    if not 0 < count < pool:
        raise ValueError(
            f"{tokens} tokens are too few for a share of {share:g}: {int(1 / min(share, 1 - share)) + 1} or more"
        )
    flat, size = hidden.flatten(0, -2), max(1, _BLOCK // max(tokens * attention.num_heads, 1))
    cuts, best = list[Tensor](), list[Tensor]()
    for block, limits in zip(entries.split(size), thresholds.split(size, dim=-1), strict=True):
        scores = (attention.project_query(flat)[0] @ block.T + limits[0]).movedim(0, -1)  # [heads, entries, tokens]
        if not bool(torch.isfinite(scores).all()):
            raise ValueError("a score is NaN or infinite: check the weights of the model")
        if each:
            cuts.append(_cut(scores, count))
        else:
            best = [torch.cat([*best, scores.flatten(1)], dim=1)]
            best = [best[0].topk(min(count + 1, best[0].shape[1]), dim=1).values]
    shift = -(torch.cat(cuts, dim=-1) if each else _cut(best[0], count))  # [heads, entries] or [heads]
    if each:
        attention.entry_thresholds[0] += shift
    elif attention.threshold == CONSTANT:
        attention.constant[0] += shift
    else:
        cast(nn.Linear, attention.threshold_network[2]).bias[: len(shift)] += shift


def _cut(scores: Tensor, count: int) -> Tensor:
    """The middle between the count-th largest score and the next one, along the last axis."""
    best = scores.topk(count + 1, dim=-1).values
    return (best[..., -2] + best[..., -1]) / 2


def _parameters(attention: GeneralizedCrossAttention) -> list[nn.Parameter]:
    """Where a layer's thresholds are."""
    if attention.threshold == "mlp":
        return [cast(nn.Linear, attention.threshold_network[2]).bias]
    if attention.threshold == CONSTANT:
        return [attention.constant]
    return [attention.entry_thresholds] if attention.threshold == "per_entry" else []


def _tensor(entries: object) -> Tensor:
    if not isinstance(entries, Tensor):
        raise ValueError("the model reads a store, whose thresholds are stored with it: remove the store first")
    return entries
