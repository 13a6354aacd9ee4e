"""Shared prefixes on SmolLM2-135M against the software whose calls they take: trl's GRPO, DPO and SFT, and lm-eval.

Each function prepares one side, ours after a comparison of its numbers with the other's, and returns what is timed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import attnflow as af

_QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}


class Noted:
    """What is timed, with what was found when it was checked."""

    def __init__(self, run: Callable[[], object], note: str) -> None:
        self.run, self.note = run, note

    def __call__(self) -> object:
        return self.run()


def grpo_step(share: bool, group: int, prompt: int, completion: int, packed: bool = False) -> Callable[[], object]:
    """Loss and gradients of one batch of rollouts by trl's own trainer, the model shared or as it is.

    With `packed` its log-probabilities come of one row of all sequences, as trainers at scale have them and trl's not.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = af.load_model("smollm2-135m")
    model.float().train()
    arguments = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=group,
        per_device_train_batch_size=group,
        **_QUIET,
    )
    data = Dataset.from_dict({"prompt": ["one", "two"]})
    trainer = GRPOTrainer(model, lambda **_: [0.0] * group, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.current_gradient_accumulation_steps = 1  # what `train` sets
    if packed:
        trainer._get_per_token_logps_and_entropies = _of_one_row
    tokens = tokenizer(af.models.sample_text("hamlet"), return_tensors="pt")["input_ids"][0]
    rest = tokens[prompt : prompt + group * completion].reshape(group, completion)
    inputs = {
        "prompt_ids": tokens[:prompt].expand(group, prompt),
        "prompt_mask": torch.ones(group, prompt, dtype=torch.int64),
        "completion_ids": rest,
        "completion_mask": torch.ones_like(rest),
        "advantages": torch.linspace(-1, 1, group),
        "num_items_in_batch": torch.tensor(rest.numel()),
    }

    def log_probs() -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], rest], dim=1)
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), completion)[0]

    return _step(trainer, inputs, log_probs, share)


def grpo_whole(share: bool, group: int, prompt: int, completion: int) -> Callable[[], object]:
    """One step of `train`: the group's completions are generated, scored and trained on, and the optimiser steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = af.load_model("smollm2-135m")
    arguments = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=group,
        per_device_train_batch_size=group,
        max_completion_length=completion,
        generation_kwargs={"min_new_tokens": completion},
        max_steps=1,
        learning_rate=0.0,  # each repeat trains the same model
        **_QUIET,
    )
    text = _texts(tokenizer, prompt)(0, 1, prompt)
    reward = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
    trainer = GRPOTrainer(
        model.float(),
        reward,
        arguments,
        train_dataset=Dataset.from_dict({"prompt": text * 2}),
        processing_class=tokenizer,
    )

    def run() -> object:
        with contextlib.redirect_stdout(None):
            return trainer.train()

    if not share:
        return run
    handle = af.tasks.share_prefixes(trainer)
    run()
    assert handle.report.shared, handle
    return Noted(run, f"{handle.report.last_before} -> {handle.report.last_after} tokens; {_load()}")


def _of_one_row(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, **_: object
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Log-probabilities and entropies of the completions, as trl's trainer computes them but in one row."""
    assert bool(mask.all())
    labels = ids.clone()
    labels[:, :-length] = -100
    places = torch.arange(ids.shape[1]).expand_as(ids)
    row = {"input_ids": ids, "position_ids": places, "labels": labels}
    output = model(**{name: value.reshape(1, -1) for name, value in row.items()}, fused_lm_head=True)
    read = [
        F.pad(value, (0, 1)).reshape(ids.shape)[:, -length - 1 : -1] for value in (output.log_probs, output.entropy)
    ]
    return read[0], read[1], None


def dpo_step(share: bool, pairs: int, prompt: int, completion: int) -> Callable[[], object]:
    """Loss and gradients of one batch of pairs of answers, each pair to its own prompt, by trl's own trainer."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = af.load_model("smollm2-135m")
    model.float().train()
    words = _texts(tokenizer, pairs * prompt + 2 * pairs * completion)
    prompts, answers = words(0, pairs, prompt), words(pairs * prompt, 2 * pairs, completion)
    data = Dataset.from_dict({"prompt": prompts, "chosen": answers[::2], "rejected": answers[1::2]})
    arguments = DPOConfig(tempfile.mkdtemp(), per_device_train_batch_size=pairs, max_length=None, **_QUIET)
    trainer = DPOTrainer(model, copy.deepcopy(model), arguments, train_dataset=data, processing_class=tokenizer)
    return _step(trainer, _batch(trainer), None, share)


def sft_step(share: bool, rows: int, prompt: int, completion: int, packed: bool = False) -> Callable[[], object]:
    """Loss and gradients of one batch of answers to one prompt by trl's own trainer, on the answers alone."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = af.load_model("smollm2-135m")
    model.float().train()
    words = _texts(tokenizer, prompt + rows * completion)
    data = Dataset.from_dict({"prompt": words(0, 1, prompt) * rows, "completion": words(prompt, rows, completion)})
    arguments = SFTConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=rows, max_length=None, padding_free=packed, **_QUIET
    )
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    return _step(trainer, _batch(trainer), None, share)


def _texts(tokenizer: Any, tokens: int) -> Callable[[int, int, int], list[str]]:
    """Texts of so many tokens each, one after the other from a place of a play on."""
    ids = tokenizer(af.models.sample_text("hamlet"))["input_ids"][:tokens]
    return lambda at, count, size: [tokenizer.decode(ids[at + k * size : at + (k + 1) * size]) for k in range(count)]


def _batch(trainer: Any) -> dict[str, Any]:
    trainer.current_gradient_accumulation_steps = 1  # what `train` sets
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def _step(
    trainer: Any, inputs: dict[str, Any], log_probs: Callable[[], torch.Tensor] | None, share: bool
) -> Callable[[], object]:
    """Loss and gradients of a batch; shared ones after they were compared with those of the trainer as it is."""
    model = trainer.model
    model.gradient_checkpointing_enable()  # as `train` does, which is not called
    assert model.is_gradient_checkpointing
    assert model.training

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = trainer.compute_loss(model, dict(inputs))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    if not share:
        return run
    before = None if log_probs is None else log_probs()
    loss, held = run()
    gradients = {name: g.clone() for name, g in held.items()}
    reports = [af.tasks.share_prefixes(trainer)]
    if getattr(trainer, "ref_model", None) is not None:
        reports.append(af.tasks.share_prefixes(trainer.ref_model))
    after = None if log_probs is None else log_probs()
    shared, others = run()
    rounding = 1e3 * torch.finfo(torch.float32).eps
    largest = max(float(g.abs().max()) for g in gradients.values())
    off = max(float((g - others[name]).abs().max()) for name, g in gradients.items()) / largest
    assert off <= rounding, off
    assert abs(float(shared - loss)) <= rounding * max(1.0, abs(float(loss)))
    report = reports[0].report
    assert not report.stock, report.stock
    note = f"{report.last_before} -> {report.last_after} tokens, gradients {off:.0e}; {_load()}"
    if before is not None and after is not None:
        away = float((before - after).abs().max())
        assert away <= rounding * float(before.abs().max()), away
        note += f", log-probs {away:.0e}"
    return Noted(run, note)


def _load() -> str:
    return f"a load of {os.getloadavg()[0]:.1f} on the machine"


def hellaswag(share: bool, questions: int, shots: int) -> Callable[[], object]:
    """lm-eval's hellaswag as it ships, on passages of Shakespeare that go on in four ways."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from experiments.evaluation.harness import SharedPrefixLM

    folder = Path(tempfile.mkdtemp())
    words = af.models.sample_text("hamlet").split()

    def document(number: int) -> dict[str, object]:
        at = 1_000 * number
        endings = [" ".join(words[at + 300 * k + 60 : at + 300 * k + 75]) for k in range(4)]
        passage = {"ctx_a": " ".join(words[at : at + 50]), "ctx_b": " ".join(words[at + 50 : at + 60])}
        return {**passage, "activity_label": "Shakespeare", "endings": endings, "label": "0", "ind": number}

    data = folder / "documents.jsonl"
    data.write_text("\n".join(json.dumps(document(number)) for number in range(questions)))
    shipped = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    (folder / "here.yaml").write_text(
        f"include: {shipped}\ntask: hellaswag_here\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{train: {data}, validation: {data}}}, cache_dir: {folder}}}\n"
    )
    model, tokenizer = af.load_model("smollm2-135m")
    hosts = {
        kind: kind(pretrained=model.float(), tokenizer=tokenizer, batch_size=8, device="cpu")
        for kind in ([SharedPrefixLM, HFLM] if share else [HFLM])
    }

    def run(kind: type = SharedPrefixLM if share else HFLM) -> Any:
        with contextlib.redirect_stdout(None):
            return lm_eval.simple_evaluate(
                model=hosts[kind],
                tasks=["hellaswag_here"],
                task_manager=TaskManager(include_path=str(folder)),
                num_fewshot=shots,
                log_samples=True,
                bootstrap_iters=0,
            )

    if not share:
        return run
    answers = []
    for kind in hosts:
        samples = run(kind)["samples"]["hellaswag_here"]
        answers.append([float(value) for sample in samples for value, _ in sample["filtered_resps"]])
    away = max(abs(a - b) / abs(b) for a, b in zip(*answers, strict=True))
    assert away <= 1e3 * torch.finfo(torch.float32).eps, away
    host = hosts[SharedPrefixLM]
    return Noted(run, f"{host.tokens_before} -> {host.tokens_after} tokens, log-likelihoods {away:.0e}")
