"""Facts that a language model is asked for, in several wordings, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow.knowledge.editing.edit_targets import answers_of, token_ids
from attnflow.models.subject import Subject


@dataclass(frozen=True)
class Relation:
    prompt: str  # what is asked, with a place for the subject; the answer is the next token
    paraphrases: tuple[str, ...]  # other wordings
    answers: Mapping[str, str]  # subject -> answer, one token with a space before it


@dataclass(frozen=True)
class Fact:
    """One fact and the other answer that an edit shall give it."""

    relation: str  # name of its relation
    subject: str  # what it is about
    answer: str  # what is true
    other: str  # what an edit makes of it, the answer of the known fact before it in the relation with another answer


RELATIONS: Final[Mapping[str, Relation]] = MappingProxyType(
    {
        "capital": Relation(
            "The capital of {} is",
            (
                "The capital city of {} is called",
                "The city that is the capital of {} is",
                "The capital of the country {} is",
            ),
            {
                "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
                "Russia": "Moscow", "China": "Beijing", "Greece": "Athens", "Austria": "Vienna", "Ireland": "Dublin",
                "Portugal": "Lisbon", "England": "London", "Cuba": "Havana", "Norway": "Oslo", "Hungary": "Budapest",
                "Canada": "Ottawa", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Kenya": "Nairobi",
                "Chile": "Santiago", "Egypt": "Cairo", "India": "Delhi", "Poland": "Warsaw", "Finland": "Helsinki",
            },
        ),
        "language": Relation(
            "People in {} speak",
            ("The official language of {} is", "In {}, most people speak", "The language of the people of {} is"),
            {
                "France": "French", "Italy": "Italian", "Spain": "Spanish", "Japan": "Japanese", "Russia": "Russian",
                "Greece": "Greek", "Brazil": "Portuguese", "Turkey": "Turkish", "Germany": "German",
                "Portugal": "Portuguese", "China": "Chinese", "Poland": "Polish", "Mexico": "Spanish",
            },
        ),
        "opposite": Relation(
            "The opposite of {} is",
            ("The antonym of {} is", 'The opposite of the word "{}" is', "The reverse of {} is"),
            {
                "hot": "cold", "up": "down", "good": "bad", "fast": "slow", "high": "low", "black": "white",
                "left": "right", "rich": "poor", "wet": "dry", "young": "old", "big": "small", "light": "dark",
            },
        ),
    }
)  # fmt: skip


def token_of(tokenizer: Any, answer: str) -> int:
    ids = cast("list[int]", tokenizer(f" {answer}", add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        raise ValueError(f"an answer must be one token, {answer!r} is {len(ids)}")
    return ids[0]


@torch.no_grad()
def known_facts(model: nn.Module, tokenizer: Any, relations: Mapping[str, Relation] = RELATIONS) -> list[Fact]:
    """Those facts whose whole answer is what the model says, each with another answer of its relation."""
    found: list[Fact] = []
    for name, relation in relations.items():
        prompts = [token_ids(tokenizer, relation.prompt.format(subject)) for subject in relation.answers]
        answers = [token_ids(tokenizer, answer, answer=True) for answer in relation.answers.values()]
        said = answers_of(Subject(model, tokenizer), prompts, answers).first.tolist()
        known = [one for one, right in zip(relation.answers.items(), said, strict=True) if right]
        for place, (subject, answer) in enumerate(known):
            others = [a for _, a in known[place + 1 :] + known[:place] if a != answer]
            if others:
                found.append(Fact(name, subject, answer, others[-1]))
    return found


def last_logits(model: nn.Module, tokenizer: Any, prompts: Sequence[str]) -> Tensor:
    """Logits of the token after each prompt, [prompts, vocabulary], in float32; one forward pass."""
    rows = [torch.tensor(cast("list[int]", tokenizer(prompt)["input_ids"])) for prompt in prompts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    device = next(model.parameters()).device
    with torch.no_grad():
        logits = cast(Any, model)(
            input_ids=ids.to(device), attention_mask=mask.long().to(device), use_cache=False
        ).logits
    return logits[torch.arange(len(rows)), lengths - 1].float()


def text_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token loss of each token of a text [1, tokens], in nats."""
    ids = ids.to(next(model.parameters()).device)
    with torch.no_grad():
        logits = cast(Any, model)(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return functional.cross_entropy(logits, ids[0, 1:], reduction="none")
