"""`attnflow knowledge ...`: build a store, count and export it, edit what a model says, trace its entries."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from attnflow._core.markup import plural
from attnflow.cli import _arguments as arguments
from attnflow.cli._arguments import FIGURES, Against, Answer, FigureOption, Ids, argument, load, option, require
from attnflow.cli._early import require_place
from attnflow.cli._output import BadUsage, JsonFlag, complain, output_path, print_json, show, working, write

if TYPE_CHECKING:
    from attnflow.knowledge.store import Store
    from attnflow.models.subject import Loaded

PATCH: Final = ".patch"
Patches = Annotated[list[Path] | None, option("--apply PATCH", "A saved edit to apply first, in float32 (repeatable).")]

app = typer.Typer(help="Feed-forward knowledge: build, stats, export, edit, trace.", rich_markup_mode=None)


@app.command("build")
def build(
    store: Annotated[str, argument("STORE", "A new folder or s3://BUCKET/PATH.")],
    model: Annotated[str, argument("MODEL", "A short name, a folder, a GGUF file or a hub id.")],
    patches: Patches = None,
    json_output: JsonFlag = False,
) -> None:
    """Make a store of the entries of a model's feed-forward layers."""
    require(model)
    _refuse_memory(store)
    _require_patches(patches)
    from attnflow.knowledge.convert import save_entries
    from attnflow.knowledge.store import Store
    from attnflow.knowledge.store.table import check_uri

    check_uri(store)
    with working(f"reading {model}") as spinner:
        converted = _converted(load(model, tokenizer=False), patches)
        base = converted.knowledge
        with Store.open(store, dim=base.entry_dim, num_thresholds=base.num_layers) as held:
            if len(held):
                raise BadUsage(f"{store} already holds {plural(len(held), 'entry', 'entries')}: name a new store")
            save_entries(converted, held, name=_label(model, patches), progress=spinner)
            numbers = held.stats()
    show(numbers, json_output)


@app.command("stats")
def stats(
    store: Annotated[str, argument("STORE", "The folder or s3:// address of a store.")],
    duplicates: Annotated[bool, option("--duplicates", "Also find near-duplicate entries.")] = False,
    threshold: Annotated[float, option("--threshold X", "Least cosine of duplicates.")] = 0.95,
    json_output: JsonFlag = False,
) -> None:
    """Count the entries of a store.

    Prints the number of entries by version and by encoder. Exits with 1 if --duplicates finds any.
    """
    with working(f"opening {store}") as spinner, opened(store) as held:
        numbers, same, texts = held.stats(), None, list[str | None]()
        if duplicates:
            from attnflow.knowledge.reading.duplication import duplicates as find

            same = find(held, threshold, progress=spinner)
            texts = [entry.text for entry in held.get([group[0] for group in same.groups[:20]])]
    show(same or numbers, json_output, "" if same is None else f"{numbers}\n\nduplicates {same.listed(texts)}")
    raise typer.Exit(0 if same is None or same.ok else 1)


@app.command("export")
def export(
    store: Annotated[str, argument("STORE", "The folder or s3:// address of a store.")],
    file: Annotated[Path, argument("FILE", "A .parquet file, or a .csv file without vectors.")],
    json_output: JsonFlag = False,
) -> None:
    """Write the entries of a store to a file.

    Parquet keeps everything exactly; CSV has ids, texts, sources, encoders, versions and times.
    """
    target = output_path(file, [".parquet", ".csv"])
    with working(f"writing {file}"), opened(store) as held:
        held.export(target)
        numbers = held.stats()
    show(numbers, json_output, written=file)


@contextmanager
def opened(uri: str) -> Generator[Store, None, None]:
    """Opens an existing store to read it, and closes it; raises BadUsage without one."""
    _refuse_memory(uri)
    path = Path(uri)
    if "://" not in uri and not (path.is_dir() and any(path.iterdir())):
        raise BadUsage(f"found no store at {uri}: make one with `attnflow knowledge build {uri} MODEL`")
    from attnflow.knowledge.store import Store

    with Store.open(uri, read_only=True) as store:
        yield store


def _refuse_memory(uri: str) -> None:
    if uri == "memory":
        raise BadUsage("a store in memory is lost when the command ends: name a folder")


@app.command("edit")
def knowledge_edit(
    model: Annotated[str, argument("MODEL", "A causal language model; its files are not changed.")],
    output: Annotated[Path, option("--output -o DIR", "Folder for the edited model; NAME.patch: the change alone.")],
    prompt: Annotated[str | None, option("--prompt TEXT", "The prompt to answer.")] = None,
    answer: Annotated[str | None, option("--answer TEXT", "The new answer.")] = None,
    subject: Annotated[str, option("--subject TEXT", "The part of the prompt that it is about.")] = "",
    file: Annotated[Path | None, option("--file FILE", "A .jsonl file of facts: prompt, answer, subject.")] = None,
    keep: Annotated[Path | None, option("--keep FILE", "Texts, one per line, that must not change.")] = None,
    layers: Annotated[str | None, option("--layers LIST", "The model's layers to change, such as 7,9,11.")] = None,
    guard: Annotated[bool, option("--guard/--no-guard", "Hold and measure other statements, or do not.")] = True,
    patches: Patches = None,
    json_output: JsonFlag = False,
) -> None:
    """Edit what a model says.

    Makes the smallest change to the values of feed-forward entries that gives the new answers, and writes an ordinary
    transformers model, or only the change, which --apply reads. Exits with 1 if the edited model does not give an
    answer, if something beside it lies outside its bound, or if something that has a bound was not measured, as with
    --no-guard; the report says which.
    """
    if (file is None) == (prompt is None) or (prompt is None) != (answer is None):
        raise BadUsage("give --prompt and --answer, or --file with facts")
    for path in (file, keep):
        if path is not None and not path.is_file():
            raise BadUsage(f"the file {path} does not exist")
    require(model)
    chosen = None if layers is None else arguments.integers(layers, "--layers")
    require_place(model, layers=chosen)
    _require_patches(patches)
    if not output.expanduser().resolve().parent.is_dir():
        raise BadUsage(f"cannot write {output}: no folder {output.expanduser().resolve().parent}; create it first")
    from attnflow._core.files import write_folder
    from attnflow.knowledge import edit, to_ffn
    from attnflow.knowledge.editing.facts import Fact, read_facts
    from attnflow.models.loading.loader import quiet

    facts = [Fact(str(prompt), str(answer), subject)] if file is None else read_facts(file)
    texts = [] if keep is None else [line for line in keep.read_text(encoding="utf-8").splitlines() if line.strip()]
    with working(f"loading {model}") as spinner:
        loaded = load(model)
        converted = _converted(loaded, patches).float()  # half precision would lose the changes
        loaded = loaded._replace(model=converted)
        with edit(loaded, facts, layers=chosen, guard=guard, untouched=texts, progress=spinner) as handle:
            text, report = str(handle), handle.report
            if output.suffix == PATCH:
                handle.save(output)
            else:
                plain, tokenizer = to_ffn(converted), cast(Any, loaded.tokenizer)
                with write_folder(output) as part, quiet():
                    plain.save_pretrained(part)
                    tokenizer.save_pretrained(part)
    show(report, json_output, text)
    raise typer.Exit(0 if report.ok else 1)


def _converted(loaded: Loaded, patches: list[Path] | None) -> Any:
    from attnflow.knowledge import from_ffn, load_edit

    converted: Any = from_ffn(loaded)
    if patches:
        converted.float()
    for folder in patches or ():
        if overlap := load_edit(converted, folder).overlap():
            complain(f"{folder}: {overlap}")
    return converted


def _require_patches(patches: list[Path] | None) -> None:
    for folder in patches or ():
        if not folder.is_dir():
            raise BadUsage(f"found no saved edit at {folder}: `attnflow knowledge edit ... -o NAME{PATCH}` writes one")


def _label(model: str, patches: list[Path] | None) -> str:
    return " + ".join([model, *map(str, patches or ())])


@app.command("trace")
def knowledge_trace(
    model: Annotated[str, argument("MODEL", "Any model; its feed-forward layers are read as entries.")],
    texts: Annotated[list[str] | None, argument("[TEXT]...", 'The texts to read; "-" reads stdin.')] = None,
    ids: Ids = None,
    answer: Answer = None,
    against: Against = None,
    position: Annotated[int, option("--position N", "The token that answers (default: the last).")] = -1,
    layer: Annotated[int | None, option("--layer N>=0", "One layer (default: all).")] = None,
    count: Annotated[int, option("--count N>=1", "Entries to list.")] = 12,
    ablate: Annotated[int, option("--ablate N>=0", "Leading entries to take out of the model, one by one.")] = 0,
    output: FigureOption = None,
    patches: Patches = None,
    json_output: JsonFlag = False,
) -> None:
    """Show which feed-forward entries fire for a text, or for each of several.

    Lists the entries with the largest effect on the logit of the next token: a first-order estimate of what it loses
    without the entry. Beside it stands the direct effect, past later layers. With --ablate, also what that logit and
    the token's probability lose when the model runs without the entry. The words beside an entry are its text, or the
    tokens that it promotes (+) and suppresses (-).
    """
    require(model)
    prompts = [arguments.text_or_ids(text, ids) for text in texts or [None]]
    path = None if output is None else output_path(output, FIGURES, "a trace as a figure")
    if path is not None and len(prompts) > 1:
        raise BadUsage(f"-o writes one trace, and there are {len(prompts)} texts: give one of them")
    longest = min(len(one.encode()) + 8 if isinstance(one, str) else len(one) for one in prompts)  # with special tokens
    if not -longest <= position < longest:
        raise BadUsage(f"--position {position} lies outside {'a text' if ids is None else '--ids'}")
    require_place(model, layer=layer)
    _require_patches(patches)
    with working(f"loading {model}") as spinner:
        from attnflow.knowledge import trace
        from attnflow.knowledge.layered import reads_entries

        wanted = None if answer is None else arguments.token(answer, ids, "--answer")
        others = [arguments.token(word, ids, "--against") for word in against] if against else None
        loaded = load(model, ids is None, "give token ids, as in --ids 5,6,7")
        if patches or not reads_entries(loaded.model):
            spinner.stage("converting its feed-forward layers")
            loaded = loaded._replace(model=_converted(loaded, patches))
        spinner.stage("tracing")
        # What is printed is about one token; an ablation runs the model for each position.
        places = position if ablate or not (json_output or path or answer) else None
        kept = max(16, count, ablate)
        found = [trace(loaded, one, wanted, others, places, top=kept, ablate=ablate) for one in prompts]
        results = [replace(one, model=_label(model, patches)) for one in found]
        lines = [f"{one.summary(position)}\n\n{one.table(position, layer, min(count, one.top))}" for one in results]
        if path is not None:
            spinner.stage(f"writing {output}")
            write(results[0], path, position=position)
    if json_output and len(results) > 1:
        print_json("attnflow.knowledge.trace/1", {"traces": [one.to_dict() for one in results]})
    else:
        show(results[0], json_output, "\n\n".join(lines), title=results[0].model, written=output)
