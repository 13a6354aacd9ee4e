"""Where the queries and keys of a model in memory are: by the registry, and what that does not know by a probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from torch import nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.checkpoints.weights import config_of, stated_by
from attnflow.models.families.find import (
    Config,
    Place,
    Said,
    Shapes,
    Stem,
    nothing_known,
    ordered,
    registered,
)

if TYPE_CHECKING:
    from attnflow.models.sites import Site

_Pair = tuple[Stem, Place]
_Pairs = list[tuple[Stem, Place | UnsupportedArchitecture]]

_places: Final[WeakKeyDictionary[nn.Module, tuple[Shapes, tuple[Place, ...]]]] = WeakKeyDictionary()


def places_of(model: nn.Module, shapes: Shapes, config: Mapping[str, object] | None = None) -> tuple[Place, ...]:
    """A place for each attention module of a model in memory, in the order of its layers.

    Modules that call the attention interface of transformers and are not of a family in the registry are probed, once
    for each model; the registry alone speaks for others.

    Args:
        model: the model.
        shapes: name and shape of each of its parameters.
        config: entries that replace those of its own config.

    Raises:
        UnsupportedArchitecture: there is no attention that is known, or queries or keys that are no linear function of
            a token.
    """
    if config:
        return _find(model, shapes, config)
    entry = _places.get(model)
    if entry is None or entry[0] != shapes:
        entry = _places[model] = shapes, _find(model, shapes, {})
    return entry[1]


def said_by(model: nn.Module) -> Callable[[str], Said]:
    """What a model in memory says of its module at a path: the heads there, and the config of the part around it."""
    owners = [
        (f"{name}.", part, part.config) for name, part in model.named_modules() if name and hasattr(part, "config")
    ]
    configs: dict[int, Config] = {}  # by the identity of the config, which many modules share

    def said(path: str) -> Said:
        for name, part, own in reversed(owners):
            if f"{path}.".startswith(name):
                if id(own) not in configs:
                    configs[id(own)] = config_of(part)
                if "model_type" in (config := configs[id(own)]):
                    return Said(stated_by(model, path), config)
        return Said(stated_by(model, path), {})

    return said


def _find(model: nn.Module, shapes: Shapes, config: Config) -> tuple[Place, ...]:
    root = {**config_of(model), **config}
    pairs = registered(shapes, root, said_by(model))
    sites: Sequence[Site] = ()
    if not any(parameter.is_meta or hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        try:
            from attnflow.models.sites import find_sites, moves_between_positions

            sites = find_sites(model)
        except (ImportError, ValueError, UnsupportedArchitecture):
            pass  # no transformers, no model of it, or one that goes past its interface
        else:  # recurrent layers have queries and keys, too
            at = dict(model.named_modules())
            pairs = [
                (stem, p) for stem, p in pairs if stem.path not in at or not moves_between_positions(at[stem.path])
            ]
    if sites:
        pairs = _probed(model, sites, pairs)
    places: list[_Pair] = []
    for stem, place in pairs:
        if isinstance(place, UnsupportedArchitecture):
            raise place
        places.append((stem, place))
    if not places:
        raise UnsupportedArchitecture(nothing_known(shapes, root))
    return ordered(places)


def _probed(model: nn.Module, sites: Sequence[Site], pairs: _Pairs) -> _Pairs:
    """The pairs, with what the probe sees in place of what the registry guesses or does not know."""
    numbered = any(stem.numbers for stem, _ in pairs) or any(_stem(site).numbers for site in sites)
    certain = [stem.path for stem, place in pairs if isinstance(place, Place) and not place.discovered]
    unknown = [
        site
        for site in sites
        if not any(_inside(path, site.name) for path in certain)
        and not _stem(site).beside
        and (not numbered or _stem(site).numbers)
    ]
    if not unknown:
        return pairs
    from attnflow.models.noise import traces
    from attnflow.models.probed import Unread, weights_of

    result = list(pairs)
    seen = weights_of({site.name: site.module for site in unknown}, traces(model, unknown, alone=True))
    for site in unknown:
        guesses = [pair for pair in pairs if _inside(pair[0].path, site.name)]
        weights = seen[site.name]
        if isinstance(weights, Unread):
            if guesses and not weights.ran:
                continue  # nothing speaks against what the registry says, be it a guess, which the result says
            place: Place | UnsupportedArchitecture = UnsupportedArchitecture(
                f"{site.name} ({type(site.module).__name__}): {weights.why}"
            )
        else:
            place = Place(
                next(iter(_stem(site).numbers), 0),
                site.name,
                "",
                site.kind,
                weights.query,
                weights.key,
                weights.num_heads,
                weights.num_kv_heads,
                False,
            )
        result = [pair for pair in result if pair not in guesses]
        result.append((_stem(site), place))
    return result


def _stem(site: Site) -> Stem:
    return Stem(site.name, "", "")


def _inside(path: str, name: str) -> bool:
    return name == "" or path == name or path.startswith(f"{name}.")
