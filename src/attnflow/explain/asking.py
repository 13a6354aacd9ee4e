"""What is asked of a pass: the logits, the position that answers, and tokens or classes by number and by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.passes.held import HeldPass
from attnflow.models.subject import Subject

Token = str | int


def logits(subject: Subject, held: HeldPass) -> Tensor:
    """Logits [1, classes] or [1, tokens, classes or vocabulary]."""
    found = getattr(held.output, "logits", None)
    if not isinstance(found, Tensor) or found.ndim not in (2, 3) or len(found) != 1:
        raise UnsupportedArchitecture(
            f"{subject.kind} returns no logits of tokens or classes, so that there is no answer: load it with its head "
            "(AutoModelForCausalLM, AutoModelForMaskedLM, ...)"
        )
    return found.detach()


def usual_position(subject: Subject, inputs: Mapping[str, Tensor]) -> int:
    """The position that answers by default, counted from the end: that of the only mask token, else the last."""
    ids, mask = inputs.get("input_ids"), getattr(subject.tokenizer, "mask_token_id", None)
    masked = [] if ids is None or mask is None else (ids[0] == mask).nonzero().flatten().tolist()
    return masked[0] - ids.shape[1] if len(masked) == 1 and ids is not None else -1


def position(held: HeldPass, wanted: int, found: Tensor) -> tuple[int, int]:
    """The position that answers, counted from the start and from the end."""
    count = found.shape[1] if found.shape[1] > 1 else length(held)  # or of the last token alone
    at = checks.integer("position", wanted, -count, count - 1) % count
    return at, at - count


def number(subject: Subject, token: Token, count: int, argument: str) -> int:
    labels: Mapping[str, int] = getattr(subject.config, "label2id", None) or {}
    if isinstance(token, str):
        if token not in labels and _classes(subject, count):
            raise ValueError(
                f"{argument} must be a class of the model, {checks.preview(sorted(labels))}, got {token!r}"
            )
        token = labels[token] if _classes(subject, count) else subject.token(token)
    return checks.integer(argument, token, 0, count - 1)


def name(subject: Subject, token: int, count: int) -> str:
    """The text of a token, or the label of a class."""
    labels: Mapping[int, str] = getattr(subject.config, "id2label", None) or {}
    return labels[token] if _classes(subject, count) else subject.texts([token])[0]


def _classes(subject: Subject, count: int) -> bool:
    """Whether logits are those of the model's classes."""
    return count == len(getattr(subject.config, "label2id", None) or ()) != getattr(subject.config, "vocab_size", None)


def length(held: HeldPass, half: str = "") -> int:
    """The number of tokens of one half; 0 if there is none."""
    return next((a.hidden.shape[-2] for a in held.arrivals if a.first and held.halves[a.prefix] == half), 0)


def texts(held: HeldPass, inputs: Mapping[str, Tensor], half: str) -> tuple[str, ...]:
    """The texts of the tokens of one half."""
    if not (count := length(held, half)):
        return ()
    two = "decoder_input_ids" in inputs and not half
    ids = inputs.get("decoder_input_ids" if two else "input_ids")
    if ids is None or ids.shape[-1] > count:
        return tuple(map(str, range(count)))
    virtual = [f"virtual {number}" for number in range(count - ids.shape[-1])]  # tokens of a prompt
    return (*virtual, *held.subject.texts_in_sequence(ids[0].tolist()))
