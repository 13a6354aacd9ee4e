"""FlexAttention through transformers, which compiles it, and compiled models."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import StaticCache

import attnflow as af
from tests.models import outputs, tiny, tokens

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's own, at compilation
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def test_flex_attention_equals_sdpa_with_empty_rows_padding_and_a_mask_per_layer():
    model, size = tiny("Llama", torch.float32), 12
    ids = tokens(2, size)
    empty = af.masks.from_intervals([[(0, size)] if q in (0, 5) else [] for q in range(size)])
    masks = [af.masks.sliding_window(size, 4) & ~empty, af.masks.attention_sink(size, 2, 3)]
    real = torch.ones_like(ids)
    real[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": real}
    with torch.no_grad():
        with af.masks.attach(model, per_layer=masks):
            sdpa = outputs(model, **inputs)
        with af.masks.attach(model, per_layer=masks, backend="flex_attention") as handle:
            assert handle.backend == "flex_attention"
            flex = outputs(model, **inputs)
    assert flex.isfinite().all()
    torch.testing.assert_close(flex, sdpa, rtol=1e-4, atol=1e-4)


def test_generate_with_flex_attention_takes_the_rows_of_the_new_tokens():
    """A block mask over all positions would be longer than one query, which FlexAttention refuses."""
    model, ids = tiny("Llama", torch.float32, eos_token_id=None), tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    mask = af.masks.attention_sink(20, 1, 3)
    with af.masks.attach(model, mask):
        expected = model.generate(ids, **options)
    with af.masks.attach(model, mask, backend="flex_attention"):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_compiled_model_under_a_mask(implementation):
    model, mask = tiny("Llama", torch.float32), af.masks.block_two_stream(3, 2)
    ids, positions = tokens(2, 8), torch.tensor([[0, 1, 2, 3, 2, 3, 4, 5]]).expand(2, -1)
    with af.masks.attach(model, mask, backend=implementation):
        expected = outputs(model, input_ids=ids, position_ids=positions)
        expected.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        ours = outputs(compiled, input_ids=ids, position_ids=positions, use_cache=False)
        ours.square().sum().backward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-3)


def test_a_compiled_model_checks_its_sequences():
    model = tiny("Llama", torch.float32)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad(), af.masks.attach(model, af.masks.causal(6)):
        compiled(tokens(1, 6), use_cache=False)
        with pytest.raises(Exception, match="8 positions, but causal"):
            compiled(tokens(1, 8), use_cache=False)
    with (
        torch.no_grad(),
        af.masks.attach(model, af.masks.full(6)),
        pytest.raises(Exception, match=r"only 4 positions so far|needs a mask of its own"),
    ):
        compiled(tokens(1, 4), use_cache=False)


def test_a_compiled_model_under_the_leading_part_of_a_causal_mask():
    """Lengths vary, so that the compiler makes them symbols; and the mask is put on the model after compiling it."""
    model = tiny("Llama", torch.float32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        plain = outputs(compiled, input_ids=(ids := tokens(1, 6)), use_cache=False)
        with af.masks.attach(compiled, af.masks.sliding_window(40, 3)):
            for length in (6, 7, 9):
                here = tokens(1, length)
                expected = outputs(model, input_ids=here)
                ours = outputs(compiled, input_ids=here, use_cache=False)
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outputs(compiled, input_ids=ids, use_cache=False), plain)


def test_a_compiled_model_with_a_static_cache():
    model, ids, mask = tiny("Llama", torch.float32), tokens(1, 8), af.masks.attention_sink(8, 2, 3)
    with torch.no_grad(), af.masks.attach(model, mask):
        expected = outputs(model, input_ids=ids)
        cache = StaticCache(config=model.config, max_cache_len=12)
        parts = [model(ids[:, :5], past_key_values=cache).logits]
        compiled = torch.compile(model, backend="aot_eager")
        for i in range(5, 8):
            where = torch.tensor([[i]])
            parts.append(compiled(ids[:, i : i + 1], past_key_values=cache, position_ids=where).logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
        with pytest.raises(Exception, match=r"longer than its mask|9 positions"):
            compiled(ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[8]]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mask", [af.masks.block_two_stream(40, 8), af.masks.butterfly(200)], ids=lambda mask: mask.name
)
def test_training_with_flex_attention_equals_sdpa(mask):
    model = tiny("Llama", torch.float32, hidden_size=128, initializer_range=0.1, max_position_embeddings=1024).cuda()
    ids = tokens(2, mask.num_queries).cuda()
    found = {}
    for implementation in ("sdpa", "flex_attention"):
        model.zero_grad()
        with af.masks.attach(model, mask, backend=implementation):
            logits = outputs(model, input_ids=ids)
            logits.square().mean().backward()
        found[implementation] = logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
    (expected, right), (ours, gradients) = found.values()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    for name, gradient in right.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-2, atol=1e-3 * scale)


def bucket(seed: int, lengths: list[int]):
    """Masks of one bucket: three sequences of any lengths up to 96, one to four intervals a query."""
    draw = torch.Generator().manual_seed(seed)
    kinds = [
        lambda n: af.masks.causal(n),
        lambda n: af.masks.document([n // 3, n - n // 3]),
        lambda n: af.masks.attention_sink(n, 2, 5),
        lambda n: af.masks.longformer(n, 4, [0, n // 2]),
    ]
    chosen = torch.randint(len(kinds), (3,), generator=draw).tolist()
    grid = af.masks.batch([kinds[kind](n) for kind, n in zip(chosen, lengths, strict=True)], size=96)
    return tokens(3, 96), grid.row_intervals(min_width=4)


BUCKETED = [bucket(0, [96, 63, 7]), bucket(1, [50, 96, 1]), bucket(2, [9, 11, 96]), bucket(3, [96, 95, 94])]


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_one_compiled_graph_serves_a_bucketed_run(implementation):
    """Whatever masks the batches bring: their values are data. FlexAttention has no gradients on the CPU."""
    model = tiny("Llama", torch.float32)
    with af.masks.attach(model, "batch", backend="sdpa"), torch.no_grad():
        expected = [outputs(model, input_ids=ids, attention_mask=rows, use_cache=False) for ids, rows in BUCKETED]
    counter = CompileCounterWithBackend("inductor" if implementation == "flex_attention" else "aot_eager")
    with af.masks.attach(model, "batch", backend=implementation):
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
        for (ids, rows), each in zip(BUCKETED, expected, strict=True):
            with torch.set_grad_enabled(implementation != "flex_attention"):
                ours = outputs(compiled, input_ids=ids, attention_mask=rows, use_cache=False)
            if ours.requires_grad:
                ours.square().sum().backward()
            torch.testing.assert_close(ours.detach(), each, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
