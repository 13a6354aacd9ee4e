"""One cell of the matrix: a feature on a miniature, against the oracle, as one code with its reason."""

from __future__ import annotations

import inspect
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from linecache import getline
from pathlib import Path
from textwrap import shorten
from types import FrameType
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnflow as af
from attnflow.geometry.attribution import ScoreAttribution
from tests.conformance import inputs as made
from tests.conformance import oracles, senses
from tests.conformance.alone import rows_alone
from tests.conformance.explained import answer_explained
from tests.conformance.inputs import LENGTH, Inputs
from tests.conformance.loss import loss_read
from tests.conformance.miniature import NotBuilt, Wrong

Code = Literal["works", "refused", "unclear", "wrong", "none"]
_CLEAR = (af.AttnflowError, ValueError, TypeError, RuntimeError)
_PACKAGE = Path(af.__file__).parent


@dataclass(frozen=True)
class Cell:
    """What became of one feature on one class: `none` where the feature has nothing to work on."""

    code: Code
    reason: str = ""


def cell(feature: Callable[[PreTrainedModel], str | None], model: PreTrainedModel) -> Cell:
    """Run one feature on a copy of the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reason = feature(deepcopy(model))
    except Wrong as error:
        return Cell("wrong", words(error))
    except NotBuilt as error:
        return Cell("none", words(error))
    except Exception as error:
        return Cell("refused" if refused(error) else "unclear", f"{type(error).__name__}: {words(error)}")
    return Cell("works", reason or "")


def refused(error: BaseException) -> bool:
    """Whether an error is a sentence of ours: what a `raise` of the package says, not what broke below it or in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, _CLEAR) or len(str(error).split()) < 5:
        return False
    path = trace.tb_frame.f_code.co_filename
    return Path(path).is_relative_to(_PACKAGE) and getline(path, trace.tb_lineno).lstrip().startswith("raise ")


def words(error: BaseException) -> str:
    return shorten(re.sub(r" at 0x[0-9a-f]+", "", str(error)), 200, placeholder=" …")


def markdown(text: str) -> str:
    """The text in a page, with the characters that mean something there escaped."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("[", "\\[")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"no answer in {seconds} s of processor time")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# -------- audit


def audit_default(model: PreTrainedModel) -> str:
    """The order that the model declares, on two rows of plain text; else of what the model sees, hears or reads."""
    if made.is_text(model):
        with suppress(NotBuilt):
            return _audit(model, made.text(model, batch=2))
    return _audit_senses(model, model.__dict__.get("sensed") or senses.runs_on(model))


def _audit_senses(model: PreTrainedModel, inputs: Inputs) -> str:
    """Two rows of pixels, sounds or several towers: rows stay apart, and the text beside them keeps its order."""
    if any(name in inputs and inputs[name].dim() == 2 for name in ("input_ids", "decoder_input_ids")):
        with suppress(NotBuilt):
            answer = _audit(model, inputs)
            return _rows_apart(model, inputs, af.audit.check(model, inputs)) or answer
    report = af.audit.check(model, inputs)
    _rows_apart(model, inputs, report)
    ordered = [v for v in report.violations if v.kind != "batch"]
    early = "causal" in report.order and oracles.early_moves(model, inputs)
    if early and report.ok:
        raise Wrong(f"false clean: early outputs move with late inputs, and the audit says {report.order}")
    if ordered and not early:
        raise Wrong(f"false alarm: {ordered[0]}")
    return _answer(report)


def _rows_apart(model: PreTrainedModel, inputs: Inputs, report: af.audit.AuditReport) -> str:
    mixed = oracles.rows_mix(model, inputs)
    if mixed and not report.violations:
        raise Wrong(f"false clean: the rows of the batch mix, and the audit says {report.verdict}")
    crossed = [v for v in report.violations if v.kind == "batch"]
    if crossed and not mixed:
        raise Wrong(f"false alarm: {crossed[0]}")
    return ""


def audit_packed(model: PreTrainedModel) -> str:
    """Two documents by positions that restart: what crosses them is a leak, by whatever mixer."""
    inputs = _of_one_stack(model, made.packed(), "position_ids", "packed documents are")
    documents = torch.block_diag(torch.ones(4, 4), torch.ones(8, 8)).bool()
    return _audit(model, inputs, documents)


def audit_padded(model: PreTrainedModel) -> str:
    return _audit(model, _of_one_stack(model, made.padded(model), "attention_mask", "a padded batch is"))


def audit_cached(model: PreTrainedModel) -> str:
    """Prefill and steps with a cache, against one full forward."""
    inputs = made.text(_text(model))
    if not model.can_generate():
        raise NotBuilt("does not generate")
    equal = {path: _cached_equals_full(model, inputs, *way) for path, way in _WAYS.items()}
    if equal["cached"] is None:
        raise NotBuilt("keeps no cache that can be read back")
    report = af.audit.check(model, inputs, cache=True)
    accused = {violation.path: violation for violation in report.violations if violation.kind == "cache"}
    for path in accused:
        if equal.get(path):
            raise Wrong(f"{path} equals the full forward, and the audit says {accused[path]}")
    differ = [path for path in _WAYS if equal[path] is False]
    if differ and not report.violations:
        raise Wrong(f"false clean: {', '.join(differ)} differs from the full forward, and the audit says clean")
    return "; ".join([_answer(report), *(f"{path}: not the full forward" for path in accused)])


def audit_image(model: PreTrainedModel) -> str:
    return _audit(model, made.with_image(model))


def _audit(model: PreTrainedModel, inputs: Inputs, within: Tensor | None = None) -> str:
    try:
        oracles.output(model, inputs)
    except Exception as error:
        raise NotBuilt(f"does not run on these inputs: {type(error).__name__}: {error}") from error
    moved = oracles.moves(model, inputs)
    report = af.audit.check(model, inputs)
    flows = [af.audit.declared_order(model, inputs, sequence=row) for row in range(len(moved))]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)  # a window of one layer reaches further
    order = [flow.reachability(depth if flow.num_layers is None else None) for flow in flows]
    name = oracles.stream(inputs)
    size = inputs[name].shape[1]
    believed = torch.stack([rows[-size:, -size:] for rows in order])
    real = inputs.get("attention_mask", torch.ones_like(inputs[name])).bool()
    moved, believed = moved & real[:, :, None], believed & real[:, :, None]
    outside = moved & ~believed
    leak = bool(report.violations)
    mixed = within is not None and bool((moved & ~within).any())
    named = type(model).__name__.endswith("ForCausalLM") or name != "input_ids"  # CPM-Ant's labels come shifted
    if (
        leak
        and within is None
        and not named
        and "causal" in report.order
        and oracles.predicts_next(model, inputs) is False
    ):
        raise Wrong(f"false alarm: its loss is of the tokens in place, so its order is not {report.order}")
    if mixed and not leak:
        raise Wrong(f"false clean: documents mix, and the audit says {report.verdict}")
    if outside.any() and not leak:
        raise Wrong(f"false clean: {int(outside.sum())} pairs move that its own order forbids")
    pooled = [v for v in report.violations if v.module != type(model).__name__ and v.module not in _modules(model)]
    if pooled and not oracles.summaries_move(model, inputs):
        raise Wrong(f"false alarm: {pooled[0]}")
    if leak and not pooled and not outside.any() and not mixed:
        raise Wrong(f"false alarm: {report.violations[0]}")
    later = ~torch.ones(size, size, dtype=torch.bool).tril() & oracles.plain(inputs[name])[:, None]
    causal = bool((moved & later.mT).any()) and not bool((moved & later).any())
    if causal and bool((believed & later).any()):
        raise Wrong("declared weaker than it is: no position sees a later one, and the order lets it")
    return _answer(report)


def _modules(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_modules()}


def _answer(report: af.audit.AuditReport) -> str:
    return f"{report.verdict}: {report.order}"


# -------- masks and biases


def mask_attached(model: PreTrainedModel) -> str:
    """A random mask: exactly its pairs move, through as many layers as there are; other mixers put out nothing."""
    inputs = made.text(_text(model))
    size = inputs[oracles.stream(inputs)].shape[1]
    allow = torch.rand(size, size, generator=torch.Generator().manual_seed(3)) < 0.3
    allow = (allow | torch.eye(size, dtype=torch.bool)).tril()
    model, _ = oracles.precise(model, inputs)
    with oracles.silenced(model) as silent:
        free = oracles.moves(model, inputs)[0]
        stack, calls = _stack(model), len(oracles.attention_calls(model, inputs))
        before = oracles.output(model, inputs)
        with af.masks.attach(stack, af.masks.from_dense(allow), other_mixers="keep" if silent else "error"):
            moved = oracles.moves(model, inputs)[0]
        if not torch.equal(before, oracles.output(model, inputs)):
            raise Wrong("removed, and the outputs are others")
    through = oracles.reachable(allow, calls)
    if extra := int((moved & ~through).sum()):
        raise Wrong(f"{extra} pairs move that the mask forbids")
    if missing := int((allow & free & ~moved).sum()):
        raise Wrong(f"{missing} pairs that the mask allows do not move")
    return f"{calls} layers" + (f"; {len(silent)} other mixers are not masked" if silent else "")


def bias_attached(model: PreTrainedModel) -> str:
    """Nothing changes at the start; then something does, and no later position; with a cache as without."""
    inputs = made.text(_text(model))
    before, free = oracles.output(model, inputs), oracles.moves(model, inputs)
    equal = _cached_equals_full(model, inputs)
    names = {name for name, _ in model.named_parameters()}
    handle = af.bias.attach(_stack(model), af.bias.GuidanceConfig(hidden_dim=8))
    start = oracles.output(model, inputs)
    if not torch.allclose(start, before, rtol=1e-4, atol=1e-5 * float(before.abs().amax())):
        raise Wrong(f"a zero bias moves the outputs by {(start - before).abs().amax():.2g}")
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if name not in names:
            torch.nn.init.normal_(parameter)
    after = oracles.output(model, inputs)
    if float((after - before).abs().amax()) < 1e-6 * float(before.abs().amax()):
        raise Wrong("a random bias moves nothing")
    if any(hasattr(model.config.get_text_config(), name) for name in ("index_topk", "index_topk_blocks")):
        free |= torch.ones_like(free[0]).tril()  # an indexer chooses other keys once the states are others
    if extra := int((oracles.moves(model, inputs) & ~free).sum()):
        raise Wrong(f"{extra} pairs move that did not move without the bias")
    if equal and _cached_equals_full(model, inputs) is False:
        raise Wrong("with a cache the outputs are others than without")
    handle.remove()
    if not torch.equal(before, oracles.output(model, inputs)):
        raise Wrong("removed, and the outputs are others")
    return ""


# -------- geometry and knowledge


def geometry_scored(model: PreTrainedModel) -> str:
    """S and D of every layer, against the matrix that unit vectors show."""
    inputs = made.text(_text(model))
    seen = oracles.queries_and_keys(model, inputs)
    scores = af.geometry.score(model, per_head=False, fold=False)
    rows = {row["name"]: row for row in scores.rows()}
    shared = sorted(set(rows) & set(seen))
    if not seen:
        raise NotBuilt("no attention through the interface of transformers")
    if not shared:
        raise Wrong(f"scores {sorted(map(str, rows))[:2]}, and attention is in {sorted(seen)[:2]}")
    for name in shared:
        s, d = oracles.geometry(*seen[name])
        row = rows[name]
        if abs(row["symmetry"] - s) > 1e-4 or abs(row["directionality"] - d) > 1e-3:
            raise Wrong(
                f"{name}: S {row['symmetry']:.4f}, D {row['directionality']:.4f}; unit vectors: {s:.4f}, {d:.4f}"
            )
    return f"{len(shared)} layers"


def scores_attributed(model: PreTrainedModel) -> str:
    """The sum of the terms is the score of the model's attention, and without biases nothing is constant in it."""
    inputs = made.text(_text(model))
    stack = _stack(model) if any(hasattr(model.config, name) for name in _OTHER_SENSES) else model
    if not made.beside(model) and "input_ids" in inspect.signature(stack.forward).parameters:
        model, inputs = stack, inputs if stack is model else {"input_ids": inputs["input_ids"]}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
    model, _ = oracles.precise(model, inputs)
    inputs = oracles.fitting(model, inputs)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters and "input_ids" in inputs:
        inputs = {"decoder_input_ids": inputs["input_ids"], **inputs}  # which some would make by a shift
    truth = oracles.scores(model, inputs)
    answers: list[str] = []
    for kind in ("self", "cross") if getattr(model.config, "is_encoder_decoder", False) else ("self",):
        result = _last_attribution(model, inputs, kind)
        _is_attribution_of(result, truth)
        earlier = {name.layer for name in result.components if name.layer is not None}
        if kind == "self" and len(earlier) < result.layer:
            raise Wrong(
                f"{result.layer} layers come before, and the components are {list(map(str, result.components))}"
            )
        answers.append(f"{kind}: {len(result.components)} x {len(result.key_components)} components")
    return "; ".join(answers)


def _last_attribution(model: PreTrainedModel, inputs: Inputs, kind: str) -> ScoreAttribution:
    """Of the last layer that attends: hybrid models may end in another mixer."""
    try:
        return af.geometry.attribute(model, inputs, layer=-1, attention=kind)
    except ValueError as error:
        listed = re.search(r"layers with it: .*?(\d+)\]", str(error))
        if listed is None:
            raise
        return af.geometry.attribute(model, inputs, layer=int(listed[1]), attention=kind)


def _is_attribution_of(result: ScoreAttribution, truth: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Compare with the module whose scores are nearest; raise `Wrong`."""
    sums, keys = result.raw.sum((-1, -2)) + result.constants["biases"], list(result.keys)
    near = [name for name, (right, _) in truth.items() if right.shape[0] == len(sums) and max(keys) < right.shape[2]]
    span = float(sums.amax() - sums.amin()) or float(sums.abs().amax()) or 1.0
    errors = {name: float((truth[name][0][:, result.query, keys] - sums).abs().amax()) / span for name in near}
    place = min(errors, key=lambda name: errors[name]) if errors else ""
    if not errors or errors[place] > 1e-4:
        raise Wrong(f"{result.attention}: no module has the scores that the terms add up to ({errors})")
    if not torch.allclose(truth[place][1][:, result.query, keys].double(), result.weights, atol=1e-4):
        raise Wrong(f"{result.attention}: the weights are others than those of {place}")
    if (constant := float(result.constants["biases"].abs().amax())) > 1e-4 * span:
        raise Wrong(f"{result.attention}: there are no biases, and the constant is {constant:.2g}")


def feed_forward_opened(model: PreTrainedModel) -> str:
    """The logits, the effect of an edit, the way back, and every parameter accounted for."""
    inputs = made.text(_text(model))
    check = inputs if made.beside(model) else True
    stack = _stack(model) if check is None and any(hasattr(model.config, n) for n in _OTHER_SENSES) else model
    if oracles.stream(inputs) in inspect.signature(stack.forward).parameters:
        model = stack
    before = oracles.output(model, inputs)
    opened = af.knowledge.from_ffn(model, check=check)
    after = oracles.output(opened, inputs)
    if not torch.allclose(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().amax())):
        raise Wrong(f"the logits differ by {(after - before).abs().amax():.2g}")
    if left := sorted(oracles.feed_forward_parameters(model) & oracles.feed_forward_parameters(opened)):
        raise Wrong(f"partly: {len(left)} matrices of feed-forward layers are not in the base, such as {left[0]}")
    with torch.no_grad():
        next(opened.knowledge.parameters()).mul_(1.5)
    if torch.allclose(oracles.output(opened, inputs), before, rtol=1e-5, atol=1e-6 * float(before.abs().amax())):
        raise Wrong("the base is another, and nothing moves")
    opened = af.knowledge.from_ffn(model, check=check)
    back = af.knowledge.to_ffn(opened)
    for name, value in model.state_dict().items():
        if not torch.equal(value, back.state_dict()[name]):
            raise Wrong(f"on the way back {name} is another")
    return f"{opened.knowledge.num_entries} entries"


# -------- helpers


def _text(model: PreTrainedModel) -> PreTrainedModel:
    if not made.is_text(model):
        raise NotBuilt(f"reads {model.main_input_name}")
    return model


_OTHER_SENSES = ("vision_config", "audio_config", "protein_encoder_config")


def _stack(model: PreTrainedModel) -> PreTrainedModel:
    """The stack that answers in text: what the errors of models with several stacks advise to pass."""
    config = model.config
    if made.beside(model) and not model.can_generate():  # every stack answers
        return model
    if getattr(config, "is_encoder_decoder", False) or any(hasattr(config, name) for name in _OTHER_SENSES):
        return model.get_decoder()
    return model


def _of_one_stack(model: PreTrainedModel, inputs: Inputs, needed: str, what: str) -> Inputs:
    """What a text model of one stack takes of the inputs."""
    names = inspect.signature(_text(model).forward).parameters
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotBuilt(f"{what} for a single stack")
    if needed not in names:
        raise NotBuilt(f"takes no {needed}")
    inputs = {name: value for name, value in inputs.items() if name in names}
    return inputs | made.beside(model, len(inputs["input_ids"]))


_HALF = (LENGTH // 2, *[1] * (LENGTH // 2))
_WAYS: dict[str, tuple[Sequence[int], int]] = {
    "cached": (_HALF, 0),
    "chunks": ((5, 4, 3), 0),
    "left padding": (_HALF, 2),
}


def _cached_equals_full(
    model: PreTrainedModel, inputs: Inputs, steps: Sequence[int] = _HALF, pads: int = 0, exact: bool = True
) -> bool | None:
    """Whether steps with a cache give what one forward gives; None of a way that the model does not have."""
    name = oracles.stream(inputs)
    original = model
    model = oracles.precise(model, inputs)[0] if exact else deepcopy(model)
    full = oracles.output(model, inputs)
    taken = inspect.signature(model.forward).parameters
    if pads and (len(inputs) > 1 or "attention_mask" not in taken):
        return None
    ids = torch.cat([torch.zeros_like(inputs[name][:, :pads]), inputs[name]], dim=1)
    size = ids.shape[1]
    real, positions = (torch.arange(size) >= pads).long()[None], (torch.arange(size) - pads).clamp(min=0)[None]
    parts: list[Tensor] = []
    past = None
    ends = [min(end + pads, size) for end in accumulate(steps)]
    for start, end in zip([0, *ends], ends, strict=False):
        step = inputs | {name: ids[:, start:end]}
        if pads:
            step |= {"attention_mask": real[:, :end]}
            step |= {"position_ids": positions[:, start:end]} if "position_ids" in taken else {}
        if start == end:
            break
        try:
            with torch.no_grad():
                result = model(
                    **oracles.fitting(model, step),
                    use_cache=True,
                    **({"past_key_values": past} if past is not None else {}),
                )
        except Exception:
            return None
        past = getattr(result, "past_key_values", None)
        if past is None:
            return None
        parts.append(result[0] if not hasattr(result, "logits") else result.logits)
    cached = torch.cat(parts, dim=1)[:, pads:]
    if exact and not cached.isfinite().all():  # a softmax in float32 over a row of padding, masked in float64
        return _cached_equals_full(original, inputs, steps, pads, exact=False)
    if cached.shape != full.shape:  # a step writes a block of its own
        return None
    difference = float((cached - full).abs().amax() / full.abs().amax())
    return None if 1e-5 < difference < 1e-3 else difference < 1e-5  # in between: rounding of parts in float32


FEATURES: dict[str, Callable[[PreTrainedModel], str | None]] = {
    "audit": audit_default,
    "packed": audit_packed,
    "padded": audit_padded,
    "alone": rows_alone,
    "cached": audit_cached,
    "image": audit_image,
    "loss": loss_read,
    "mask": mask_attached,
    "bias": bias_attached,
    "geometry": geometry_scored,
    "attribution": scores_attributed,
    "explain": answer_explained,
    "from_ffn": feed_forward_opened,
}
