"""Facts taught in three ways, then training on other text: what is left of them, and what the teaching cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from attnflow._core.progress import Progress
from attnflow.knowledge import edit, from_ffn, to_ffn
from attnflow.knowledge.editing.edit_targets import answers_of, token_ids
from attnflow.models import load_model, sample_text
from attnflow.models.subject import Subject
from experiments.editing.facts import RELATIONS, Case, cases, prompt_of
from experiments.editing.study import answers, as_taught, hamlet
from experiments.knowledge_ablation.facts import known_facts, text_losses
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, repeated
from experiments.runner.training import Loop, linear, train

WAYS: Final = ("edit", "LoRA", "full")  # of teaching
_ENOUGH: Final = 0.95  # probability of every answer at which teaching by gradients ends, as the edit's descent does


@dataclass(frozen=True)
class Lasting:
    """One experiment. The defaults are the scale "lasting"."""

    model: str = "smollm2-135m"  # as `af.models.load_model` takes it
    seeds: tuple[int, ...] = (0, 1, 2)  # of the text's order; each has facts of its own, one of every relation
    others: int = 4  # other facts of each relation that are asked for
    tokens: int = 4096  # of the model's own text, which the edit preserves
    text_tokens: int = 128  # of Hamlet, for the loss on other text
    rank: int = 8  # of LoRA, in all linear layers
    lora_rate: float = 1e-3
    full_rate: float = 2e-5
    most: int = 60  # steps of teaching by gradients, each of all facts
    steps: int = 200  # on other text: Shakespeare's sonnets
    length: int = 32  # tokens of the one row of a step
    rate: float = 1e-4  # at most; it rises for a tenth of the steps, then falls to 0
    measure_every: int = 100


def lasting() -> Lasting:
    """Three seeds of three ways, 45 minutes of one CPU core."""
    return Lasting()


def miniature(config: Lasting) -> Lasting:
    return replace(config, tokens=64, text_tokens=16, most=2, steps=2, length=8, measure_every=1)


class Classes:
    """For each seed, a model as it was loaded, and its facts."""

    def __init__(self, config: Lasting) -> None:
        self.config = config
        model, self.tokenizer = self.loaded()
        every = cases(known_facts(model, self.tokenizer, RELATIONS), len(config.seeds))
        turns = len({case.fact.relation for case in every})
        chosen = {seed: every[place * turns :][:turns] for place, seed in enumerate(config.seeds)}
        self.cases = {
            seed: [replace(case, relation=case.relation[: config.others]) for case in some]
            for seed, some in chosen.items()
        }
        self.text, self.sonnets = hamlet(self.tokenizer, config.text_tokens), token_ids(self.tokenizer, sample_text())

    def loaded(self) -> tuple[nn.Module, Any]:
        loaded = load_model(self.config.model, dtype="float32")
        return cast(nn.Module, loaded.model).eval(), loaded.tokenizer

    def run(self, job: Job, folder: Path, progress: Progress) -> dict[str, Any]:
        """Teach the facts of a seed, then train on text; measured before, and as training goes on."""
        seed, config = cast(int, job.seed), self.config
        mine, (model, _) = self.cases[seed], self.loaded()
        before = self._measured(model, mine)
        torch.manual_seed(seed)
        model, spent = self._taught(job.arm, model, mine)
        optimiser = torch.optim.AdamW([one.requires_grad_() for one in model.parameters()], weight_decay=0.01)

        def losses(model: nn.Module, step: int, part: int) -> dict[str, Tensor]:
            draw = random.Random(f"{seed} {step} {part}")
            start = draw.randrange(len(self.sonnets) - config.length)
            ids = torch.tensor([self.sonnets[start : start + config.length]])
            return {"text": cast(Any, model)(input_ids=ids, labels=ids, use_cache=False).loss}

        loop = Loop(
            config.steps, config.rate, linear(config.steps, config.steps // 10), measure_every=config.measure_every,
            save_every=0,
        )  # fmt: skip
        course = train(
            *(model, optimiser, losses, loop, folder), seed=seed, identity={"way": job.arm}, progress=progress,
            measure=lambda model, _: self._measured(model, mine),
        )  # fmt: skip
        facts = [case.fact.subject for case in mine]
        return {"way": job.arm, "facts": facts, "before": before, "steps": spent, "measured": course.measured}

    def _taught(self, way: str, model: nn.Module, mine: Sequence[Case]) -> tuple[nn.Module, int | None]:
        """The model that says the new answers, plain again, and the steps that it took."""
        config = self.config
        if way == "edit":
            facts = [as_taught(case.fact) for case in mine]
            converted = from_ffn(cast(Any, model)).eval()
            edit(converted, facts, tokens=config.tokens, tokenizer=self.tokenizer)
            return to_ffn(converted), None
        if way == "full":
            return model, self._trained(model, mine, config.full_rate)
        settings = LoraConfig(
            r=config.rank, lora_alpha=2 * config.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(cast(Any, model), settings)
        spent = self._trained(cast(nn.Module, adapted), mine, config.lora_rate)
        return cast(nn.Module, cast(Any, adapted).merge_and_unload()), spent

    def _trained(self, model: nn.Module, mine: Sequence[Case], rate: float) -> int:
        """Steps on all facts at once, until every answer is likely."""
        prompts = [token_ids(self.tokenizer, prompt_of(case.fact)) for case in mine]
        wanted = [token_ids(self.tokenizer, case.fact.other, answer=True) for case in mine]
        optimiser = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], rate, weight_decay=0.0)
        for step in range(self.config.most):
            now = answers_of(Subject(model), prompts, wanted)
            if bool(now.first.all()) and float(now.scores.detach().min().exp()) > _ENOUGH:
                return step
            optimiser.zero_grad()
            (-now.scores.mean()).backward()
            optimiser.step()
        return self.config.most

    @torch.no_grad()
    def _measured(self, model: nn.Module, mine: Sequence[Case]) -> dict[str, Any]:
        subject = Subject(model, self.tokenizer)
        return {
            "cases": [answers(subject, case) for case in mine],
            "text": float(text_losses(model, self.text).mean()),
        }


def setup(config: Lasting) -> Setup:
    """A job for each way and seed; seeds in turn."""
    classes = Classes(config)
    about = {"facts": {str(seed): [case.fact.subject for case in some] for seed, some in classes.cases.items()}}
    return Setup(repeated(WAYS, config.seeds), classes.run, about)
