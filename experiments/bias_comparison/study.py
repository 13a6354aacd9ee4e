"""One run of the comparison: an arm, a learning rate and a seed on one part, trained and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from attnflow._core.progress import Progress
from attnflow.bias.kind import layer_biases
from attnflow.models import load_model
from experiments.bias_comparison import probes
from experiments.bias_comparison.arms import Arm, arm_of, count_trained, fitted
from experiments.bias_comparison.data import Rows, Texts, texts_of
from experiments.bias_comparison.maps import look_at_sums, map_of, similarity, strength
from experiments.bias_comparison.probes import IGNORED, PROBES
from experiments.bias_comparison.settings import CHANGES, Comparison, Part
from experiments.bias_comparison.shuffle import shuffled
from experiments.geometry_init.model import build, token_losses
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan, Read, Record, swept
from experiments.runner.processes import launched
from experiments.runner.saved import newest
from experiments.runner.study import taken
from experiments.runner.training import Loop, cosine, decayed, train

_WARMUP = 20
_EVALUATED = 64  # sequences of a pass
_CHOOSING, _RESULTS = 2**40, 2**41  # seeds of a probe's data that no step of training has
_SHUFFLED = ("guidance", "lowrank")  # arms whose trained bias is measured shuffled, too
DEPTHS, LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0), (1, 2, 4, 8)
DISTRACTORS = (0, 3, 4, 5)


def setup(config: Comparison) -> Setup:
    """For each part every arm with every rate on the first seed, then, seed by seed, with its best rate."""
    runs = {part.name: Runs(config, part) for part in config.parts}
    texts = texts_of(config) if any(part.kind != "probe" for part in config.parts) else None

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        part, arm = split_name(job.arm, runs)
        return runs[part].run(arm, cast(float, job.rate), cast(int, job.seed), folder, progress, texts)

    plans = [
        swept(
            [f"{part.name} {arm}" for arm in part.arms],
            part.rates,
            config.seeds,
            choosing_loss,
            choosing=1,
            widen=False,
        )
        for part in config.parts
    ]

    def then(read: Read) -> list[Job]:
        return sorted((job for plan in plans for job in plan.then(read)), key=lambda job: cast(int, job.seed))

    every = Plan(tuple(job for plan in plans for job in plan.first), then, sum(plan.count for plan in plans))
    return Setup(every, run)


def split_name(name: str, parts: Mapping[str, object]) -> tuple[str, str]:
    """(part, arm) of a job.

    >>> split_name("flip-flop every layer", {"flip-flop": None})
    ('flip-flop', 'every layer')
    """
    part = next(part for part in parts if name.startswith(f"{part} "))
    return part, name.removeprefix(f"{part} ")


def choosing_loss(run: Record) -> float:
    """By which the learning rate of an arm is chosen, on data that are not those of the results."""
    return run["choosing"]


@dataclass(frozen=True)
class Runs:
    """The runs of one part."""

    config: Comparison
    part: Part

    def run(
        self, name: str, rate: float, seed: int, folder: Path, progress: Progress, texts: Texts | None
    ) -> Mapping[str, object]:
        """Train one arm and measure it; the same whenever it is called."""
        part, config = self.part, self.config
        model = self._start(name, seed, folder, progress, texts)
        rows = _rows(self.part, name, texts)
        arm = arm_of(model, "guidance" if name in CHANGES else name, part.hidden_dim, part.layers)
        with fitted(model, arm, seed, part.trained) as trained:
            if part.trained == "additions" and count_trained(trained) != arm.parameters:
                raise AssertionError(f"{name} trains {count_trained(trained)} parameters, counted {arm.parameters}")
            if name in CHANGES:
                _restore_guidance(trained, folder.parent / _start_name(part, seed, guided=True))
            before = map_of(trained, texts.new.test) if name in CHANGES and texts is not None else None

            def measure(now: nn.Module, step: int) -> dict[str, object]:
                del step
                return self._measure(now, rows, _RESULTS)

            loop = Loop(
                part.steps,
                rate,
                cosine(part.steps, min(_WARMUP, part.steps // 10), 0.1),
                parts=part.passes,
                log_every=config.measure_every,
                measure_every=config.measure_every,
                save_every=config.save_every,
            )
            identity = {"part": part.name, "arm": arm.to_dict(), "rate": rate, "steps": part.steps}
            course = train(
                trained, _optimiser(trained), self._losses(rows, seed), loop, folder, seed=seed, identity=identity,
                measure=measure, progress=progress,
            )  # fmt: skip
            with launched().precision():
                choosing = self._measure(trained, rows, _CHOOSING)["loss"]
                more: dict[str, object] = {}
                if before is not None and texts is not None:
                    more["kept"] = similarity(before, map_of(trained, texts.new.test))
                with torch.no_grad():
                    more |= self._extras(trained, arm, rows, seed)
        return {
            "part": part.name,
            "arm": name,
            "parameters": arm.parameters,
            "measured": course.measured,
            "choosing": choosing,
            "extras": more,
            "seconds": course.seconds,
        }

    def _start(self, name: str, seed: int, folder: Path, progress: Progress, texts: Texts | None) -> Any:
        """The model that an arm is added to: all arms of a seed have the same one."""
        part = self.part
        if isinstance(part.model, str):
            model, _ = load_model(part.model, dtype=self.config.dtype)
            return cast(Any, model).to(launched().home)
        model = self._fresh(seed, texts)
        if part.start:
            guided = name in CHANGES
            place = folder.parent / _start_name(part, seed, guided)
            place.mkdir(parents=True, exist_ok=True)
            schedule = cosine(part.start, min(_WARMUP, part.start // 10), 0.1)
            every = self.config.measure_every
            loop = Loop(part.start, part.start_rate, schedule, log_every=every, save_every=part.start)
            rows = _rows(part, "", texts)
            arm = arm_of(model, "guidance" if guided else "plain", part.hidden_dim, part.layers)
            with taken(place / "lock", True, launched()), fitted(model, arm, seed, "all") as trained:
                identity = {"model": dict(part.model), "start": part.start, "guided": guided}
                train(
                    trained, _optimiser(trained), self._losses(rows, 1000 + seed), loop, place, seed=seed,
                    identity=identity, progress=progress,
                )  # fmt: skip
        return model

    def _fresh(self, seed: int, texts: Texts | None) -> Any:
        part, sizes = self.part, dict(cast("Mapping[str, Any]", self.part.model))
        vocabulary = probes.VOCABULARY if texts is None or part.kind == "probe" else texts.vocabulary
        if part.kind == "masked":
            sizes |= {"vocab_size": vocabulary, "max_position_embeddings": self.config.length}
            return build(sizes, "default", "masked", seed).to(launched().home)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=4096, use_cache=False, **sizes)
            model: Any = LlamaForCausalLM(config)
            return model.to(launched().home)

    def _losses(self, rows: Rows | None, seed: int) -> Any:
        part = self.part

        def losses(now: nn.Module, step: int, number: int) -> dict[str, Tensor]:
            place = step * part.passes + number
            if rows is None:
                drawn = PROBES[part.name](part.batch_size, torch.Generator().manual_seed(seed * 2**20 + place))
                logits, labels = _answers(now, drawn.tokens, drawn.labels)
                return {"loss": functional.cross_entropy(logits, labels)}
            batch = rows.batch(seed, place, part.batch_size)
            chance = torch.Generator().manual_seed(seed * 2**32 + place)
            return {"loss": _text_losses(now, part, rows, batch, chance).mean()}

        return losses

    @torch.no_grad()
    def _measure(self, now: nn.Module, rows: Rows | None, which: int) -> dict[str, object]:
        """Held-out loss, and of a probe the share of right answers."""
        now.eval()
        if rows is None:
            drawn = PROBES[self.part.name](self.config.tested, torch.Generator().manual_seed(which))
            return _scores(now, drawn)
        held = rows.test if which == _RESULTS else rows.choosing
        chance = torch.Generator().manual_seed(0)  # the same tokens are masked for all
        pieces = held.split(_EVALUATED)
        return {"loss": float(torch.cat([_text_losses(now, self.part, rows, some, chance) for some in pieces]).mean())}

    def _extras(self, now: nn.Module, arm: Arm, rows: Rows | None, seed: int) -> dict[str, object]:
        """What is measured of a trained model beside its loss."""
        more: dict[str, object] = {}
        now.eval()
        if arm.bias is not None and arm.name in _SHUFFLED and self.part.kind == "text":
            for how in ("queries", "keys"):
                with shuffled(now, how, seed):
                    more[f"{how} shuffled"] = self._measure(now, rows, _RESULTS)["loss"]
        if arm.bias is not None and rows is not None and next(layer_biases(now), None) is not None:
            more["strength"] = {str(layer): b for layer, b in strength(now, rows.test[:8]).items()}
        if self.part.name == "recall":
            more["distractors"] = {
                str(count): _scores(now, probes.recall(self.config.tested, _generator(), distractors=count))["accuracy"]
                for count in DISTRACTORS
            }
            more["depth"] = {
                f"{length}x {depth:g}": _scores(
                    now,
                    probes.recall(
                        -(-self.config.tested // 8), _generator(), context=probes.CONTEXT * length, depth=depth
                    ),
                )["accuracy"]
                for length in LENGTHS
                for depth in DEPTHS
            }
        if self.part.name == "sums" and arm.name in ("plain", "alibi", "guidance"):
            more["sums"] = look_at_sums(now, _generator())
        return more


def _start_name(part: Part, seed: int, guided: bool) -> str:
    # Parts with the same model and start share it.
    return f"start-{'guided-' if guided else ''}{seed}"


def _restore_guidance(model: nn.Module, place: Path) -> None:
    """The trained guidance of the start; `fitted` has made a fresh one."""
    checkpoint = newest(place)
    if checkpoint is None:
        raise FileNotFoundError(f"{place} holds no checkpoint of the start: remove it, and it is made again")
    saved = load_file(checkpoint / "model.safetensors")
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _rows(part: Part, name: str, texts: Texts | None) -> Rows | None:
    if part.kind == "probe" or texts is None:
        return None
    return texts.new if name == "new text" or (part.name == "tuned" and name) else texts.old


def _text_losses(now: nn.Module, part: Part, rows: Rows, tokens: Tensor, chance: torch.Generator) -> Tensor:
    """Loss of each predicted token in nats."""
    if part.kind == "masked":
        return token_losses(now, tokens, "masked", rows.mask_token, chance)
    tokens = tokens.to(next(now.parameters()).device)
    logits = cast(Any, now)(input_ids=tokens, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")


def _answers(now: nn.Module, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, labels) where the model has to answer."""
    device = next(now.parameters()).device
    logits = cast(Any, now)(input_ids=tokens.to(device), use_cache=False).logits[:, :-1]
    following = labels[:, 1:].to(device)
    asked = following != IGNORED
    return logits[asked], following[asked]


@torch.no_grad()
def _scores(now: nn.Module, drawn: probes.Sequences) -> dict[str, object]:
    parts = [
        _answers(now, *some)
        for some in zip(drawn.tokens.split(_EVALUATED), drawn.labels.split(_EVALUATED), strict=True)
    ]
    logits, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    right = (logits.argmax(dim=-1) == labels).float().mean()
    return {"loss": float(functional.cross_entropy(logits, labels)), "accuracy": float(right)}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_RESULTS)


def _optimiser(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decayed(model, 0.01), betas=(0.9, 0.98))
