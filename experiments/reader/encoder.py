"""`TextEncoder`: texts to embeddings by a transformers encoder."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from attnflow._core.checks import preview
from attnflow._core.progress import Progress
from attnflow.models.loading.loader import load_model
from attnflow.models.loading.names import MODELS
from attnflow.models.passes.evaluation import evaluating

_POOLING: Final = "1_Pooling/config.json"
_BATCH: Final = 32  # texts of a forward pass
_WINDOW: Final = 64  # batches that are sorted by length together: all tokens of a million texts need not fit
_DIGITS: Final = 12  # of the digest in a version


class TruncatedText(UserWarning):
    """The end of a text is not in its embedding."""


class TextEncoder:
    """Embeddings of texts: the last hidden states of a transformers model, pooled over tokens and normalised.

    What sentence-transformers wrote beside a model (pooling, longest text) is respected: all-MiniLM-L6-v2 takes means
    over at most 256 tokens. Embeddings of length 1 make inner products cosines.

    Args:
        model: a short name of `af.models.MODELS`, a folder or a hub id; or a loaded (model, tokenizer).

    Attributes:
        name: by which the same encoder is loaded again.
        pooling: "mean" over the tokens of a text, or its "first" token.
        max_length: tokens of a text that are read.

    >>> from experiments.reader.encoder import TextEncoder
    >>> encoder = TextEncoder("minilm")
    >>> one, two, three = encoder(["a cat sat", "a kitten was sitting", "interest rates"])
    >>> float(one @ two) > float(one @ three)
    True
    """

    def __init__(
        self, model: str | os.PathLike[str] | tuple[PreTrainedModel, PreTrainedTokenizerBase] = "minilm"
    ) -> None:
        named = "" if isinstance(model, tuple) else os.fspath(model)
        self.model, tokenizer = model if isinstance(model, tuple) else load_model(named)
        self.tokenizer = cast(PreTrainedTokenizerBase, tokenizer)
        source = str(getattr(self.model.config, "name_or_path", "") or "")
        if named and named not in MODELS and (folder := Path(named).expanduser()).exists():
            named = str(folder.resolve())
        self.name = named or source or type(self.model).__name__
        if "decoder_input_ids" in inspect.signature(self.model.forward).parameters:
            raise ValueError(f"{self.name} has an encoder and a decoder; pass (model.get_encoder(), tokenizer)")
        kinds = [type(self.model).__name__, *(getattr(self.model.config, "architectures", None) or [])]
        if any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds) and not _beside(source, _POOLING):
            raise ValueError(
                f"{self.name} is a decoder that writes texts ({type(self.model).__name__}), and nothing beside it says "
                'that it embeds them: take an encoder such as "minilm"'
            )
        self.pooling = _pooling(source)
        longest = _beside(source, "sentence_bert_config.json").get("max_seq_length") or self.tokenizer.model_max_length
        self.max_length = int(min(longest, getattr(self.model.config, "max_position_embeddings", None) or longest))

    @property
    def dim(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def version(self) -> str:
        """`name@digest`; the digest is of the weights, the vocabulary and the settings above.

        Computed anew each time, because weights may be trained. Cost: about 0.1 s for MiniLM.
        """
        digest = hashlib.sha256()
        for key, value in sorted(self.model.state_dict().items()):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        settings = (vocabulary, self.pooling, True, self.max_length, None)  # of length 1, and of whole texts
        digest.update(json.dumps(settings).encode())
        return f"{self.name}@{digest.hexdigest()[:_DIGITS]}"

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, "texts dim"]:
        """One embedding for each text.

        Warns:
            TruncatedText: some were longer than the encoder reads; `encode` returns which.
        """
        embeddings, truncated = self.encode(texts)
        if truncated:
            warnings.warn(
                f"{len(truncated):,} of {len(texts):,} texts have more than {self.max_length} tokens, and "
                f"their ends are not embedded: texts {preview(truncated)}; split them",
                TruncatedText,
                stacklevel=2,
            )
        return embeddings

    def encode(self, texts: Sequence[str], progress: Progress | None = None) -> tuple[Tensor, list[int]]:
        """Embeddings, float32 [texts, dim], and which texts were too long, so that their ends are not embedded.

        `progress` is called as progress(done, total, what).
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in cast("Sequence[object]", texts)):
            raise TypeError("texts must be a sequence of strings")
        embeddings, truncated = torch.empty(len(texts), self.dim), list[int]()
        window = _WINDOW * _BATCH
        with evaluating(self.model):
            for start in range(0, len(texts), window):
                tokens = self._tokens(texts[start : start + window], start, truncated)
                # Batches hold texts of similar length.
                order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]), reverse=True)
                for first in range(0, len(order), _BATCH):
                    rows = order[first : first + _BATCH]
                    embeddings[[start + row for row in rows]] = self._embed([tokens[row] for row in rows])
                    if progress is not None:
                        progress(start + first + len(rows), len(texts), "texts")
        if not bool(torch.isfinite(embeddings).all()):
            row = int((~torch.isfinite(embeddings).all(dim=1)).nonzero()[0])
            raise ValueError(f"the embedding of text {row} is not finite: {texts[row][:80]!r}")
        return embeddings, truncated

    def _tokens(self, texts: Sequence[str], start: int, truncated: list[int]) -> list[list[int]]:
        tokens = cast("list[list[int]]", self.tokenizer(list(texts), verbose=False)["input_ids"])
        long = [place for place, ids in enumerate(tokens) if len(ids) > self.max_length]
        if long:  # cut in a second call: the tokenizer does not say which texts it cuts
            cut = self.tokenizer([texts[place] for place in long], truncation=True, max_length=self.max_length)
            for place, ids in zip(long, cast("list[list[int]]", cut["input_ids"]), strict=True):
                tokens[place] = ids
            truncated.extend(start + place for place in long)
        empty = next((place for place, ids in enumerate(tokens) if not ids), None)
        if empty is not None:
            raise ValueError(f"text {start + empty} has no tokens: {texts[empty]!r}")
        return tokens

    @torch.inference_mode()
    def _embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        padding = getattr(self.tokenizer, "pad_token_id", None) or 0
        rows = [torch.tensor(row, device=self.model.device) for row in tokens]
        ids = pad_sequence(rows, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(row) for row in tokens], device=ids.device)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        inner = cast(nn.Module, getattr(self.model, "base_model", self.model))  # without a language model's head
        out: Any = inner(input_ids=ids, attention_mask=mask.long())
        hidden = cast(Tensor, out.last_hidden_state).float()
        pooled = hidden[:, 0] if self.pooling == "first" else (hidden * mask[..., None]).sum(1) / lengths[:, None]
        return functional.normalize(pooled, dim=-1).cpu()


def _pooling(source: str) -> str:
    """Read the pooling that sentence-transformers saved beside the model; "mean" by default."""
    settings = _beside(source, _POOLING)
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if not chosen or chosen == ["pooling_mode_mean_tokens"]:
        return "mean"
    if chosen == ["pooling_mode_cls_token"]:
        return "first"
    raise ValueError(f"{source} pools by {', '.join(chosen)}, which is not supported: take another encoder")


def _beside(source: str, name: str) -> dict[str, Any]:
    try:
        path = cached_file(source, name) if source else None
    except OSError:
        path = None
    return {} if path is None else cast("dict[str, Any]", json.loads(Path(path).read_text(encoding="utf-8")))
