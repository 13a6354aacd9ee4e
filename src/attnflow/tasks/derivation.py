"""Merges a named family, proves that it does not leak, and compares it with its closed form (for CLI and studio)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from attnflow import masks
from attnflow._core.checks import preview
from attnflow._core.markup import plural
from attnflow._core.parameters import Named, named
from attnflow.masks.mask import Mask
from attnflow.tasks import families
from attnflow.tasks.extra_tokens import look_ahead
from attnflow.tasks.families import Family
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.merging import MergedTask, merge

_SHOWN: Final = 8  # leaks and positions that a text names


BY_LENGTH: Final[frozenset[Callable[..., Family]]] = frozenset({
    families.causal_lm, families.multi_token_prediction, look_ahead, families.block_two_stream, families.butterfly,
    families.masked_lm, families.permutation_lm, families.block_diffusion,
})  # fmt: skip


def of_length_alone(family_fn: Callable[..., object]) -> bool:
    """Whether a family's tasks have one structure for all sequences of a length; random masks do not."""
    random = isinstance(family_fn, partial) and isinstance(family_fn.keywords.get("masked"), str)
    return not random and (family_fn.func if isinstance(family_fn, partial) else family_fn) in BY_LENGTH


@cache
def named_families() -> Mapping[str, Named[Family]]:
    functions = sorted(BY_LENGTH, key=lambda function: function.__name__)
    return {function.__name__: named(function, leading=["tokens"]) for function in functions}


@dataclass(frozen=True)
class Derivation:
    """A merged family, its leak proof, its mask's known formula, and whether the mask equals it (None if unknown)."""

    call: str
    merged: MergedTask
    report: LeakReport
    closed_form: str | None
    equals_closed_form: bool | None

    @property
    def ok(self) -> bool:
        """Whether nothing leaks and the mask equals its formula, if there is one."""
        return self.report.ok and self.equals_closed_form is not False

    @property
    def subtask_positions(self) -> int:
        return sum(map(len, self.merged.positions))

    def lines(self) -> list[tuple[str, str]]:
        merged, report = self.merged, self.report
        least = "the least possible" if merged.is_minimal else f"at least {merged.lower_bound:,} are needed"
        verdict = "equal to" if self.equals_closed_form else "DIFFERENT from"
        formula = f"{verdict} {self.closed_form}" if self.closed_form else f"the paper gives none for {self.call}"
        return [
            ("subtasks", f"{len(merged.positions):,}, with {self.subtask_positions:,} positions if run one by one"),
            ("merged", f"{plural(merged.task.size, 'position')} in {plural(merged.num_nodes, 'node')}: {least}"),
            ("closed form", formula),
            ("one layer", "suffices" if merged.task.is_dense else "does not suffice"),
            ("leaks", "none: proved for any number of layers" if report.ok else f"{len(report.leaks):,}"),
            *(("", f"{leak}") for leak in report.leaks[:_SHOWN]),
            ("dead positions", preview(report.dead, _SHOWN) if report.dead else "none"),
        ]


def derive(family: Named[Family], num_tokens: int, values: Mapping[str, object]) -> Derivation:
    """Merge a family over distinct tokens, compare its mask with its formula, and prove that nothing leaks."""
    family.require(values)
    merged = merge(family.function(tokens=list(range(1, num_tokens + 1)), **with_mask(family, values)))
    formula, mask = _closed_form(family.name, num_tokens, {**{p.name: p.default for p in family.parameters}, **values})
    shown = [f"{num_tokens} tokens", *(f"{name}={value}" for name, value in values.items())]
    equal = None if mask is None else merged.task.mask == mask
    return Derivation(f"{family.name}({', '.join(shown)})", merged, check(merged), formula, equal)


def with_mask(family: Named[Family], values: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a family over the tokens 1..n, with 0 as [MASK]."""
    return ({"mask_token": 0} if any(p.name == "mask_token" for p in family.parameters) else {}) | dict(values)


def _closed_form(family: str, n: int, values: Mapping[str, Any]) -> tuple[str | None, Mask | None]:
    if family in ("causal_lm", "multi_token_prediction"):
        return f"causal({n - 1})", masks.causal(n - 1)
    if family == "butterfly" and values["block"] is None:
        return f"butterfly({n}), eq. 58 corrected", masks.butterfly(n)
    plain = {"masked": None, "clean": "block", "noisy": "block", "prompt": 0}
    if family == "block_two_stream" or (
        family == "block_diffusion" and all(values[name] == value for name, value in plain.items())
    ):
        block, first = values["block"], bool(values.get("predict_first", True))
        call = f"block_two_stream({n // block}, {block}{', predict_first=True' if first else ''}), eq. 45"
        return call, masks.block_two_stream(n // block, block, first)
    return None, None
