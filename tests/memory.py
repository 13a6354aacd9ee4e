"""How much memory a process of its own has taken at most."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Source for such a process: `ru_maxrss` would not do, because Linux hands the parent's peak down to it.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
"""


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made._is_view():
            self.numel = max(self.numel, made.numel())
        return made
