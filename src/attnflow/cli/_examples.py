"""An example for each help page; each runs as it stands in an empty folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_TASK: Final = """{
  "inputs": [{"id": 5, "position": 0}, {"id": 6, "position": 1}],
  "labels": [{"position": 0, "target": {"id": 6, "position": 1}}],
  "mask": {"name": "causal", "parameters": {"n": 2}}}"""
_ROW: Final = '{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}'
_BIAS: Final = """python -c 'import attnflow as af; m = af.load_model("smollm2-135m").model; (
    af.bias.attach(m, af.bias.KeyConfig()), af.bias.save(m, "my-bias"))' && attnflow bias show my-bias"""
_TRACE: Final = 'attnflow knowledge trace smollm2-135m "The capital of France is" --count 5'
_BUILD: Final = "attnflow knowledge build"  # a store for each example, as none is built twice

EXAMPLES: Final[Mapping[str, str]] = {
    "": "attnflow mask show causal --n 8",
    "explain": (
        'attnflow explain smollm2-135m "When Mary and John went to the store, John gave a drink to" '
        '--answer " Mary" --against " John" -o mary.html'
    ),
    "report": "attnflow report sliding_window --n 16 --set window=4 -o window.html",
    "studio": "attnflow studio causal --n 16",
    "doctor": "attnflow doctor",
    "mask": "attnflow mask show sliding_window --n 8 --set window=3",
    "mask list": "attnflow mask list",
    "mask show": 'attnflow mask show smollm2-135m --text "The capital of France is"',
    "mask check": f"echo '{_TASK}' | attnflow mask check -",
    "mask merge": "attnflow mask merge butterfly --tokens 5",
    "mask export": "attnflow mask export causal --n 8 --to flashmask",
    "mask debug": "attnflow mask export causal --n 8 --to varlen --json > mask.json && attnflow mask debug mask.json",
    "audit": "attnflow audit smollm2-135m --tokens 16",
    "audit batch": f"echo '{_ROW}' > rows.jsonl && attnflow audit batch rows.jsonl",
    "bias": _BIAS,
    "bias show": _BIAS,
    "geometry": "attnflow geometry smollm2-135m",
    "geometry score": "attnflow geometry score smollm2-135m --per-head -o scores.csv",
    "geometry attribute": 'attnflow geometry attribute smollm2-135m "The capital of France is" --layer 24 --head 4',
    "knowledge": _TRACE,
    "knowledge build": f"{_BUILD} my-store smollm2-135m",
    "knowledge stats": f"{_BUILD} counted smollm2-135m && attnflow knowledge stats counted",
    "knowledge export": f"{_BUILD} exported smollm2-135m && attnflow knowledge export exported entries.csv",
    "knowledge edit": (
        'attnflow knowledge edit smollm2-135m --prompt "The capital of France is" --answer " Rome" --subject France '
        "-o rome.patch"
    ),
    "knowledge trace": _TRACE,
}
_WORD: Final = re.compile(r"""(?:-[-\w]+ (?!-))?(?:'[^']*'|"[^"]*"|[^\s'"])+""")  # an option stays with its value


def example(page: str, width: int = 74) -> str:
    """The end of a help page: lines that a shell joins, as a line that click wraps may end inside quotes."""
    first, *words = _WORD.findall(EXAMPLES[page])
    lines = [first]
    for word in words:
        if len(lines[-1].rpartition("\n")[2]) + len(word.partition("\n")[0]) < width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {word}")
    return "Example:\n\n\b\n" + "\n".join(lines)
