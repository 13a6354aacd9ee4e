"""A family of tasks by name: merged, compared with its closed form, and proved free of leaks.

What `attnflow mask merge` and the studio show. In code it is `merge`, `check` and a comparison of masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from attnflow import masks
from attnflow._core.checks import integer, preview
from attnflow._core.markup import plural
from attnflow._core.parameters import Named, find, named
from attnflow._core.plain import as_integer, as_object
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.tasks import families
from attnflow.tasks.families import Family
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.merging import MergedTask, merge

_SHOWN: Final = 8  # leaks and positions that a text names


@cache
def named_families() -> Mapping[str, Named[Family]]:
    """The families of the library by name, sorted, with their parameters (the tokens of the sample left out)."""
    functions = sorted(families.BY_LENGTH, key=lambda function: function.__name__)
    return {function.__name__: named(function, leading=["tokens"]) for function in functions}


@dataclass(frozen=True)
class Derivation(Result):
    """A merged family over `num_tokens` distinct tokens, with everything that is proved about it.

    Attributes:
        parameters: what else the family was called with.
        closed_form: the known formula of the mask, in words; None if there is none.
        equals_closed_form: whether the merged mask is the formula's; None if there is no formula.
    """

    family: str
    num_tokens: int
    parameters: Mapping[str, object]
    merged: MergedTask
    report: LeakReport
    closed_form: str | None
    equals_closed_form: bool | None

    @property
    def ok(self) -> bool:
        """Whether nothing leaks and the mask is the formula's, where there is one."""
        return self.report.ok and self.equals_closed_form is not False

    @property
    def subtask_positions(self) -> int:
        """Positions of all subtasks together, what training them one by one would compute."""
        return sum(map(len, self.merged.positions))

    @property
    def call(self) -> str:
        """The call that makes the family, for display."""
        shown = [f"{self.num_tokens} tokens", *(f"{name}={value}" for name, value in self.parameters.items())]
        return f"{self.family}({', '.join(shown)})"

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs for a terminal."""
        merged, report = self.merged, self.report
        least = "the least possible" if merged.is_minimal else f"at least {merged.lower_bound:,} are needed"
        verdict = "equal to" if self.equals_closed_form else "DIFFERENT from"
        formula = f"{verdict} {self.closed_form}" if self.closed_form else f"none is known for {self.call}"
        return [
            ("subtasks", f"{len(merged.positions):,}, with {self.subtask_positions:,} positions one by one"),
            ("merged", f"{plural(merged.task.size, 'position')} in {plural(merged.num_nodes, 'node')}: {least}"),
            ("closed form", formula),
            ("dense", "yes, one layer lets everything flow" if merged.task.is_dense else "no"),
            ("leaks", "none: proved for any number of layers" if report.ok else f"{len(report.leaks):,}"),
            *(("", f"{leak}") for leak in report.leaks[:_SHOWN]),
            ("dead positions", preview(report.dead, _SHOWN) if report.dead else "none"),
        ]

    def __str__(self) -> str:
        return "\n".join([self.call, *(f"{label:<16}{text}" for label, text in self.lines())])

    def to_dict(self) -> dict[str, object]:
        """The call and what came of it, as plain data; `from_dict` derives the family again."""
        merged = self.merged
        return {
            "attnflow": "Derivation",
            "version": self.version,
            "ok": self.ok,
            "family": self.family,
            "num_tokens": self.num_tokens,
            "parameters": dict(self.parameters),
            "num_subtasks": len(merged.positions),
            "subtask_positions": self.subtask_positions,
            "merged_positions": merged.task.size,
            "position_ids": merged.position_ids.tolist(),
            "num_nodes": merged.num_nodes,
            "lower_bound": merged.lower_bound,
            "is_minimal": merged.is_minimal,
            "is_dense": merged.task.is_dense,
            "closed_form": self.closed_form,
            "equals_closed_form": self.equals_closed_form,
            "check": self.report.to_dict(),
            "task": merged.task.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Derivation:
        """The derivation of the family that `to_dict` named."""
        content = cls._content(values)
        parameters = as_object(content.get("parameters"), "parameters")
        derived = derive(str(content.get("family")), as_integer(content.get("num_tokens"), "num_tokens"), **parameters)
        return cls(**vars(derived))


_MOST_TOKENS: Final = 1 << 20


def derive(family: str, num_tokens: int, **parameters: object) -> Derivation:
    """Merge a family of the library, compare its mask with its formula, and prove that nothing leaks.

    Args:
        family: its name: "causal_lm", "block_two_stream", "butterfly", ...
        num_tokens: tokens of the sample.
        parameters: further arguments of the family's function, such as `block=4`.

    Raises:
        ValueError: an unknown family or parameter, or values that the family refuses.

    >>> derive("butterfly", 5).ok
    True
    """
    entry = find(family, named_families(), "family")
    values = entry.check(parameters, family)
    num_tokens = integer("num_tokens", num_tokens, 1, _MOST_TOKENS)
    merged = merge(entry.function(tokens=list(range(1, num_tokens + 1)), **values))
    defaults = {p.name: p.default for p in entry.parameters if not p.required}
    formula, mask = _closed_form(family, num_tokens, {**defaults, **values})
    return Derivation(
        family=family,
        num_tokens=num_tokens,
        parameters=values,
        merged=merged,
        report=check(merged),
        closed_form=formula,
        equals_closed_form=None if mask is None else merged.task.mask == mask,
    )


def _closed_form(family: str, n: int, values: Mapping[str, Any]) -> tuple[str | None, Mask | None]:
    if family in ("causal_lm", "multi_token_prediction"):
        return f"causal({n - 1})", masks.causal(n - 1)
    if family == "butterfly":
        whole = values.get("block") is None
        return (f"butterfly({n}), eq. 58 corrected", masks.butterfly(n)) if whole else (None, None)
    if family == "masked_lm":
        return f"full({n})", masks.full(n)
    if family == "permutation_lm":
        both, unread = masks.permutation_lm(values["permutation"]), values["permutation"][-1]
        read = [i for i in range(2 * n) if i != unread]
        return "permutation_lm(permutation) without the content token that nothing reads", _part(both, read)
    block, masked = values["block"], values.get("masked")
    blocks = n // block
    if masked is None:
        first = bool(values.get("predict_first", True))
        call = f"block_two_stream({blocks}, {block}{', predict_first=True' if first else ''}), eq. 45"
        return call, masks.block_two_stream(blocks, block, first)
    if {place // block for place in masked} != set(range(blocks)):
        return None, None  # a block without a masked token makes no task
    formula = f"block_diffusion({blocks}, {block}) without its last clean block, which nothing reads"
    return formula, _part(masks.block_diffusion(blocks, block), [*range(n, 2 * n - block), *range(n)])


def _part(mask: Mask, positions: Sequence[int]) -> Mask:
    """The mask over some positions, in their order."""
    rest = sorted(set(range(mask.num_queries)) - set(positions))
    return mask.permute([*positions, *rest])[: len(positions), : len(positions)]
