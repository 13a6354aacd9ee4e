"""The rival that is trained: LoRA with as many parameters as the readers, on the facts, then on the edits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.knowledge.editing.edit_targets import answers_of, token_ids
from attnflow.models.subject import Subject
from experiments.facts.corpus import UNKNOWN
from experiments.reader.asking import said, scored
from experiments.reader.bench import Bench
from experiments.reader.questions import FRAMES, PROMPT
from experiments.reader.records import SEPARATOR, Record
from experiments.reader.world import World
from experiments.runner.training import Loop, cosine, train

_UNKNOWN_SHARE: Final = 0.2  # of questions about facts that are not there, as the readers' fit has them


def tuned(bench: Bench, folder: Path, progress: Progress) -> list[dict[str, object]]:
    """LoRA on stores of the sizes that the settings name, asked after the edits were trained, too."""
    config, ways = bench.config, list[dict[str, object]]()
    rank = rank_for(bench.model, bench.size_of_reader())
    asked = bench.world.questions({})
    _ = bench.known, bench.text  # of the model as it is
    for size, steps in zip(config.lora_sizes, config.lora_steps, strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(bench.seed)
            settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            model = cast(nn.Module, get_peft_model(cast(Any, bench.model), settings))
        try:
            for name, (facts, count) in _courses(bench.world, size, steps, config.lora_edit_steps).items():
                _train(bench, model, facts, count, folder / f"{name}-{size}", f"{name} {size} {bench.seed}", progress)
            answers = said(bench.model, bench.tokenizer, [one.prompt for one in asked], config.tokens, [])
            rows = scored(bench.tokenizer, asked, answers, None, [text == UNKNOWN for text in answers.texts])
            held = 4 * sum(one.numel() for one in model.parameters() if one.requires_grad)
            ways.append(bench.way("LoRA", size, rows, asked, lambda _, held=held: held))
        finally:
            cast(Any, model).unload()
    return ways


def rank_for(model: nn.Module, parameters: int) -> int:
    """The rank that gives adapters of all linear layers but the head nearly so many parameters, 1 at least."""
    head = cast(Any, model).get_output_embeddings()
    layers = [one for one in model.modules() if isinstance(one, nn.Linear) and one is not head]
    return max(1, round(parameters / sum(one.in_features + one.out_features for one in layers)))


def _courses(world: World, size: int, steps: int, edit_steps: int) -> dict[str, tuple[list[Record], int]]:
    """What is trained one after the other: the facts with some that are not there, then what the edits change."""
    unknown = world.filler[size : size + max(1, round(size * _UNKNOWN_SHARE / (1 - _UNKNOWN_SHARE)))]
    absent = [Record(f"{one.text.partition(SEPARATOR)[0]}{SEPARATOR}{UNKNOWN}") for one in unknown]
    changed = [one for one in world.items if one.group in ("corrected", "inserted", "deleted")]
    edits = [Record(f"{one.key}{SEPARATOR}{one.after or UNKNOWN}") for one in changed]
    return {"facts": ([*world.records(size), *absent], steps), "edits": (edits, edit_steps)}


def _train(
    bench: Bench, model: nn.Module, facts: Sequence[Record], steps: int, folder: Path, name: str, progress: Progress
) -> None:
    config, newline = bench.config, token_ids(bench.tokenizer, "\n")[-1]
    optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=config.lora_rate)

    def losses(model: nn.Module, step: int, part: int) -> dict[str, Tensor]:
        draw = random.Random(f"{name} {step} {part}")
        prompts, answers = list[list[int]](), list[list[int]]()
        for one in draw.sample(facts, min(config.lora_batch, len(facts))):
            key, _, value = one.text.partition(SEPARATOR)
            question = draw.choice(FRAMES).format(key=key)
            prompts.append(token_ids(bench.tokenizer, PROMPT.format(question[0].upper() + question[1:])))
            answers.append([*token_ids(bench.tokenizer, value, answer=True), newline])
        return {"answer": -answers_of(Subject(model), prompts, answers).scores.mean()}

    loop = Loop(steps, config.lora_rate, cosine(steps, max(1, steps // 10)), save_every=20)
    train(
        *(model, optimiser, losses, loop, folder), seed=bench.seed, identity={"course": name, "facts": len(facts)},
        progress=progress,
    )  # fmt: skip
