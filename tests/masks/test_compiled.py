"""One compiled kernel serves every mask of a kind: sizes and parameters are data, not code."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import flex_attention

from attnflow import masks

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own, at compilation
]

FAMILIES = {
    "sliding windows": [masks.sliding_window(n, w) for n, w in ((256, 20), (384, 33), (512, 64), (640, 7))],
    "causal, windowed and prefix": [masks.causal(256), masks.sliding_window(384, 9), masks.prefix_lm(512, 40)],
    "butterflies": [masks.butterfly(n) for n in (86, 128, 171, 200)],
    "dilated windows": [masks.dilated_window(n, 10, d) for n, d in ((256, 2), (384, 3), (512, 5))],
    "document packings": [masks.document(lengths) for lengths in ([100, 156], [3, 381], [512])],
    "trees": [masks.tree([-1, *((i * i) % (i + 1) for i in range(n - 1))]) for n in (300, 400)],
    "many intervals": [
        masks.from_edges([(q, k) for q in range(0, n, 9) for k in range(0, n, 3)], n) for n in (200, 300)
    ],
}


def assert_attends_under(mask, attention):
    q, k, v = (torch.randn(1, 2, mask.num_queries, 16) for _ in range(3))
    actual = attention(q, k, v, block_mask=mask.block_mask(32))
    reachable = mask.row_counts() > 0  # a row without keys is NaN for one and zero for the other
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense())
    torch.testing.assert_close(actual[:, :, reachable], expected[:, :, reachable], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_one_compilation_covers_all_sizes_of_a_family(family):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention, backend=counter)
    for mask in family:
        assert_attends_under(mask, compiled)
    assert counter.frame_count <= 2  # once for the first size, once more when torch learns that sizes vary


@pytest.mark.parametrize("mask", [masks.butterfly(86), FAMILIES["many intervals"][0]], ids=["compare", "look_up"])
def test_the_generated_kernel_attends_under_the_mask(mask):
    torch._dynamo.reset()
    assert_attends_under(mask, torch.compile(flex_attention))
