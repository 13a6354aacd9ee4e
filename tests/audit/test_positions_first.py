"""Decoders of images whose learned queries come before the batch, [queries, batch, width], as those of Mask2Former."""

import pytest
import torch
import transformers
from torch import nn

from attnflow.audit import check

WIDTH = 24


class QueryConfig(transformers.PreTrainedConfig):
    model_type = "queries"


class Layer(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.itself, self.image = (nn.MultiheadAttention(WIDTH, 4) for _ in range(2))
        self.mixes = mixes

    def forward(self, queries, image):
        queries = queries + self.itself(queries, queries, queries)[0]
        queries = queries + self.image(queries, image, image)[0]
        return queries + 0.1 * queries.mean(1, keepdim=True) if self.mixes else queries


class Queries(transformers.PreTrainedModel):
    """Its queries stand first inside and, where they are put out so, in the output."""

    config_class, base_model_prefix, main_input_name = QueryConfig, "", "pixel_values"

    def __init__(self, queries, mixes=(False, False), turned=False):
        super().__init__(QueryConfig())
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.queries = nn.Parameter(torch.randn(queries, WIDTH))
        self.layers = nn.ModuleList(Layer(mixed) for mixed in mixes)
        self.turned = turned

    def forward(self, pixel_values):
        image = self.patches(pixel_values).flatten(2).permute(2, 0, 1)
        states = self.queries[:, None].expand(-1, len(pixel_values), -1)
        for layer in self.layers:
            states = layer(states, image)
        return states if self.turned else states.transpose(0, 1)


def images(rows):
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "queries"), [(1, 8), (2, 8), (3, 8), (4, 9), (8, 4)])
def test_rows_that_stay_apart_are_no_leak(rows, queries, turned):
    report = check(Queries(queries, turned=turned).eval(), images(rows))
    assert report.verdict == "nothing tested", str(report)
    assert f"{rows} x {queries} positions" in str(report)


@pytest.mark.parametrize("mixes", [(True, False), (False, True)])
@pytest.mark.parametrize(("rows", "queries"), [(2, 8), (3, 8), (8, 4)])
def test_rows_that_mix_are_found(rows, queries, mixes):
    report = check(Queries(queries, mixes).eval(), images(rows))
    assert {violation.kind for violation in report.violations} == {"batch"}, str(report)
    assert f"layers.{mixes.index(True)}" in {violation.module for violation in report.violations}, str(report)
    assert f"{rows} x {queries} positions" in str(report)


class Crops(Queries):
    """Two sequences of three positions for each image, the batch first: [2 * images, 3, width]."""

    def __init__(self):
        super().__init__(1)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True) for _ in range(2))

    def forward(self, pixel_values):
        states = self.patches(pixel_values).flatten(2).mT[:, :6].reshape(-1, 3, WIDTH)
        for layer in self.layers:
            states = layer(states)
        return states


def test_as_many_positions_as_images_are_no_batch():
    report = check(Crops().eval(), images(3))
    assert report.verdict == "nothing tested", str(report)
    assert "6 x 3 positions" in str(report)
