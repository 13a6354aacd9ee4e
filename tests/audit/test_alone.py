"""`check_alone`: what a row has in its batch and not alone is found, with its cause; healthy calls are clean."""

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnflow.audit import check_alone
from attnflow.audit.batch.alone import AloneReport, compare_alone
from attnflow.models.subject import Subject
from tests.leaks.alone import IDS, LEFT, ON_THE_LEFT, ON_THE_RIGHT, RIGHT
from tests.models import AUDITED, ZOO, tiny

COUNTED = (LEFT.cumsum(-1) - 1).clamp(min=0)
SIDES = {"right": ON_THE_RIGHT, "left": ON_THE_LEFT, "left, counted": {**ON_THE_LEFT, "position_ids": COUNTED}}
LLAMA = tiny("Llama", torch.float32)
PACKED = torch.cat([torch.arange(3), torch.arange(5)])
END = torch.tensor([[5, 6, 7, 8, 40, 11, 12, 13, 40]])  # documents of 5 and 4 tokens, by their end tokens


def packed(**entries):
    return {"input_ids": IDS, "use_cache": False, **entries}


def pairs(*sizes):
    return torch.block_diag(*(torch.ones(size, size).tril() for size in sizes)).bool()[None, None]


class Net(nn.Module):
    """A user's own module, [batch, n] -> [batch, n, 50]; the parts are what tests change."""

    def __init__(self, mix=lambda hidden, mask: hidden, norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.mix, self.norm = mix, norm

    def forward(self, ids, mask=None):
        hidden = self.mix(self.embedding(ids), mask)
        return self.head(hidden if self.norm is None else self.norm(hidden.mT).mT)


class WithLoss(Net):
    """A loss for each token; `rolled` the last target of a row is the first token of the next one."""

    def __init__(self, rolled=False):
        super().__init__()
        self.rolled = rolled

    def forward(self, ids, labels, mask=None):
        logits = super().forward(ids, mask)
        flat = labels.flatten().roll(-1).view_as(labels) if self.rolled else F.pad(labels[:, 1:], (0, 1), value=-100)
        return {"logits": logits, "losses": F.cross_entropy(logits.mT, flat, reduction="none")}


def mean_of_rows(hidden, mask):
    return hidden + hidden.mean(0, keepdim=True)


def mean_with_padding(hidden, mask):
    return hidden + hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]


def mean_of_real(hidden, mask):
    real = torch.ones(hidden.shape[:2]) if mask is None else mask.float()
    return hidden + (hidden * real[..., None]).cumsum(1) / real.cumsum(1).clamp(min=1)[..., None]


# -------- healthy calls


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Gemma2", "Qwen3", "GPTNeoX", "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "Mamba2"]
)
def test_a_padded_batch_of_a_healthy_model_is_the_same(name, side):
    call = dict(SIDES[side])
    if name == "Mamba2":
        call.pop("position_ids", None)
    report = check_alone(tiny(name, torch.float32), call)
    assert report.ok, report
    assert report.compared == report.documents == 2
    assert "logits" in report.outputs


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GPT2", "Mixtral", "Bert", "Qwen3Next", "Mamba2", "FalconH1"])
@pytest.mark.parametrize("entry", ["position_ids", "attention_mask"])
def test_packed_documents_differ_where_other_tokens_of_the_row_move_them(name, entry):
    """The oracle changes the first document's tokens and looks at the second; it shares no code with the package."""
    model = tiny(name, torch.float32)
    call = packed(position_ids=PACKED.expand(2, -1)) if entry == "position_ids" else packed(attention_mask=pairs(3, 5))
    if name == "Bert":
        call["attention_mask"] = pairs(3, 5) | pairs(3, 5).mT
    if name == "Mamba2":
        if entry == "attention_mask":
            return
        call.pop("position_ids")
        call["seq_idx"] = (torch.arange(8) >= 3).int().expand(2, -1)
    other = {**call, "input_ids": torch.cat([IDS[:, :3] + 7, IDS[:, 3:]], 1)}
    try:
        with torch.no_grad():
            moved = float((model(**call).logits - model(**other).logits)[:, 3:].abs().max())
    except Exception:  # not a call of this family
        return
    report = check_alone(model, call)
    if moved > 1e-3:
        assert report.verdict == "differs"
        assert {d.document for d in report.differences} >= {1}
        assert report.differences[0].column >= 3 or name == "Bert"
        assert "the document before it" in report.differences[-1].cause
    elif entry == "position_ids":
        assert report.ok, report


@pytest.mark.parametrize("name", ["T5", "Bart", "MBart", "EncoderDecoder"])
def test_both_halves_are_cut(name):
    model = ZOO[name].make()
    mask = RIGHT.flip(0)
    call = SIDES["right"] | {"decoder_input_ids": IDS + 2, "decoder_attention_mask": mask}
    report = check_alone(model, call)
    assert report.ok, report
    assert "encoder_last_hidden_state" in report.outputs


def pixels(rows):
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def beside_images():
    ids = torch.tensor([[5, 7, 7, 7, 7, 6, 8, 9, 0, 0], [3, 7, 7, 7, 7, 6, 8, 9, 10, 11]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "pixel_values": pixels(2)}


ROWS = {
    "an image for each row": ("Llava", beside_images(), "image_hidden_states"),
    "images alone": ("ViT", {"pixel_values": pixels(2)}, "pooler_output"),
    "scores of rows for rows": ("CLIP", {"input_ids": IDS, "pixel_values": pixels(2)}, "logits_per_image"),
    "segments": ("Bert", SIDES["right"] | {"token_type_ids": (IDS > 8).long()}, "pooler_output"),
    "vectors": ("Llama", {"inputs_embeds": torch.randn(2, 8, 32), "attention_mask": RIGHT}, "last_hidden_state"),
    "everything a model returns": (
        "Mixtral",
        SIDES["right"] | {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True},
        "router_logits.1",
    ),
    "the last logits": ("Llama", SIDES["right"] | {"logits_to_keep": 2}, "logits"),
}


@pytest.mark.parametrize("case", ROWS)
def test_what_belongs_to_a_row_is_cut_along(case):
    name, call, output = ROWS[case]
    report = check_alone(ZOO[name].make(), call)
    assert report.ok, report
    assert output in report.outputs or (output == "last_hidden_state" and "logits" in report.outputs)


def test_rows_of_scores_that_read_other_rows_are_found():
    class Mixed(Net):
        def forward(self, ids):
            summary = self.mix(self.embedding(ids).mean(1), None)
            return summary @ summary.mT

    assert check_alone(Mixed().eval(), {"ids": IDS}).ok
    differences = check_alone(Mixed(mean_of_rows).eval(), {"ids": IDS}).differences
    assert [d.cause for d in differences] == ["it reads the other rows"] * 2


PEFT_WARNS = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@PEFT_WARNS
def test_prompt_tuning_under_right_padding_is_the_same():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert check_alone(peft.get_peft_model(tiny("Llama", torch.float32), config).eval(), SIDES["right"]).ok


def test_flattened_documents_by_their_boundaries():
    bounds = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    call = {"input_ids": IDS.reshape(1, -1), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8}
    call |= {"max_length_k": 8, "position_ids": torch.cat([torch.arange(size) for size in (3, 5, 8)])[None]}
    report = check_alone(tiny("Llama", torch.float32), {**call, "use_cache": False})
    assert report.ok, report
    assert report.compared == 3


@pytest.mark.parametrize(
    ("net", "call", "ok"),
    [
        (Net(), {"ids": IDS}, True),
        (Net(mean_of_real), {"ids": IDS * LEFT, "mask": LEFT}, True),
        (Net(mean_with_padding), {"ids": IDS * LEFT, "mask": LEFT}, False),
        (Net(mean_with_padding), {"ids": IDS * RIGHT, "mask": RIGHT}, True),
        (Net(mean_of_rows), {"ids": IDS}, False),
        (Net(norm=nn.BatchNorm1d(16)), {"ids": IDS}, True),
        (Net(norm=nn.InstanceNorm1d(16)), {"ids": IDS}, True),
    ],
)
def test_a_module_of_ones_own(net, call, ok):
    report = check_alone(net.eval(), call)
    assert report.ok == ok, report
    assert report.verdict == ("same" if ok else "differs")


# -------- faults, each with the cause that the report must name


def forgotten_mask():
    model = peft.get_peft_model(
        tiny("Llama", torch.float32), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).eval()
    base = model.get_base_model()
    forward = base.forward
    base.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})
    return model, SIDES["left"]


def forgotten_encoder_mask():
    model = tiny("GPT2", torch.float32, add_cross_attention=True)
    states = torch.randn(2, 6, 32)
    block = model.transformer.h[1].crossattention
    forward = block.forward
    block.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "encoder_attention_mask": None})
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    return model, {"input_ids": IDS, "encoder_hidden_states": states, "encoder_attention_mask": mask}


def chunks_that_count_padding():
    model = AUDITED["Llama4"].make(num_hidden_layers=2)
    return model, {**SIDES["left"], "position_ids": torch.arange(8).expand(2, -1)}


def batch_norm():
    return Net(norm=nn.BatchNorm1d(16)).train(), {"ids": IDS}


def calls(name, call, **more):
    return lambda: (tiny(name, torch.float32, **more), call)


def llama(**entries):
    return calls("Llama", {"input_ids": END, "use_cache": False, **entries}, eos_token_id=40)


def restarts(*sizes):
    return torch.cat([torch.arange(size) for size in sizes])[None]


FAULTS = {
    "the base model's mask forgotten": (forgotten_mask, [(0, 0, 3)], "it reads the padding"),
    "the encoder's mask forgotten": (forgotten_encoder_mask, [(0, 0, 0)], "the padding of encoder_hidden_states"),
    "positions count the padding": (
        calls("GPT2", SIDES["left"]),
        [(0, 0, 3)],
        "the positions count the padding: pass position_ids",
    ),
    "position_ids count the padding": (
        calls("GPT2", {**SIDES["left"], "position_ids": torch.arange(8).expand(2, -1)}),
        [(0, 0, 3)],
        "they begin at 3",
    ),
    "positions in tables of an encoder": (calls("Bert", ON_THE_LEFT), [(0, 0, 3)], "the positions count the padding"),
    "statistics of the batch": (batch_norm, [(0, 0, 0), (1, 0, 0)], "it reads the other rows"),
    "restart one token late": (llama(position_ids=restarts(6, 3)), [(0, 1, 5)], "restart one token late"),
    "restart one token early": (llama(position_ids=restarts(4, 5)), [(0, 0, 4), (0, 1, 5)], "restart one token early"),
    "boundaries one token late, too": (
        llama(position_ids=restarts(6, 3), cu_seq_lens_q=torch.tensor([0, 6, 9], dtype=torch.int32)),
        [(0, 1, 5)],
        "restart one token late",
    ),
    "a 2D mask that mixes documents": (
        llama(position_ids=restarts(5, 4), attention_mask=torch.ones(1, 9, dtype=torch.long)),
        [(0, 1, 5)],
        "it reads the document before it",
    ),
    "a mask that counts documents": (
        llama(attention_mask=torch.tensor([[1] * 5 + [2] * 4])),
        [(0, 1, 5)],
        "it reads the document before it",
    ),
    "documents and a cache": (llama(position_ids=restarts(5, 4), use_cache=True), [(0, 1, 5)], "pass use_cache=False"),
    "positions that run on": (
        calls("GPT2", {"input_ids": END, "attention_mask": pairs(5, 4)}),
        [(0, 1, 5)],
        "run on over the documents",
    ),
    "padding without a mask": (calls("Bert", {"input_ids": IDS * RIGHT}), [(0, 0, 0)], "it reads the padding"),
}


@PEFT_WARNS
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_with_its_place_and_cause(fault):
    make, places, cause = FAULTS[fault]
    model, call = make()
    if fault == "padding without a mask":
        model.config.pad_token_id = 0
    report = check_alone(model, call, training=model.training)
    assert report.verdict == "differs"
    assert not report.ok
    assert [(d.row, d.document, d.column) for d in report.differences] == places, report
    assert cause in report.differences[-1].cause
    assert all(d.confirmed for d in report.differences)
    assert str(report).startswith("DIFFERS")


def test_chunks_that_count_the_padding_are_found(monkeypatch):
    from transformers import masking_utils

    right = masking_utils.chunked_causal_mask_function
    monkeypatch.setattr(
        masking_utils, "chunked_causal_mask_function", lambda size, pads: right(size, torch.zeros_like(pads))
    )
    report = check_alone(AUDITED["Llama4"].make(), SIDES["left, counted"])
    assert [(d.row, d.document) for d in report.differences] == [(0, 0)]
    assert "its place in the row" in report.differences[0].cause
    monkeypatch.undo()
    assert check_alone(AUDITED["Llama4"].make(), SIDES["left, counted"]).ok


@pytest.mark.parametrize("rolled", [False, True])
def test_a_loss_for_each_token_is_compared(rolled):
    report = check_alone(WithLoss(rolled).eval(), {"ids": IDS, "labels": IDS})
    assert report.ok != rolled, report
    assert {"logits", "losses"} <= set(report.outputs)
    if rolled:
        assert [(d.output, d.row, d.column) for d in report.differences] == [("losses", 0, 7), ("losses", 1, 7)]


# -------- what is not compared is named, and not green


def cache():
    with torch.no_grad():
        return LLAMA(IDS).past_key_values


def drawn(hidden, mask):
    return hidden + torch.rand_like(hidden)


UNCOMPARED = {
    "one row, nothing to differ": (Net(), {"ids": IDS[:1]}, ""),
    "no batch axis": (Net(), {"ids": IDS[0]}, "no batch axis"),
    "a cache": (LLAMA, lambda: {"input_ids": IDS, "past_key_values": cache()}, "states of earlier positions"),
    "random numbers": (Net(drawn), {"ids": IDS}, "drawn at random"),
    "another mode": (Net(norm=nn.BatchNorm1d(16)), {"ids": IDS}, "pass training=True"),
    "NaN": (Net(lambda hidden, mask: hidden * torch.nan), {"ids": IDS}, "NaN"),
    "an output of the batch": (Net(lambda hidden, mask: hidden.flatten(0, 1)[:9]), {"ids": IDS}, "shape"),
    "an entry of the batch": (LLAMA, {"input_ids": IDS, "extra": torch.ones(3)}, "without an axis of the 2 rows"),
    "images of the batch": (LLAMA, {"input_ids": IDS, "pixel_values": torch.ones(3, 4)}, "it belongs to the batch"),
    "an image beside documents": (
        LLAMA,
        packed(position_ids=PACKED.expand(2, -1), pixel_values=torch.ones(2, 4)),
        "which is not known",
    ),
    "a mask whose sense is not known": (Net(), {"ids": IDS, "mask": LEFT}, "not one padding token"),
    "documents under another name": (
        LLAMA,
        {"input_ids": IDS, "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)},
        "is not read",
    ),
    "documents that forward does not take": (Net(), {"ids": IDS, "seq_lens": torch.tensor([3, 5, 8])}, "not take it"),
    "padding of sound": (LLAMA, {"input_ids": IDS, "audio_attention_mask": torch.eye(2)}, "marks padding"),
    "a part that is refused": (
        Net(lambda hidden, mask: hidden if len(hidden) == 2 else hidden[:, :0] @ hidden),
        {"ids": IDS},
        "",
    ),
}


@pytest.mark.parametrize("case", UNCOMPARED)
def test_what_is_not_compared_is_named(case):
    model, call, words = UNCOMPARED[case]
    model = model.train(case == "another mode")
    report = check_alone(model, call() if callable(call) else call)
    assert report.verdict == "nothing tested"
    assert not report.ok
    assert bool(report.uncompared) == (case != "one row, nothing to differ")
    assert words in str(report.uncompared), report
    assert str(report).startswith("nothing tested")


def test_a_pooled_output_of_several_documents_is_named():
    class Pooled(Net):
        def forward(self, input_ids, position_ids=None):
            hidden = self.embedding(input_ids)
            return {"states": hidden, "summary": hidden.mean(1)}

    assert check_alone(Pooled().eval(), {"input_ids": IDS}).outputs == ("states", "summary")
    report = check_alone(Pooled().eval(), {"input_ids": IDS, "position_ids": PACKED.expand(2, -1)})
    assert report.verdict == "nothing tested"
    assert report.uncompared == (("summary", "has no positions, and its row holds several documents"),)


def test_a_summary_that_reads_the_padding_is_found_by_row():
    class Mean(Net):
        def forward(self, ids, mask=None):
            return self.embedding(ids).mean(1)

    (difference,) = check_alone(Mean().eval(), {"ids": IDS * RIGHT, "mask": RIGHT}).differences
    assert (difference.row, difference.column, difference.cause) == (0, None, "it reads the padding")


def test_a_small_leak_is_confirmed_and_rounding_is_not():
    def leak(hidden, mask):
        return hidden + 2e-5 * hidden.mean(0, keepdim=True)

    def rounds(hidden, mask):
        return hidden + (1e-4 * len(hidden) if hidden.dtype == torch.float32 else 0.0)

    (first, _) = check_alone(Net(leak).eval(), {"ids": IDS}).differences
    assert first.confirmed
    report = check_alone(Net(rounds).eval(), {"ids": IDS})
    assert report.ok
    assert "rounding" in report.notes[0]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_half_precision_is_rounding_too_but_hides_no_leak(name, side):
    model = tiny(name, torch.bfloat16)
    assert check_alone(model, SIDES[side]).ok
    table = model.get_input_embeddings()
    handle = table.register_forward_hook(lambda module, args, out: out + 0.02 * out.mean(0, keepdim=True))
    assert check_alone(model, SIDES[side]).verdict == "differs"
    handle.remove()


def test_a_large_difference_stands_although_float64_lacks_it():
    def leak(hidden, mask):
        return hidden + (hidden.mean(0, keepdim=True) if hidden.dtype == torch.float32 else 0.0)

    report = check_alone(Net(leak).eval(), {"ids": IDS})
    assert [d.confirmed for d in report.differences] == [False, False]
    assert "not in float64" in str(report)


# -------- limits, integration


def test_limits_choose_the_padded_rows_and_the_last_documents():
    report = check_alone(tiny("Llama", torch.float32), SIDES["right"], rows=1)
    assert (report.compared, report.documents, report.forward_passes) == (1, 2, 2)
    call = {"input_ids": END, "attention_mask": torch.ones(1, 9, dtype=torch.long), "position_ids": restarts(5, 4)}
    (difference,) = check_alone(tiny("Llama", torch.float32), call, documents=1).differences
    assert difference.document == 1
    with pytest.raises(ValueError, match="rows"):
        check_alone(tiny("Llama", torch.float32), SIDES["right"], rows=0)


def test_a_bound_call_needs_no_labels_and_names_its_places():
    model = tiny("Llama", torch.float32)
    report = compare_alone(Subject(model), packed(), places=[(0, torch.arange(3, 8)), (1, torch.arange(8))])
    assert [(d.row, d.document, d.column) for d in report.differences] == [(0, 0, 3)]


def test_the_model_is_left_as_it_was():
    model = Net(norm=nn.BatchNorm1d(16)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    check_alone(model, {"ids": IDS}, training=True)
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_dropout_does_not_count_in_training_mode():
    model = Net(lambda hidden, mask: F.dropout(hidden, 0.5)).train()
    assert check_alone(model, {"ids": IDS}, training=True).ok


def test_entries_that_forward_does_not_take_are_left_out_and_named():
    report = check_alone(Net().eval(), {"ids": IDS, "source": torch.tensor([8, 8])})
    assert report.ok
    assert "source" in report.notes[0]


def test_it_is_read_back_and_has_a_row_for_each_difference():
    report = check_alone(tiny("GPT2", torch.float32), SIDES["left"])
    assert AloneReport.from_json(report.to_json()) == report
    assert [row["column"] for row in report.rows()] == [3]
