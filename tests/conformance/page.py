"""The matrix as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

from tests.conformance.cells import FEATURES, markdown
from tests.conformance.matrix import Row
from tests.conformance.miniature import KINDS, architectures

FILE = Path(__file__).parents[2] / "docs" / "conformance.md"
CODES = ("works", "refused", "unclear", "wrong", "none")
SIGNS = {"works": "works", "refused": "refused", "unclear": "unclear", "wrong": "**wrong**", "none": ""}
ASKED = {
    "audit": "does it find what moves against the order that it believes, and accuse nothing else",
    "packed": "two documents by position ids that restart",
    "padded": "padding on the left",
    "alone": "rows of padded batches and packed documents against themselves alone",
    "cached": "prefill and steps, chunks, left padding against one forward pass",
    "image": "with an image in place",
    "loss": "each label trains the position that autograd shows, with its weight; mistakes are found",
    "mask": "a random mask: exactly its pairs move; state-space and convolutional mixers are silenced, and not masked",
    "bias": "the identity at the start, then an effect; causality and caches as before; gone when removed",
    "geometry": "S and D of every layer",
    "attribution": "terms that add up to the scores of the last layer, its weights, nothing constant without biases",
    "explain": "sources that add up to the value; taking out an edge does what an attention function of our own does",
    "from_ffn": "the same logits, every matrix in the base, the effect of an edit, the way back",
}
# The families of 2025-2026 that most people run, first.
POPULAR = [
    *("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "gemma3_text", "gemma3", "gemma4", "gemma4_text"),
    *("mistral", "ministral", "mistral3", "llama4", "gpt_oss", "deepseek_v3", "glm4", "glm4_moe", "phi3"),
    *("olmo3", "smollm3", "granite", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2", "bamba", "jamba"),
    *("zamba2", "qwen2_5_vl", "qwen3_vl", "paligemma", "modernbert", "bert", "roberta", "t5", "bart", "whisper"),
]


def write(rows: Mapping[tuple[str, str], Row], path: Path = FILE) -> None:
    """Counts, the popular families, what is wrong or unclear, everything else by class."""
    classes: dict[str, dict[str, Row]] = {}
    for (name, feature), row in rows.items():
        classes.setdefault(name, {})[feature] = row
    built = {name: cells for name, cells in classes.items() if "build" not in cells}
    installed = sum(1 for _ in architectures())
    lines = [
        "# Does it work with my model?",
        "",
        f"Architectures of transformers {transformers.__version__} (torch {torch.__version__}) in miniature, each",
        "feature against an oracle that shares no code with it. The oracles change tokens and compare float64 outputs,",
        "push unit vectors through every attention module, and form matrices. `make conformance` makes this page and",
        "[the table as CSV](conformance.csv).",
        "",
        f"**{len(classes)} of {installed} classes have been run**, {len(built)} of them could be built.",
        "",
        "*Works* means that the feature and the oracle agree. So an audit that finds a real leak works.",
        "",
        "| feature | works | refused, with the reason | unclear error | wrong | nothing to work on |",
        "|---|---|---|---|---|---|",
    ]
    for feature in FEATURES:
        counts = Counter(cells[feature].cell.code for cells in built.values() if feature in cells)
        lines.append(f"| {feature}: {ASKED[feature]} | " + " | ".join(str(counts[code]) for code in CODES) + " |")
    lines += ["", "Share of the cells that work, of those with something to work on:", ""]
    rows_by_kind = {kind: [row for row in rows.values() if row.architecture.kind == kind] for kind in KINDS}
    for kinds in (("decoder", "vision-language", "encoder"), *((kind,) for kind in KINDS)):
        codes = [row.cell.code for kind in kinds for row in rows_by_kind[kind] if row.cell.code != "none"]
        if codes:
            lines.append(f"- {', '.join(kinds)}: {codes.count('works') / len(codes):.1%} of {len(codes):,}")
    order = sorted(built, key=lambda name: _popularity(next(iter(built[name].values())).architecture.model_type))
    lines += ["", "## By class", "", "| class | " + " | ".join(FEATURES) + " |", "|---" * (len(FEATURES) + 1) + "|"]
    for name in order:
        cells = built[name]
        signs = [SIGNS[cells[feature].cell.code] if feature in cells else "" for feature in FEATURES]
        lines.append(f"| {next(iter(cells.values())).architecture.name} | " + " | ".join(signs) + " |")
    lines += ["", "## Models that leak", "", "Audit and oracle agree that information flows against the order:", ""]
    leaks = [row for name in order for row in built[name].values() if row.cell.reason.startswith("leak: ")]
    lines += [f"- {row.architecture.name}, {row.feature}: {markdown(row.cell.reason[6:])}" for row in leaks] or [
        "None."
    ]
    lines += ["", "## What is wrong or unclear", ""]
    bad = [row for name in order for row in built[name].values() if row.cell.code in ("wrong", "unclear")]
    lines += [f"- {row.architecture.name}, {row.feature}: {markdown(row.cell.reason)}" for row in bad] or ["Nothing."]
    lines += ["", "## Not built", ""]
    lost = [cells["build"] for cells in classes.values() if "build" in cells]
    lines += [f"- {row.architecture.name}: {markdown(row.cell.reason)}" for row in lost]
    path.write_text("\n".join(lines) + "\n")


def _popularity(model_type: str) -> int:
    return POPULAR.index(model_type) if model_type in POPULAR else len(POPULAR)
