"""What is trained: families of tasks, dense and sparse, and how much of what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

import attnflow as af
from attnflow.tasks import Task

Family = Literal["causal", "blocks", "butterfly", "gaps", "random gaps"]
TaskOf = Callable[[Sequence[int]], Task]


@dataclass(frozen=True)
class Arm:
    family: Family  # of tasks; "gaps" are butterflies whose centre is a block, masked whole or, "random gaps", in part
    layers: int  # of the model
    block: int = 1  # tokens that "blocks" predicts at once; of a gap
    warm: bool = False  # whether the first half of the steps is causal
    # of a sparse realisation, at most: the narrowest window that has it; None for the dense mask
    depth: int | None = None
    repeated: bool = False  # whether the second half of each row is the first once more

    @property
    def decodes(self) -> bool:
        """Whether a decoder computes what was trained: those of the library run dense masks, from the left."""
        return self.family in ("causal", "blocks") and self.depth is None and not self.repeated

    @property
    def random(self) -> bool:
        """Whether a task is drawn anew each time, so that no two rows share its structure."""
        return self.family == "random gaps"

    def task(self, mask_token: int) -> TaskOf:
        """From token ids to the merged task, sparse if the arm is; the window is chosen once for each length."""
        family: Callable[[Sequence[int]], Sequence[Task]] = {
            "causal": af.tasks.causal_lm,
            "blocks": partial(af.tasks.block_two_stream, block=self.block, mask_token=mask_token),
            "butterfly": af.tasks.butterfly,
            "gaps": partial(af.tasks.butterfly, block=self.block, mask_token=mask_token),
            "random gaps": partial(af.tasks.butterfly, block=self.block, masked="random", mask_token=mask_token),
        }[self.family]
        windows: dict[int, int] = {}

        def made(tokens: Sequence[int]) -> Task:
            dense = af.tasks.merge(family(tokens)).task
            if self.depth is None:
                return dense
            if len(tokens) not in windows:
                windows[len(tokens)] = narrowest(dense, self.depth)
            return dense.sparsified(window=windows[len(tokens)])

        return made


def narrowest(task: Task, depth: int) -> int:
    """The smallest window that gives a task's sparse form at most that depth; a wider one never has more.

    >>> import attnflow as af
    >>> task = af.tasks.merge(af.tasks.causal_lm(range(64))).task
    >>> [narrowest(task, depth) for depth in (2, 4, 8, 62)]
    [32, 17, 9, 1]
    """
    low, high = 1, task.size
    if task.sparsified(window=high).depth > depth:
        raise ValueError(f"no window gives {task!r} a depth of {depth}: its own is {task.depth}")
    while low < high:
        middle = (low + high) // 2
        if task.sparsified(window=middle).depth <= depth:
            high = middle
        else:
            low = middle + 1
    return low


def arms(layers: Sequence[int], blocks: Sequence[int], depths: Sequence[int], repeats: Sequence[int]) -> dict[str, Arm]:
    """All arms by name, the main ones first.

    Args:
        layers: of the models; the last number is that of the main ones, the others have depths alone.
        blocks: tokens per block.
        depths: of sparse causal masks.
        repeats: likewise, on rows that repeat.
    """
    most = layers[-1]
    main = {
        "causal": Arm("causal", most),
        **{f"block {block}": Arm("blocks", most, block) for block in blocks},
        "butterfly": Arm("butterfly", most),
    }
    warm = {f"warm {block}": Arm("blocks", most, block, warm=True) for block in blocks}
    sparse = {f"sparse {name}": Arm(arm.family, most, arm.block, depth=most) for name, arm in main.items()}
    found = main | warm | sparse
    for count in layers:
        if count != most:
            found[f"causal of {count} layers"] = Arm("causal", count)
        for depth in depths:
            if (count, depth) != (most, most):  # which is "sparse causal"
                found[f"depth {depth} of {count} layers"] = Arm("causal", count, depth=depth)
    for depth in (None, *repeats):
        name = "repeats" if depth is None else f"repeats depth {depth}"
        found[name] = Arm("causal", most, depth=depth, repeated=True)
    return found


@dataclass(frozen=True)
class Cost:
    positions: int  # of the merged sequence
    labels: int  # that it trains
    pairs: int  # (query, key) that its mask allows
    depth: int  # of the mask
    # of forward and backward pass, as of kernels that skip all pairs that are not allowed and a head that runs on
    # positions with labels alone
    flops: int


def cost(task: Task, sizes: Mapping[str, int]) -> Cost:
    """Of a row; a multiply-add is 2, and a training step three times its forward pass.

    Args:
        task: merged.
        sizes: of the model: layers, width, inner (of the feed-forward layers), vocabulary.
    """
    width = sizes["width"]
    matrices = sizes["layers"] * (4 * width**2 + 3 * width * sizes["inner"])
    labels = len(task.targets)
    forward = 2 * matrices * task.size + 4 * sizes["layers"] * width * task.mask.nnz
    forward += 2 * width * sizes["vocabulary"] * labels
    return Cost(task.size, labels, task.mask.nnz, task.depth, 3 * forward)


def build(sizes: Mapping[str, int], length: int, seed: int) -> nn.Module:
    """A Llama of these sizes, with heads of 32 or, as from a width of 512 on, 64 numbers; takes averaged tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = sizes["width"]
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=width,
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=max(1, width // (64 if width >= 512 else 32)),
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    af.tasks.average_embeddings(model)
    return model
