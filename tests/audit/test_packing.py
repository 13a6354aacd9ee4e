"""What says where documents begin is read once: the declared order and the lint of a batch read every form alike."""

import pytest
import torch

import attnflow as af
from attnflow.audit import check_batch, declared_order
from tests.audit.batches import CAUSAL
from tests.audit.common import tiny
from tests.audit.packing import PAD

IDS = torch.arange(4, 16)[None]
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
    mask = entries.get("attention_mask", torch.ones_like(IDS))
    ids = IDS.where(mask != 0, PAD)
    report = check_batch({"input_ids": ids, "labels": ids, **entries}, CAUSAL)
    assert report.documents == len(lengths)
    model = tiny("Qwen2VLText" if form == "positions of time" else "Llama", initializer_range=0.2)
    flow = declared_order(model, {"input_ids": ids, **entries})
    words = f"causal within {len(lengths)} packed documents, {' + '.join(map(str, lengths))} tokens"
    assert flow.masks[0].name.split(";")[0] == (words if len(lengths) > 1 else "causal")
    real = mask[0] != 0
    assert torch.equal(flow.masks[0].dense()[real][:, real], af.masks.document(lengths).dense())


def test_a_wrapped_document_under_a_mask_of_pairs():
    """The first document of a row goes on from another row: the second one begins at 0, not where the row begins."""
    positions = torch.tensor([[7, 8, *range(10)]])
    labels = IDS.where(torch.arange(12) != 2, -100)
    batch = {"input_ids": IDS, "labels": labels, "position_ids": positions}
    mixing = {**batch, "attention_mask": af.masks.causal(12).dense()[None, None]}
    assert [(m.kind, m.position) for m in check_batch(mixing, CAUSAL).mistakes] == [("mask", 2)]
    apart = {**batch, "attention_mask": af.masks.document([2, 10]).dense()[None, None]}
    assert check_batch(apart, CAUSAL).ok


@pytest.mark.parametrize("bounds", [[1, 5, 12], [0, 5, 11], [0, 7, 5, 12], []])
def test_boundaries_that_contradict_themselves(bounds):
    entries = {"input_ids": IDS, "labels": IDS, "cu_seq_lens_k": torch.tensor(bounds, dtype=torch.int64)}
    message = "cu_seq_lens_k must rise from 0 to 12, the number of positions"
    assert check_batch(entries, CAUSAL).mistakes[0].message.startswith(message)
    with pytest.raises(ValueError, match=message):
        declared_order(tiny("Llama"), {name: value for name, value in entries.items() if name != "labels"})


def test_positions_that_do_not_count_on_are_noted():
    batch = {"input_ids": IDS, "labels": IDS, "position_ids": torch.tensor([[0, 1, 2, 2, *range(3, 11)]])}
    assert any("do not count on at position 3 of sequence 0" in note for note in check_batch(batch, CAUSAL).notes)
