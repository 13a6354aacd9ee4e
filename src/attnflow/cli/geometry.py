"""`attnflow geometry`: score the attention of checkpoints, and say why a head looked at a token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperGroup

from attnflow._core.markup import aligned, part_name, plural, token_label
from attnflow.cli import _arguments as arguments
from attnflow.cli._arguments import FIGURES, FigureOption, Ids, Text, argument, option
from attnflow.cli._early import require_place
from attnflow.cli._output import BadUsage, JsonFlag, complain, console, output_path, say, show, working, write

if TYPE_CHECKING:
    from attnflow.geometry.attribution import ScoreAttribution
    from attnflow.geometry.published import Summary
    from attnflow.geometry.table import GeometryScores
    from attnflow.report.attribution_rows import HeadRow


class _ScoreByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from attnflow._core.plain import close_to

        named = args[:1] and args[0] in (*self.commands, "-h", "--help")
        near = "" if named or not args or Path(args[0]).exists() else close_to(args[0], self.commands)
        if near:
            raise BadUsage(f"no command or model {args[0]!r}{near}")
        return super().parse_args(ctx, args if named else ["score", *args])


_HELP: Final = """Geometry of attention: score (the default), attribute.

`attnflow geometry MODEL` is short for `attnflow geometry score MODEL`."""

app = typer.Typer(help=_HELP, rich_markup_mode=None, cls=_ScoreByDefault)


@app.command("score")
def geometry_score(
    models: Annotated[list[str], argument("MODEL", "One or more: smollm2-135m, minilm, folders, files, hub ids.")],
    per_head: Annotated[bool, option("--per-head", "Also score and list each head.")] = False,
    attention: Annotated[Literal["self", "cross", "all"], option("--attention", "Which attention to score.")] = "self",
    gamma: Annotated[
        float, option("--gamma", "A norm counts when this many standard deviations above the mean.")
    ] = 2.0,
    mode: Annotated[
        Literal["excess", "norm"], option("--mode", "What is summed: the excess over the threshold, or the whole norm.")
    ] = "excess",
    stored: Annotated[bool, option("--stored", "Leave out the gains of norms, as was published.")] = False,
    config: Annotated[
        list[str] | None, option("--config NAME=N", "Supply what config.json lacks: num_attention_heads=12.")
    ] = None,
    output: FigureOption = None,
    picture: Annotated[
        Literal["plane", "layers", "heads"], option("--picture", "What to draw in an .svg or .png.")
    ] = "plane",
    shard: Annotated[str | None, option("--shard I/N", "Only part I of N of the models, for a job array.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Score symmetry and directionality of attention.

    Scores W_q^T W_k in every layer, with the gains of norms folded in, and prints medians and quartiles. It reads only
    query and key weights and these gains, one layer at a time. A model that cannot be scored is skipped with a message;
    the exit code is then 1, or 2 if no model could be scored.
    """
    target = None if output is None else output_path(output, FIGURES, "scores as a figure")
    drawn = target is not None and target.suffix.lower() in (".svg", ".png", ".pdf")
    if drawn and picture == "heads" and len(set(models)) > 1:
        raise BadUsage(f"--picture heads shows one model, got {len(set(models))}: write .html to see them all")
    models = models if shard is None else _part(list(dict.fromkeys(models)), shard)
    heads = per_head or picture == "heads" or (target is not None and target.suffix.lower() == ".html")
    if len(set(models)) == 1 and shard is None:
        arguments.require(models[0])
    overrides: dict[str, int] = {}
    for name, text in arguments.settings_from(config or [], "--config").items():
        try:
            overrides[name] = int(text)
        except ValueError:
            raise BadUsage(f"--config {name}=... must be a whole number, got {text!r}") from None
    with working(f"opening {models[0]}") as spinner:
        from attnflow.geometry.score import survey

        result = survey(models, gamma, mode, heads, attention, fold=not stored, config=overrides, progress=spinner)
        if target is not None and result.models:
            spinner.stage(f"writing {output}")
            write(result, target, picture=picture)
    if json_output and (result.models or shard):  # a part without scores is a part, too
        show(result, json_output)
    elif result.models:
        listed = result.models if per_head or len(result.models) == 1 else ()
        parts = [*(_details(model, heads=per_head) for model in listed), _overview(result.models)]
        say(console(), "\n\n".join(parts) + ("" if output is None else f"\nwritten: {output}"))
    for name, reason in result.unscored.items():
        advice = reason.replace('attention="all"', "--attention all")  # as it is typed here
        complain(f"attnflow: {name}: {advice}")
    raise typer.Exit(0 if result.ok else 1 if result.models else 2)


def _part(models: list[str], shard: str) -> list[str]:
    """Every N-th model from the I-th, so that all parts together score each model once."""
    first, _, count = shard.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise BadUsage(f"--shard {shard!r} is not I/N with I from 1 to N, as in --shard 1/8")
    if not (part := models[int(first) - 1 :: int(count)]):
        raise BadUsage(f"--shard {shard} is empty: {len(models)} models make at most {len(models)} parts")
    return part


@app.command("attribute")
def geometry_attribute(
    model: Annotated[str, argument("MODEL", "smollm2-135m, minilm, a folder, a file or a hub id.")],
    layer: Annotated[int, option("--layer N>=0", "The layer of the head.")],
    text: Text = None,
    head: Annotated[int | None, option("--head N>=0", "The head (default: one is chosen and named).")] = None,
    query: Annotated[int, option("--query N", "Position of the token that looks (-1: the last).")] = -1,
    key: Annotated[int | None, option("--key N", "Position looked at (default: that of the largest weight).")] = None,
    ids: Ids = None,
    attention: Annotated[
        Literal["self", "cross"], option("--attention", "Which attention, of an encoder-decoder.")
    ] = "self",
    raw: Annotated[bool, option("--raw", "Show terms as they are, not centred over the row.")] = False,
    count: Annotated[int, option("--count N>=1", "Terms and keys to list.")] = 10,
    output: FigureOption = None,
    json_output: JsonFlag = False,
) -> None:
    """Say why a head looked at a token.

    The score of a query and a key is a sum over pairs: what an earlier attention or feed-forward layer wrote at the
    query, against what one wrote at the key. Lists the largest terms in logits, less their mean over the row, because
    softmax ignores what all keys share.
    """
    arguments.require(model)
    inputs = arguments.text_or_ids(text, ids)
    target = None if output is None else output_path(output, FIGURES, "an attribution as a figure")
    require_place(model, layer=layer, head=head)
    with working(f"loading {model}") as spinner:
        from attnflow.geometry import reading
        from attnflow.models.subject import Subject
        from attnflow.report.attribution import attribution_part
        from attnflow.report.attribution_rows import row_of
        from attnflow.report.page import Context, build

        loaded = arguments.load(model, ids is None, "give token ids, as in --ids 5,6,7")
        loaded = loaded._replace(model=loaded.model.float())  # a sum in half precision could not be checked
        if getattr(loaded.model.config, "is_encoder_decoder", False):  # both sides read the text, as in an audit
            inputs = {name: value[:1] for name, value in Subject.of(loaded).sample(inputs).items()}
        spinner.stage(f"attributing layer {layer}")
        with reading(loaded, inputs) as read:
            one = read.telling_head(layer, query, attention=attention) if head is None else head
            found = replace(read.explain(layer, one, query, attention=attention), model=model)
        row = row_of(found, None, key, raw)
        if target is not None:
            spinner.stage(f"writing {output}")
            if target.suffix.lower() == ".html":
                build([attribution_part(found, Context(), key=key, raw=raw)], None, {}, {}).save(target)
            else:
                write(found, target, key=key, raw=raw, count=count)
    title = f"{model}, {part_name(found.layer, 'head', row.head)}{_chosen(found, row) if head is None else ''}"
    show(found, json_output, _explained(found, row, count), title=title, written=output)


def _chosen(found: ScoreAttribution, row: HeadRow) -> str:
    from attnflow.geometry.attribution import telling
    from attnflow.report.attribution import CHOICE
    from attnflow.report.attribution_rows import key_name

    if found.attention == "cross":
        return ", which has the most weight on one token"
    others = telling(found)
    if not others:
        return ""
    return f", which {CHOICE}: {key_name(found, max(others, key=lambda index: row.weights[index]))}"


def _explained(found: ScoreAttribution, row: HeadRow, count: int) -> str:
    from attnflow.report.attribution_rows import key_name, query_name, remark
    from attnflow.report.html import numbers

    order = sorted(range(len(row.weights)), key=lambda index: -row.weights[index])
    listed = order[:count] + [row.index] * (row.index not in order[:count])
    columns = {"weight": row.weights, "score": row.scores, **({"above mean": row.totals} if row.centred else {})}
    cells = [numbers([float(values[index]) for index in listed]) for values in columns.values()]
    keys = [["key", "token", *columns]]
    for index, *shown in zip(listed, *cells, strict=True):
        keys.append([str(found.keys[index]), token_label(found.tokens[index]), *shown])
    looks = f"{query_name(found)} looks at {key_name(found, row.index)} with weight {row.weights[row.index]:.3f}"
    lines = [looks, "", *_terms(found, row, count), aligned(keys, left=[1]), ""]
    warning = remark(found, row).replace("’", "'")
    if warning and len(order) > 1:
        warning += f" For example: --key {found.keys[next(index for index in order if index != row.index)]}, or --raw."
    lines += [warning] if warning else []
    lines.append(f"The sum over all terms agrees with the model's scores to {found.error:.0e} of their range.")
    return "\n".join(lines).replace("−", "-")


def _terms(found: ScoreAttribution, row: HeadRow, count: int) -> list[str]:
    """Lists the leading terms and their sums; nothing for a single key, whose centred terms are zero."""
    from attnflow.report.attribution_rows import leading
    from attnflow.report.html import numbers

    if row.centred and len(found.keys) == 1:
        return []
    best = leading(found, row, count)
    sums = [plural(best.count, "other term"), "sum: its score" + (", less the row's mean" if row.centred else "")]
    values = numbers([*best.values, best.others, best.total], signed=True)
    rows = [[number, name] for number, name in zip(values, [*best.names(), *sums], strict=True)]
    if not best.count:
        del rows[-2]
    head = ["logits", "written at the query × written at the key" + (", centred over the row" if row.centred else "")]
    return [aligned([head, *rows], left=[1]), ""]


def _overview(models: Sequence[GeometryScores]) -> str:
    from attnflow.report.geometry import rows_of

    rows: list[list[str]] = []
    for scores in models:
        for index, one in enumerate(scores.summaries):
            quartiles = ("none" if math.isnan(q.median) else str(q) for q in (one.symmetry, one.directionality))
            rows.append(["" if index else scores.model, _matrices(scores, one), *quartiles])
    head = ["model", "matrices", "symmetry", "directionality"]
    readings = sorted({f"gamma {scores.gamma:g} and mode {scores.mode}" for scores in models})
    remarks = [f"Median [quartiles]. Directionality uses {', '.join(readings)}. Ignored: {models[0].ignored}."]
    for scores in models:
        for one in (each for each in scores.summaries if each.flagged):
            counts = Counter(flag for row in rows_of(scores, one) for flag in row.flags)
            listed = ", ".join(f"{count} flagged {flag!r}" for flag, count in counts.items())
            remarks.append(f"{scores.model}: of {_matrices(scores, one)}, {listed}")
        remarks += [f"{scores.model}: {note}" for note in scores.notes]
        remarks += [str(comparison) for comparison in scores.compare()]
    return "\n".join([aligned([head, *rows], left=range(4)), "", *remarks])


def _details(scores: GeometryScores, *, heads: bool) -> str:
    from attnflow.report.geometry import has_several

    several = has_several(scores)
    head = [*(["attention"] if several else []), "layer", "head", "symmetry", "directionality", "norm"]
    table = [[*head, "rows", "columns", "flags"]]
    for row in scores if heads else (row for row in scores if row.head == "all"):
        where = [", ".join(filter(None, (row.tower, row.kind)))] if several else []
        numbers = (_number(row.symmetry), _number(row.directionality), f"{row.norm:.4g}")
        counts = [str(row.outlier_rows), str(row.outlier_columns)]
        table.append([*where, str(row.layer), str(row.head), *numbers, *counts, ", ".join(row.flags)])
    lines = aligned(table, left=[*range(len(table[0]) - 6), len(table[0]) - 1])
    legend = f"rows, columns: how many have a norm more than {scores.gamma:g} standard deviations above the mean"
    return "\n".join([scores.model, "", lines, "", legend])


def _matrices(scores: GeometryScores, summary: Summary) -> str:
    from attnflow.report.geometry import has_several

    count = f"{summary.count} {'layers' if summary.matrix == 'all' else 'heads'}"
    return f"{summary.what}: {count}" if has_several(scores) else count


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:z.3f}"
