"""Outputs that relate rows of two inputs by design, such as similarities of texts and images, and rows that mix."""

import pytest
import torch
import transformers
from torch import nn

import attnflow as af
from attnflow.audit import check
from tests.audit.common import tokens
from tests.conformance.miniature import named
from tests.conformance.senses import runs_on

LENGTH, VOCABULARY = 11, 60
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}


def clip():
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    return transformers.CLIPModel(config).eval()


def siglip():
    torch.manual_seed(0)
    config = transformers.SiglipConfig(text_config=TEXT | {"projection_size": 32}, vision_config=VISION)
    return transformers.SiglipModel(config).eval()


def pairs(texts, images, **more):
    ids = tokens(texts, LENGTH).clamp(max=VOCABULARY - 1)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(images, 3, 32, 32), **more}


class Towers(nn.Module):
    """A dual encoder of a user's own: [texts, others] similarities, or their transpose, alone or beside the states."""

    def __init__(self, output):
        super().__init__()
        self.embed, self.other = nn.Embedding(VOCABULARY, 24), nn.Linear(5, 24)
        self.output = output

    def forward(self, input_ids, others):
        text = self.embed(input_ids)
        text = text + 0.1 * text.cumsum(1)
        return self.output(text, text.mean(1), self.other(others))


CLEAN = {
    "CLIP": (clip, pairs(2, 2), "logits_per_image [2, 2]", "[rows of pixel_values, rows of input_ids]"),
    "more images": (clip, pairs(2, 4), "logits_per_image [4, 2]", "[rows of pixel_values, rows of input_ids]"),
    "more texts": (clip, pairs(5, 2), "logits_per_text [5, 2]", "[rows of input_ids, rows of pixel_values]"),
    "one text": (clip, pairs(1, 2), "logits_per_image [2, 1]", "[rows of pixel_values, rows of input_ids]"),
    "a loss beside": (clip, pairs(2, 2, return_loss=True), "logits_per_text [2, 2]", "[rows of input_ids, rows of p"),
    "as many as features": (clip, pairs(16, 16), "logits_per_image [16, 16]", "[rows of pixel_values, rows of inp"),
    "SigLIP": (siglip, pairs(2, 2), "logits_per_image [2, 2]", "[rows of pixel_values, rows of input_ids]"),
}


@pytest.mark.parametrize("case", CLEAN)
def test_similarities_of_two_inputs_are_no_leak(case):
    make, given, name, rows = CLEAN[case]
    report = check(make(), given, mode="quick")
    assert report.verdict == ("nothing tested" if case == "SigLIP" else "clean"), str(report)
    assert not report.untested
    assert any(note.startswith(f"{name} relates rows by design: {rows}") for note in report.notes), report.notes


OWN = {
    "texts first": lambda states, text, other: (states, text @ other.T),
    "others first": lambda states, text, other: (states, other @ text.T),
    "with itself": lambda states, text, other: (states, text @ text.T),
}


@pytest.mark.parametrize("others", [3, 4])
@pytest.mark.parametrize("name", OWN)
def test_a_dual_encoder_of_a_users_own(name, others):
    given = {"input_ids": tokens(3, LENGTH).clamp(max=VOCABULARY - 1), "others": torch.randn(others, 5)}
    order = af.masks.causal(LENGTH)
    report = check(Towers(OWN[name]).eval(), given, order=order)
    assert report.ok, str(report)
    assert any("relates rows by design" in note for note in report.notes)

    def mixed(states, text, other):
        return OWN[name](states, text + 0.1 * text.mean(0), other)

    found = check(Towers(mixed).eval(), given, order=order)
    assert [v.kind for v in found.violations] == ["batch"], str(found)
    assert "sequences were kept apart" not in str(found)


def test_similarities_alone_show_no_order():
    given = {"input_ids": tokens(3, LENGTH).clamp(max=VOCABULARY - 1), "others": torch.randn(4, 5)}
    model = Towers(lambda states, text, other: text @ other.T).eval()
    assert check(model, given, order=af.masks.causal(LENGTH)).verdict == "nothing tested"


class Mixed(nn.Module):
    """What a layer says, with a little of the mean over the batch, as of statistics or attention across it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        return output + 0.1 * output.mean(0, keepdim=True)


class Patches(nn.Linear):
    """Numbers at the place that the first one names, as Pix2Struct reads patches of an image."""

    def forward(self, rows):
        return super().forward(rows + torch.eye(5, dtype=rows.dtype)[rows[:, 0].long()])


PLACED = torch.cat([torch.arange(4.0)[:, None], torch.randn(4, 4)], 1)
READ = {
    "a number for each row": (nn.Linear(5, 24), torch.randn(4, 5)),
    "places among numbers": (Patches(5, 24), PLACED),
    "whole numbers alone": (nn.Linear(5, 24), PLACED.round()),
}


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("name", READ)
def test_rows_of_another_tower_by_what_it_reads(name, mixes):
    tower, others = READ[name]
    model = Towers(lambda states, text, other: (states, text @ other.T, other.sum(-1))).eval()
    model.other = Mixed(tower) if mixes else tower
    given = {"input_ids": tokens(3, LENGTH).clamp(max=VOCABULARY - 1), "others": others}
    report = check(model, given, order=af.masks.causal(LENGTH))
    assert [v.kind for v in report.violations] == ["batch"] * mixes, str(report)


@pytest.mark.parametrize("images", [2, 3])
@pytest.mark.parametrize("tower", ["text_projection", "visual_projection", "text_model.encoder.layers.1.mlp"])
def test_rows_that_mix_in_a_tower_are_found(tower, images):
    model = clip()
    parent, _, name = tower.rpartition(".")
    setattr(model.get_submodule(parent), name, Mixed(model.get_submodule(tower)))
    report = check(model, pairs(2, images), mode="quick", watch="layers")
    assert [v.kind for v in report.violations] == ["batch"], str(report)
    assert "relates rows by design" not in str(report)
    assert ("pixel_values" in report.violations[0].why) == (tower == "visual_projection")


@pytest.mark.parametrize("name", ["GroupViTModel", "AltCLIPModel", "Siglip2Model"])
def test_contrastive_models_of_transformers(name):
    model = named(name)
    report = check(model, runs_on(model), watch="layers")
    assert not report.violations, str(report)
    assert any("relates rows by design" in note for note in report.notes)


class Pictured(nn.Module):
    """Reads an image in front of each text; `beside` says what of other images a text reads, too."""

    def __init__(self, beside, limit=9):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.patch, self.beside = nn.Embedding(VOCABULARY, 24), nn.Linear(12, 24), beside
        self.limit = limit

    def forward(self, input_ids, pixel_values):
        if pixel_values.abs().max() > self.limit:
            raise ValueError(f"pixels beyond {self.limit}")
        image = self.patch(pixel_values[: len(input_ids)].flatten(1))
        text = self.embed(input_ids) + (image + self.beside(image))[:, None]
        return {"logits": text.cumsum(1), "pooled": text[:, -1]}


def behind(image):
    """Row r - 1 for row r: what a merge of features that is one image short does."""
    return torch.nn.functional.pad(image[:-1], (0, 0, 1, 0))


MIXES = {
    "none": lambda image: 0 * image,
    "its own": lambda image: image.sin(),
    "the mean": lambda image: 0.1 * image.mean(0),
    "the one before": behind,
    "the one after": lambda image: behind(image.flip(0)).flip(0),
    "the first two together": lambda image: image.sign()[:2].prod(0) + 0 * image,
}


def read_images(name, images, texts, mode, **more):
    given = pairs(texts, images)
    given["pixel_values"] = given["pixel_values"][:, :, :2, :2].sin()
    return check(Pictured(MIXES[name], **more).eval(), given, order=af.masks.causal(LENGTH), mode=mode)


@pytest.mark.parametrize("mode", ["quick", "perturb"])
@pytest.mark.parametrize("images", [2, 3])
@pytest.mark.parametrize("name", MIXES)
def test_images_that_reach_the_text_of_other_rows(name, images, mode):
    report = read_images(name, images, images, mode)
    assert [v.kind for v in report.violations] == ["batch"] * (name not in ("none", "its own")), str(report)
    assert all("of pixel_values" in v.why for v in report.violations)


@pytest.mark.parametrize(("images", "limit", "why"), [(3, 9, "there are 3 for 2 sequences"), (2, 1, "beyond 1")])
def test_images_that_were_not_tested_are_named(images, limit, why):
    report = read_images("none", images, 2, "perturb", limit=limit)
    (note,) = [note for note in report.notes if "not tested: whether rows of pixel_values reach others" in note]
    assert why in note


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "InstructBlipForConditionalGeneration"])
def test_images_of_models_of_transformers(name, mixes):
    model = named(name)
    given = runs_on(model)
    (projector,) = [n for n, _ in model.named_modules() if n.endswith(("multi_modal_projector", "language_projection"))]
    parent, _, last = projector.rpartition(".")
    if mixes:
        setattr(model.get_submodule(parent), last, Mixed(model.get_submodule(projector)))
    report = check(model, given, watch="layers")
    assert any(v.why.endswith("of pixel_values") for v in report.violations) == mixes, str(report)
    assert mixes or report.verdict == "clean"
