"""The matrix as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from tests.conformance.cells import FEATURES
from tests.conformance.matrix import Row
from tests.conformance.miniature import KINDS, architectures

FILE = Path(__file__).parents[2] / "docs" / "conformance.md"
CODES = ("works", "refused", "unclear", "wrong", "none")
SIGNS = {"works": "works", "refused": "refused", "unclear": "unclear", "wrong": "**wrong**", "none": ""}
# The families of 2025-2026 that most people run, first.
POPULAR = [
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "gemma3_text",
    "gemma3",
    "gemma4",
    "gemma4_text",
    "mistral",
    "ministral",
    "mistral3",
    "llama4",
    "gpt_oss",
    "deepseek_v3",
    "glm4",
    "glm4_moe",
    "phi3",
    "olmo3",
    "smollm3",
    "granite",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "bamba",
    "jamba",
    "zamba2",
    "qwen2_5_vl",
    "qwen3_vl",
    "paligemma",
    "modernbert",
    "bert",
    "roberta",
    "t5",
    "bart",
    "whisper",
]


def write(rows: Mapping[tuple[str, str], Row], path: Path = FILE) -> None:
    """Counts, the popular families, what is wrong or unclear, everything else by class."""
    classes: dict[str, dict[str, Row]] = {}
    for (name, feature), row in rows.items():
        classes.setdefault(name, {})[feature] = row
    built = {name: found for name, found in classes.items() if "build" not in found}
    installed = sum(1 for _ in architectures())
    lines = [
        "# Does it work with my model?",
        "",
        f"Architectures of transformers {transformers.__version__} (torch {torch.__version__}) in miniature, each",
        "feature against an oracle that shares no code with it: tokens are changed and float64 outputs compared, unit",
        "vectors are pushed through every attention module, matrices are formed. `make conformance` makes this page",
        "and [the table as CSV](conformance.csv).",
        "",
        f"**{len(classes)} of {installed} classes have been run**, {len(built)} of them could be built.",
        "",
        "*Works* says that the feature and the oracle agree: an audit that finds the leak that is there works.",
        "",
        "| feature | works | refused, with the reason | unclear error | wrong | nothing to work on |",
        "|---|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        counts = Counter(found[feature].cell.code for found in built.values() if feature in found)
        lines.append(f"| {feature} | " + " | ".join(str(counts[code]) for code in CODES) + " |")
    lines += ["", "Share of the cells that work, of those with something to work on:", ""]
    for kind in KINDS:
        cells = [row.cell.code for found in built.values() for row in found.values() if row.architecture.kind == kind]
        cells = [code for code in cells if code != "none"]
        if cells:
            lines.append(f"- {kind}: {cells.count('works') / len(cells):.0%} of {len(cells)}")
    order = sorted(built, key=lambda name: _popularity(next(iter(built[name].values())).architecture.model_type))
    lines += ["", "## By class", "", "| class | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for name in order:
        found = built[name]
        signs = [SIGNS[found[feature].cell.code] if feature in found else "" for feature in FEATURES]
        lines.append(f"| {found[next(iter(found))].architecture.name} | " + " | ".join(signs) + " |")
    lines += ["", "## Models that leak", "", "Audit and oracle agree that information flows against the order:", ""]
    leaks = [row for name in order for row in built[name].values() if row.cell.reason.startswith("leak: ")]
    lines += [f"- {row.architecture.name}, {row.feature}: {_plain(row.cell.reason[6:])}" for row in leaks] or ["None."]
    lines += ["", "## What is wrong or unclear", ""]
    bad = [row for name in order for row in built[name].values() if row.cell.code in ("wrong", "unclear")]
    lines += [f"- {row.architecture.name}, {row.feature}: {_plain(row.cell.reason)}" for row in bad] or ["Nothing."]
    lines += ["", "## Not built", ""]
    lines += [
        f"- {f['build'].architecture.name}: {_plain(f['build'].cell.reason)}" for f in classes.values() if "build" in f
    ]
    path.write_text("\n".join(lines) + "\n")


def _popularity(model_type: str) -> int:
    return POPULAR.index(model_type) if model_type in POPULAR else len(POPULAR)


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")
