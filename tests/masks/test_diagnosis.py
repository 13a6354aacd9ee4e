import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from attnflow import masks
from attnflow.masks.diagnosis import diagnose, equal_to, read_mask
from tests.catalogue_cases import MASKS
from tests.strategies import square_masks

NAMED = ["full", "causal", "sliding_window", "prefix_lm", "document", "block_causal", "attention_sink"]


def kinds(mask):
    return [finding.kind for finding in diagnose(mask).findings]


@pytest.mark.parametrize("name", NAMED)
def test_masks_are_recognised(name):
    for mask in MASKS:
        if mask.name == name and 0 not in mask.shape:
            assert equal_to(masks.from_dense(mask.dense())) == mask


def test_documents_with_a_window_are_recognised():
    mask = masks.document([5, 7, 4]) & masks.sliding_window(16, 3)
    assert diagnose(mask).same_as is not None
    assert diagnose(mask).ok


@settings(max_examples=30)
@given(square_masks(7))
def test_what_is_recognised_is_equal(mask):
    other = equal_to(mask)
    assert other is None or other == mask
    result = diagnose(mask)
    assert type(result).from_json(result.to_json()).to_json() == result.to_json()


def test_what_looks_wrong():
    n = 64
    causal = masks.causal(n)
    assert kinds(causal) == []
    assert "inverted" in kinds(~causal)
    assert kinds(masks.from_dense(causal.dense().T)) == ["transposed"]
    [finding] = diagnose(causal | off(n, (3, 9))).findings
    assert (finding.kind, finding.pairs) == ("nearly", ((3, 9),))
    assert finding.message == "1 pair away from causal(n=64): allows query 3, key 9"
    assert kinds(causal & ~off(n, *((5, k) for k in range(6))))[0] == "empty"
    assert kinds(causal & ~off(n, (5, 5))) == ["diagonal", "nearly"]
    assert kinds(masks.longformer(n, 5)) == []


def off(n, *pairs):
    return masks.from_edges(list(pairs), n)


NEARLY = {
    "one pair leaks": (masks.document([4, 4]) | off(8, (4, 3)), "1 pair away from document(lengths=[4, 4], in"),
    "the first sees the last": (masks.document([5, 7, 4]) | off(16, (0, 15)), "lengths=[5, 7, 4], inner='causal')"),
    "full": (masks.document([6, 9], "full") | off(15, (14, 3)), "document(lengths=[6, 9], inner='full'): allows"),
    "one pair is missing": (masks.document([5, 7, 4]) & ~off(16, (14, 12)), "forbids query 14, key 12"),
    "many": (masks.document([99] * 9) | off(891, (99, 98), (500, 3)), "2 pairs away from document(lengths=[99, 99, "),
    "causal, missing": (masks.causal(12) & ~off(12, (6, 2)), "1 pair away from causal(n=12): forbids query 6, key 2"),
    "causal, future": (masks.causal(12) | off(12, (6, 8)), "1 pair away from causal(n=12): allows query 6, key 8"),
    "window, middle": (masks.sliding_window(16, 4) | off(16, (8, 2)), "window=4, causal=True): allows query 8, key 2"),
    "window, last": (masks.sliding_window(16, 4) | off(16, (15, 2)), "window=4, causal=True): allows query 15, key 2"),
    "prefix": (
        masks.prefix_lm(16, 5) & ~off(16, (0, 4)),
        "1 pair away from prefix_lm(n=16, prefix=5): forbids query 0",
    ),
    "prefix, more": (masks.prefix_lm(16, 5) | off(16, (4, 5)), "prefix_lm(n=16, prefix=5): allows query 4, key 5"),
}


LENGTHS = [37, 20, 55, 16]
PACKED = masks.document(LENGTHS)
FAMILIES = {
    "documents": PACKED,
    "full documents": masks.document(LENGTHS, "full"),
    "windows in documents": PACKED & masks.sliding_window(128, 8),
    "both sides in documents": masks.document(LENGTHS, "full") & masks.sliding_window(128, 8, causal=False),
    "sinks in documents": masks.block_diagonal([masks.attention_sink(length, 2, 8) for length in LENGTHS]),
    "documents after a shared prefix": PACKED | masks.attention_sink(128, 4, 1),
    "chunks": masks.document([16] * 8),
    "prefix-LM": masks.prefix_lm(128, 40),
    "block causal": masks.block_causal(128, 8),
    "block diffusion": masks.block_diffusion(16, 4),
    "two streams": masks.block_two_stream(17, 4),
    "two streams with the first": masks.block_two_stream(16, 8, predict_first=True),
    "sinks": masks.attention_sink(128, 2, 8),
}


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8)
@given(st.data())
def test_any_pair_that_is_off_is_named(name, data):
    """One or two pairs too many, or one too few, wherever they are."""
    mask, few = FAMILIES[name], data.draw(st.booleans())
    n = mask.num_queries
    choices = np.argwhere(np.tril(mask.dense().numpy(), -1) if few else ~mask.dense().numpy())
    places = data.draw(st.lists(st.integers(0, len(choices) - 1), min_size=1, max_size=1 if few else 2, unique=True))
    pairs = {(int(q), int(k)) for q, k in choices[places]}
    given = mask & ~off(n, *pairs) if few else mask | off(n, *pairs)
    findings = [finding for finding in diagnose(masks.from_dense(given.dense())).findings if finding.kind == "nearly"]
    assert [set(finding.pairs) for finding in findings] == [pairs]


@pytest.mark.parametrize("window", [None, 512])
def test_a_pair_between_documents_of_a_long_mask_is_named(window):
    n = 1 << 15
    mask = masks.document([n // 4, 100, n // 2, n // 4 - 100])
    mask = mask if window is None else mask & masks.sliding_window(n, window)
    for pair in ((n // 4, n // 4 - 1), (n - 1, 5)):
        [finding] = diagnose(mask | off(n, pair)).findings
        assert (finding.kind, finding.pairs) == ("nearly", (pair,))
    [finding] = diagnose(mask & ~off(n, (n // 4 + 1, n // 4))).findings
    assert finding.pairs == ((n // 4 + 1, n // 4),)


@pytest.mark.parametrize("name", NEARLY)
def test_a_mask_a_few_pairs_off_is_named_with_the_pairs(name):
    mask, message = NEARLY[name]
    [finding] = diagnose(masks.from_dense(mask.dense())).findings
    assert finding.kind == "nearly"
    assert message in finding.message


def test_unusual_masks_are_near_nothing():
    """What the catalogue makes and random sparse masks; a random mask that allows nearly all is nearly full."""
    generator = torch.Generator().manual_seed(0)
    random = [torch.rand(n, n, generator=generator) < share for n in range(6, 24, 3) for share in (0.1, 0.4, 0.7)]
    own = [mask for mask in MASKS if mask.num_queries == mask.num_keys and mask.num_keys]
    for mask in [*own, *(masks.from_dense(table | torch.eye(len(table)).bool()) for table in random)]:
        assert "nearly" not in kinds(mask), mask


@pytest.mark.parametrize("noisy", ["full", "causal"])
@pytest.mark.parametrize("blocks", [16, 64])
def test_published_variants_of_block_diffusion_are_no_mistakes(noisy, blocks):
    """SBD and I-DLM: the clean stream is causal by token, and so, in I-DLM, is each noised block."""
    q, k = np.indices((8 * blocks,) * 2)
    clean_q, clean_k, q, k = q >= 4 * blocks, k >= 4 * blocks, q % (4 * blocks), k % (4 * blocks)
    own = ~clean_q & ~clean_k & (q // 4 == k // 4) & ((k <= q) | (noisy == "full"))
    table = own | (~clean_q & clean_k & (k // 4 < q // 4)) | (clean_q & clean_k & (k <= q))
    assert kinds(masks.from_dense(torch.from_numpy(table))) == []


def test_files(tmp_path):
    table = masks.causal(6).dense()
    additive = torch.zeros(6, 6).masked_fill(~table, -torch.inf)
    np.save(tmp_path / "a.npy", table.numpy())
    torch.save(table[None, None].int(), tmp_path / "b.pt")
    torch.save(torch.zeros(2, 3, 6, 6).masked_fill(~table, torch.finfo(torch.float32).min), tmp_path / "c.pt")
    save_file({"mask": additive.bfloat16()}, tmp_path / "d.safetensors")
    (tmp_path / "e.json").write_text(masks.export.varlen(masks.causal(6)).to_json())
    for name in ("a.npy", "b.pt", "c.pt", "d.safetensors", "e.json"):
        assert read_mask(tmp_path / name) == masks.causal(6), name
    torch.save(~table, tmp_path / "f.pt")
    assert read_mask(tmp_path / "f.pt", masked_true=True) == masks.causal(6)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([[1.0, 0.0], [1.0, 1.0]]), "a kernel that adds them masks nothing"),
        (torch.tensor([[0.0, -torch.inf], [0.5, 0.0]]), r"1 values are neither .* 0.5 at \[1, 0\]"),
        (torch.tensor([[0.0, torch.nan], [0.0, 0.0]]), r"or NaN: nan at \[0, 1\]"),
        (torch.tensor([[1, 2], [1, 1]]), r"neither 0 nor 1: 2 at \[0, 1\]"),
        (torch.ones(2, 1, 2, 2).cumsum(0) == 1, "differs from the first at query 0, key 0"),
        (torch.ones(3) > 0, "expected shape"),
        ({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, "expected one tensor, got 2"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_mask(tensor, message, tmp_path):
    torch.save(tensor, tmp_path / "mask.pt")
    with pytest.raises(ValueError, match=message):
        read_mask(tmp_path / "mask.pt")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bad.npy").write_bytes(b"no array")
    (tmp_path / "bad.pt").write_bytes(b"no tensor")
    (tmp_path / "mask.json").write_text(json.dumps({"dense": ["1x"]}))
    for name, message in {
        "none.npy": "cannot read .*none.npy",
        "bad.npy": "cannot read .*bad.npy",
        "bad.pt": "cannot read .*bad.pt",
        "mask.json": "expected 0, 1",
        "mask.txt": r"must end in \.json",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_mask(tmp_path / name)


RIGHT = {  # packed masks without a mistake; some have lengths that look like ids
    "short, then longer": lambda: masks.block_diagonal([masks.causal(k) for k in [1] * 8 + [2] * 8]),
    "one token each": lambda: masks.block_diagonal([masks.full(1)] * 20 + [masks.full(3)]),
    "sinks": lambda: masks.block_diagonal([masks.attention_sink(256, 2, 64)] * 4),
    "a shared prefix": lambda: masks.document([8, 500, 500]) | masks.attention_sink(1008, 8, 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_packed_masks_without_a_mistake_have_no_finding(name):
    mask = RIGHT[name]()
    assert diagnose(mask).ok
    n = mask.num_queries
    [finding] = diagnose(mask | masks.from_edges([(n - 1, 9)], n)).findings
    assert finding.pairs == ((n - 1, 9),)


@pytest.mark.parametrize("pads", [0, 1, 5, 20])
def test_a_leak_beside_padding_that_reads_nothing_is_named(pads):
    table = (masks.document([12, 20, 12]) | masks.from_edges([(20, 3)], 44)).dense()
    mask = masks.from_dense(torch.nn.functional.pad(table, (0, pads, 0, pads)))
    findings = {finding.kind: finding.pairs for finding in diagnose(mask).findings}
    assert findings.pop("nearly") == ((20, 3),)
    assert set(findings) == ({"empty"} if pads else set())


def test_values_of_which_nothing_can_be_told_get_the_usual_advice():
    for tensor in (
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.full((2, 2), torch.nan),
        torch.tensor([[1.0, -1.0]]),
    ):
        with pytest.raises(TypeError, match="These values are of neither kind"):
            masks.from_dense(tensor)
