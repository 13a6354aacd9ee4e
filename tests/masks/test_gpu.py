"""Compiled FlexAttention on a GPU under our masks: values and gradients are those of SDPA under the dense mask.

Compiled masks of several streams have given wrong gradients in torch (pytorch #158212), so each kind is checked.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attnflow import masks, testing

pytestmark = [pytest.mark.gpu, pytest.mark.compiled, pytest.mark.filterwarnings("ignore")]

KINDS = [
    masks.causal(1000),
    masks.sliding_window(1024, 100),
    masks.dilated_window(1000, 20, 3),
    masks.document([300, 724]),
    masks.longformer(512, 40, [0, 77]),
    masks.big_bird(1024, 64),
    masks.tree([-1, *(i // 2 for i in range(499))]),
    masks.permutation_lm([(7 * i) % 250 for i in range(250)]),
    masks.block_two_stream(9, 32),
    masks.block_diffusion(6, 50),
    masks.butterfly(200),
    masks.look_ahead(200, 3),
    masks.from_edges([(q, k) for q in range(300) for k in range(q % 3, 300, 3)], 300),
]


def gradients(attention, inputs, outwards):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out, *torch.autograd.grad(out, inputs, outwards)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", KINDS, ids=lambda m: m.name)
def test_values_and_gradients_are_those_of_attention_under_the_dense_mask(mask, dtype):
    torch._dynamo.reset()
    shape = (2, 4, mask.num_queries, 64)
    exact_inputs = [torch.randn(shape, dtype=torch.float64, device="cuda") for _ in range(4)]
    inputs = [x.to(dtype) for x in exact_inputs]
    dense, block_mask = mask.dense("cuda"), mask.block_mask(device="cuda")
    compiled = torch.compile(flex_attention)
    actual = gradients(lambda q, k, v: compiled(q, k, v, block_mask=block_mask), inputs[:3], inputs[3])

    def reference(q, k, v):
        return scaled_dot_product_attention(q, k, v, attn_mask=dense)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        low = gradients(reference, inputs[:3], inputs[3])
        exact = gradients(reference, [x.double() for x in inputs[:3]], inputs[3].double())
    for ours, plain, true in zip(actual, low, exact, strict=True):
        testing.assert_as_accurate(ours, plain, true)


@pytest.mark.parametrize("mask", KINDS, ids=lambda m: m.name)
def test_block_mask_on_the_gpu_is_torchs(mask):
    ours = mask.block_mask(device="cuda")
    theirs = create_block_mask(mask.mask_mod_on("cuda"), None, None, *mask.shape, device="cuda")
    assert ours.kv_num_blocks.device.type == "cuda"
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_a_long_mask_trains_without_a_table():
    mask = masks.sliding_window(131072, 512)
    q, k, v = (torch.randn(1, 1, 131072, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    block_mask = mask.block_mask(device="cuda")
    torch.cuda.reset_peak_memory_stats()
    torch.compile(flex_attention)(q, k, v, block_mask=block_mask).sum().backward()
    assert torch.cuda.max_memory_allocated() < 2**30
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
