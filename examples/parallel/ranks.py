"""What the scripts of this folder share: lines that ranks print in turn, and the memory that a rank takes."""

import sys

import torch.distributed as dist
from torch import nn


def say(text: str) -> None:
    """Print a line of each rank, in the order of the ranks, from rank 0."""
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, f"rank {dist.get_rank()}: {text}")
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)
    dist.barrier()  # a rank that ends with an exit code other than 0 makes torchrun end the others


def memory(model: nn.Module) -> str:
    """The parameters that lie on this rank, of all, and the most memory that its process has taken."""
    held = sum(getattr(p, "to_local", p.detach)().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    return f"{held:,} of {whole:,} parameters, peak {peak():,.0f} MiB"


def peak() -> float:
    """The largest resident set of this process, in MiB."""
    try:
        with open("/proc/self/status") as status:  # on Linux `ru_maxrss` includes the peak of the parent
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
