"""Every export against its published definition, read back, and refused only where no form says it."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.masks import export
from attnflow.masks.export import NotExpressible
from attnflow.masks.export.slices import transposed
from tests.catalogue_cases import MASKS
from tests.refused import refused
from tests.strategies import dense_masks, relations, square_masks

ODD = [masks.causal(127), masks.document([63, 1, 64]), masks.longformer(129, 5, [0, 64]), masks.block_diffusion(5, 7)]
EVERY = [*MASKS, *ODD]


# Each format read pair by pair from its published definition; this shares no code with the package.


def decoded_varlen(cu_seqlens_q, cu_seqlens_k, causal, window_size):
    """flash-attn 2.1's docstring: bottom right alignment; window_size (left, right) inclusive, -1 for no limit."""
    left, right = window_size
    if causal:
        right = 0
    table = np.zeros((cu_seqlens_q[-1], cu_seqlens_k[-1]), np.bool_)
    for document in range(len(cu_seqlens_q) - 1):
        q0, q1, k0, k1 = *cu_seqlens_q[document : document + 2], *cu_seqlens_k[document : document + 2]
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                centre = i + (k1 - k0) - (q1 - q0)
                table[q0 + i, k0 + j] = (left < 0 or j >= centre - left) and (right < 0 or j <= centre + right)
    return table


def decoded_magi(q_ranges, k_ranges, attn_type_map, shape):
    """MagiAttention's kernels: each slice adds its pairs, so a pair counted twice is an error."""
    count = np.zeros(shape, np.int64)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, attn_type_map, strict=True):
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                causal, inverse = j <= i + (k1 - k0) - (q1 - q0), j >= i
                count[q0 + i, k0 + j] += [True, causal, inverse, causal and inverse][kind]
    assert count.max(initial=0) <= 1
    return count == 1


def decoded_flashmask(bounds, causal, num_queries):
    """The dense mask that PaddlePaddle's documentation of `flashmask_attention` gives for its bounds."""
    table = np.ones((num_queries, len(bounds)), np.bool_)
    for key, values in enumerate(bounds):
        with_end = len(values) == (2 if causal else 4)
        table[values[0] : values[1] if with_end else None, key] = False
        if causal:
            table[:key, key] = False
        elif with_end:
            table[values[2] : values[3], key] = False
        else:
            table[: values[1], key] = False
    return table


def compositions(n):
    """All ways to cut n positions into documents."""
    if n == 0:
        yield ()
    for first in range(1, n + 1):
        for rest in compositions(n - first):
            yield (first, *rest)


def decoded(form, mask):
    """The table of a form, by its published definition."""
    match form:
        case export.Varlen():
            lengths = form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist()
            assert form.max_seqlen_q == np.diff(lengths[0]).max(initial=0)
            assert form.max_seqlen_k == np.diff(lengths[1]).max(initial=0)
            return decoded_varlen(*lengths, form.causal, form.window_size)
        case export.MagiRanges():
            tables = form.q_ranges.tolist(), form.k_ranges.tolist(), form.attn_type_map.tolist()
            return decoded_magi(*tables, mask.shape)
        case export.FlashMask():
            return decoded_flashmask(form.startend_row_indices[0, 0].tolist(), form.causal, form.num_queries)


def made(mask, name):
    try:
        return export.FORMATS[name](mask), None
    except NotExpressible as error:
        return None, error


def check(mask, name):
    """Export, decode by the definition, read back, through JSON too; or a refusal that names a pair of the mask."""
    form, error = made(mask, name)
    if error is not None:
        assert error.format == name
        assert error.allowed == mask.allows(*error.pair)
        assert f"query {error.pair[0]}, key {error.pair[1]}" in str(error)
        return None
    table = decoded(form, mask)
    assert table is None or np.array_equal(table, mask.dense().numpy())
    assert form.to_mask() == mask
    assert masks.from_json(form.to_json()) == mask
    return form


@pytest.mark.parametrize("name", sorted(export.FORMATS))
def test_the_whole_catalogue(name):
    said = [check(mask, name) is not None for mask in EVERY]
    if name == "magi":
        assert all(said)


@settings(max_examples=100)
@given(st.one_of(square_masks(9), dense_masks(9)))
def test_random_masks(mask):
    for name in export.FORMATS:
        check(mask, name)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 5), st.booleans())
def test_documents_with_windows_are_said(lengths, window, causal):
    n = sum(lengths)
    mask = masks.document(lengths, "full") & masks.sliding_window(n, window, causal=causal)
    assert check(mask, "varlen") is not None


def said_by(name, table):
    return made(masks.from_dense(torch.from_numpy(table)), name)[0] is not None


def sides(n):
    return [(left, right) for left in range(-1, n) for right in range(-1, n)]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_nothing_is_refused_that_can_be_said(n):
    """Every relation of n positions against every setting of the format."""
    cuts = [np.cumsum([0, *lengths]).tolist() for lengths in compositions(n)]
    bands = {(cut := tuple(c), w): decoded_varlen(cut, cut, False, w).tobytes() for c in cuts for w in sides(n)}
    varlen = set(bands.values())
    for table in (np.array(bits).reshape(n, n) for bits in product((False, True), repeat=n * n)):
        assert said_by("varlen", table) == (table.tobytes() in varlen)


@given(relations(7))
def test_flashmask_refuses_what_has_three_stretches(table):
    forbidden = np.pad(~table, ((1, 1), (0, 0))).astype(np.int8)
    stretches = (np.diff(forbidden, axis=0) == 1).sum(axis=0).max(initial=0)
    assert said_by("flashmask", table) == (stretches <= 2)


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("keys", [1, 3, 4])
def test_rectangles_of_one_document_are_said(queries, keys):
    for left, right in sides(5):
        table = decoded_varlen([0, queries], [0, keys], False, (left, right))
        mask = masks.from_dense(torch.from_numpy(table))
        if queries != keys:
            assert export.varlen(mask).to_mask() == mask


@given(relations(8))
def test_transposition(table):
    rows = masks.from_dense(torch.from_numpy(table)).intervals()
    assert np.array_equal(transposed(rows).to_bool(), table.T)
    assert transposed(transposed(rows)).equals(rows)


def test_few_slices_and_bounds_for_regular_masks():
    slices = {
        masks.causal(65): 1,
        masks.full(7, 9): 1,
        masks.sliding_window(65, 9): 2,
        masks.document([5, 9, 3]): 3,
        masks.prefix_lm(33, 8): 2,
        masks.block_causal(32, 8): 4,
    }
    for mask, count in slices.items():
        assert len(export.magi(mask).attn_type_map) == count
    bounds = {
        masks.causal(9): (1, True),
        masks.document([5, 9]): (1, True),
        masks.sliding_window(9, 3): (1, True),
        masks.attention_sink(9, 2, 3): (1, True),
        masks.prefix_lm(9, 4): (2, False),
        masks.document([3, 4], "full"): (2, False),
        masks.block_two_stream(4, 2): (4, False),
        masks.longformer(9, 2): (4, False),
    }
    for mask, (width, causal) in bounds.items():
        form = export.flashmask(mask)
        assert (form.startend_row_indices.shape[-1], form.causal) == (width, causal), mask


def test_what_cannot_be_said_is_named():
    with pytest.raises(
        NotExpressible, match=r"flashmask cannot express butterfly\(n=6\): it forbids query \d+, key \d+"
    ):
        export.flashmask(masks.butterfly(6))
    with pytest.raises(NotExpressible, match="forbids query 2, key 2, but every query") as caught:
        export.varlen(masks.from_edges([(0, 0), (1, 1)], 3))
    assert caught.value.pair == (2, 2)


def test_what_is_no_mask_is_told_how_to_become_one():
    for make in export.FORMATS.values():
        with pytest.raises(Exception, match=r"from_dense|Mask"):
            make(torch.ones(2, 2, dtype=torch.bool))


def test_forms_that_say_something_else_are_refused():
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    with pytest.raises(ValueError, match="overlap"):
        export.MagiRanges(ints([0, 2], [1, 2]), ints([0, 2], [0, 2]), ints(0, 0), 2, 2).to_mask()
    with pytest.raises(ValueError, match="0, 1, 2 or 3"):
        export.MagiRanges(ints([0, 2]), ints([0, 2]), ints(4), 2, 2).to_mask()
    with pytest.raises(ValueError, match="start at 0"):
        export.Varlen(ints(1, 2), ints(0, 2), 1, 2, True, (-1, -1)).to_mask()
    with refused(ValueError, "as many documents"):
        export.Varlen(ints(0, 2), ints(0, 1, 2), 2, 1, True, (-1, -1)).to_mask()
    with pytest.raises(ValueError, match="takes 1 or 2 bounds"):
        export.FlashMask(torch.zeros(1, 1, 3, 4).int(), True, 3).to_mask()


def test_long_masks_take_intervals_only():
    n = 8192
    for mask in (masks.longformer(n, 512), masks.sliding_window(n, 512), masks.document([1024] * 8)):
        assert export.flashmask(mask).to_mask() == mask
        assert export.magi(mask).to_mask() == mask


PACKED = [masks.causal(4), masks.document([2, 1]), masks.causal(1)]


def blocks(parts):
    return torch.block_diag(*(part.dense().int() for part in parts)).bool()


@pytest.mark.parametrize("make", [export.varlen, export.magi])
def test_a_batch_is_laid_end_to_end(make):
    form = make(masks.batch(PACKED))
    assert torch.equal(form.to_mask().dense(), blocks(PACKED))


def test_requests_of_several_lengths():
    """Chunks of prompts: each has fewer queries than keys, aligned at the last."""
    parts = [masks.causal(9)[6:, :], masks.causal(4), masks.causal(5)[4:, :]]
    form = export.varlen(masks.batch(parts))
    assert form.cu_seqlens_q.tolist() == [0, 3, 7, 8]
    assert form.cu_seqlens_k.tolist() == [0, 9, 13, 18]
    table = decoded_varlen(form.cu_seqlens_q.tolist(), form.cu_seqlens_k.tolist(), form.causal, form.window_size)
    assert np.array_equal(table, blocks(parts).numpy())
    with pytest.raises(NotExpressible, match=r"varlen cannot express block_diagonal\(\["):
        export.varlen(masks.batch([masks.sliding_window(9, 3)[6:, :], masks.causal(9)[2:, :]]))


@settings(max_examples=40)
@given(st.lists(square_masks(6).filter(lambda mask: mask.num_queries), min_size=2, max_size=3))
def test_any_batch(parts):
    grid = masks.batch(parts)
    assert torch.equal(export.magi(grid).to_mask().dense(), blocks(parts))
    try:
        rows = export.flashmask(grid)
    except NotExpressible:
        return
    assert torch.equal(rows.to_mask().dense(), grid.dense())
    for b, part in enumerate(grid.dense()):
        bounds = rows.startend_row_indices[b, 0].tolist()
        assert np.array_equal(decoded_flashmask(bounds, rows.causal, rows.num_queries), part[0].numpy())


@pytest.mark.parametrize(
    ("parts", "width", "causal"),
    [
        ([masks.causal(6), masks.sliding_window(6, 3)], 1, True),
        ([masks.causal(6), masks.causal(6) & ~masks.from_edges([(3, 1)], 6)], 2, True),
        ([masks.causal(6), masks.full(6)], 2, False),
        ([masks.prefix_lm(6, 3), masks.longformer(6, 2)], 4, False),
    ],
)
def test_heads_of_flashmask(parts, width, causal):
    heads = masks.per_head(parts)
    form = export.flashmask(heads)
    assert form.startend_row_indices.shape == (1, 2, 6, width)
    assert form.causal == causal
    assert form.to_mask() == heads
    assert torch.equal(type(form).from_json(form.to_json()).to_mask().dense(), heads.dense())
    with pytest.raises(ValueError, match="expected one mask, got"):
        masks.from_json(form.to_json())


@pytest.mark.parametrize("make", [export.varlen, export.magi])
def test_heads_that_share_a_mask_are_refused_where_they_differ(make):
    with pytest.raises(NotExpressible, match="query 2, key 0, but another head of sequence 0"):
        make(masks.per_head([masks.causal(4), masks.sliding_window(4, 2)]))
