"""Which modules move information between positions: attention and other mixers, by their code or name."""

from __future__ import annotations

import inspect
import re
from types import CodeType
from typing import Final

from torch import nn

INTERFACE: Final = "ALL_ATTENTION_FUNCTIONS"
CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_ATTENTION: Final = re.compile(r"Att(entio)?n")
_MIXER: Final = re.compile(
    r"Mamba|SSM(?![a-z])|Delta(Net|Attention)|Linear(Recurrent)?Attention|Lightning|Recurrent|RgLru|Rwkv|Retention"
    r"|ShortConv|LongConv|Hyena|[sm]LSTM"
)


def attends(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention interface, or is named so, as those that compute it themselves."""
    return calls_interface(module) or _ATTENTION.search(type(module).__name__) is not None


def moves_between_positions(module: nn.Module) -> bool:
    """Whether a module is recurrent, a state space or a convolution wider than 1; attention does not count."""
    if calls_interface(module):
        return False
    if isinstance(module, CONVOLUTIONS):
        return max(module.kernel_size) > 1
    name = type(module).__name__
    return isinstance(module, nn.RNNBase) or (_MIXER.search(name) is not None and "Norm" not in name)


def calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return isinstance(code, CodeType) and INTERFACE in code.co_names
