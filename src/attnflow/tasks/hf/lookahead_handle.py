"""`lookahead`: several tokens a pass from a frozen model, and exactly the text that it writes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast, get_args

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from attnflow._core.checks import integer, number
from attnflow._core.handles import Handle
from attnflow._core.progress import Progress
from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded, split
from attnflow.tasks.decoded import Decoded, GreedyComparison
from attnflow.tasks.hf.decoding_choice import Choice
from attnflow.tasks.hf.decoding_pass import decodable, end_tokens, prompts, require_in_vocabulary
from attnflow.tasks.hf.lookahead_adapter import GatedAdapter
from attnflow.tasks.hf.lookahead_decode import Mode, decode
from attnflow.tasks.hf.lookahead_fit import fit

_LARGEST: Final = 64  # drafts: a pass has (drafts + 1)^2 rows


class Lookahead(Handle):
    """A frozen model with an adapter that drafts, until it is removed; made by `lookahead`.

    Attributes:
        model: the model; its own passes are as before.
        adapter: what `fit` trains; `adapter.state_dict()` keeps it, `adapter.load_state_dict` takes it up again.
        drafts: the most tokens that a pass drafts.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, drafts: int, rank: int, seed: int) -> None:
        super().__init__(model)
        self.drafts, self.rank = drafts, rank
        self.adapter = GatedAdapter(model, drafts, rank, seed)

    def fit(
        self,
        texts: Sequence[Sequence[int]],
        *,
        steps: int = 200,
        length: int = 128,
        batch_size: int = 1,
        learning_rate: float = 1e-3,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> tuple[float, ...]:
        """Train the adapter to draft what the model will say; the model's own weights stay as they are.

        A step runs [text | masks after each token], the merged task of `causal_lm` and of one lookahead task for each
        token, once. The loss is the Kullback-Leibler divergence of each mask from the model's own prediction at that
        place, in nats: the lower, the more drafts are accepted.

        Args:
            texts: token ids of texts like those to be written.
            steps: of Adam.
            length: tokens of a window, drawn from the texts; at most the shortest text.
            batch_size: windows of a step.
            learning_rate: of Adam.
            seed: of the windows.
            progress: called with (steps done, steps, what).

        Returns:
            The loss of each step.

        Raises:
            ValueError: a text of less than drafts + 2 tokens, or nothing to draft (drafts=0).

        Cost: a step has length x (drafts + 1) rows, forward and backward, and their logits.
        """
        rows = prompts("texts", texts)
        steps, length = integer("steps", steps), integer("length", length, 1)
        shortest = min(map(len, rows))
        length = min(length, shortest, _window(self.model) or length)
        if self.drafts == 0:
            raise ValueError("drafts=0 drafts nothing, so there is nothing to fit: lookahead(model, drafts=3)")
        if length < self.drafts + 2:
            raise ValueError(
                f"windows to draft {self.drafts} tokens in must have at least {self.drafts + 2}, got {length} (the "
                f"shortest text has {shortest}); leave short texts out, or draft fewer tokens"
            )
        self._require_active()
        decodable(self.model, length)
        require_in_vocabulary(self.model, "texts", rows)
        return fit(
            self.model,
            self.adapter,
            rows,
            steps=steps,
            length=length,
            batch_size=integer("batch_size", batch_size, 1),
            learning_rate=number("learning_rate", learning_rate, 0.0),
            seed=integer("seed", seed),
            progress=progress,
        )

    def generate(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        *,
        max_new_tokens: int = 64,
        drafts: int | None = None,
        mode: Mode = "quadratic",
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        eos_token: int | Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> Decoded:
        """Write what the model itself would write: a pass verifies the last drafts and makes the next ones.

        Greedy text is that of `model.generate(do_sample=False)` but for rounding, which `compare` looks at; drawn
        text has exactly the model's distribution (a rule rejects drafts). Other settings of the model's generation
        config, such as a repetition penalty, are not used.

        Args:
            ids: token ids of one prompt.
            max_new_tokens: tokens to write.
            drafts: tokens that a pass drafts at most; by default as many as the adapter has. 0 is stock decoding.
            mode: "quadratic": masks after each draft, so that whatever is accepted, the next drafts are there:
                1 + m + (m + 1) m rows a pass. "linear": masks after the last draft alone, 1 + 2 m rows; when a draft
                fails, the next pass has nothing to verify.
            temperature: to draw tokens; greedy without `temperature`, `top_k` and `top_p`.
            top_k: draw from the best so many.
            top_p: draw from the best that make up this probability.
            seed: of the drawing.
            eos_token: id or ids that end the text; by default those of the model's generation config, -1 for none.
            progress: called with (tokens written, tokens to write, what).

        Returns:
            The new tokens, the passes that they took, and how many drafts were accepted.

        Raises:
            ValueError: no prompt or several, more positions than the model has or than its window holds.
        """
        self._require_active()
        prompt, most = self._prompt(ids), integer("max_new_tokens", max_new_tokens)
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}, got {mode!r}")
        self._require_room(len(prompt) + most)
        return decode(
            self.model,
            self.adapter,
            prompt,
            most=most,
            mode=mode,
            drafts=self.drafts if drafts is None else integer("drafts", drafts, 0, self.drafts),
            choice=Choice(temperature, top_k, top_p, seed),
            ends=end_tokens(self.model, eos_token),
            progress=progress,
        )

    @torch.no_grad()
    def compare(
        self,
        ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        *,
        max_new_tokens: int = 64,
        drafts: int | None = None,
        mode: Mode = "quadratic",
        eos_token: int | Sequence[int] | None = None,
    ) -> GreedyComparison:
        """Greedy text of `generate` against that of the model's own: where they part, and how near a choice it was.

        The two compute the same numbers in other shapes, so that sums are rounded otherwise; text can part only where
        the model's two best tokens lie within that rounding.

        Cost: both ways of writing, and a pass over the common part where they part.
        """
        most = integer("max_new_tokens", max_new_tokens)
        ours = self.generate(ids, max_new_tokens=most, drafts=drafts, mode=mode, eos_token=eos_token)
        prompt, ends = self._prompt(ids), end_tokens(self.model, eos_token)
        with evaluating(self.model):
            new, stock = list(ours.tokens[0]), _own_text(self.model, prompt, most, ends)
            divergence = margin = scale = None
            if new != stock:
                parts = [i for i, pair in enumerate(zip(new, stock, strict=False)) if pair[0] != pair[1]]
                divergence = parts[0] if parts else min(len(new), len(stock))
                read = torch.tensor([prompt + stock[:divergence]], device=self.model.device)
                logits = self.model(read).logits[0, -1].double()
                best = logits.topk(2).values
                margin, scale = float(best[0] - best[1]), float(logits.abs().max())
        tolerance = torch.finfo(self.model.dtype).eps ** 0.5
        return GreedyComparison(len(stock), ours.passes, divergence, margin, scale, tolerance)

    def _prompt(self, ids: object) -> list[int]:
        rows = prompts("ids", ids)
        if len(rows) != 1 or not rows[0]:
            raise ValueError(
                f"lookahead writes one text at a time (each accepts another number of drafts), from a prompt of at "
                f"least one token; got {len(rows)} prompts of {[len(row) for row in rows][:4]} tokens: call it for each"
            )
        require_in_vocabulary(self.model, "ids", rows)
        return rows[0]

    def _require_room(self, positions: int) -> None:
        decodable(self.model, positions)
        window = _window(self.model)
        if window is not None and positions > window:
            raise ValueError(
                f"{type(self.model).__name__} attends through a window of {window} positions, but the text would take "
                f"{positions}; lookahead runs layers under one causal mask: write fewer tokens"
            )

    def _require_active(self) -> None:
        if not self.active:
            raise RuntimeError("this Lookahead was removed; call af.tasks.lookahead(model) again")

    def _restore(self) -> None:
        self.adapter.remove()

    def _summary(self) -> str:
        size = sum(parameter.numel() for parameter in self.adapter.parameters())
        return (
            f"lookahead of {self.drafts} tokens on {type(self.model).__name__}: {len(self.adapter.up)} linear maps "
            f"adapted with rank {self.rank} on masked rows alone, {size:,} parameters"
        )


def lookahead(model: nn.Module | Loaded, drafts: int = 3, rank: int = 16, seed: int = 0) -> Lookahead:
    """Let a frozen model draft several tokens a pass, losslessly: what is written is what the model itself would write.

    Masks after a token are trained to predict what the model will say there (`fit`); the model's own rows read no
    mask and are not adapted, so that they verify the drafts in the same pass (`generate`). Before it is fitted,
    lookahead is right, but has no use.

    A pass has more rows than one of plain decoding, so that it is slower: it pays where a pass is bound by memory (a
    GPU, one text at a time), and not where it is bound by computing. Measure before you claim.

    Args:
        model: a frozen causal language model with attention alone, run by "sdpa" or "eager", or what `load_model`
            returns.
        drafts: tokens that a pass drafts at most.
        rank: of the updates.
        seed: of their random start.

    Returns:
        A handle with `.fit(texts)`, `.generate(ids)`, `.compare(ids)` and `.remove()`. Calls of the model itself are
        as before, also while it is attached.

    Raises:
        UnsupportedArchitecture: the model takes no 4D mask, positions or cache, or has recurrent parts.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> with af.tasks.lookahead(model, drafts=2) as ahead:
    ...     losses = ahead.fit([list(range(32))], steps=2)
    ...     ahead.compare([5, 6, 7], max_new_tokens=8, eos_token=-1).ok
    True
    """
    drafts, rank = integer("drafts", drafts, 0, _LARGEST), integer("rank", rank, 1)
    return Lookahead(decodable(split(model)[0], 1), drafts, rank, integer("seed", seed))


def _own_text(model: PreTrainedModel, prompt: list[int], most: int, ends: frozenset[int]) -> list[int]:
    """Greedy text of `generate`, whatever else the model's generation config asks for."""
    if most == 0:
        return []
    never = model.config.get_text_config().vocab_size  # `generate` would take None for the config's
    before, model.generation_config = model.generation_config, GenerationConfig(pad_token_id=0)
    ids = torch.tensor([prompt], device=model.device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": most}
    try:
        whole = cast(Any, model).generate(ids, **options, eos_token_id=sorted(ends) or [never])
    finally:
        model.generation_config = before
    return whole[0, len(prompt) :].tolist()


def _window(model: PreTrainedModel) -> int | None:
    """How many positions the narrowest layer attends to; None if all do to everything."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    widths = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    values = [width for kind, width in widths.items() if width is not None and (kinds is None or kind in kinds)]
    return min(values, default=None)
