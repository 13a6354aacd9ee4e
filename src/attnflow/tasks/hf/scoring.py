"""`score`: log-probabilities of continuations, or of the labels of a family of tasks, in few passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnflow._core.checks import index_array, integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.passes.watching import Arguments, Call, Watch
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.embedding import require_runnable, require_targets, run
from attnflow.tasks.hf.shared_calls import attention_masks, skips_pairs
from attnflow.tasks.hf.sharing import check_sharing, head_of, prepared
from attnflow.tasks.merging import MergedTask, merge, one_mask
from attnflow.tasks.prefixes import Batch, SharedPlan, common, plan
from attnflow.tasks.task import Task

Text = str | Sequence[int] | Tensor
Request = tuple[list[int], list[int]]
Dtype = Callable[[torch.dtype], torch.dtype]


@dataclass(frozen=True)
class Scores(Result):
    """The log-probabilities of continuations, or of a family's labels, under a model.

    Attributes:
        log_probs: in nats. For each request, the sum over its continuation's tokens; for each label of a family, the
            log-probability of its target, ordered by subtask and then by position.
        greedy: whether each of these tokens is the most probable one.
        tokens_before: how many tokens all requests or subtasks would take if each ran alone.
        tokens_after: how many tokens were run.
        passes: forward passes.
    """

    log_probs: tuple[float, ...]
    greedy: tuple[bool, ...]
    tokens_before: int
    tokens_after: int
    passes: int

    def rows(self) -> Sequence[Mapping[str, object]]:
        pairs = enumerate(zip(self.log_probs, self.greedy, strict=True))
        return [{"request": number, "log_prob": value, "greedy": greedy} for number, (value, greedy) in pairs]

    def __str__(self) -> str:
        return (
            f"{plural(len(self.log_probs), 'log-probability', 'log-probabilities')} in "
            f"{plural(self.passes, 'pass', 'passes')}: {self.tokens_before:,} tokens -> {self.tokens_after:,}"
        )


def score(
    model: nn.Module | Loaded,
    requests: Sequence[tuple[Text, Text]] | Sequence[Task] | MergedTask,
    *,
    tokenizer: Any = None,
    tokens_per_pass: int = 4096,
) -> Scores:
    """Score continuations of contexts, running common prefixes once, or every label of a family of tasks.

    The requests of a pass become prefix trees (see `share_prefixes`): few-shot examples run once for many questions,
    and a question once for all its answers. Logits are computed only for the tokens that predict a continuation.

    A family runs as its merged task, all subtasks in one pass. Each label gets log p(label | what its subtask reads),
    without its weight. For `butterfly(ids)` that is log p(x_k | all other tokens), and the sum is the
    pseudo-log-likelihood (Salazar et al., arXiv:1910.14659). Scores mean something only for what a model was trained
    on: a causal model has no two-sided scores.

    Args:
        model: a language model (a causal one for requests), or what `load_model` returns.
        requests: pairs (context, continuation) of texts or token ids, neither empty; or the subtasks of a family, or
            its merged task. Texts are tokenized as in lm-eval: context and continuation together, with spaces at the
            end of the context moved to the continuation.
        tokenizer: for texts; not needed with what `load_model` returned.
        tokens_per_pass: the most tokens that one forward pass runs, unless a single request has more.

    Raises:
        ValueError: an empty context or continuation (the message names it), texts without a tokenizer, a request that
            is too long for the model, an id outside the vocabulary, or a family that `merge` refuses.
        UnsupportedArchitecture: as in `share_prefixes`, or a model without a head; for a family, a model that does not
            take embeddings, position ids and a 4D mask.

    Cost: a pass over the tokens after sharing, and float32 logits for those that predict; for a family, a dense mask.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> scores = score(model, [([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8], [11]), ([5, 6, 7, 3], [9])])
    >>> print(scores)
    3 log-probabilities in 1 pass: 13 tokens -> 6
    """
    subject = Subject.of(model, tokenizer)
    if isinstance(requests, MergedTask) or (len(requests) and isinstance(requests[0], Task)):
        return _family_scores(subject, requests if isinstance(requests, MergedTask) else merge(cast(Any, requests)))
    pairs: list[Request] = []
    for number, request in enumerate(cast("Sequence[Any]", requests)):
        if not isinstance(request, tuple | list) or len(request) != 2:
            raise TypeError(f"request {number} must be a pair (context, continuation), got {request!r}"[:200])
        context, continuation = request
        try:
            pairs.append(_encoded(context, continuation, subject.tokenizer))
        except (ValueError, TypeError) as error:
            raise type(error)(f"request {number}: {error}") from error
    return Scorer(subject.model).score(pairs, integer("tokens_per_pass", tokens_per_pass, 1))


@torch.no_grad()
def _family_scores(subject: Subject, merged: MergedTask) -> Scores:
    task = one_mask(merged.task)
    require_runnable(subject)
    labels = sorted(task.labels, key=lambda label: label.task)  # stable: within a subtask they stand by position
    with evaluating(subject.model):
        logits = run(subject, task, merged.log_multiplicity())
    targets = torch.tensor([label.target_id for label in labels], dtype=torch.int64, device=logits.device)
    require_targets(targets, logits)
    rows = logits[[label.position for label in labels]]
    log_probs = rows.to(_at_least_float32(rows.dtype)).log_softmax(dim=-1)
    values, greedy = log_probs.gather(-1, targets[:, None])[:, 0], log_probs.argmax(dim=-1) == targets
    before = sum(map(len, merged.positions))
    return Scores(tuple(values.tolist()), tuple(greedy.tolist()), before, task.size, 1)


class Scorer:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._backbone, self._calls, checked = prepared(model)
        head = head_of(self._model)
        if head is None:
            raise UnsupportedArchitecture(f"{type(self._model).__name__} has no head that makes logits")
        self._head = head
        if not checked:
            check_sharing(self._model, self._backbone, self._calls)

    def score(self, requests: Sequence[Request], tokens_per_pass: int, softmax: Dtype | None = None) -> Scores:
        """As `score`; `softmax` gives the softmax type for logits of a type, by default at least float32."""
        longest = max((len(context) + len(rest) - 1 for context, rest in requests), default=0)
        limit = getattr(cast(Any, self._backbone.module.config).get_text_config(), "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < longest:
            raise ValueError(f"a request has {longest} tokens, but the model reads at most {limit}: shorten it")
        size = getattr(cast(Any, self._model).get_input_embeddings(), "num_embeddings", None)
        for number, (context, rest) in enumerate(requests):
            wrong = [token for token in (*context, *rest) if token < 0 or (isinstance(size, int) and token >= size)]
            if wrong:
                raise ValueError(f"request {number}: token ids must lie in [0, {size}), the vocabulary; got {wrong[0]}")
        log_probs, greedy = [0.0] * len(requests), [False] * len(requests)
        passes = after = 0
        with evaluating(self._model), torch.no_grad():
            for numbers in _chunks(requests, tokens_per_pass):
                chosen, answers = self._pass([requests[number] for number in numbers], softmax or _at_least_float32)
                for number, (value, best) in zip(numbers, answers, strict=True):
                    log_probs[number], greedy[number] = value, best
                passes, after = passes + 1, after + chosen.nodes
        before = sum(len(context) + len(rest) - 1 for context, rest in requests)
        return Scores(tuple(log_probs), tuple(greedy), before, after, passes)

    def _pass(self, requests: Sequence[Request], softmax: Dtype) -> tuple[SharedPlan, list[tuple[float, bool]]]:
        rows = [[*context, *rest][:-1] for context, rest in requests]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        real = np.zeros(ids.shape, np.bool_)
        for number, row in enumerate(rows):
            ids[number, : len(row)], real[number, : len(row)] = row, True
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        stack = self._backbone.module
        chosen = plan(Batch(ids, real, positions), self._calls.cost_of(stack), one_row=skips_pairs(stack))
        assert chosen is not None
        places = [chosen.place[n, len(row) - len(requests[n][1]) : len(row)] for n, row in enumerate(rows)]
        slots, at = np.unique(np.concatenate(places), return_inverse=True)
        logits = self._logits(chosen, slots)
        targets = torch.tensor([token for _, rest in requests for token in rest], device=logits.device)
        require_targets(targets, logits)
        rows_of = torch.from_numpy(at.reshape(-1)).to(logits.device)  # many continuations may read one row
        log_probs = F.log_softmax(logits, dim=-1, dtype=softmax(logits.dtype))
        values, best = log_probs[rows_of, targets], log_probs.argmax(dim=-1)[rows_of] == targets
        sizes = [len(rest) for _, rest in requests]
        return chosen, [
            (float(value.sum()), bool(all_best.all()))
            for value, all_best in zip(values.split(sizes), best.split(sizes), strict=True)
        ]

    def _logits(self, chosen: SharedPlan, slots: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
        device = Subject(self._backbone.module).device
        index = torch.from_numpy(slots).to(device)

        def choose(call: Call) -> Arguments:
            states = call.first
            return (states.reshape(-1, states.shape[-1])[index.to(states.device)][None], *call.args[1:]), call.kwargs

        masks = attention_masks(self._backbone.module, self._calls.windows, chosen, device)
        with Watch({"head": self._head}, choose):
            output = cast(Any, self._model)(
                input_ids=torch.from_numpy(chosen.ids).to(device),
                position_ids=torch.from_numpy(chosen.positions).to(device),
                attention_mask=next(iter(masks.values())) if len(masks) == 1 else masks,
                use_cache=False,
            )
        logits: Tensor = output.logits
        if tuple(logits.shape[:2]) != (1, len(slots)):
            raise UnsupportedArchitecture(
                f"the logits of {type(self._model).__name__} do not depend on its head's input alone: expected logits "
                f"of {len(slots)} tokens, got {tuple(logits.shape)}"
            )
        return logits[0]


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _encoded(context: Text, continuation: Text, tokenizer: Any) -> Request:
    if isinstance(context, str) and isinstance(continuation, str):
        if tokenizer is None:
            raise ValueError("texts need a tokenizer: pass what af.load_model returned, tokenizer=..., or token ids")
        bare = context.rstrip()
        rest = context[len(bare) :] + continuation
        before = cast("list[int]", list(tokenizer(bare)["input_ids"]))
        pair = before, cast("list[int]", list(tokenizer(bare + rest)["input_ids"]))[len(before) :]
    elif isinstance(context, str) or isinstance(continuation, str):
        raise TypeError("context and continuation must both be texts or both be token ids")
    else:
        pair = index_array("the context", context).tolist(), index_array("the continuation", continuation).tolist()
    for name, ids in zip(("context", "continuation"), pair, strict=True):
        if not ids:
            raise ValueError(f"the {name} has no token: pass at least one, such as the BOS token for a context")
    return pair


def _chunks(requests: Sequence[Request], tokens_per_pass: int) -> Iterator[list[int]]:
    arrays = [np.array([*context, *rest[:-1]], np.int64) for context, rest in requests]
    order = sorted(range(len(arrays)), key=lambda number: arrays[number].astype(">i8").tobytes())
    chunk: list[int] = []
    size = 0
    for number in order:
        own = len(arrays[number]) - (common(arrays[chunk[-1]], arrays[number]) if chunk else 0)
        if chunk and size + own > tokens_per_pass:
            yield chunk
            chunk, size, own = [], 0, len(arrays[number])
        chunk.append(number)
        size += own
    if chunk:
        yield chunk
