"""The main job as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnflow._core.markup import percent, plural, shorten
from attnflow.cli.demo_job import TOLERANCE, Derived, MainJob
from attnflow.report import SECTIONS, Html, Section, Subject, build, html, mask_svg
from attnflow.report.sections import leaks, order, picture, verification

if TYPE_CHECKING:
    from attnflow.report import Report


def main_report(job: MainJob, details: Mapping[str, str] | None = None) -> Report:
    """The results of the main job: block two-stream in full, butterfly and eq. 58 as sections of their own.

    Args:
        job: the results.
        details: more rows for the provenance, such as the command.
    """
    block, butterfly = job.derived
    text = shorten("".join(job.token_texts), 400)
    provenance = {"Model": f"{job.model_name}, {job.num_parameters:,} parameters", "Text": text}
    subject = Subject(
        title=f"Main job: two masks derived, proved, and run on {job.model_name}",
        masks=(block.merged.task.mask,),
        flow=block.merged.task.flow,
        check=block.check,
        verification=job.agreements[0].verification,
        audit=job.audited.report,
        model=job.model_name,
        labels=_labels(block, job),
        details={**provenance, **(details or {})},
    )
    other = Subject(
        title="Butterfly attention",
        masks=(butterfly.merged.task.mask,),
        flow=butterfly.merged.task.flow,
        check=butterfly.check,
        verification=job.agreements[1].verification,
        labels=_labels(butterfly, job),
    )

    def summary(_: Subject) -> Section:
        return Section("summary", "What was shown", _summary(job))

    def second(_: Subject) -> Section:
        parts = [made for make in (picture, order, leaks, verification) if (made := make(other)) is not None]
        body = html.join(html.tag("h3", part.title) + part.body for part in parts)
        return Section("butterfly", "Butterfly attention", body)

    def published(_: Subject) -> Section:
        return Section("eq58", "Eq. 58 as printed", _printed(job))

    return build(subject, (summary, *SECTIONS, second, published))


def _labels(derived: Derived, job: MainJob) -> tuple[str, ...]:
    """What stands at each merged position: a token of the text, several averaged, or [MASK]."""
    inputs = derived.merged.task.inputs
    return tuple(" + ".join(job.token_texts[i] for i in sorted(t.provenance)) or "[MASK]" for t in inputs)


def _summary(job: MainJob) -> Html:
    lead = (
        "Two training objectives were given as lists of subtasks. The one sequence and mask that trains each list in "
        "a single forward pass was derived from nothing else, compared with its closed form, proved free of leaks, "
        "and run on a real model against every subtask alone, in float64. The sections up to the cost are about block "
        "two-stream attention; butterfly attention has its own."
    )
    head = ["", "subtasks", "their positions", "merged", "nodes", "leaks", "output difference", "gradient difference"]
    rows = [_row(derived, job) for derived in job.derived]
    worst = max(each.verification.output_difference for each in job.agreements)
    good = all(each.ok for each in job.agreements)
    sentence = (
        f"The merged tasks give what their subtasks give: the largest relative difference of outputs is {worst:.1e} "
        f"(tolerance {TOLERANCE:.0e}; float64 rounds at 1e-16 and a deep model adds up to about 1e-12)."
        if good
        else f"The merged tasks do NOT give what their subtasks give: outputs differ by {worst:.1e}."
    )
    controls = html.paragraph(
        f"Controls: with all attention allowed the same proof finds {len(job.derived[0].control.leaks)} and "
        f"{len(job.derived[1].control.leaks)} leaks, and the same audit finds "
        f"{plural(len(job.audited.control.violations), 'place')} where information flows backwards."
    )
    return (
        html.paragraph(lead, kind="lead")
        + html.table(head, rows)
        + html.note("good" if good else "bad", html.paragraph(sentence))
        + html.note("neutral", controls)
    )


def _row(derived: Derived, job: MainJob) -> list[str]:
    found = next(each.verification for each in job.agreements if each.derived is derived)
    gradient = "" if found.gradient_difference is None else f"{found.gradient_difference:.1e}"
    return [
        derived.name,
        str(len(derived.family)),
        str(derived.one_by_one),
        str(derived.merged.task.size),
        f"{len(derived.merged.nodes)}{' (minimal)' if derived.merged.is_minimal else ''}",
        str(len(derived.check.leaks)),
        f"{found.output_difference:.1e}",
        gradient,
    ]


def _printed(job: MainJob) -> Html:
    printed, found = job.printed, job.printed_verification
    n = printed.num_tokens
    lost = ", ".join(str(task) for task in printed.lost_tasks)
    sentence = (
        f"Of {n} subtasks {len(printed.lost_tasks)} are not embedded in the mask that the paper prints: the centres "
        f"of tokens {lost} cannot read their right neighbour."
    )
    effect = (
        f"On {job.model_name} its outputs differ from the subtasks' by up to {percent(found.output_difference)} of the "
        f"largest logit; the corrected mask's by {job.agreements[1].verification.output_difference:.1e}."
    )
    pairs = ", ".join(f"{query} → {key}" for query, key in printed.missing_pairs[:32])
    missing = f"{plural(len(printed.missing_pairs), 'pair')} (query → key) are missing: {pairs}."
    fix = "The condition i-n+1 < j must read i-n+1 <= j."
    figures = [
        html.tag("div", html.tag("h3", title), html.figure(mask_svg(mask, size=280, standalone=False), caption))
        for title, mask, caption in (
            ("As printed", printed.mask, "Eq. 58 of the paper."),
            ("As derived", job.derived[1].merged.task.mask, "From the subtasks; every one of them is embedded."),
        )
    ]
    return (
        html.note("bad", html.paragraph(sentence), html.paragraph(effect))
        + html.paragraph(f"{missing} {fix}")
        + html.tag("div", *figures, class_="many")
    )
