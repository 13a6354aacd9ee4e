"""One held pass of a model, kept for many questions about it; `answer` is one question."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from threading import Lock
from typing import Any, Final, cast, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow._core.progress import Progress
from attnflow.audit.declared import flow_of
from attnflow.audit.inputs import read
from attnflow.audit.survey import CallSurvey, surveying
from attnflow.explain import asking
from attnflow.explain.amounts import Amounts
from attnflow.explain.entries import Entries
from attnflow.explain.explanation import Edge, Explanation, Link, Removal, Source, SourceGraph
from attnflow.explain.removal import attention_of, value_without, with_removals
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.reading import AttentionReading
from attnflow.geometry.reading import reading as scores_of
from attnflow.models.passes.held import Derivatives, HeldPass
from attnflow.models.subject import Loaded, Subject, Text
from attnflow.order.flow import Flow

Token = asking.Token
CLOSE: Final = 1e-5  # of the range of the logits: how far the sum of sources may be from the value
_SAME: Final = 1e-3  # of that range: how far the value may be from that of the model without its graph
_CHANGED: Final = "the model changed since the pass of this reading: call af.explain.reading again"


@contextmanager
def _differentiating() -> Generator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def answer(
    model: nn.Module | Loaded,
    inputs: Text | Mapping[str, Tensor],
    answer: Token | None = None,
    against: Token | Sequence[Token] | None = None,
    position: int | None = None,
    *,
    measure: int = 0,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> Explanation:
    """Explain one answer of a model: which tokens, heads and entries told it, and how much each.

    The logit of the answer less that of another token is an affine function of its sources, once the scales of norms,
    the weights of attention, the activations of entries and gates keep their values in this pass:

        y = sum over tokens of e_t . dy/de_t + sum over entries of a_ltm (v_m . dy/dx_lt) + constants

    exactly. A head carries w_qk (v_k W_O) . dy/dx_q from token k to token q. Three readings are never mixed up:
    *carried* (exact, sums to the value, no causal claim), *effect* (first-order estimate of removing a source, by the
    derivative of the model as it is) and *removed* (measured without it).

    Args:
        model: a transformers model on the attention interface, or what `af.load_model` returned. Float32 or float64.
        inputs: a text, token ids, or the model's named inputs, of one sequence.
        answer: the token as text or id, or the class; by default the most likely one.
        against: the tokens, or classes, with whose mean logit it is compared; by default all of them.
        position: of the token that answers; by default the masked one of a masked model, else the last.
        measure: for how many of the strongest edges, and of the strongest entries, to measure what removing each does.
        tokenizer: needed for texts unless `model` has one; for token ids, it names the tokens.
        progress: called as progress(done, total, what) while removals are measured.

    Returns:
        The explanation: print it, or show it by `af.report.figure` and `af.report.page`.

    Raises:
        ValueError: a token, class or position that is not there, or several sequences.
        UnsupportedArchitecture: the model has no logits, is of half precision, or its value is no such sum to 1e-5 of
            the range of the logits: the message names the layer.

    Cost: one forward pass and two backward passes, with the memory of one training step; one more for each removal.
    Another position than the last takes the logits of all of them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> result = answer(model, [5, 6, 7, 8], answer=3, against=4)
    >>> abs(sum(source.carried for source in result.sources) - result.value) < 1e-4
    True
    """
    with reading(model, inputs, tokenizer=tokenizer) as handle:
        return handle.answer(answer, against, position, measure=measure, progress=progress)


def reading(model: nn.Module | Loaded, inputs: Text | Mapping[str, Tensor], *, tokenizer: Any = None) -> AnswerReading:
    """Keep one pass of a model for many questions: `answer`, `why`, `remove`, `entry` and `graph` of the handle.

    Arguments, errors and cost are as in `answer`; the pass, its graph and the model's activations are held until
    `remove()` or the end of the `with` block. The model is not changed.
    """
    subject = Subject.of(model, tokenizer).inside
    return AnswerReading(subject, subject.read_one(inputs))


def weights(
    model: nn.Module | Loaded, inputs: Text | Mapping[str, Tensor], layer: int, *, tokenizer: Any = None
) -> Float[Tensor, "heads queries keys"]:
    """The attention weights of one layer in a pass, after the softmax, whatever computed them.

    Masks, attached biases, sinks and softcaps count. Args and errors as for `answer`; layer: its number, negative from
    the last. Of a model of two halves it is the decoder's self-attention. Cost: one forward pass.
    """
    subject = Subject.of(model, tokenizer).inside
    held = HeldPass(subject, subject.read_one(inputs), {})
    by_layer = {a.layer: a.weights for a in held.attentions if a.site.kind == "self" and not held.halves[a.site.layers]}
    count = max(by_layer) + 1
    number = checks.integer("layer", layer, -count, count - 1, why=f": there are {count}, numbered from 0") % count
    if number not in by_layer:
        raise ValueError(f"layer {number} has no self-attention; layers with it: {checks.preview(sorted(by_layer))}")
    return by_layer[number].clone()


class AnswerReading(Handle):
    """The handle of `reading`: one pass of a model with its graph, asked many times."""

    def __init__(self, subject: Subject, inputs: dict[str, Tensor]) -> None:
        super().__init__(subject.model)
        with torch.inference_mode(False):
            self._subject, self._inputs = subject, {name: value.clone() for name, value in inputs.items()}
        self._entries, self._turn = Entries.of(subject), Lock()
        self._held: HeldPass | None = None
        self._gated = self._whole = False
        self._version: list[int] | None = None  # of the parameters in the pass
        self._surveyed: Callable[[], CallSurvey] | None = None  # what the first pass tells of the declared order
        self._scores: AttentionReading | None = None  # with the pass up to the layer of the edge explained last
        self._last: Explanation | None = None

    @_differentiating()
    def answer(
        self,
        answer: Token | None = None,
        against: Token | Sequence[Token] | None = None,
        position: int | None = None,
        *,
        measure: int = 0,
        progress: Progress | None = None,
    ) -> Explanation:
        """Explain an answer of this pass; see `af.explain.answer`."""
        checks.integer("measure", measure)
        row, at, read = self._asked(position)
        chosen = int(row.argmax()) if answer is None else asking.number(self._subject, answer, len(row), "answer")
        listed = [against] if isinstance(against, str | int) else [] if against is None else list(against)
        others = [asking.number(self._subject, other, len(row), "against") for other in listed]
        if chosen in others:
            raise ValueError(f"the answer {answer!r} is compared with itself: choose another token for against")

        def value(output: Any) -> Tensor:
            row = read(output)
            return row[chosen] - (row[others] if others else row if len(row) > 1 else torch.zeros_like(row)).mean()

        span = float(row.max() - row.min()) if len(row) > 1 else float(row.abs())
        amounts = self._amounts(value, span)
        names = partial(asking.name, self._subject, count=len(row))
        explained = amounts.explanation(
            self._entries,
            model=self._subject.name,
            texts=asking.texts(amounts.held, self._inputs, ""),
            encoder_texts=asking.texts(amounts.held, self._inputs, "encoder"),
            position=at,
            answer=names(chosen),
            answer_id=chosen,
            against=tuple(map(names, others)) if len(row) > 1 else ("0",),
            probability=float(row.softmax(0)[chosen]) if len(row) > 1 else float("nan"),
            **self._order(amounts, at),
        )
        self._last = explained
        self._value, self._span = value, span
        if not measure:
            return explained
        causes = [*explained.causes[:measure], *explained.entries[:measure]]
        return with_removals(explained, causes, self.remove(causes, progress))

    def likely(self, count: int = 5, position: int | None = None) -> tuple[tuple[int, str, float], ...]:
        """List the most likely answers of this pass, at a position: number, text and probability of each."""
        row, *_ = self._asked(position)
        chances = row.softmax(0).topk(min(checks.integer("count", count, 1), len(row)))
        best = zip(*map(Tensor.tolist, chances), strict=True)
        return tuple((number, asking.name(self._subject, number, len(row)), chance) for chance, number in best)

    def why(self, edge: Edge, against: int | None = None) -> ScoreAttribution:
        """Explain why the head of an edge looked there, and not at another key; see `af.geometry.attribute`.

        Cost: as there; the next edge of the same layer takes no other pass.

        Args:
            edge: of an explanation of this pass.
            against: position of the other key; by default the strongest other one that is not the first token.

        Raises:
            ValueError: an edge of an encoder's own attention: read `model.get_encoder()`.
        """
        attention = attention_of(self._pass(), edge)
        if attention.first_head:
            raise ValueError(f"{edge.name} belongs to a further attention of its layer, whose scores are not explained")
        if edge.half == "encoder":
            raise ValueError("the edge lies in the encoder: explain its score by af.geometry.attribute(encoder, ...)")
        if self._scores is None:
            self._scores = scores_of(self.model, self._inputs, tokenizer=self._subject.tokenizer)
        return self._scores.explain(
            edge.layer, edge.head, edge.query, edge.key,
            against="strongest" if against is None else against, attention="cross" if edge.half else "self",
        )  # fmt: skip

    @overload
    def remove(self) -> None: ...

    @overload
    def remove(self, items: Sequence[Edge | Source], progress: Progress | None = None) -> Removal: ...

    def remove(self, items: Sequence[Edge | Source] | None = None, progress: Progress | None = None) -> Removal | None:
        """Without arguments, end the reading. With edges or entries, measure what leaving them out costs.

        The last explained value is measured without each alone, and without all of them. An entry's value, or what an
        edge carries, is taken out of the sum that it belongs to; weights of other keys stay. Later layers then react.
        Cost: one forward pass for each, and two.

        Raises:
            ValueError: nothing was explained yet, or a source that is no entry: a token cannot be left out of a sum.
            RuntimeError: the model changed since the pass.
        """
        if items is None:
            return super().remove()
        if self._last is None:
            raise ValueError("explain an answer first: reading.answer(...)")
        taken = list(items)
        wrong = next((item for item in taken if isinstance(item, Source) and item.kind != "entry"), None)
        if wrong is not None:
            raise ValueError(f"{wrong.name} cannot be taken out: only edges and single entries can")
        held = self._pass()
        sets: list[Sequence[Edge | Source]] = [[], *([item] for item in taken), taken]
        values: list[float] = []
        for done, some in enumerate(sets):
            values.append(value_without(self._entries, some, self._value, held))
            if progress is not None:
                progress(done + 1, len(sets), "removing")
        full, *alone, together = values
        if abs(full - self._last.value) > _SAME * self._span:
            raise RuntimeError(_CHANGED)
        return Removal(tuple(item.name for item in taken), tuple(full - part for part in alone), full - together, full)

    @_differentiating()
    def entry(self, source: Source) -> Explanation:
        """Explain why an entry fired: the sources of its own score, which is as affine as an answer.

        The value is the entry's score before the activation (of the gate, in gated layers); `answer` is its name.

        Raises:
            ValueError: a source that is no entry of a feed-forward layer.
            UnsupportedArchitecture: the score is no sum of sources.
        """
        held = self._pass()
        amounts = self._fired(held, source)
        last = asking.texts(held, self._inputs, source.half)
        return amounts.explanation(
            self._entries,
            model=self._subject.name,
            texts=last,
            encoder_texts=() if source.half else asking.texts(held, self._inputs, "encoder"),
            position=source.position,
            answer=source.name,
            answer_id=cast(int, source.neuron),
            against=(),
            probability=float("nan"),
            reach=(),
        )

    @_differentiating()
    def graph(self, nodes: int = 40) -> SourceGraph:
        """Link the strongest sources of the last explained answer: what each gave to the entries among them.

        A link is the exact share of a source in the score of an entry; links never run against the mask's order, as
        the pass itself does not. Cost: two backward passes for each entry.
        """
        checks.integer("nodes", nodes, 2)
        if self._last is None:
            raise ValueError("explain an answer first: reading.answer(...)")
        strongest = sorted(
            (source for source in self._last.sources if source.kind in ("entry", "token")),
            key=lambda source: -abs(source.effect),
        )[:nodes]
        chosen = sorted(strongest, key=lambda source: -1 if source.layer is None else source.layer)
        place = {(s.kind, s.half, s.name, s.position): number for number, s in enumerate(chosen)}
        links: list[Link] = []
        for target, source in enumerate(chosen):
            if source.kind != "entry":
                continue
            for giver, carried in self._fired(self._pass(), source).of(self._entries, chosen):
                number = place[giver.kind, giver.half, giver.name, giver.position]
                if carried and number != target:
                    links.append(Link(number, target, carried))
        return SourceGraph(tuple(chosen), tuple(links))

    # -------- parts

    def _asked(self, position: int | None) -> tuple[Tensor, int | None, Callable[[Any], Tensor]]:
        """The logits that answer, their position (None of a whole sequence), and how they are read off an output."""
        wanted = asking.usual_position(self._subject, self._inputs) if position is None else position
        held = self._pass(whole=wanted != -1)
        logits = asking.logits(self._subject, held)
        if logits.ndim == 2:
            if position is not None:
                raise ValueError(f"{self._subject.kind} answers for the whole sequence: leave position out")
            return logits[0], None, lambda output: output.logits[0]
        at, last = asking.position(held, wanted, logits)
        return logits[0, last], at, lambda output: output.logits[0, last]

    def _pass(self, gated: bool = False, whole: bool = False) -> HeldPass:
        """The pass; `gated` and `whole` (with the logits of all positions) once they were asked for."""
        if not self.active:
            raise RuntimeError("this reading was removed: call af.explain.reading again")
        gated, whole = gated or self._gated, whole or self._whole
        if self._held is None or (gated, whole) != (self._gated, self._whole):
            self._held = None  # its memory is free before the next pass
            with self._entries.observed(self._entries.readings):
                modules, scorers = self._entries.modules(), self._entries.scorers(self.model)
                first = self._surveying() if self._version is None else None
                self._held = HeldPass(
                    self._subject, self._inputs, modules, scorers, gated=gated, whole=whole, watching=first
                )
            self._gated, self._whole, self._version = gated, whole, self._versions()
            self._entries.number(self._held)
        if self._version != self._versions():
            raise RuntimeError(_CHANGED)
        return self._held

    @contextmanager
    def _surveying(self) -> Generator[None]:
        with ExitStack() as stack:
            with suppress(UnsupportedArchitecture, ValueError, TypeError):
                self._surveyed = stack.enter_context(surveying(read(self._subject.inside, self._inputs)))
            yield

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.model.parameters()]

    def _amounts(self, value: Callable[[Any], Tensor], span: float) -> Amounts:
        """The amounts of a value; gates of attention are held where the value is no sum without that."""
        held = self._pass()
        try:
            return self._amounts_of(held, value(held.output), span)
        except UnsupportedArchitecture:
            if self._gated:
                raise
        held = self._pass(gated=True)
        return self._amounts_of(held, value(held.output), span)

    def _fired(self, held: HeldPass, source: Source) -> Amounts:
        score, bias = self._entries.score(held, source)
        return self._amounts_of(held, score, max(1.0, abs(float(score.detach()) + bias)), bias)

    def _amounts_of(self, held: HeldPass, value: Tensor, span: float, constant: float = 0.0) -> Amounts:
        def derived(along: bool) -> Derivatives:
            with self._turn:  # threads may ask one pass
                found = held.derivatives(value, along)
            found.constants[""] = found.constants.get("", 0.0) + constant
            return found

        amounts = Amounts(held, float(value.detach()) + constant, derived(True), partial(derived, False))
        amounts.check(span, CLOSE)
        return amounts

    @cached_property
    def _flow(self) -> Flow | None:
        with suppress(UnsupportedArchitecture, ValueError, TypeError):
            flow = None if self._surveyed is None else flow_of(self._surveyed())
            return flow if flow and flow.size == asking.length(self._pass()) else None
        return None

    def _order(self, amounts: Amounts, at: int | None) -> dict[str, Any]:
        """Which tokens the declared order lets reach the answer, and the pairs that it allows."""
        if self._flow is None:
            return {"reach": ()}
        layers = 1 + max(a.layer for a in amounts.held.attentions)
        answering = amounts.answering() if at is None else [at]  # a class may be told by several tokens
        steps = zip(*(self._flow.arrivals(query, layers).tolist() for query in answering), strict=True)
        reach = tuple(min((number for number in some if number >= 0), default=-1) for some in steps)
        return {"reach": reach, "allowed": tuple(mask.dense() for mask in self._flow.masks)}

    def _restore(self) -> None:
        self._held = self._scores = None  # the model was not changed

    def _summary(self) -> str:
        kept = "no pass yet" if self._held is None else f"a pass of {len(self._held.attentions)} attentions is kept"
        return f"reads one answer of {self._subject.kind}; {kept}"
