"""What a format cannot say is refused by a pair."""

from __future__ import annotations

from attnflow._core.errors import AttnflowError
from attnflow.masks.mask import Mask, not_a_mask


class NotExpressible(AttnflowError, ValueError):
    """A format cannot say this mask.

    Attributes:
        format: name of the format.
        pair: (query, key) of a pair that no mask of this format can hold together with the others of this mask.
        allowed: whether the mask allows that pair.
    """

    def __init__(self, format: str, mask: Mask, pair: tuple[int, int], reason: str) -> None:
        query, key = pair
        verb = "allows" if mask.allows(query, key) else "forbids"
        super().__init__(f"{format} cannot say {mask!r}: it {verb} query {query}, key {key}, but {reason}")
        self.format = format
        self.pair = pair
        self.allowed = verb == "allows"


def checked(mask: object) -> Mask:
    """`mask`, if it is one."""
    if not isinstance(mask, Mask):
        raise not_a_mask(mask)
    return mask
