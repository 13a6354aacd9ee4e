"""A model for lm-eval (`pip install lm-eval`) whose requests run the common prefixes of a pass once.

model = SharedPrefixLM(pretrained=model, tokenizer=tokenizer)
lm_eval.simple_evaluate(model=model, tasks=["hellaswag"], num_fewshot=10)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lm_eval.models.huggingface import HFLM
from torch import nn

from attnflow._core.checks import integer
from attnflow.tasks.hf.scoring import Scorer


class SharedPrefixLM(HFLM):
    """lm-eval's `HFLM` with the same numbers: log-likelihoods are computed by `score`, everything else is HFLM's.

    Args:
        tokens_per_pass: tokens that one forward pass runs at most, in place of `batch_size`.
        options: as of `HFLM`; an encoder-decoder model runs as there.
    """

    def __init__(self, *args: Any, tokens_per_pass: int = 4096, **options: Any) -> None:
        self.tokens_per_pass = integer("tokens_per_pass", tokens_per_pass, 1)
        self.tokens_before = self.tokens_after = 0
        self._scorer: Scorer | None = None
        super().__init__(*args, **options)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        harness = cast(Any, self)  # lm-eval's attributes are not typed
        if harness.backend != "causal":
            return cast(Any, super())._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        if self._scorer is None:
            self._scorer = Scorer(cast(nn.Module, harness.model))
        pairs: list[tuple[list[int], list[int]]] = []
        for _, context, continuation in requests:
            whole = [*context, *continuation][-(harness.max_length + 1) :]  # HFLM cuts long contexts in the same way
            pairs.append((whole[: -len(continuation)], continuation))
        autocast = cast("torch.dtype | None", harness.mixed_precision_dtype)
        with torch.autocast(harness.device.type, dtype=autocast, enabled=autocast is not None):
            scores = self._scorer.score(pairs, self.tokens_per_pass, lambda dtype: harness.softmax_dtype or dtype)
        self.tokens_before += scores.tokens_before
        self.tokens_after += scores.tokens_after
        answers = list(zip(scores.log_probs, scores.greedy, strict=True))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:  # as windows of loglikelihood_rolling are, which HFLM adds up and keeps itself
                harness.cache_hook.add_partial("loglikelihood", text, answer)
        return answers
