"""The main job on a real model and real text, as `make demo` runs it: two masks derived, proved and run on SmolLM2.

Derives block two-stream and butterfly attention from their tasks, and proves them free of leaks. Shows that the paper's
eq. 58 is wrong as printed. Audits the model, runs the merged tasks in float64 against every subtask alone, asks the
model who told it an answer, and writes a report. Each proof has a control that must fail. It takes one to two minutes
on two cores and 6 GB of memory, and downloads nothing. Exits with 1 if anything comes out otherwise.
`python examples/demo.py [MODEL] [REPORT.html]`
"""

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import attnflow as af
from attnflow.tasks.families import butterfly_as_printed
from attnflow.tasks.merging import MergedTask

BLOCKS, BLOCK, BUTTERFLY, AUDITED = 6, 16, 16, 64  # blocks and tokens of each; tokens that the audit reads
PROMPT = "When Mary and John went to the store, John gave a drink to"
# Largest relative difference, in float64, at which a merged task counts as equal to its subtasks: rounding of a
# 30-layer model gives about 1e-12, one dropped pair of a mask 1e-3 and more.
TOLERANCE, WRONG = 1e-9, 1e-3


@dataclass(frozen=True)
class Objective:
    """A family of subtasks, what merging it gives, and the closed form of the mask that trains them."""

    name: str
    family: Sequence[af.tasks.Task]
    formula: str
    closed_form: af.masks.Mask
    merged: MergedTask

    @classmethod
    def of(cls, name, family, formula, closed_form):
        """With its family merged."""
        return cls(name, family, formula, closed_form, af.tasks.merge(family))

    def under(self, mask):
        """The merged inputs and labels under another mask."""
        return af.tasks.Task(self.merged.task.inputs, self.merged.task.labels, mask)


def prove(objective):
    """The least sequence, equal to the closed form, and no label leaks; with all attention allowed some must."""
    merged, check = objective.merged, af.tasks.check(objective.merged.task)
    control = af.tasks.check(objective.under(af.masks.full(merged.task.size)))
    equal, dense = merged.task.mask == objective.closed_form, merged.task.is_dense
    labels = f"{check.num_labels} labels"
    yield f"{len(objective.family)} subtasks of {sum(t.size for t in objective.family):,} positions merge to " + (
        f"{merged.task.size:,}"
    )
    least = "the least possible" if merged.is_minimal else f"NOT minimal, {merged.lower_bound} would do"
    yield f"{merged.num_nodes} nodes in the Hasse diagram: {least}"
    yield f"mask: {'equal to' if equal else 'DIFFERENT from'} {objective.formula}"
    yield f"depth: {'one layer lets everything flow' if dense else 'NOT dense'}"
    yield "leaks: " + (f"none of {labels} leaks, however many layers" if check.ok else f"some of {labels} LEAK")
    yield from (f"leak: {leak}" for leak in check.leaks[:3])
    such = "NO leak was found" if control.ok else f"{len(control.leaks)} leaks, such as {control.leaks[0].route}"
    yield f"control, all attention allowed: {such}"
    return merged.is_minimal and equal and dense and check.ok and not control.ok, [merged.task.flow, check]


def disprove(butterfly):
    """Eq. 58 as printed is one pair short for n - 1 of n subtasks."""
    n, right = len(butterfly.family), butterfly.closed_form
    printed = butterfly_as_printed(n)
    missing = right.difference(printed, limit=right.num_queries * right.num_keys)
    lost = sorted({node.task for node in butterfly.merged.embeds(butterfly.family, printed).missing})
    pairs = ", ".join(f"{query}->{key}" for query, key in missing[:3])
    yield f"wrong: {len(missing)} pairs (query->key) are missing: [{pairs}, ...]"
    yield (
        f"not embedded: subtasks {lost[0]}-{lost[-1]} of {n}, whose centres lack a neighbour"
        if lost
        else "all embedded"
    )
    return len(missing) == n - 1 and lost == list(range(n - 1)), []


def audit(model, token_ids):
    """The model is clean, and with its causal mask taken away it is not."""
    inputs, n = torch.tensor([token_ids]), len(token_ids)
    report = af.audit.check(model, inputs, passes=32)
    with af.masks.attach(model, af.masks.full(n), other_mixers="keep"):
        control = af.audit.check(model, inputs, order=af.masks.causal(n), passes=1)
    yield f"{'clean' if report.ok else 'LEAKS'}: {report.order}"
    tested = f"{100 * report.coverage:.1f} % of {report.forbidden:,} forbidden pairs"
    modules = f"{report.layers} layers, {len(report.modules)} module outputs"
    yield f"{modules}, {report.forward_passes} passes, {tested}"
    yield from (f"leak: {violation}" for violation in report.violations[:3])
    first = control.violations[0] if control.violations else None
    found = f"{first.module} leaks {first.source} -> {first.target}" if first else "NOTHING was found"
    yield f"control, causal mask removed: {found}"
    return report.ok and not control.ok, [report]


def verify(model, objective):
    """Every subtask alone and the merged task once, forward and backward."""
    comparison = af.tasks.verify(objective.family, objective.merged, model)
    outputs, losses = comparison.output_difference, comparison.loss_difference
    gradients = comparison.gradient_difference
    yield (
        f"largest relative difference of outputs {outputs:.1e}, of losses {losses:.1e}, of gradients {gradients:.1e}"
    )
    yield f"tolerance {TOLERANCE:.0e} (float64 rounds at 1e-16; deep models reach about 1e-12)"
    alone = sum(task.loss for task in comparison.tasks)
    yield f"loss of the merged task {comparison.merged_loss:.10f}, of its subtasks {alone:.10f}"
    return max(outputs, losses, gradients) <= TOLERANCE, [comparison]


def verify_printed(model, butterfly):
    """What the printed mask does to the outputs of a real model."""
    printed = replace(butterfly.merged, task=butterfly.under(butterfly_as_printed(len(butterfly.family))))
    comparison = af.tasks.verify(butterfly.family, printed, model, gradients=False)
    wrong = sum(task.output_difference > WRONG for task in comparison.tasks)
    worst = comparison.output_difference
    yield f"outputs differ by up to {worst:.2f} of the largest logit, in {wrong} of {len(comparison.tasks)} subtasks"
    return worst > WRONG, []


def tell(loaded):
    """Who told the model an answer: the amounts add up, and nothing flows against the order."""
    result = af.explain.answer(loaded, PROMPT, " Mary", against=" John", measure=3)
    yield from str(result).splitlines()
    total = sum(source.carried for source in result.sources)
    yield f"sum of all sources {total:+.4f}, the answer {result.value:+.4f}"
    return result.ok and abs(total - result.value) < WRONG, [result]


def step(title, work, shown):
    """Print the lines of a step and whether it came out as claimed; adds what a page shows of it to `shown`."""
    began, lines = time.perf_counter(), []
    while True:
        try:
            lines.append(next(work))
        except StopIteration as end:
            ok, results = end.value
            break
    print(f"{'ok  ' if ok else 'FAIL'} {title} ({time.perf_counter() - began:.1f} s)")
    for line in lines:
        print(textwrap.fill(line, 100, initial_indent="       ", subsequent_indent="         "))
    shown += results
    return ok


def run(name, model, token_ids, blocks=BLOCKS, block=BLOCK, butterfly=BUTTERFLY, audited=AUDITED):
    """(whether all came out as claimed, results for a page); the model ends unchanged."""
    block_family = af.tasks.block_two_stream(token_ids[: blocks * block], block, mask_token=0)
    formula = f"eq. 45, block_two_stream({blocks}, {block})"
    two_stream = Objective.of("block two-stream", block_family, formula, af.masks.block_two_stream(blocks, block))
    butterfly_family, formula = af.tasks.butterfly(token_ids[:butterfly]), f"eq. 58 corrected, butterfly({butterfly})"
    both = Objective.of("butterfly", butterfly_family, formula, af.masks.butterfly(butterfly))
    shown = []
    passed = [
        step(f"Derive {each.name} attention from its tasks, and prove it", prove(each), shown)
        for each in (two_stream, both)
    ]
    passed.append(step("Hold the paper's eq. 58, as printed, against the same tasks", disprove(both), shown))
    passed.append(step(f"Audit {name}", audit(model, token_ids[:audited]), shown))
    dtype = model.dtype
    model.double()  # float32 comes back unharmed
    passed += [
        step(f"Run {each.name} on {name}, merged and one by one", verify(model, each), shown)
        for each in (two_stream, both)
    ]
    passed.append(step(f"Run eq. 58, as printed, on {name}", verify_printed(model, both), shown))
    model.to(dtype)
    return all(passed), shown


def main(name="smollm2-135m", report="attnflow-demo.html"):
    """The whole job; returns the exit code."""
    began = time.perf_counter()
    loaded = model, tokenizer = af.load_model(name)
    print(f"{name}: {type(model).__name__}, {model.num_parameters():,} parameters")
    text = " ".join(af.models.sample_text(characters=4000).split())
    print(f"text: {textwrap.shorten(text, 70)}")
    ok, shown = run(name, model, tokenizer(text)["input_ids"][: BLOCKS * BLOCK])
    ok = step(f"Ask {name} who told it an answer", tell(loaded), shown) and ok
    af.report.page(*shown, title=f"Two masks derived, proved, and run on {name}").save(report)
    verdict = "everything came out as claimed" if ok else "NOT everything came out as claimed"
    print(f"{verdict}, in {time.perf_counter() - began:.0f} s. Report: {report}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
