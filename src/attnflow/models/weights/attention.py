"""The attention layers of a model in memory or in a checkpoint: their places, heads, queries and keys.

A model in memory is probed with noise. The registry of families serves checkpoints, weights that are not here, and
modules that compute attention without transformers' interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.mixing import moves_between_positions
from attnflow.models.loading.offload import parameter_of
from attnflow.models.passes.processes import whole
from attnflow.models.subject import Subject
from attnflow.models.weights.checkpoints import BadCheckpoint, Weights, config_of
from attnflow.models.weights.families.find import (
    Config,
    Pairs,
    Place,
    Shapes,
    Stem,
    inside,
    lacking,
    ordered,
    registered,
)
from attnflow.models.weights.families.rows import Composed, Read, Selected
from attnflow.models.weights.families.table import UnknownHeads, is_query_or_key, misstated

if TYPE_CHECKING:
    from attnflow.models.anatomy.sites import Site
    from attnflow.models.weights.probe import Projections

_HEADS: Final = ("num_attention_heads", "num_heads", "num_key_value_heads")


@dataclass(frozen=True, eq=False)
class AttentionLayer(Place):
    """One attention module with its query and key projections, in one layout for every model.

    Weights are stored (out, in): row `h * head_dim + i` makes component i of head h. Query head h scores against KV
    head `h // (num_heads // num_kv_heads)`, and `query_h.T @ key_h` is its bilinear form (geometry, sec. 3), without
    biases, rotations, norm gains and 1/sqrt(head_dim).
    """

    read: Read
    parameters: Mapping[str, nn.Parameter]  # of a model in memory, which hold query and key, perhaps among other rows

    def query(self) -> Float[Tensor, "out d_query"]:
        """Return the query's weight, [num_heads * head_dim, d_query]; differentiable, or read from a file now."""
        return self.query_rows.load(self.read)

    def key(self) -> Float[Tensor, "kv_out d_key"]:
        """Return the key's weight likewise, [num_kv_heads * head_dim, d_key]; d_key may differ in cross-attention."""
        return self.key_rows.load(self.read)

    def write(
        self, query: Float[Tensor, "out d_query"] | None = None, key: Float[Tensor, "kv_out d_key"] | None = None
    ) -> None:
        """Replace the weights of a model in memory in place; the rest of a fused parameter stays."""
        for rows, weight in ((self.query_rows, query), (self.key_rows, key)):
            if weight is None:
                continue
            assert isinstance(rows, Selected), "the factors of a product are not unique"
            if self.parameters[rows.tensor].is_meta:
                raise UnsupportedArchitecture(
                    f"{self.name} cannot be written: its weights are offloaded or on the meta device; load it without "
                    "device_map and offload"
                )
            with torch.no_grad():
                rows.put(self.parameters[rows.tensor], weight)


def attention_layers(model: nn.Module | Subject) -> list[AttentionLayer]:
    """List the attention modules of a model in memory, each once, by layer, by one forward pass of 16 tokens."""
    subject = Subject.of(model)
    parameters = dict(subject.model.named_parameters(remove_duplicate=False))  # layers may share their weights
    shapes = {name: tuple(parameter.shape) for name, parameter in subject.model.named_parameters()}

    def read(tensor: str, rows: tuple[int, int] | None) -> Tensor:
        parameter = parameters[tensor] if not parameters[tensor].is_meta else parameter_of(subject.model, tensor)
        parameter = whole(parameter)
        return parameter if rows is None else parameter[slice(*rows)]

    return [
        AttentionLayer(**vars(place), read=read, parameters={name: parameters[name] for name in place.tensors})
        for place in _places(subject, shapes, {})
    ]


def projections(model: nn.Module | Subject, sites: Sequence[Site]) -> dict[str, Projections | str]:
    """Return what the queries and keys of each site consist of at run time, by one pass of 16 tokens, or why not."""
    from attnflow.models.weights.noise import traces
    from attnflow.models.weights.probe import projections_in

    traced = traces(Subject.of(model), sites)
    read = {trace: projections_in(trace) for trace in dict.fromkeys(traced.values())}
    return {name: read[trace] for name, trace in traced.items()}


def stored_layers(weights: Weights, config: Mapping[str, object] | None = None) -> list[AttentionLayer]:
    """List the attention modules of a checkpoint, in order, read on demand; `config` overrides config.json."""
    packed = sorted(name for name in weights.packed if is_query_or_key(name))
    if packed:
        raise UnsupportedArchitecture(
            f"{weights.name}: the weights are quantised in a format that is not read ({preview(packed, 2)}); GGUF and "
            "8-bit floats are"
        )
    try:
        if weights.module is not None:
            places = _places(Subject(weights.module), weights.shapes, config or {})
        else:
            shapes, whole = weights.shapes, {**weights.config, **(config or {})}
            if wrong := misstated(whole):
                raise BadCheckpoint(f"the config of {weights.name} is damaged: {wrong}")
            pairs = registered(shapes, whole)
            if any(isinstance(place, UnknownHeads) for _, place in pairs):
                whole = _with_defaults(whole)
                pairs = registered(shapes, whole)
            places = ordered(pairs, shapes, whole)
            if gap := lacking(places, shapes, whole):
                raise BadCheckpoint(f"{weights.name} is incomplete: {gap}; download or save it again")
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{weights.name}: {error}") from error
    return [AttentionLayer(**vars(place), read=weights.read, parameters={}) for place in places]


def _with_defaults(config: Config) -> Config:
    """Fill in the defaults of the config's family: released configs of several towers often list what differs."""
    try:
        from transformers import CONFIG_MAPPING

        family = cast(Any, CONFIG_MAPPING)[config["model_type"]]
        return cast(Config, family.from_dict(dict(config)).to_dict())
    except Exception:  # every config checks its values in its own way, and refuses entries that it has never had
        return config


def _places(subject: Subject, shapes: Shapes, config: Config) -> tuple[Place, ...]:
    """Return a place for each attention module: as its names suggest, corrected by the probe."""
    at = dict(subject.model.named_modules())
    root = {**config_of(next((part for part in at.values() if hasattr(part, "config")), subject.model)), **config}

    def stated(path: str) -> Config:  # by torch's own attention
        return {word: n for word in _HEADS if isinstance(n := getattr(at[path], word, None), int)}

    pairs = registered(shapes, root, stated)
    if not subject.without_numbers:
        try:
            sites = subject.sites
        except (ImportError, ValueError, UnsupportedArchitecture):
            pass  # no transformers, no model of it, or one that goes past its interface
        else:  # recurrent layers have queries and keys, too
            mixers = {path for path, module in at.items() if moves_between_positions(module)}
            pairs = _probed(subject, sites, [(stem, place) for stem, place in pairs if stem.path not in mixers])
    return ordered(pairs, shapes, root)


def _probed(subject: Subject, sites: Sequence[Site], pairs: Pairs) -> Pairs:
    from attnflow.models.weights.noise import traces
    from attnflow.models.weights.probe import weights_in

    stems = {site.name: Stem(site.name, "", "") for site in sites}
    numbered = any(stem.numbers for stem in (*stems.values(), *(stem for stem, _ in pairs)))
    chosen = [site for site in sites if not stems[site.name].beside and (not numbered or stems[site.name].numbers)]
    result = list(pairs)
    if not chosen:
        return result
    traced = traces(subject, chosen)
    if subject.sharded_by:  # layers that are built alike have one trace, so that none is told to share another's keys
        probed = {name: weights_in({name: cast(Any, trace.module)}, traced)[name] for name, trace in traced.items()}
    else:
        probed = weights_in({site.name: site.module for site in chosen}, traced)
    for site in chosen:
        named = [pair for pair in pairs if inside(pair[0].path, site.name)]
        certain = [place for _, place in named if isinstance(place, Place) and not place.discovered]
        weights = probed[site.name]
        if isinstance(weights, str):
            if certain or (named and not traced[site.name].calls):
                continue  # nothing speaks against what the registry says, be it a guess, which the result says
            place: Place | UnsupportedArchitecture = UnsupportedArchitecture(
                f"{site.name} ({type(site.module).__name__}): {weights}"
            )
        elif certain and (
            isinstance(certain[0].key_rows, Composed) or weights.query_rows.head_dim != certain[0].head_dim
        ):
            continue  # rotations reorder the rows of some products, and double heads of width 1
        elif certain:
            result[result.index(named[0])] = (named[0][0], replace(certain[0], **vars(weights)))
            continue
        else:
            layer = next(iter(stems[site.name].numbers), 0)
            place = Place(layer, site.name, "", site.kind, **vars(weights), discovered=False)
        result = [pair for pair in result if pair not in named]
        result.append((stems[site.name], place))
    return result
