"""`trace`: runs a transformers model whose layers read entries, and records which entries fired in each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.layered import LayerReader, SharedReader, observed, readers, reads_entries, unobserved
from attnflow.knowledge.reading.ablation import LocatedEntry, logits_without
from attnflow.knowledge.reading.direct_effect import Directions, Stream, directions, wide
from attnflow.knowledge.reading.layer_watch import LayerWatch, promoted_tokens
from attnflow.knowledge.reading.provenance import By, LayerTrace, Trace
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.arguments import unpadded
from attnflow.models.passes.evaluation import evaluating, still
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import Loaded, Subject, Text

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Prompts = list[str] | tuple[str, ...] | list[Mapping[str, Any]]
Positions = int | Sequence[int] | None
Words = str | int | Sequence[str | int] | None


@overload
def trace(
    model: nn.Module | Loaded, inputs: str | Sequence[int] | Tensor, answer: Words = ..., against: Words = ...,
    position: Positions = ..., *, top: int = ..., by: By | None = ..., promoted: int = ..., ablate: int = ...,
    tokenizer: PreTrainedTokenizerBase | None = ...,
) -> Trace: ...  # fmt: skip
@overload
def trace(
    model: nn.Module | Loaded, inputs: Prompts, answer: Words | Sequence[Words] = ...,
    against: Words | Sequence[Words] = ..., position: Positions | Sequence[Positions] = ..., *, top: int = ...,
    by: By | None = ..., promoted: int = ..., ablate: int = ..., tokenizer: PreTrainedTokenizerBase | None = ...,
) -> list[Trace]: ...  # fmt: skip
@overload
def trace(
    model: nn.Module | Loaded, inputs: Text | Prompts, answer: Words | Sequence[Words] = ...,
    against: Words | Sequence[Words] = ..., position: Positions | Sequence[Positions] = ..., *, top: int = ...,
    by: By | None = ..., promoted: int = ..., ablate: int = ..., tokenizer: PreTrainedTokenizerBase | None = ...,
) -> Trace | list[Trace]: ...  # fmt: skip
def trace(
    model: nn.Module | Loaded,
    inputs: Text | Prompts,
    answer: Words | Sequence[Words] = None,
    against: Words | Sequence[Words] = None,
    position: Positions | Sequence[Positions] = None,
    *,
    top: int = 16,
    by: By | None = None,
    promoted: int = 128,
    ablate: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Trace | list[Trace]:
    """Record which entries fired for each token and layer of a text, and their effect on the next token's logit.

    Three numbers are never mixed up. The *effect* is the weight times the value of an entry, times the derivative of
    the answers' logits by what its layer adds: the first-order estimate of removing it, over all paths. The *direct*
    effect leaves out the paths through later layers, with the scale of the final norm held. *Ablated* is measured.

    Args:
        model: any model, or what `af.load_model` returned. If it is not converted, a converted copy is traced.
        inputs: a text; token ids [tokens] or [1, tokens]; or the model's named inputs for one sequence. Several prompts
            are a list of texts or of named inputs, or named inputs of several rows, whose `attention_mask` tells the
            padding. `answer`, `against` and `position` are then those of all, or a list with those of each prompt.
        answer: the tokens whose logits the effects refer to, one for all positions or one each; by default the next
            token of the text, and at its end the token that the model finds most likely. A text of several tokens
            stands for the sum of their log-probabilities after the text, at the positions that predict them.
        against: the tokens whose mean logit is subtracted; by default all tokens.
        position: the tokens to trace, with negative positions counted from the end; by default all.
        top: how many entries are kept for each token and layer.
        by: which entries to keep: those with the largest absolute "effect", or "direct" effect, or with the largest
            contribution ("norm"); by default "effect" if the model has logits.
        promoted: for how many entries to find the tokens that they promote and suppress most: the strongest 40 of the
            last position first, then the strongest of each.
        ablate: how many leading entries of each position, of all layers, to take out of the model one by one (0 to
            `top`), to measure what the answer's logit and probability lose.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The trace of all layers that run, on the CPU, in float32 (float64 for a model in float64). The experts of a
        layer count as one layer, and shared experts as another. Entries of an attached store have their texts. Some
        models have no direct effects in closed form; `.without` then says why. Of several prompts, a list of traces:
        they run one after another without their padding, so that each trace is exactly that of the prompt alone.

    Raises:
        ValueError: a position or a token does not exist; a text of several tokens with `position`, `against` or more.
        UnsupportedArchitecture: an encoder-decoder model, or one with unknown feed-forward layers; to ablate, also a
            model without logits, or one whose sequences of a batch influence one another.

    Cost: one forward and one backward pass, with the memory of a training step, and one more product with the values
    for each layer. A model that is not converted costs the conversion, so `from_ffn` once is cheaper for many short
    texts. `ablate` costs for each position one forward pass of a batch of `ablate` + 1 copies of the text. Never
    tokens x entries x model_dim. In half precision small effects of an ablation are rounding: load the model in
    float32.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = af.knowledge.from_ffn(LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)))
    >>> result = trace(model, [5, 6, 7], top=24)
    >>> result.layer(0).ids.shape
    torch.Size([3, 24])
    >>> bool((result.layer(0).explained - 1).abs().max() < 1e-5)
    True
    """
    subject = Subject.of(model, tokenizer).inside
    subject.require_weights("trace")
    if subject.encodes_and_decodes:
        raise UnsupportedArchitecture(
            f"trace needs a model with one residual stream, but {subject.kind} has an encoder and a decoder"
        )
    checks.integer("top", top, 1)
    checks.integer("promoted", promoted)
    checks.integer("ablate", ablate, 0, top)
    if by not in (None, "norm", "effect", "direct"):
        raise ValueError(f"by must be 'effect', 'direct' or 'norm', got {by!r}")
    prompts = _prompts(subject, inputs)
    asked = [[given] if prompts is None else _each(given, len(prompts)) for given in (answer, against, position)]
    questions = [_question(subject, *one) for one in zip(prompts or [inputs], *asked, strict=True)]
    if ablate and any(question.whole for question in questions):
        raise ValueError("an answer of several tokens is not ablated: pass one token, or leave ablate out")
    if not reads_entries(subject.model):
        with torch.inference_mode(False):
            subject = Subject(from_ffn(subject.model), subject.tokenizer)
    found = [_traced(replace(one, subject=subject), top, by, promoted, ablate) for one in questions]
    return found[0] if prompts is None else found


def _traced(question: _Question, top: int, by: By | None, promoted: int, ablate: int) -> Trace:
    subject = question.subject
    stream, every = Stream(subject.model, question.rows), readers(subject.model)
    run = partial(cast(Any, subject.model), **question.arguments)
    with unobserved(subject.model):
        watched = [LayerWatch(reader, stream, top) for reader in every]
        towards, answered = _run(subject, question, stream, watched, run)
        if isinstance(towards, str) and by == "direct":
            raise ValueError(f"this model has no direct effects, since {towards}: use by='effect' or by='norm'")
        frozen = towards if isinstance(towards, Directions) else None
        if answered is None and (by == "effect" or (question.wanted is not None and by != "norm")):
            raise ValueError(f"{subject.kind} returns no logits of tokens, so it has no effects: use by='norm'")
        order: By = by or ("norm" if answered is None else "effect")
        # layers of another stack, such as an image tower, do not run
        watched = [layer for layer in watched if layer.ran] or watched
        with torch.no_grad():
            for layer in watched:
                layer.frozen = frozen
            traced = tuple(layer.finish(order) for layer in watched)
            words = () if frozen is None else promoted_tokens(watched, frozen, promoted, subject)
            about: dict[str, Any] = {"without": towards if frozen is None else ""} | (answered or {})
            if frozen is not None:
                effects = frozen.effects.items()
                about["embedding_effect"] = next(effect for (kind, _), effect in effects if kind == "embedding")
                about["constant_effect"] = frozen.constant.cpu()
            about["answers"] = tuple(subject.texts(about.get("answer_ids", ())))
            about["against"] = tuple(subject.texts(question.against))
            texts, tokens = _texts(every[0], traced), tuple(subject.texts_in_sequence(question.ids))
            rows = tuple(question.rows)
            result = Trace(subject.name, tokens, rows, traced, texts=texts, promoted=words, by=order, **about)
            if not ablate:
                return result
            if answered is None:
                raise UnsupportedArchitecture(f"{subject.kind} returns no logits that an ablation could change")
            with evaluating(subject.model):
                return _ablated(result, subject.model, question, watched, ablate)


@dataclass(frozen=True, eq=False)
class _Question:
    arguments: dict[str, Tensor]
    rows: list[int]  # the traced positions
    wanted: Words
    against: list[int]
    whole: bool  # whether these tokens are one answer, whose log-probability counts
    subject: Subject

    @property
    def ids(self) -> list[int]:
        return self.arguments["input_ids"][0].tolist()

    def answers(self, logits: Tensor) -> list[int]:
        for other in self.against:
            checks.integer("against", other, 0, len(logits) - 1)
        return _answers(self.wanted, self.ids, self.rows, self.subject, logits)

    def compared(self, logits: Tensor) -> Tensor:
        """What is subtracted from logits [..., vocabulary]: the mean of those to compare with."""
        return (logits[..., self.against] if self.against else logits).mean(dim=-1)


def _prompts(subject: Subject, inputs: Text | Prompts) -> Sequence[Text] | None:
    """Those of a batch, each without its padding; None if the inputs are those of one."""
    if isinstance(inputs, Mapping):
        named = subject.read(inputs, ids=True)
        return unpadded(named) if len(named["input_ids"]) > 1 else None
    listed = isinstance(inputs, list | tuple) and any(isinstance(one, str | Mapping) for one in inputs)
    return cast(Sequence[Text], inputs) if listed else None


def _each(given: Any, count: int) -> list[Any]:
    """What is asked of each of some prompts: the same of all, unless it is a list."""
    if given is None or isinstance(given, str | int):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"expected a value for all prompts, or a list of one for each of the {count}, got {given!r}")
    return list(given)


def _question(subject: Subject, inputs: Text, answer: Words, against: Words, position: Positions) -> _Question:
    arguments = subject.read(inputs, ids=True)
    if len(arguments["input_ids"]) > 1:
        raise ValueError(f"trace takes one sequence, got {len(arguments['input_ids'])}: pass one row of the inputs")
    others = [] if against is None else [against] if isinstance(against, str | int) else list(against)
    compared = [subject.token(o) if isinstance(o, str) else checks.integer("against", o, 0) for o in others]
    tokens: list[int] = []
    if isinstance(answer, str) and subject.tokenizer is not None:
        tokens = cast("list[int]", cast(Any, subject.tokenizer)(answer, add_special_tokens=False)["input_ids"])
    count = arguments["input_ids"].shape[1]
    if len(tokens) < 2 or position is not None or compared:
        rows = _positions(position, count)
        return _Question(arguments, rows, answer, compared, False, subject)
    more = torch.tensor([tokens[:-1]], device=subject.device)
    for name, value in arguments.items():
        if value.shape[:2] != (1, count) or name not in ("input_ids", "attention_mask", "token_type_ids"):
            raise ValueError(
                f"an answer of several tokens needs a text or token ids, got {name} of {list(value.shape)}"
            )
        added = more if name == "input_ids" else value[:, -1:].expand(1, more.shape[1])
        arguments[name] = torch.cat([value, added], dim=1)
    return _Question(arguments, list(range(count - 1, count + len(tokens) - 1)), tokens, [], True, subject)


def _run(
    subject: Subject, question: _Question, stream: Stream, watched: Sequence[LayerWatch], run: Callable[..., Any]
) -> tuple[Directions | str, dict[str, Any] | None]:
    """Run the model once and back: what `directions` returns, and its result for the answers; None without logits."""
    outputs, made = dict[int, Tensor](), list[Any]()

    def track(call: Call, output: Tensor) -> Tensor:
        outputs[call.name] = output if output.requires_grad else output.detach().requires_grad_()
        return outputs[call.name].clone()  # some models write into what their layers return

    first, keep = question.rows[0], dict(subject.sparing)
    if "logits_to_keep" in keep:
        keep["logits_to_keep"] = len(question.ids) - first
    modules = {number: cast(nn.Module, layer.reader) for number, layer in enumerate(watched)}
    looking = observed([(layer.reader, layer.see) for layer in watched])

    def forward() -> Any:
        with torch.enable_grad(), Watch(modules, leave=track):
            made.append(run(**keep))
        return made[0]

    with still(subject.model, exact=False), looking:
        towards = directions(stream, forward, question.answers, question.against)
        logits = getattr(made[0], "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return towards, None
        rows = torch.tensor(question.rows, device=logits.device) - (len(question.ids) - logits.shape[1])
        read = logits[0, rows].to(wide(logits.dtype))
        wanted = torch.tensor(question.answers(logits[0, -1].detach()), device=logits.device)
        chosen = read.gather(1, wanted[:, None])[:, 0]
        scores = chosen - question.compared(read)
        value = read.log_softmax(-1).gather(1, wanted[:, None]).sum() if question.whole else scores.sum()
        found = torch.autograd.grad(value, list(outputs.values()), allow_unused=True)
    for number, gradient in zip(outputs, cast("Sequence[Tensor | None]", found), strict=True):
        watched[number].towards = None if gradient is None else watched[number].reader.received(gradient)
    chances = read.detach().softmax(-1).gather(1, wanted[:, None])[:, 0]
    return towards, {
        "answer_ids": tuple(wanted.tolist()),
        "logits": scores.detach().cpu(),
        "probabilities": chances.cpu(),
    }


def _ablated(trace: Trace, model: nn.Module, question: _Question, watched: Sequence[LayerWatch], count: int) -> Trace:
    columns = [one.ids.shape[1] for one in trace]
    layer_of = torch.repeat_interleave(torch.tensor(columns)).tolist()
    places = torch.cat([one.joined("places") for one in watched], dim=1).cpu()
    heads = torch.cat([one.joined("heads") for one in watched], dim=1).cpu()
    sizes = torch.cat([_sizes(layer, trace.by) for layer in trace], dim=1).masked_fill(places < 0, -1)
    lost = sizes.new_full((2, *sizes.shape), torch.nan)
    rounding = max(torch.finfo(one.dtype).eps for one in model.parameters() if one.is_floating_point())
    seen: list[tuple[float, float]] = []
    for row, (position, answer) in enumerate(zip(trace.positions, trace.answer_ids, strict=True)):
        leading = sizes[row].topk(min(count, sizes.shape[1])).indices
        leading = leading[sizes[row, leading] >= 0]
        removed = [
            LocatedEntry(watched[layer_of[at]].reader, int(places[row, at]), int(heads[row, at]))
            for at in leading.tolist()
        ]
        before, after = logits_without(model, question.arguments, removed, position)
        every = torch.cat([before[None], after])
        logits, chances = every[:, answer] - question.compared(every), every.softmax(dim=-1)[:, answer]
        lost[0, row, leading], lost[1, row, leading] = ((each[0] - each[1:]).to(lost) for each in (logits, chances))
        seen.append((float(logits[0]), float(chances[0])))
        apart = 0.0 if trace.logits is None else abs(seen[-1][0] - float(trace.logits[row]))
        if not apart <= rounding**0.5 * float(before.abs().max()):
            raise UnsupportedArchitecture(
                f"{type(model).__name__} answers otherwise in a batch of copies of a text (a logit is off by "
                f"{apart:.2g}), so entries cannot be taken out in one: trace it without ablate"
            )
    layers = [
        replace(one, ablated_effects=effects, probability_effects=probabilities)
        for one, effects, probabilities in zip(trace, *(each.split(columns, dim=1) for each in lost), strict=True)
    ]
    trace = replace(trace, layers=tuple(layers))
    if trace.logits is not None:
        return trace
    logits, chances = torch.tensor(seen, dtype=lost.dtype).T
    return replace(trace, logits=logits, probabilities=chances)


def _sizes(layer: LayerTrace, by: By) -> Tensor:
    return {"norm": layer.norms, "effect": layer.effects, "direct": layer.direct_effects}[by].abs()  # pyright: ignore


def _positions(position: Positions, size: int) -> list[int]:
    chosen = range(size) if position is None else [position] if isinstance(position, int) else list(position)
    if not chosen or not all(-size <= place < size for place in chosen):
        raise ValueError(f"position must be from {-size} to {size - 1} for {size} tokens, got {chosen}")
    return sorted({place % size for place in chosen})


def _answers(wanted: Words, ids: Sequence[int], rows: Sequence[int], subject: Subject, logits: Tensor) -> list[int]:
    """Return the ids of the answers; by default the next token, and after the last token the most likely one."""
    if wanted is None:
        return [ids[row + 1] if row + 1 < len(ids) else int(logits.argmax()) for row in rows]
    listed = [wanted] * len(rows) if isinstance(wanted, str | int) else list(wanted)
    if len(listed) != len(rows):
        raise ValueError(f"expected one answer, or one for each of the {len(rows)} positions, got {len(listed)}")
    answers = [subject.token(word) if isinstance(word, str) else int(word) for word in listed]
    checks.index_array("answer", answers, len(logits))
    return answers


def _texts(reader: LayerReader, layers: Sequence[LayerTrace]) -> dict[int, str]:
    source = reader.current() if isinstance(reader, SharedReader) else None
    if not isinstance(source, EntrySource):
        return {}
    ids = torch.cat([one.ids[one.ids >= 0] for one in layers]).unique().tolist()
    return {one.id: one.text for one in source.store.get([entry for entry in ids if entry in source.store]) if one.text}
