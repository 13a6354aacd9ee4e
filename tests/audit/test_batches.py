"""`check_batch`: every injected mistake is found, no clean batch is accused; checked against brute force and losses."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoConfig

import attnflow as af
from attnflow.audit import check_batch, check_loss, declared_order
from attnflow.audit.batch.reading import family_of
from attnflow.testing import closure
from tests.audit.batches import CAUSAL, CLEAN, IDS, MASKED, MISTAKES, label
from tests.audit.common import tiny
from tests.audit.packing import EOS, PAD

ALL = [(batch, name) for batch, mistakes in MISTAKES.items() for name in mistakes]


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_batch_is_not_accused(name):
    make, config = CLEAN[name]
    batch = make()
    for subject in (config, None):
        report = check_batch(batch, subject)
        if subject is None and name == "sequence to sequence, labels alone":
            assert report.verdict == "nothing tested"  # labels that are no tokens of the batch, and no model
            continue
        assert report.ok, report
        assert report.labels > 0
        assert "MISTAKE" not in str(report)
    assert any(line.startswith(("labels", "answers")) for line in check_batch(batch, config).checked)


@pytest.mark.parametrize(("name", "mistake"), ALL)
def test_an_injected_mistake_is_found(name, mistake):
    make, config = CLEAN[name]
    kind, change = MISTAKES[name][mistake]
    report = check_batch(change(make()), config)
    assert not report.ok
    assert kind in {m.kind for m in report.mistakes}, report
    assert str(report).splitlines()[0].startswith(f"{len(report.mistakes)} MISTAKE")


def test_the_batch_is_left_alone():
    batch = CLEAN["flattening, all keys"][0]()
    before = copy.deepcopy(batch)
    check_batch(batch, CAUSAL)
    assert batch.keys() == before.keys()
    assert all(torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(before[key])) for key in batch)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_labels_that_can_be_read_against_brute_force(data):
    """Every pair (label, token) from the definitions, the mask closed by multiplication."""
    n = data.draw(st.integers(3, 9))
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))[:n] + 3
    offset = data.draw(st.sampled_from([-1, 0, 1]))
    there = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    labels = torch.tensor([
        int(ids[i + offset]) if there[i] and 0 <= i + offset < n else -100 for i in range(n)
    ])  # fmt: skip
    allow = np.array(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=n, max_size=n)))
    batch = {"input_ids": ids[None], "labels": labels[None], "attention_mask": torch.tensor(allow)[None, None]}
    config = AutoConfig.for_model("llama", **IDS, num_hidden_layers=n, architectures=["LlamaForCausalLM"])
    reach = closure(allow)
    expected = [
        i for i in range(1, n) if labels[i] != -100 and 0 <= i + offset < n and reach[i - 1, i + offset]
    ]  # fmt: skip
    isolated = [
        all(not allow[i, j] and not allow[j, i] for j in range(n) if j != i) for i in range(n)
    ]  # read as padding at the ends  # fmt: skip
    if any(isolated) and not all(isolated):
        return
    found = [m for m in check_batch(batch, config).mistakes if m.kind == "readable"]
    assert [m.position for m in found] == expected[:1]
    assert sum(m.count for m in found) == len(expected)


@pytest.mark.parametrize(
    "name",
    ["Llama", "Gemma2", "GPT2", "Qwen3Moe", "Mamba2", "Bert", "BertDecoder", "ModernBert", "RoFormer", "T5", "Bart"],
)
def test_the_shift_of_a_family_is_that_of_its_loss(name):
    """One label: the loss depends on the logits of the position that predicts it, and on no others."""
    model = tiny(name)
    at, ids = 4, torch.randint(4, 40, (1, 9), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(ids, -100)
    labels[0, at] = 7
    call = {"input_ids": ids} | ({"decoder_input_ids": ids[:, :9]} if model.config.is_encoder_decoder else {})
    seen = {}

    def hook(module, inputs, output):
        output.retain_grad()
        seen["logits"] = output

    handle = model.get_output_embeddings().register_forward_hook(hook)
    model(**call, labels=labels).loss.backward()
    handle.remove()
    (predicts,) = seen["logits"].grad[0].abs().sum(-1).nonzero().flatten().tolist()
    family = family_of(model)
    assert family.shift == at - predicts
    assert family_of(model.config).causal in (family.causal, None)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT2", "Bert", "BertDecoder", "ModernBert", "Gemma3Encoder"])
def test_the_direction_of_a_family_is_that_of_its_model(name):
    model = tiny(name)
    measured = af.audit.measure(model, torch.arange(4, 12)[None], by="output").masks[0]
    assert family_of(model).causal == (not measured.allows(0, 1))


def test_a_bert_head_that_is_no_decoder_reads_its_labels():
    ids = torch.arange(4, 12)[None]
    call = {"input_ids": ids, "labels": ids}
    model = tiny("BertDecoder")
    assert check_batch(call, model).ok
    model.config.is_decoder = False
    assert [m.kind for m in check_batch(call, model).mistakes] == ["readable"]


def test_other_forms_of_a_mask():
    ids = torch.arange(4, 12)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    labels = label({"input_ids": ids, "labels": ids.clone()}, 0, 5, -100)["labels"]
    call = {"input_ids": ids, "labels": labels, "position_ids": positions}
    document = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])

    def apart(b, h, q, k):
        return (q >= k) & (document[q] == document[k])

    blocks = create_block_mask(apart, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    pairs = af.masks.document([5, 3]).dense()[None, None]
    for mask in (blocks, pairs, torch.where(pairs, 0.0, -1e9), {"full_attention": pairs, "sliding_attention": pairs}):
        report = check_batch({**call, "attention_mask": mask}, CAUSAL)
        assert report.ok, report
    mixing = {"full_attention": af.masks.causal(8).dense()[None, None], "sliding_attention": pairs}
    assert [m.kind for m in check_batch({**call, "attention_mask": mixing}, CAUSAL).mistakes] == ["mask"]
    hole = pairs.clone()
    hole[0, 0, 6, 3] = True
    (found,) = check_batch({**call, "attention_mask": hole}, CAUSAL).mistakes
    assert (found.kind, found.position, found.count) == ("mask", 6, 1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_pairs_that_attention_adds(dtype, implementation):
    """The model itself says what its mask lets through."""
    model = tiny("Llama", attn_implementation=implementation)
    ids, allow = torch.arange(4, 12)[None], af.masks.causal(8).dense()[None, None]
    moved = ids.clone()
    moved[0, 7] = 20
    report = check_batch({"input_ids": ids, "labels": ids, "attention_mask": allow.to(dtype)}, model)
    try:
        with torch.no_grad():
            one, other = (model(each, attention_mask=allow.to(dtype)).logits[0, :7] for each in (ids, moved))
        assert report.ok == torch.equal(one, other)
    except RuntimeError:  # SDPA takes no integers
        assert not report.ok
    if not report.ok:
        assert "to the scores, which forbids nothing" in report.mistakes[0].message
        additive = torch.where(allow, 0.0, -torch.inf)
        assert check_batch({"input_ids": ids, "labels": ids, "attention_mask": additive}, model).ok


PACKED = {"input_ids": torch.arange(5, 17)[None], "labels": torch.arange(5, 17)[None].clone()}
PACKED["labels"][0, 5] = -100


@pytest.mark.parametrize("given", [[[0] * 5 + [3] * 7], [5, 7], [[5, 7]], [0, 5, 12]])
def test_documents_in_an_entry_with_a_name_of_its_own(given):
    numbers = torch.tensor([[0] * 5 + [3] * 7])
    expected = check_batch({**PACKED, "document_ids": numbers}, CAUSAL)
    assert expected.documents == 2
    for one in (given, torch.tensor(given)):
        for report in (
            check_batch(PACKED, CAUSAL, documents=one),
            check_batch({**PACKED, "turn": one}, CAUSAL, documents="turn"),
        ):
            known = str(report).replace("documents=", "document_ids").replace("turn", "document_ids")
            assert known == str(expected)
    assert "turn" in str(check_batch({**PACKED, "turn": given}, CAUSAL, documents="turn"))


@pytest.mark.parametrize("given", ["turn", torch.tensor([[0] * 5 + [3] * 7])])
def test_documents_of_the_caller_are_compared_with_those_of_the_batch(given):
    batch = {**PACKED, "turn": torch.tensor([[0] * 5 + [3] * 7]), "document_ids": torch.tensor([[0] * 4 + [1] * 8])}
    report = check_batch(batch, CAUSAL, documents=given)
    (mistake,) = [m for m in report.mistakes if "document_ids" in m.message]
    assert ("turn" if given == "turn" else "documents=") in mistake.message
    lengths = {**PACKED, "turn": [5, 7], "document_lengths": [4, 8]}
    assert "document_lengths" in str(check_batch(lengths, CAUSAL, documents="turn").mistakes)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["https://a", "https://b"], "https://a"),
        ([0, 5, 11], r"\[0, 5, 11\]"),
        ([5, 8], r"\[5, 8\]"),
        ([[0, 1], [2]], r"\[\[0, 1\], \[2\]\]"),
        (torch.zeros(1, 12), "tensor"),
        (torch.tensor(7), "7"),
    ],
)
def test_documents_of_no_known_form_are_refused_by_the_name_that_was_given(given, shown):
    rest = r" must number the positions \[1, 12\], be lengths .* from 0 to 12, got .*"
    with pytest.raises(ValueError, match=f"^documents=url{rest}{shown}"):
        check_batch({**PACKED, "url": given}, CAUSAL, documents="url")
    with pytest.raises(ValueError, match=f"^documents={rest}{shown}"):
        check_batch(PACKED, CAUSAL, documents=given)


@pytest.mark.parametrize("takes", [True, False])
def test_a_model_gets_the_entries_of_the_batch_alone(takes):
    inner, seen = tiny("Llama"), []

    class Turns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = inner, inner.config

        if takes:

            def forward(self, input_ids, turn, labels=None):
                seen.append({"turn"})
                return self.inner(input_ids, labels=labels)
        else:

            def forward(self, input_ids, labels=None, **others):
                seen.append(set(others) - {"use_cache"})
                return self.inner(input_ids, labels=labels)

    batch = {**PACKED, "turn": torch.tensor([[0] * 5 + [3] * 7])}
    for documents in ("turn", batch["turn"]):
        for report in (
            check_batch(batch, Turns(), documents=documents),
            check_loss(Turns(), batch, documents=documents),
        ):
            assert not any("does not run" in why for _, why in report.untested)
            assert report.loss
            assert any("does not read it" in str(mistake) for mistake in report.mistakes) != (
                takes and documents == "turn"
            )
    assert {"turn"} in seen
    assert not any("document" in name for names in seen for name in names)


def test_text_behind_an_end_token_is_named():
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, EOS, 9, 10, 11, EOS]])
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(8).expand(2, -1)}
    report = check_batch(batch, CAUSAL)
    (what,) = [why for name, why in report.untested if name == "documents"]
    assert "sequence 1 goes on behind the end token at position 3" in what
    assert report.verdict == "nothing tested"
    assert check_batch(batch, CAUSAL, documents="rows").ok
    apart = torch.tensor([[*range(8)], [*range(4), *range(4)]])
    labels = label({"input_ids": ids, "labels": ids.clone()}, 1, 4, -100)["labels"]
    report = check_batch({**batch, "position_ids": apart, "labels": labels}, CAUSAL)
    assert report.ok
    assert not report.untested


def test_what_could_not_be_checked_is_said():
    ids = torch.arange(4, 12)[None]
    report = check_batch({"input_ids": ids})
    assert not report.ok
    assert str(report).startswith("nothing tested")
    assert dict(report.unchecked)["labels"] == "the batch has none"
    without = check_batch({"input_ids": ids, "labels": ids})
    assert without.family.startswith("assumed, as no model is given")
    assert "whether it is causal is not known" in dict(without.unchecked)["labels that a position can read"]
    assert "no configuration" in dict(without.unchecked)["the token that ends an answer"]
    classes = AutoConfig.for_model("bert", architectures=["BertForTokenClassification"])
    assert "classes" in dict(check_batch({"input_ids": ids, "labels": ids % 3}, classes).unchecked)["labels"]
    unknown = check_batch({"input_ids": ids, "labels": ids}, nn.Linear(2, 2))
    assert "not known which position of Linear" in dict(unknown.untested)["labels that a position can read"]
    assert unknown.verdict == "nothing tested"


ROW = torch.arange(4, 16)[None]
REAL = torch.tensor([[1] * 10 + [0] * 2])
FIVE = torch.tensor([[0] * 5 + [1] * 7])
RESTARTS = torch.tensor([[*range(5), *range(7)]])
FORMS = {
    "numbers": ({"seq_idx": FIVE}, [5, 7]),
    "numbers of the batch": ({"seq_idx": FIVE[0]}, [5, 7]),
    "a number that comes again": ({"seq_idx": torch.tensor([[0] * 4 + [1] * 4 + [0] * 4])}, [4, 4, 4]),
    "boundaries": ({"cu_seq_lens_q": torch.tensor([0, 5, 12])}, [5, 7]),
    "boundaries of another name": ({"cu_seqlens": torch.tensor([0, 5, 5, 12])}, [5, 7]),
    "a mask that counts": ({"attention_mask": FIVE + 1}, [5, 7]),
    "positions": ({"position_ids": RESTARTS}, [5, 7]),
    "positions of time": ({"position_ids": RESTARTS.expand(3, 1, 12)}, [5, 7]),
    "positions of documents of one token": ({"position_ids": torch.tensor([[2, 2, *range(2, 12)]])}, [1, 1, 10]),
    "positions that stand still": ({"position_ids": torch.tensor([[0, 1, 2, 2, *range(3, 11)]])}, [12]),
    "positions from the middle of a document": ({"position_ids": torch.tensor([[7, 8, *range(10)]])}, [2, 10]),
    "padding behind": ({"attention_mask": (FIVE + 1) * REAL}, [5, 5]),
    "padding inside": ({"seq_idx": FIVE, "attention_mask": torch.tensor([[1] * 4 + [0] * 2 + [1] * 6])}, [4, 6]),
}


@pytest.mark.parametrize("form", FORMS)
def test_check_and_check_batch_read_the_same(form):
    entries, lengths = FORMS[form]
    mask = entries.get("attention_mask", torch.ones_like(ROW))
    ids = ROW.where(mask != 0, PAD)
    report = check_batch({"input_ids": ids, "labels": ids, **entries}, CAUSAL)
    assert report.documents == len(lengths)
    model = tiny("Qwen2VLText" if form == "positions of time" else "Llama", initializer_range=0.2)
    flow = declared_order(model, {"input_ids": ids, **entries})
    words = f"causal within {len(lengths)} packed documents, {' + '.join(map(str, lengths))} tokens"
    assert flow.masks[0].name.split(";")[0] == (words if len(lengths) > 1 else "causal")
    real = mask[0] != 0
    assert torch.equal(flow.masks[0].dense()[real][:, real], af.masks.document(lengths).dense())


NUMBERS = torch.tensor([[0] * 5 + [1] * 7])
PACKED = {"input_ids": ROW, "labels": ROW.where(torch.arange(12) != 5, -100)}
OTHER_NAMES = {  # numbers, boundaries, lengths and positions, by the names of other trainers: {entry: what it holds}
    "document_ids": NUMBERS,
    "segment_ids": NUMBERS + 1,
    "doc_id": NUMBERS[0],
    "sequence_ids": NUMBERS,
    "cu_seqlens_q": torch.tensor([0, 5, 12]),
    "cu_seqlens_kv_padded": torch.tensor([0, 5, 12]),
    "cumulative_seqlens": torch.tensor([0, 5, 12]),
    "seq_lengths": [[5, 7]],
    "document_lens": torch.tensor([5, 7]),
    "positions": RESTARTS,
    "input_pos": RESTARTS[0],
    "pos_ids": RESTARTS,
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_documents_under_other_names(name):
    """They are read as `position_ids` are; transformers reads none of them, so that documents mix there."""
    entry = {name: OTHER_NAMES[name]}
    alone = check_batch({**PACKED, **entry}, eos=1, pad=0)
    assert alone.documents == 2
    assert alone.ok, alone
    crossing = check_batch({**PACKED, "labels": ROW, **entry})
    assert [(m.kind, m.position) for m in crossing.mistakes] == [("documents", 5)]
    if not name.startswith("cu_"):  # boundaries are arguments of some of its models
        assert [(m.kind, m.position) for m in check_batch({**PACKED, **entry}, CAUSAL).mistakes] == [("mask", 5)]
    both = check_batch({**PACKED, **entry, "seq_idx": torch.zeros_like(ROW)}, CAUSAL)
    assert "documents" in {m.kind for m in both.mistakes}


UNREAD = {
    "document_ids": torch.rand(1, 12),
    "segment_ids": NUMBERS[:, :7],
    "cu_seqlens_padded_to": torch.tensor([0, 5, 12]),
    "seq_lengths": torch.tensor([5, 6]),
    "positions": torch.rand(1, 12),
    "loss_mask": torch.rand(1, 12),
    "loss_scale_mask": torch.ones(1, 12),
    "token_weights": torch.rand(1, 12),
    "perm_mask": torch.zeros(1, 12, 12),
    "target_mapping": torch.zeros(1, 3, 12),
    "packing_info": "two",
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_named_and_not_green(name):
    batch = {"input_ids": ROW, "labels": ROW, name: UNREAD[name]}
    for subject in (None, CAUSAL):
        report = check_batch(batch, subject)
        assert report.verdict == "nothing tested", report
        assert repr(name) in dict(report.untested)[f"entry {name!r}"] or f"entry {name!r}" in dict(report.untested)
    assert check_batch({"input_ids": ROW, "labels": ROW, "pixel_values": torch.rand(1, 3, 4, 4)}, CAUSAL).ok


def packed(ids, starts, prompt=()):
    """One row of documents that begin at `starts`, with positions and labels that agree."""
    ids = torch.tensor([ids])
    begins = torch.isin(torch.arange(ids.shape[1]), torch.tensor(starts))
    first = torch.where(begins, torch.arange(ids.shape[1]), 0).cummax(0).values
    silent = begins | torch.isin(torch.arange(ids.shape[1]), torch.tensor(list(prompt), dtype=torch.int64))
    positions = (torch.arange(ids.shape[1]) - first)[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(~silent, -100)}


def answer(ids, prompt=3):
    ids = torch.tensor(ids)
    real = ids != PAD
    return {
        "input_ids": ids,
        "attention_mask": real.long(),
        "labels": ids.where(real & (torch.arange(ids.shape[1]) >= prompt), -100),
    }


def text(ids, **entries):
    """A text whose labels are its tokens but for padding; other labels by `entries`."""
    ids = torch.tensor(ids) if isinstance(ids, list) else ids
    return {"input_ids": ids, "labels": ids.where(ids != PAD, -100), **entries}


def with_ends(pad):
    return AutoConfig.for_model("llama", **{**IDS, "pad_token_id": pad}, architectures=["LlamaForCausalLM"])


PREFIX = AutoConfig.for_model("paligemma", architectures=["PaliGemmaForConditionalGeneration"])
EIGHT = torch.arange(4, 12)[None]
SUFFIX = (torch.arange(8) > 4).long()[None]
SUFFIXED = text(EIGHT, labels=EIGHT.where(SUFFIX == 1, -100))
COUNTED = text(EIGHT, labels=EIGHT.where(torch.arange(8) != 5, -100), attention_mask=1 + SUFFIX)
ENDED = torch.tensor([[5, 6, 7, EOS, EOS, EOS], [5, 6, 7, 8, 9, EOS]])
COVERS = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
GOES_ON = torch.tensor([[7, 8, *range(10)]])  # the first document goes on from another row: only the second begins at 0
WRAPPED = text(ROW, labels=ROW.where(torch.arange(12) != 2, -100), position_ids=GOES_ON)
LOSS_MASK = (torch.arange(12) > 4).long()[None]
CLOSED, OPEN, FULL = [5, 6, 7, 8, 9, EOS, PAD], [5, 6, 7, 8, 9, 10, PAD], [5, 6, 7, 8, 9, 10, 11]
TWO, THREE = [5, 6, 7, 8, EOS, 11, 12, 13, EOS], [5, 6, EOS, 8, 9, EOS, 11, 12, EOS]
ONE_INSIDE = [5, EOS, 7, 8, EOS, 11, 12, 13, EOS]
LATE, EARLY = "one token late", "one token too early"
JUDGED = {  # (batch, model or arguments, whether it is right, or its mistakes, or words of the report)
    "an answer behind its prefix": ({**SUFFIXED, "token_type_ids": SUFFIX}, PREFIX, True),
    "an answer in its prefix": ({**SUFFIXED, "token_type_ids": SUFFIX * 0}, PREFIX, [("readable", 0, 5, 3)]),
    "few open labels": (text(EIGHT, labels=EIGHT.where(torch.arange(8) < 2, -100)), MASKED, "too few to tell"),
    "end tokens that pad": (
        text(ENDED, attention_mask=COVERS, labels=ENDED.where(COVERS == 1, -100)),
        with_ends(EOS),
        True,
    ),
    "ends that a collator took for padding": (
        text(ENDED, attention_mask=COVERS, labels=ENDED.where(ENDED != EOS, -100)),
        with_ends(EOS),
        [("unsupervised", 0, 3, 2)],
    ),
    "padding before a text without a mask": (text([[PAD, PAD, 5, 6, 7, 8]]), CAUSAL, "mask: sequence 0"),
    "padding behind a text without a mask": (text([[5, 6, 7, EOS, PAD, PAD]]), CAUSAL, True),
    "a wrapped document that is read": (
        {**WRAPPED, "attention_mask": af.masks.causal(12).dense()[None, None]},
        CAUSAL,
        [("mask", 0, 2, 10)],
    ),
    "a wrapped document": ({**WRAPPED, "attention_mask": af.masks.document([2, 10]).dense()[None, None]}, CAUSAL, True),
    "positions that stand still": (
        text(ROW, position_ids=torch.tensor([[0, 1, 2, 2, *range(3, 11)]])),
        CAUSAL,
        "do not continue at position 3 of sequence 0",
    ),
    "a loss mask for a loop": (text(ROW, loss_mask=LOSS_MASK), {}, "7 labels"),
    "a loss mask for a model": (text(ROW, loss_mask=LOSS_MASK), CAUSAL, [("untrained", 0, 1, 4)]),
    "a loss mask and its labels": (
        text(ROW, loss_mask=LOSS_MASK, labels=ROW.where(LOSS_MASK == 1, -100)),
        CAUSAL,
        True,
    ),
    "a mask that counts documents": (COUNTED, CAUSAL, [("mask", 0, 5, 1)]),
    "a mask that counts documents, why": (COUNTED, CAUSAL, "transformers reads every number as 1"),
    "a mask that a trainer makes it count": (COUNTED, {"documents": "attention_mask", "model_or_config": CAUSAL}, True),
    "a mask that counts, and labels that cross": (
        {**COUNTED, "labels": EIGHT},
        CAUSAL,
        [("documents", 0, 5, 1), ("mask", 0, 5, 1)],
    ),
    "two documents": (packed(TWO, [0, 5]), CAUSAL, True),
    "two documents, late": (packed(TWO, [0, 6]), CAUSAL, LATE),
    "two documents, early": (packed(TWO, [0, 4]), CAUSAL, EARLY),
    "three documents": (packed(THREE, [0, 3, 6]), CAUSAL, True),
    "three documents, late": (packed(THREE, [0, 3, 7]), CAUSAL, LATE),
    "three documents, early": (packed(THREE, [0, 2, 6]), CAUSAL, EARLY),
    "an end inside": (packed(ONE_INSIDE, [0, 5]), CAUSAL, True),
    "an end inside, late": (packed(ONE_INSIDE, [0, 6]), CAUSAL, LATE),
    "an end inside, early": (packed(ONE_INSIDE, [0, 4]), CAUSAL, EARLY),
    "a newline behind each end, as in ChatML": (packed([5, 6, 7, EOS, 9, 5, 6, 8, EOS, 9], [0, 5]), CAUSAL, True),
    "ends that begin documents, as GPT-2's do": (packed([EOS, 5, 6, EOS, 8, 9, 10, EOS, 12], [0, 3, 7]), CAUSAL, []),
    "an answer with its end": (answer([CLOSED]), CAUSAL, True),
    "an answer that fills its row may be cut off": (answer([CLOSED, FULL]), CAUSAL, True),
    "an answer without its end": (answer([OPEN]), CAUSAL, [("unsupervised", 0, 5, 1)]),
    "an answer without its end before another": (answer([OPEN, FULL]), CAUSAL, [("unsupervised", 0, 5, 1)]),
    "an answer without its end behind another": (answer([CLOSED, OPEN]), CAUSAL, [("unsupervised", 1, 5, 1)]),
    "an answer that ends a turn": (answer([OPEN]), {"model_or_config": CAUSAL, "eos": [EOS, 10]}, True),
    "an answer without its end in a packed row": (
        packed([5, 6, 7, 8, 9, 10, 5, 6, 7, 8, EOS], [0, 6], prompt=[1, 7]),
        CAUSAL,
        [("unsupervised", 0, 5, 1)],
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_a_batch_is_found_to_be(name):
    batch, subject, expected = JUDGED[name]
    report = check_batch(batch, **(subject if isinstance(subject, dict) else {"model_or_config": subject}))
    if isinstance(expected, str):
        assert expected in str(report), report
    elif expected is True:
        assert report.ok, report
    else:
        assert [(m.kind, m.sequence, m.position, m.count) for m in report.mistakes] == expected, report
        assert not any("that ends" in line for line in report.checked if expected and expected[0][0] == "unsupervised")


def test_what_is_listed_as_checked_has_passed():
    """Every mistake, and none of the lines that say the opposite."""
    opposite = {
        "documents": "documents: no label is predicted", "padding": "padding: has no labels",
        "readable": "labels: none can be read", "vocabulary": "vocabulary: ids", "positions": "positions: agree",
        "prompt": "answers: labels are where",
    }  # fmt: skip
    for batch, mistakes in MISTAKES.items():
        make, config = CLEAN[batch]
        for kind, change in mistakes.values():
            report = check_batch(change(make()), config)
            if kind in opposite and not (kind == "documents" and "agree" in str(report.mistakes)):
                said = [line for line in report.checked if line.startswith(opposite[kind])]
                assert not said or kind not in {m.kind for m in report.mistakes if "label" in m.message}, report


def test_what_a_loop_says_of_itself():
    """A model that declares nothing is never known less of than none, and nothing unknown is green."""
    batch = {"x": ROW, "y": ROW.roll(-1, 1).where(torch.arange(12) < 11, -100)}
    names = {"x": "input_ids", "y": "labels"}
    loop = nn.Linear(2, 2)
    report = check_batch(batch, loop, names=names)
    assert report.verdict == "nothing tested"
    told = check_batch(batch, names=names, shift=0, causal=True, eos=1, pad=0)
    assert told.ok, told
    late = {**batch, "y": ROW}
    assert [m.kind for m in check_batch(late, names=names, shift=0, causal=True).mistakes] == ["readable"]
    documents = check_batch(batch, names=names, documents=[5, 7])
    assert documents.documents == 2
    assert [m.kind for m in documents.mistakes] == ["documents"]
    for wrong, words in (({"names": {"q": "labels"}}, "no entry 'q'"), ({"documents": "seg"}, "names no entry")):
        with pytest.raises(ValueError, match=words):
            check_batch({"input_ids": ROW, "labels": ROW}, **wrong)
