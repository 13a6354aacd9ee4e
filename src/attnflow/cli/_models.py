"""Models that commands name, and the text that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from attnflow.cli._catalogue import Parameter, entries
from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE: Final = 4000  # characters of the sample text


@dataclass(frozen=True)
class Named:
    """A loaded model with the name that the user gave; the tokenizer is None where no text is read."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def line(self) -> str:
        """What it is, in one line."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        layers = getattr(self.model.config, "num_hidden_layers", None)
        depth = "" if layers is None else f", {layers} layers"
        return f"{self.name}: {type(self.model).__name__}, {parameters:,} parameters{depth}"

    def ids(self, text: str | None, typed: str | None, limit: int) -> list[int]:
        """The first `limit` token ids: `typed`, or of `text`, or of Shakespeare's sonnets.

        Raises:
            BadUsage: both are given, or there are no tokens.
        """
        if typed is not None:
            if text is not None:
                raise BadUsage("give --text or --ids, not both")
            found = cast(list[int], Parameter("--ids", "ints", required=True, default=None).read(typed))
        else:
            encoded = self.tokenizer(sample() if text is None else text, truncation=True, max_length=limit)
            found = list(encoded["input_ids"])
        if len(found) < 2:
            raise BadUsage(f"expected at least 2 tokens, got {len(found)}: nothing can flow")
        return found[:limit]

    def texts(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """Each token of the inputs as text, an encoder's first."""
        return [str(self.tokenizer.decode([token])) for ids in inputs.values() for token in ids[0].tolist()]

    def inputs(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """Arguments of the model's forward: the tokens, and reversed as a second sequence of the batch.

        With two sequences an audit also sees what crosses a batch. For an encoder-decoder they stand on both sides.
        """
        import torch

        vocabulary = self.model.get_input_embeddings().num_embeddings
        bad = next((token for token in ids if not 0 <= token < vocabulary), None)
        if bad is not None:
            raise BadUsage(f"token ids of {self.name} lie in [0, {vocabulary}), got {bad}")
        tokens = torch.tensor([list(ids), list(ids)[::-1]])
        if getattr(self.model.config, "is_encoder_decoder", False):
            return {"input_ids": tokens, "decoder_input_ids": tokens[:, :-1]}  # an audit tells them by their lengths
        return {"input_ids": tokens}


def load(name: str, tokenizer: bool = True) -> Named:
    """The model `name`: a short name, a folder, a GGUF file or a model of the hub.

    Raises:
        BadUsage: there is no such model, or it is none that can be loaded.
    """
    from attnflow.models import load_model

    if not name.strip():
        raise BadUsage("name a model: smollm2-135m, minilm, a folder, a GGUF file or a model id of the hub")
    try:
        model, tokens = load_model(name, tokenizer=tokenizer)
    except FileNotFoundError as error:
        hint = f"; {name} is a mask: see `attnflow report {name}` and `attnflow mask show {name}`"
        raise BadUsage(f"{error}{hint if name in entries() else ''}") from error
    except ValueError as error:
        without = "pass tokenizer=False"
        raise BadUsage(str(error).replace(without, "give token ids, as in --ids 5,6,7")) from error
    return Named(name, model, tokens)


def sample() -> str:
    """Real text, its line breaks and indents as single spaces."""
    from attnflow.models import sample_text

    return " ".join(sample_text(characters=_SAMPLE).split())
