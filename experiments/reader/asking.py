"""A model asked many questions at once: what is right of what it says, what else of it has changed, its cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow.knowledge.editing.edit_targets import token_ids
from attnflow.knowledge.layered import observed
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.store_reader import StoreReader
from experiments.knowledge_ablation.facts import RELATIONS, Fact, last_logits, text_losses
from experiments.reader.world import ABSENT, GROUPS, KINDS, WORDINGS, Asked

OTHER: Final = {name: RELATIONS[name] for name in ("language", "opposite")}  # capitals are edited here
_BATCH: Final = 16
Score = Mapping[str, object]
While = Callable[[Sequence[str]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Said:
    texts: list[str]  # the first line of each, without spaces around it
    first: list[int]  # the first token of each
    read: list[float]  # of a model with readers, the weight that lies on entries at the end of each prompt
    entries: list[int]  # and the id of the entry that has most of it


@torch.no_grad()
def said(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    tokens: int,
    readers: Sequence[StoreReader],
    during: While = lambda _: nullcontext(),
) -> Said:
    """Answers, greedily, of so many tokens at most.

    Args:
        model: as it is now.
        tokenizer: of it.
        prompts: of the questions.
        tokens: of an answer.
        readers: that are looked at.
        during: what holds while the model answers some of the prompts, side by side.
    """
    texts, first, read, entries = list[str](), list[int](), list[float](), list[int]()
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    ends = [tokenizer.eos_token_id, token_ids(tokenizer, "\n")[-1]]
    for start in range(0, len(order), _BATCH):
        rows = [token_ids(tokenizer, prompts[row]) for row in order[start : start + _BATCH]]
        width = max(map(len, rows))
        ids = torch.tensor([[ends[0]] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        shares: dict[int, Tensor] = {}

        def see(reading: LayerReading, shares: dict[int, Tensor] = shares) -> None:
            if reading.layer not in shares:  # of the prompt; later ones are of the answer
                shares[reading.layer] = reading.weights[:, -1].mean(dim=1)

        device = next(model.parameters()).device
        with observed([(one, see) for one in readers]), during([prompts[row] for row in order[start : start + _BATCH]]):
            out: Tensor = cast(Any, model).generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=tokens, do_sample=False,
                pad_token_id=ends[0], eos_token_id=ends,
            )  # fmt: skip
        new = out[:, width:]
        first += new[:, 0].tolist()
        texts += [
            str(tokenizer.decode(row, skip_special_tokens=True)).strip().partition("\n")[0].strip() for row in new
        ]
        if shares:
            mean = torch.stack(list(shares.values())).mean(dim=0)
            read += mean.sum(dim=1).tolist()
            entries += readers[0].every()[mean.argmax(dim=1).cpu()].tolist()
    back = sorted(range(len(order)), key=order.__getitem__)
    return Said(
        [texts[row] for row in back],
        [first[row] for row in back],
        [read[row] for row in back if read],
        [entries[row] for row in back if entries],
    )


def scored(
    tokenizer: Any, asked: Sequence[Asked], answers: Said, entry: Sequence[bool] | None, refused: Sequence[bool]
) -> list[Score]:
    """0 or 1 for each question of each kind, group and wording.

    "entry": the right fact was read first, or is in the context. "word": the first token is right. "whole": all tokens
    are right. "refused": no answer was given. "right": whole and not refused, or refused where the store does not have
    the answer. "old": the model said the value from before the edits.
    """
    rows: list[Score] = []
    for kind in KINDS:
        for group in GROUPS:
            for wording in WORDINGS:
                mine = [
                    place
                    for place, one in enumerate(asked)
                    if (one.item.kind, one.item.group, one.wording) == (kind, group, wording)
                ]
                if mine:
                    row = _scores([asked[place] for place in mine], mine, tokenizer, answers, entry, refused)
                    rows.append({"kind": kind, "group": group, "wording": wording, **row})
    return rows


def _scores(
    asked: Sequence[Asked],
    places: Sequence[int],
    tokenizer: Any,
    answers: Said,
    entry: Sequence[bool] | None,
    refused: Sequence[bool],
) -> dict[str, list[int]]:
    absent = asked[0].item.group in ABSENT
    refusals = [int(refused[place]) for place in places]
    row: dict[str, list[int]] = {"refused": refusals}
    if any(one.item.before for one in asked):
        row["old"] = [
            int(answers.texts[place] == one.item.before and one.item.before != one.item.after and not refused[place])
            for one, place in zip(asked, places, strict=True)
        ]
    if absent:
        return {**row, "right": refusals}
    values = [cast(str, one.item.after) for one in asked]
    if entry is not None:
        row["entry"] = [int(entry[place]) for place in places]
    row["word"] = [
        int(answers.first[place] == token_ids(tokenizer, value, answer=True)[0])
        for value, place in zip(values, places, strict=True)
    ]
    row["whole"] = [int(answers.texts[place] == value) for value, place in zip(values, places, strict=True)]
    row["right"] = [whole * (1 - no) for whole, no in zip(row["whole"], refusals, strict=True)]
    return row


def drift(
    model: nn.Module,
    tokenizer: Any,
    facts: Sequence[Fact],
    text: Tensor,
    before: Callable[[str], str] | None = None,
    during: While = lambda _: nullcontext(),
) -> dict[str, object]:
    """Of facts that the model knew, which it still says, and its loss on other text, in nats a token.

    Args:
        model: as it is now.
        tokenizer: of it.
        facts: of `OTHER`.
        text: token ids [1, tokens].
        before: what stands in front of a text, as the nearest facts do.
        during: what holds while the model reads a text.
    """
    prompts = [OTHER[one.relation].prompt.format(one.subject) for one in facts]
    ids, plain = text, str(tokenizer.decode(text[0].tolist(), skip_special_tokens=True))
    if before is not None:
        prompts = [before(one) + one for one in prompts]
        lead = token_ids(tokenizer, before(plain))
        ids = torch.cat([torch.tensor([lead], dtype=text.dtype), text], dim=1)
    best = list[int]()
    for prompt in prompts:
        with during([prompt]):
            best += last_logits(model, tokenizer, [prompt]).argmax(dim=-1).tolist()
    wanted = [token_ids(tokenizer, one.answer, answer=True)[0] for one in facts]
    with during([plain]):
        losses = text_losses(model, ids)
    return {
        "kept": [int(one == other) for one, other in zip(best, wanted, strict=True)],
        "text": float(losses[-(text.shape[1] - 1) :].mean()),
    }


def timed(
    model: nn.Module,
    tokenizer: Any,
    ask: Callable[[str], str],
    questions: Sequence[str],
    tokens: int,
    during: While = lambda _: nullcontext(),
) -> dict[str, float]:
    """Medians over questions, one at a time: seconds of the prompt with its first token, and of a further token.

    Args:
        model: as it is now.
        tokenizer: of it.
        ask: a question to the prompt, with whatever search that takes.
        questions: in words.
        tokens: of each answer, two at least.
        during: what holds while the model answers, with whatever search that takes.
    """
    firsts, others, lengths = list[float](), list[float](), list[int]()
    for question in questions:
        times: list[float] = []
        for new in (1, tokens):
            began = time.perf_counter()
            prompt = ask(question)
            ids = torch.tensor([token_ids(tokenizer, prompt)], device=next(model.parameters()).device)
            with during([prompt]):
                cast(Any, model).generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                    do_sample=False, pad_token_id=tokenizer.eos_token_id,
                )  # fmt: skip
            times.append(time.perf_counter() - began)
            lengths.append(ids.shape[1])
        firsts.append(times[0])
        others.append((times[1] - times[0]) / (tokens - 1))
    return {
        "prompt_seconds": statistics.median(firsts),
        "token_seconds": statistics.median(others),
        "prompt_tokens": statistics.mean(lengths),
    }
