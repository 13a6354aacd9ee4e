"""Every verb on every way to spread a model over two and four processes: the numbers of one process, or why not.

`python -m tests.parallel.test_verbs FILE ...` writes the table of the guide from what launches wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import torchrun

PAGE = Path(__file__).parents[2] / "docs" / "parallel_verbs.md"
HEAD = """# Which verbs work on several processes?

`+` works, with the values of one process. `r` is refused by one sentence, which stands below the table. An empty cell
has nothing to try. Tests run every cell on two gloo processes (the last two columns on four) and compare this page.
Audits, batches and guards run on all of them: see [Several processes](guides/parallel.md).

"""
REFUSALS = {"ValueError", "UnsupportedArchitecture"}
RAW = re.compile(r"DTensor|aten\.|deepcopy|_local_tensor|setStorage|mat1|Traceback")
LOAD = "load it on one process with af.load_model(folder)"
Launch = dict[str, Any]

pytestmark = pytest.mark.slow


def launch(folder: Path, processes: int) -> Launch:
    done = torchrun("-m", "tests.parallel.verbs", str(folder / "seen.json"), processes=processes, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "seen.json").read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launch(tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(scope="module")
def cells(two: Launch, four: Launch) -> dict[tuple[str, str], list[Any]]:
    """{(way, verb): of each rank}, of two processes and of four."""
    return {
        (f"{way}, {count} processes", verb): ranks
        for count, found in ((2, two), (4, four))
        for way, verbs in found["cells"].items()
        for verb, ranks in verbs.items()
    }


def test_each_cell_gives_what_one_process_gives_or_says_what_to_do(cells):
    assert len(cells) > 300
    for where, ranks in cells.items():
        assert all(rank == ranks[0] for rank in ranks), (where, ranks)
        assert ranks[0].get("equal", True), (where, ranks[0])
        if "error" in ranks[0]:
            said = ranks[0]["says"]
            assert ranks[0]["error"] in REFUSALS, (where, said)
            assert not RAW.search(said), (where, said)
            assert "\n" not in said, (where, said)


@pytest.mark.parametrize(
    ("verb", "ways"),
    [
        ("geometry.score", None),
        ("geometry.monitor", None),
        ("masks.attach", None),
        ("bias.save", None),
        ("bias.capture", {"DDP", "FSDP2", "accelerate", "torch.compile", "PEFT", "PEFT in FSDP2"}),
        ("tasks.share_prefixes, then wrap", {"DDP", "FSDP2", "tensor parallel"}),
        ("tasks.share_prefixes", {"DDP", "tensor parallel", "tp_plan", "torch.compile"}),
        ("explain.answer", {"DDP", "compile of DDP", "torch.compile", "accelerate", "PEFT"}),
        ("knowledge.trace", {"DDP", "compile of DDP", "torch.compile", "accelerate", "PEFT"}),
    ],
)
def test_these_work(cells, verb, ways):
    found = {where[0].rpartition(",")[0]: ranks[0] for where, ranks in cells.items() if where[1] == verb}
    assert ways is None or ways <= found.keys()
    assert all(found[way] == {"equal": True} for way in ways or found)


@pytest.mark.parametrize(
    ("verb", "advice"),
    [
        ("geometry.attribute", LOAD),
        ("explain.answer", LOAD),
        ("knowledge.trace", LOAD),
        ("knowledge.from_ffn", LOAD),
        ("knowledge.edit", LOAD),
        ("bias.attach", "attach the bias first, then wrap or shard the model"),
        ("bias.load", "attach the bias first, then wrap or shard the model"),
        ("knowledge.attach", "attach the reader first, then wrap or shard the model"),
        ("tasks.share_prefixes", "call share_prefixes before fully_shard"),
    ],
)
def test_a_sharded_model_is_refused_with_what_to_do(cells, verb, advice):
    for count in (2, 4):
        said = cells[f"FSDP2, {count} processes", verb][0]["says"]
        assert said.startswith(("LlamaForCausalLM is in FSDP2", f"{verb.split('.')[1]} needs", "an explanation needs"))
        assert said.endswith(advice)


def test_one_rank_alone_is_not_left_waiting(two):
    first, second = two["cases"]
    assert first["alone"] == (
        "RankFailed: 1 rank (1) did not call af.geometry.score within 3 s: call it on each of the 2 processes, as they "
        "run the model together"
    )
    assert second["monitor alone"].startswith("RankFailed: 1 rank (0) did not call record()")
    assert first["after"] is second["after"] is True


def test_parts_of_a_model_may_be_whole(two):
    for rank in two["cases"]:
        assert rank["one layer"] is rank["whole after a pass"] is rank["score after a pass"] is True
        assert rank["trace after a pass"].endswith(LOAD)


def test_an_error_of_saving_reaches_all(two):
    for rank in two["cases"]:
        assert rank["saved"] is True
        assert rank["not written"].startswith("RankFailed: rank 0: NotADirectoryError")
        assert rank["not finite"].startswith("ValueError: the bias holds NaN or infinity in layers.0")


def test_handles_and_results_name_the_class_of_the_user(two):
    for rank in two["cases"]:
        assert rank["handles"][0] == "<Monitor on LlamaForCausalLM>"
        assert "of LlamaForCausalLM every" in rank["handles"][1]


def table(*launches: Launch) -> str:
    """The verbs by the ways, `+` where they work and `r` where they refuse, and the refusals below."""
    cells: dict[str, dict[str, Any]] = {}
    for found in launches:
        cells |= {way: verbs for way, verbs in found["cells"].items() if way not in cells}
    verbs = dict.fromkeys(verb for way in cells.values() for verb in way)
    rows = [["verb", *cells], ["---"] * (len(cells) + 1)]
    refused: dict[str, dict[str, None]] = {}
    for verb in verbs:
        row = [re.sub(r"^([\w.]+)", r"`\1`", verb)]
        for way in cells.values():
            cell = way.get(verb, [{}])[0]
            row.append("" if not cell else "r" if "error" in cell else "+")
            if "error" in cell:
                refused.setdefault(_in_general(cell["says"]), {})[verb] = None
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    said = (f"- {', '.join(f'`{verb}`' for verb in verbs)}: “{sentence}”" for sentence, verbs in refused.items())
    return "\n".join([*lines, "", *said, ""])


def _in_general(said: str) -> str:
    """A refusal without what differs between the ways."""
    said = re.sub(r": <masks.*?>", "", said).replace("PeftModel", "LlamaForCausalLM")
    return re.sub(r"sharded by [\w ]+:", "sharded by FSDP2:", re.sub(r"is in .* already", "is in DDP already", said))


def test_the_table_of_the_guide(two, four):
    assert HEAD + table(two, four) == PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(HEAD + table(*(json.loads(Path(path).read_text()) for path in sys.argv[1:])))
