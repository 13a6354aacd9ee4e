"""`Sparse`: a sparser mask of the same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnflow._core.plain import as_integer
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.masks.spec import mask_from_dict


@dataclass(frozen=True)
class Sparse(Result):
    """A sparser realisation of an order, with the number of layers that it needs."""

    mask: Mask
    depth: int

    def to_dict(self) -> dict[str, object]:
        """The mask as `attnflow.masks.spec` writes it, and the depth."""
        return {"attnflow": "Sparse", "version": self.version, "mask": self.mask.to_dict(), "depth": self.depth}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Sparse:
        """What `to_dict` described."""
        content = cls._content(values)
        return cls(mask_from_dict(content.get("mask")), as_integer(content.get("depth"), "depth"))

    def rows(self) -> list[dict[str, object]]:
        """One row: the mask's name, its pairs, their share, the depth."""
        mask = self.mask
        return [{"mask": mask.name, "pairs": mask.nnz, "density": mask.density, "depth": self.depth}]
