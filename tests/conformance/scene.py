"""One small model with some features on it, run, and compared with `dense`; then without them, and compared again."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.cache_utils import Cache

from tests.conformance import dense

SIZE, PROMPT, NEW, LARGEST = 12, 8, 5, 24
DOCUMENTS = (5, 7)
PADS = (0, 3, 3, 0)
FACTS = ("masks", "biased", "entries", "adapted", "alpha")  # what changes the function, and must be seen to
Mode = Literal["train", "forward", "decode", "threads"]


class Wrong(AssertionError):
    """Features and oracle disagree."""


class Impossible(Exception):
    """Two features that cannot stand together, whoever offers them."""


def small() -> Any:
    """Two layers of a Llama with grouped heads, float64, whose tokens differ clearly."""
    torch.manual_seed(0)
    shape = {"hidden_size": dense.WIDTH, "num_hidden_layers": dense.LAYERS, "num_attention_heads": dense.HEADS}
    config = transformers.LlamaConfig(
        **shape, num_key_value_heads=dense.KV_HEADS, intermediate_size=48, vocab_size=dense.VOCABULARY,
        initializer_range=0.3, rms_norm_eps=1e-6, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@dataclass(eq=False)
class Scene:
    """A model, its rows, and what the oracle must know of the features."""

    model: Any = field(default_factory=small)
    mode: Mode = "train"
    decodes: bool = False
    count: int = 4
    padded: bool = False
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of generate
    caches: Callable[[], Cache] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)  # of what was offloaded
    handles: list[Any] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    copied: list[Any] = field(default_factory=list)  # models that the present one is a copy of
    rounding: float = 2e-5  # of the largest logit: the norms of a Llama are in float32
    rank: int = 0
    ranks: int = 1

    # -------- rows

    def ids(self, seed: int = 0) -> Tensor:
        """[4, SIZE] that begin alike; prompts of two while decoding."""
        ids = torch.randint(1, dense.VOCABULARY, (4, SIZE), generator=torch.Generator().manual_seed(seed))
        ids[:, :6] = ids[0, :6].clone()
        ids = ids[: self.count, :PROMPT] if self.decodes else ids
        for row, pad in enumerate(self.pads(len(ids))):
            ids[row] = torch.cat([torch.zeros(pad, dtype=ids.dtype), ids[row, : ids.shape[1] - pad]])
        return ids

    def pads(self, rows: int) -> tuple[int, ...]:
        first = 1 if rows == 1 else 0  # the padded one
        return PADS[first : first + rows] if self.padded else (0,) * rows

    def mine(self, rows: int) -> slice:
        share = rows // self.ranks
        return slice(self.rank * share, (self.rank + 1) * share)

    def real(self, shape: torch.Size) -> Tensor:
        return torch.arange(shape[1]) >= torch.tensor(self.pads(shape[0]))[:, None]

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        named = {"input_ids": ids}
        if self.padded:
            named["attention_mask"] = self.real(ids.shape).long()
        if self.packed:
            named["position_ids"] = torch.cat([torch.arange(size) for size in DOCUMENTS]).repeat(len(ids), 1)
        return {name: value[self.mine(len(ids))] for name, value in named.items()}

    def labels(self, ids: Tensor) -> Tensor:
        labels = ids.clone()
        labels[~(self.real(ids.shape) & self.real(ids.shape).roll(1, 1))] = -100
        labels[:, 0] = -100
        if self.packed:
            labels[:, DOCUMENTS[0]] = -100
        return labels

    # -------- the oracle

    def call(self, ids: Tensor, without: str = "") -> dense.Call:
        """What the oracle computes for these rows; `without` one of the facts."""
        facts = {name: value for name, value in self.facts.items() if name != without}
        rows, size = ids.shape
        allow = torch.zeros(rows, size, size, dtype=torch.bool)
        own = torch.ones(size, size).tril().bool()
        if self.packed:
            own &= torch.block_diag(*(torch.ones(one, one) for one in DOCUMENTS)).bool()
        for row, pad in enumerate(self.pads(rows)):
            mask = facts["masks"][row % len(facts["masks"])] if "masks" in facts else own
            allow[row, pad:, pad:] = mask[: size - pad, : size - pad]
        positions = torch.arange(size).repeat(rows, 1)
        if self.packed:
            positions = torch.cat([torch.arange(one) for one in DOCUMENTS]).repeat(rows, 1)
        noise = None
        if "alpha" in facts and self.mode == "train":
            torch.manual_seed(11)
            most, dtype = facts["alpha"] / (size * dense.WIDTH) ** 0.5, next(self.model.parameters()).dtype
            noise = torch.zeros(rows // self.ranks, size, dense.WIDTH, dtype=dtype)
            noise = noise.uniform_(-most, most).double().repeat(self.ranks, 1, 1)
        return dense.Call(ids, allow, positions, noise, facts.get("entries"), "biased" in facts, "adapted" in facts)

    def truth(self, ids: Tensor, without: str = "") -> Tensor:
        with torch.no_grad():
            return dense.logits(self.weights | dense.weights_of(self.model), self.call(ids, without))

    def _close(self, what: str, found: Tensor, right: Tensor, rounding: float = 0.0) -> None:
        most = float(right.abs().amax())
        difference = float((found.double() - right).abs().amax())
        if not difference <= (rounding or self.rounding) * most:
            raise Wrong(f"{what} differ by {difference:.2g} of {most:.2g}")

    # -------- the run

    def run(self) -> None:
        """Run, and compare; a `Wrong` says what differs. Of a copy and its original both."""
        for model in [self.model, *(reversed(self.copied) if self.ranks == 1 else ())]:
            self.model = model
            if self.mode == "threads":
                self._threads()
            elif self.mode == "decode":
                self.decode(self.ids())
            else:
                self.forward(self.ids(), self.mode == "train")
        for fact in FACTS:
            if fact in self.facts and (fact != "alpha" or self.mode == "train"):
                ids, seen = self.ids(), self.real(self.ids().shape)
                right = self.truth(ids)[seen]
                change = float((right - self.truth(ids, fact)[seen]).abs().amax() / right.abs().amax())
                assert change > max(2 * self.rounding, 1e-3), f"the oracle does not feel {fact}"
        for check in self.checks:
            check()

    def forward(self, ids: Tensor, gradients: bool) -> None:
        self.model.train(gradients)
        self.model.zero_grad(set_to_none=True)
        mine, seen = self.mine(len(ids)), self.real(ids.shape)
        torch.manual_seed(11)
        with torch.set_grad_enabled(gradients):
            out = self.model(**self.inputs(ids), labels=self.labels(ids)[mine], use_cache=False)
        weights = self.weights | dense.weights_of(self.model)
        right = dense.logits(weights, self.call(ids))
        self._close("logits", out.logits.detach()[seen[mine]], right.detach()[mine][seen[mine]])
        parts = [dense.loss(right[part], self.labels(ids)[part]) for part in self._parts(len(ids))]
        self._close("losses", out.loss.detach()[None], parts[self.rank].detach()[None])
        if gradients:
            out.loss.backward()
            self._gradients(weights, torch.stack(parts).mean())

    def _parts(self, rows: int) -> list[slice]:
        return [replace(self, rank=rank).mine(rows) for rank in range(self.ranks)]

    def _gradients(self, weights: dict[str, Tensor], loss: Tensor) -> None:
        names = {dense.plain(name): value for name, value in self.model.named_parameters() if value.requires_grad}
        right = torch.autograd.grad(loss, [weights[name] for name in names], allow_unused=True)
        most = max(float(one.abs().amax()) for one in right if one is not None)
        for (name, value), one in zip(names.items(), right, strict=True):
            found = value.grad.full_tensor() if hasattr(value.grad, "full_tensor") else value.grad
            found = torch.zeros(()) if found is None else found.double()
            difference = float((found - (0 if one is None else one)).abs().amax())
            if not difference <= 10 * self.rounding * most:
                raise Wrong(f"the gradient of {name} differs by {difference:.2g} of {most:.2g}")

    def decode(self, ids: Tensor) -> None:
        self.model.eval()
        options = dict(self.options)
        if self.caches is not None:
            options["past_key_values"] = self.caches()
        if (helper := options.pop("assisted", None)) is not None:
            options["assistant_model"] = helper
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        out = inner.generate(
            **self.inputs(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True, output_scores=True, **options,
        )  # fmt: skip
        ids = ids[self.mine(len(ids))]
        start, texts = ids.shape[1], out.sequences
        if texts.shape != (len(ids), start + NEW):
            raise Wrong(f"texts of {tuple(texts.shape)}")
        right = self.truth(texts)[:, start - 1 : -1]
        if (beams := options.get("num_beams", 1)) > 1:
            said = right.log_softmax(-1).gather(-1, texts[:, start:, None]).sum((1, 2)) / NEW
            self._close("scores of beams", out.sequences_scores, said)
            for row in range(len(ids) if self.rounding < 1e-3 else 0):
                one = self._of_row(row, len(ids))
                best = dense.beams(lambda now, one=one: one.truth(now)[:, -1], ids[row].tolist(), beams, NEW)
                if texts[row].tolist() != best:
                    raise Wrong(f"beams find {texts[row].tolist()}, a search by the oracle {best}")
            return
        found = torch.stack(out.logits, 1).double()
        self._close("logits of decoding", found, right)
        if not torch.equal(found.argmax(-1), texts[:, start:]):
            raise Wrong("the tokens are not those of the largest logits")

    def _of_row(self, row: int, rows: int) -> Scene:
        one = copy.copy(self)
        one.facts = dict(self.facts)
        if "masks" in self.facts:
            one.facts["masks"] = [self.facts["masks"][row % len(self.facts["masks"])]]
        pad = self.pads(rows)[row]
        one.pads = lambda size: (pad,) * size  # type: ignore[method-assign]
        return one

    def _threads(self) -> None:
        """Four threads, three calls each, all with other rows."""
        errors: list[BaseException] = []
        gate = threading.Barrier(4)

        def work(number: int) -> None:
            try:
                gate.wait()
                for turn in range(3):
                    ids = self.ids(1 + 4 * turn + number)
                    self.decode(ids) if self.decodes else self.forward(ids, False)
            except BaseException as error:
                errors.append(error)

        pace = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(pace)
        if errors:
            raise next((error for error in errors if isinstance(error, Wrong)), errors[0])

    def plain(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            return self.model(**self.inputs(self.ids()), use_cache=False).logits

    # -------- afterwards

    def leave(self, first_in: bool) -> None:
        """Remove what is ours, the first one in first or last."""
        for handle in self.handles if first_in else reversed(self.handles):
            handle.remove()

    def traces(self) -> list[str]:
        """What of attnflow is still in the model that the handles are of."""
        found: list[str] = []
        for path, module in (self.copied or [self.model])[0].named_modules():
            for name, value in vars(module).items():
                held = list(value.values()) if isinstance(value, dict) else [value]
                if name.startswith("_attnflow") or any(_ours(one) for one in held):
                    found.append(f"{path}.{name}")
            name = str(getattr(getattr(module, "config", None), "_attn_implementation_internal", ""))
            if name.startswith("attnflow"):
                found.append(f"{path}.config: {name}")
        return found


def _ours(value: Any) -> bool:
    value = value.func if isinstance(value, partial) else getattr(value, "__func__", value)
    where = getattr(value, "__module__", None) if callable(value) and not isinstance(value, nn.Module) else None
    return str(where or type(value).__module__).startswith("attnflow")
