"""What people use today, to compare with: a probe of 64 tokens, and a check of the source.

The probe is that of nanochat 845: suffixes after seven prefixes are changed, and what is returned for a prefix must
stay. The other walks the syntax tree for the patterns that the static checker of parameter-golf 1603 lists. Both are
written anew from their descriptions.
"""

import ast
from functools import cache
from pathlib import Path

import torch

from tests.leaks.parts import VOCABULARY

PREFIXES = (1, 3, 7, 15, 31, 32, 63)


def probe_finds(function):
    """Whether what a function returns for a prefix of 64 tokens moves with what follows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (1, 64), generator=generator)
    base = function(ids)
    for prefix in PREFIXES:
        other = ids.clone()
        other[:, prefix:] = (ids[:, prefix:] + 1 + torch.arange(64 - prefix) % 7) % VOCABULARY
        rows = prefix - (64 - base.shape[1])  # of n - 1 scores row i is that of token i + 1
        if not torch.allclose(function(other)[:, :rows], base[:, :rows], rtol=1e-4, atol=1e-5):
            return True
    return False


@cache
def tree(path: Path):
    return ast.parse(path.read_text())


def sources(path, cause):
    """The syntax trees of a case's leaky and clean function, with the functions of the file that they name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == cause:
                    return [[each, *helpers(path, each)] for each in value.elts]
    raise AssertionError(cause)


def helpers(path, node):
    named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return [each for each in tree(path).body if isinstance(each, ast.FunctionDef) and each.name in named]


def suspicious(node):
    """Whether one node is of a kind that such a checker warns of."""
    if isinstance(node, ast.For):  # several passes over the text
        return any(isinstance(each, ast.Name) and "epoch" in each.id for each in ast.walk(node.iter))
    if isinstance(node, ast.Compare):  # an n-gram table that is asked for the target
        return any(isinstance(op, ast.In) for op in node.ops) and isinstance(node.left, ast.Tuple)
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    text = ast.unparse(node)
    return (
        name in ("flip", "backward", "step", "maximum", "minimum", "fft", "rfft", "solve", "LBFGS", "Counter")
        or (name == "scaled_dot_product_attention" and len(node.args) < 4 and "is_causal=True" not in text)
        or (name in ("mean", "sum", "std", "var", "median", "amax", "norm", "softmax") and "(1" in text)
        or (name in ("logsigmoid", "sigmoid") and "log_softmax" not in text)
        or "training=True" in text
    )


def source_check_finds(nodes):
    return any(suspicious(each) for node in nodes for each in ast.walk(node))
