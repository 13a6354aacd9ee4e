"""Writes `fixtures.json`: masks as the real xFormers and the real splash attention of JAX compute them.

Both are large and only their words for masks are needed, so the tests read what this script wrote once:

    pip install --target DIR --no-deps xformers==0.0.35 jax==0.10.0 jaxlib==0.10.0 ml_dtypes opt_einsum
    JAX_PLATFORMS=cpu PYTHONPATH=src:.:DIR python -m tests.masks.export.make_fixtures

It stops at the first mask whose export says something else in the package than what it was made from.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from attnflow import masks
from attnflow.masks import Mask, export
from attnflow.masks.export import NotExpressible, SplashMask, XFormersBias
from tests.catalogue_cases import MASKS

FILE = Path(__file__).with_name("fixtures.json")
MORE = [
    masks.document([3, 4, 1], "full"),
    masks.document([3, 4, 4]) & masks.sliding_window(11, 2),
    masks.document([4, 4, 3]),
    masks.document([5, 2], "full") & masks.sliding_window(7, 2, causal=False),
    masks.causal(9)[6:, :],
    masks.causal(9)[:, :4],
    masks.sliding_window(9, 3)[5:, :],
    masks.sliding_window(9, 3, causal=False)[4:, :],
    masks.sliding_window(9, 3) | masks.causal(9),
    ~masks.causal(5),
    masks.sliding_window(7, 4, causal=False) & ~masks.sliding_window(7, 2) | masks.sliding_window(7, 1),
]


def xformers_table(form: XFormersBias) -> np.ndarray:
    """The pairs that the real class allows."""
    shape = (sum(form.q_seqlen), sum(form.kv_seqlen))
    return (form.build().materialize(shape) == 0).numpy()


def splash_table(form: SplashMask) -> np.ndarray:
    """The pairs that the real class allows."""
    return np.asarray(form.build()[0, :, :])


def packed(table: np.ndarray) -> str:
    return np.packbits(table, axis=None).tobytes().hex()


def entries() -> list[dict[str, object]]:
    written: dict[str, dict[str, object]] = {}
    for mask in (*MASKS, *MORE):
        if 0 in mask.shape:
            continue
        for make, table_of in ((export.xformers, xformers_table), (export.splash, splash_table)):
            try:
                form = make(mask)
            except NotExpressible:
                continue
            table = table_of(form)
            assert np.array_equal(table, mask.dense().numpy()), (mask, form)
            if isinstance(form, SplashMask) and form.kind == "NumpyMask":
                continue
            values = json.loads(form.to_json())
            written[json.dumps(values)] = {"form": values, "shape": list(mask.shape), "allowed": packed(table)}
    return list(written.values())


def kernel_agrees(mask: Mask) -> float:
    """The largest difference between the splash kernel, interpreted, and attention under the mask."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    generator = np.random.default_rng(0)
    q, k, v = (generator.standard_normal((1, size, 128)).astype(np.float32) for size in (*mask.shape, mask.shape[1]))
    run = kernel.make_splash_mha(export.splash(mask).build(), head_shards=1, q_seq_shards=1, interpret=True)
    out = np.asarray(run(jax.numpy.asarray(q), jax.numpy.asarray(k), jax.numpy.asarray(v)))
    tensors = (torch.from_numpy(part).double() for part in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask.dense(), scale=1.0)
    return float(np.abs(out - right.numpy()).max())


if __name__ == "__main__":
    content = {"packages": {name: version(name) for name in ("xformers", "jax", "torch")}, "masks": entries()}
    for kernel_mask in (masks.causal(256), masks.sliding_window(256, 40), masks.butterfly(86)[:256, :256]):
        print(kernel_mask, export.splash(kernel_mask), f"kernel differs by {kernel_agrees(kernel_mask):.1e}")
    lines = ",\n".join(json.dumps(entry) for entry in content["masks"])
    FILE.write_text(f'{{"packages": {json.dumps(content["packages"])}, "masks": [\n{lines}\n]}}\n')
    print(len(content["masks"]), "fixtures")
