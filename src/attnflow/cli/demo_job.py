"""The main job: derive masks from their families, prove them, and hold them against a real model on real text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from attnflow import masks, tasks
from attnflow.tasks import Embedding, MergedTask, Task, Verification

if TYPE_CHECKING:
    from torch import nn

    from attnflow.audit import AuditReport
    from attnflow.masks import Mask
    from attnflow.tasks.families import Family

TOLERANCE: Final = 1e-9
"""Largest relative difference, in float64, at which a merged task counts as equal to its subtasks.

Rounding of a 30-layer model in float64 gives about 1e-12; one dropped pair of a mask gives 1e-3 and more. The tolerance
keeps away from both.
"""

WRONG: Final = 1e-3
"""Relative difference of outputs above which a mask is wrong, not rounded."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the main job; the defaults are for two CPU cores.

    Attributes:
        block_tokens: tokens of text for block two-stream; a multiple of `block`.
        block: tokens per block.
        butterfly_tokens: tokens of text for butterfly, which has as many subtasks.
        audit_tokens: tokens of text for the audit.
        audit_passes: perturbations of the audit.
    """

    block_tokens: int = 96
    block: int = 16
    butterfly_tokens: int = 16
    audit_tokens: int = 64
    audit_passes: int = 32

    @property
    def num_tokens(self) -> int:
        """Tokens of text that the main job reads."""
        return max(self.block_tokens, self.butterfly_tokens, self.audit_tokens)


@dataclass(frozen=True)
class Derived:
    """A family of subtasks, what it merges to, and the proofs about that.

    Attributes:
        name: of the family.
        family: the subtasks.
        merged: what `af.tasks.merge` made of them, from nothing but the subtasks.
        check: of the merged task.
        control: the same check with all attention allowed; it must find leaks, or it proves nothing.
        formula: the closed form, in words.
        closed_form: the closed form.
    """

    name: str
    family: Family
    merged: MergedTask
    check: LeakReport
    control: LeakReport
    formula: str
    closed_form: Mask

    @property
    def one_by_one(self) -> int:
        """Positions that the subtasks have together, when they are trained one by one."""
        return sum(task.size for task in self.family)

    @property
    def equals_closed_form(self) -> bool:
        """Whether the derived mask is the closed form, pair by pair."""
        return self.merged.task.mask == self.closed_form

    @property
    def ok(self) -> bool:
        """Whether everything that is claimed of it is so."""
        proved = self.merged.is_minimal and self.merged.task.is_dense and self.check.ok
        return proved and self.equals_closed_form and not self.control.ok


def derive_block_two_stream(token_ids: Sequence[int], block: int) -> Derived:
    """Block two-stream attention from the tasks of generating block by block (hasse, sec. 4.2)."""
    num_blocks = len(token_ids) // block
    closed_form = masks.block_two_stream(num_blocks, block)
    family = tasks.block_two_stream(token_ids, block)
    return _derived("block two-stream", family, f"eq. 45, block_two_stream({num_blocks}, {block})", closed_form)


def derive_butterfly(token_ids: Sequence[int]) -> Derived:
    """Butterfly attention from the tasks of predicting each token from both sides (hasse, sec. 4.3)."""
    n = len(token_ids)
    return _derived("butterfly", tasks.butterfly(token_ids), f"eq. 58 corrected, butterfly({n})", masks.butterfly(n))


def _derived(name: str, family: Family, formula: str, closed_form: Mask) -> Derived:
    merged = tasks.merge(family)
    blind = with_mask(merged.task, masks.full(merged.task.size))
    return Derived(name, family, merged, tasks.check(merged.task), tasks.check(blind), formula, closed_form)


def with_mask(task: Task, mask: Mask) -> Task:
    """The same inputs and labels under another mask."""
    return Task(task.inputs, task.labels, mask)


@dataclass(frozen=True)
class Printed:
    """Butterfly attention as the paper prints it, eq. 58, against the family that it is for.

    Attributes:
        num_tokens: n.
        mask: eq. 58 as printed.
        missing_pairs: (query, key) that the printed mask drops.
        embedding: which nodes of the family it holds.
    """

    num_tokens: int
    mask: Mask
    missing_pairs: tuple[tuple[int, int], ...]
    embedding: Embedding

    @property
    def lost_tasks(self) -> tuple[int, ...]:
        """Subtasks with a node that is not embedded."""
        return tuple(sorted({node.task for node in self.embedding.missing}))

    @property
    def ok(self) -> bool:
        """Whether it is wrong in the way that is claimed: one pair short for n - 1 of n subtasks."""
        n = self.num_tokens
        return len(self.missing_pairs) == n - 1 and self.lost_tasks == tuple(range(n - 1))


def disprove_printed(butterfly: Derived) -> Printed:
    """Eq. 58 as printed, held against the butterfly family."""
    n, task = len(butterfly.family), butterfly.merged.task
    mask = tasks.butterfly_as_printed(n)
    missing = butterfly.closed_form.difference(mask, limit=mask.num_queries * mask.num_keys)
    return Printed(n, mask, tuple(missing), tasks.embedded(with_mask(task, mask), butterfly.family))


@dataclass(frozen=True)
class Agreement:
    """The merged task against its subtasks on a real model, in float64.

    Attributes:
        derived: the family.
        verification: differences of outputs and of gradients.
    """

    derived: Derived
    verification: Verification

    @property
    def ok(self) -> bool:
        """Whether outputs and gradients agree up to rounding."""
        return self.verification.ok(TOLERANCE)


def verify_on(model: nn.Module, derived: Derived) -> Agreement:
    """Every subtask alone and the merged task once, forward and backward, on a float64 model."""
    return Agreement(derived, tasks.verify(derived.family, derived.merged, model))


def printed_on(model: nn.Module, butterfly: Derived, printed: Printed) -> Verification:
    """What the printed mask does to the outputs of a real model."""
    wrong = replace(butterfly.merged, task=with_mask(butterfly.merged.task, printed.mask))
    return tasks.verify(butterfly.family, wrong, model, gradients=False)


@dataclass(frozen=True)
class Audited:
    """A real model against the order that it declares.

    Attributes:
        report: of the model as it is.
        control: of the same model with all attention allowed, which must be found.
    """

    report: AuditReport
    control: AuditReport

    @property
    def ok(self) -> bool:
        """Whether the model is clean and the control is not."""
        return self.report.ok and not self.control.ok


def audit_on(model: Any, token_ids: Sequence[int], passes: int) -> Audited:
    """Perturb the inputs and watch every module; then again with the causal mask taken away."""
    import torch

    from attnflow.audit import audit
    from attnflow.masks.hf.attach import attach

    n = len(token_ids)
    inputs = torch.tensor([list(token_ids)])
    report = audit(model, inputs, passes=passes)
    with attach(model, masks.full(n)):
        control = audit(model, inputs, order=masks.causal(n), passes=1)
    return Audited(report, control)


@dataclass(frozen=True)
class MainJob:
    """All results of the main job.

    Attributes:
        model_name: of the real model.
        num_parameters: of the real model.
        token_texts: each token of the real text, as text.
        settings: sizes.
        derived: block two-stream and butterfly.
        printed: eq. 58 as the paper prints it.
        printed_verification: what that does to the real model's outputs.
        audited: the real model's audit.
        agreements: both merged tasks against their subtasks on the real model.
        seconds: wall time of each step.
    """

    model_name: str
    num_parameters: int
    token_texts: tuple[str, ...]
    settings: Settings
    derived: tuple[Derived, ...]
    printed: Printed
    printed_verification: Verification
    audited: Audited
    agreements: tuple[Agreement, ...]
    seconds: Mapping[str, float]

    @property
    def ok(self) -> bool:
        """Whether everything came out as claimed."""
        parts = (*self.derived, self.printed, self.audited, *self.agreements)
        return all(part.ok for part in parts) and self.printed_verification.output_difference > WRONG

    def to_dict(self) -> dict[str, object]:
        """The results as plain data for JSON."""
        return {
            "ok": self.ok,
            "model": {"name": self.model_name, "num_parameters": self.num_parameters},
            "text": "".join(self.token_texts),
            "settings": asdict(self.settings),
            "derived": [_derived_to_dict(each) for each in self.derived],
            "eq_58_as_printed": {
                "num_tokens": self.printed.num_tokens,
                "missing_pairs": [list(pair) for pair in self.printed.missing_pairs],
                "tasks_not_embedded": list(self.printed.lost_tasks),
                "nodes_not_embedded": [asdict(node) for node in self.printed.embedding.missing],
                "output_difference": self.printed_verification.output_difference,
            },
            "audit": {"report": self.audited.report.to_dict(), "control": self.audited.control.to_dict()},
            "verified": [
                {"name": each.derived.name, "dtype": "float64", "tolerance": TOLERANCE, **each.verification.to_dict()}
                for each in self.agreements
            ],
            "seconds": dict(self.seconds),
        }


def _derived_to_dict(derived: Derived) -> dict[str, object]:
    merged = derived.merged
    return {
        "name": derived.name,
        "num_subtasks": len(derived.family),
        "subtask_positions": derived.one_by_one,
        "merged_positions": merged.task.size,
        "num_nodes": len(merged.nodes),
        "lower_bound": merged.lower_bound,
        "is_minimal": merged.is_minimal,
        "is_dense": merged.task.is_dense,
        "closed_form": derived.formula,
        "equals_closed_form": derived.equals_closed_form,
        "check": derived.check.to_dict(),
        "leaks_of_control": len(derived.control.leaks),
    }
