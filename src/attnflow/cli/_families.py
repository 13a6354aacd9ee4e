"""Families of tasks by name, and the closed form that each merges to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnflow._core.checks import preview
from attnflow._core.markup import plural
from attnflow.cli._catalogue import call, find, parameters_of, read_settings
from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.masks import Mask
    from attnflow.tasks import LeakReport, MergedTask
    from attnflow.tasks.families import Family

NAMES: Final = (
    "block_diffusion",
    "block_two_stream",
    "butterfly",
    "causal_lm",
    "masked_lm",
    "multi_token_prediction",
    "permutation_lm",
)


@dataclass(frozen=True)
class Named:
    """A family made from typed text.

    Attributes:
        call: the call that makes it, for display.
        closed_form: the mask that it merges to, if there is a formula; `formula` names it.
    """

    name: str
    call: str
    num_tokens: int
    parameters: Mapping[str, object]
    family: Family
    formula: str | None
    closed_form: Mask | None


@dataclass(frozen=True)
class MergeFacts:
    """A merged family, with everything that is proved about it.

    Attributes:
        equals_closed_form: whether the mask is the formula's; None if there is no formula.
        sequential: positions of all subtasks together, what training them one by one would compute.
    """

    named: Named
    merged: MergedTask
    report: LeakReport
    equals_closed_form: bool | None
    sequential: int

    @property
    def ok(self) -> bool:
        """Whether nothing leaks and the mask is the formula's, where there is one."""
        return self.report.ok and self.equals_closed_form is not False

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs for the terminal."""
        merged, report = self.merged, self.report
        least = "the least possible" if merged.is_minimal else f"at least {merged.lower_bound:,} are needed"
        formula = f"none is known for {self.named.call}"
        if self.named.formula is not None:
            formula = f"{'equal to' if self.equals_closed_form else 'DIFFERENT from'} {self.named.formula}"
        found = [
            ("subtasks", f"{len(self.named.family):,}, with {self.sequential:,} positions one by one"),
            ("merged", f"{plural(merged.task.size, 'position')} in {plural(len(merged.nodes), 'node')}: {least}"),
            ("closed form", formula),
            ("dense", "yes, one layer lets everything flow" if merged.task.is_dense else "no"),
            ("leaks", "none: proved for any number of layers" if report.ok else f"{len(report.leaks):,}"),
        ]
        found += [("", f"{leak}") for leak in report.leaks[:8]]
        return [*found, ("dead positions", preview(report.dead, 8) if report.dead else "none")]

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        merged = self.merged
        return {
            "family": self.named.name,
            "num_tokens": self.named.num_tokens,
            "parameters": dict(self.named.parameters),
            "num_subtasks": len(self.named.family),
            "subtask_positions": self.sequential,
            "merged_positions": merged.task.size,
            "position_ids": merged.position_ids.tolist(),
            "num_nodes": len(merged.nodes),
            "lower_bound": merged.lower_bound,
            "is_minimal": merged.is_minimal,
            "is_dense": merged.task.is_dense,
            "closed_form": self.named.formula,
            "equals_closed_form": self.equals_closed_form,
            "check": self.report.to_dict(),
            "task": merged.task.to_dict(),
        }


def merge_facts(named: Named) -> MergeFacts:
    """Merge the family, compare with the formula, prove that nothing leaks."""
    from attnflow.tasks import check, merge

    try:
        merged = merge(named.family)
    except ValueError as error:
        raise BadUsage(str(error)) from error
    equal = None if named.closed_form is None else merged.task.mask == named.closed_form
    return MergeFacts(named, merged, check(merged.task), equal, sum(task.size for task in named.family))


def make_family(name: str, num_tokens: int, settings: Mapping[str, str]) -> Named:
    """The family `name` over `num_tokens` distinct tokens.

    Raises:
        BadUsage: an unknown name or parameter, or values that the family's own checks refuse.
    """
    from attnflow import tasks

    function: Callable[..., Any] = find(
        name, {each: getattr(tasks, each) for each in NAMES}, "family", f"known: {', '.join(NAMES)}"
    )
    known = {p.name: p for p in parameters_of(function, skip=("tokens",))}
    signature = f"{name}({', '.join(['tokens', *known])})"
    values = read_settings(signature, known, settings)
    missing = [p.name for p in known.values() if p.required and p.name not in values]
    if missing:
        raise BadUsage(f"{signature} needs {' and '.join(missing)}, as in --set {missing[0]}=...")
    family: Family = call(function, {"tokens": list(range(1, num_tokens + 1)), **values})
    defaults = {p.name: p.default for p in known.values() if not p.required}
    formula, closed_form = _closed_form(name, num_tokens, {**defaults, **values})
    shown = ", ".join([f"{num_tokens} tokens", *(f"{k}={v}" for k, v in values.items())])
    return Named(name, f"{name}({shown})", num_tokens, values, family, formula, closed_form)


def _closed_form(name: str, n: int, values: Mapping[str, Any]) -> tuple[str | None, Mask | None]:
    from attnflow import masks

    if name in ("causal_lm", "multi_token_prediction"):
        return f"causal({n - 1})", masks.causal(n - 1)
    if name == "butterfly":
        return f"butterfly({n}), eq. 58 corrected", masks.butterfly(n)
    if name == "masked_lm":
        return f"full({n})", masks.full(n)
    if name == "permutation_lm":
        both, unread = masks.xlnet_two_stream(values["permutation"]), values["permutation"][-1]
        kept = [i for i in range(2 * n) if i != unread]
        return "xlnet_two_stream(permutation) without the content token that nothing reads", _part(both, kept)
    num_blocks, block, masked = n // values["block"], values["block"], values.get("masked")
    if name == "block_two_stream" or masked is None:
        first = bool(values.get("predict_first", True))
        call = f"block_two_stream({num_blocks}, {block}{', predict_first=True' if first else ''}), eq. 45"
        return call, masks.block_two_stream(num_blocks, block, first)
    if {place // block for place in masked} != set(range(num_blocks)):
        return None, None  # a block without a masked token makes no task
    both = masks.block_diffusion(num_blocks, block)
    formula = f"block_diffusion({num_blocks}, {block}) without its last clean block, which nothing reads"
    return formula, _part(both, [*range(n, 2 * n - block), *range(n)])


def _part(mask: Mask, kept: Sequence[int]) -> Mask:
    """The mask over the positions `kept`, in that order."""
    rest = sorted(set(range(mask.num_queries)) - set(kept))
    return mask.permute([*kept, *rest])[: len(kept), : len(kept)]
