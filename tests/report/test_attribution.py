"""Why a head looked at a token, drawn: what the bars and cells hold, what is left out, and that it is said."""

import inspect
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnflow import geometry
from attnflow._core.markup import percent
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.models.passes.recording import ComponentName
from attnflow.report import figure, page
from attnflow.report.attribution import attribution_chart, attribution_part
from attnflow.report.attribution_rows import leading, row_of
from attnflow.report.charts import NEGATIVE, POSITIVE, signed
from attnflow.report.page import Context, build
from tests.models import tiny
from tests.report.reading import parse_page


def components(layers):
    kinds = [(n, kind) for n in range(layers) for kind in ("attention", "feed-forward")]
    return (
        ComponentName(None, "embedding", "layers.0"),
        *(ComponentName(n, kind, f"layers.{n}.{kind}") for n, kind in kinds),
    )


def made(layers=2, keys=5, heads=1, seed=0, **fields):
    """A consistent result: the scores are the sums, and the weights their softmax."""
    random = torch.Generator().manual_seed(seed)
    names = components(layers)
    key_names = fields.get("key_components", names)
    biases = torch.randn(heads, keys, generator=random, dtype=torch.float64)
    raw = torch.randn(heads, keys, len(names), len(key_names), generator=random, dtype=torch.float64) / len(names)
    scores = raw.sum((-1, -2)) + biases
    weights = scores.softmax(-1)
    tensors = {"raw": raw, "scores": scores, "weights": weights, "slope": torch.ones_like(scores)}
    tensors["expected"] = torch.einsum("hk,hkqc->hqc", weights, raw)
    constants = {"biases": biases, "positions": torch.zeros_like(biases)}
    means = {name: (weights * value).sum(1) for name, value in constants.items()}
    if heads == 1:
        tensors, constants, means = ({n: v[0] for n, v in one.items()} for one in (tensors, constants, means))
    tokens = tuple(f" word{n}" for n in range(keys))
    values = {
        "model": "tiny", "layer": layers, "head": 3 if heads == 1 else None, "attention": "self", "query": keys - 1,
        "keys": tuple(range(keys)), "query_token": tokens[-1], "tokens": tokens, "components": names, "error": 5e-7,
        "heads": tuple(range(heads)) if heads > 1 else (3,), "constants": constants, "expected_constants": means,
        "key_components": key_names, **tensors, **fields,
    }  # fmt: skip
    return ScoreAttribution(**values)


def centred(result, head=0):
    """By its definition, one key at a time."""
    raw, weights = (value[head] if result.head is None else value for value in (result.raw, result.weights))
    mean = sum(weight * term for weight, term in zip(weights, raw, strict=True))
    return torch.stack([term - mean for term in raw])


def panel(drawn, start):
    """The axes whose title, or the title of whose panel, starts with this."""
    return next(axes for axes in drawn.axes if axes.get_title(loc="right").startswith(start))


def bars(drawn):
    axes = panel(drawn, "largest terms")
    names = [text.get_text() for text in axes.get_yticklabels()]
    return dict(zip(names, (patch.get_width() for patch in axes.patches), strict=True)), axes


def words(drawn):
    return " | ".join(text.get_text() for text in drawn.findobj(lambda one: hasattr(one, "get_text")))


def test_bars_are_the_leading_terms_and_close_to_the_score_less_the_mean_of_the_row():
    result = made()
    shown, axes = bars(figure(result, picture="terms", key=2, count=4))
    terms = centred(result)[2]
    *largest, constant, others, total = shown.values()
    order = terms.abs().flatten().topk(4).indices
    assert largest == pytest.approx(terms.flatten()[order].tolist())
    query, key = divmod(int(order[0]), len(result.components))
    first, second = (str(result.components[i]).replace("layer ", "L") for i in (query, key))
    assert sorted(re.findall(r"\w[\w-]*", next(iter(shown)))) == sorted(re.findall(r"\w[\w-]*", f"{first} {second}"))
    assert list(shown)[4:] == ["constant: biases", "21 other terms", "sum of all"]
    bias = result.constants["biases"]
    assert constant == pytest.approx(float(bias[2] - result.weights @ bias))
    assert sum(largest) + constant + others == pytest.approx(total)
    assert total == pytest.approx(float(result.scores[2] - result.weights @ result.scores))
    for patch, value in zip(axes.patches[:-1], shown.values(), strict=False):
        colour = POSITIVE if value >= 0 else NEGATIVE
        assert np.allclose(patch.get_facecolor()[:3], [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    assert "centred over the row" in words(axes.figure)
    assert axes.get_xlabel() == "logits"


def test_raw_terms_are_on_request_and_sum_to_the_score():
    result = made()
    drawn = figure(result, picture="terms", key=1, raw=True, count=25)
    shown, _ = bars(drawn)
    assert list(shown)[-2:] == ["constant: biases", "the score"]  # no term is left out
    assert list(shown.values())[-1] == pytest.approx(float(result.scores[1]))
    assert "raw" in words(drawn)
    assert "centred" not in words(drawn)


def cells(drawn):
    return np.asarray(next(axes.images[0] for axes in drawn.axes if axes.images).get_array())


def test_a_small_map_has_a_cell_for_every_pair_and_margins_with_their_sums():
    result = made(layers=2)
    drawn = figure(result, picture="map", key=2)
    terms = centred(result)[2].numpy()
    assert cells(drawn) == pytest.approx(terms)
    sums = [[getattr(patch, f"get_{side}")() for patch in axes.patches] for axes, side in
            ((drawn.axes[0], "height"), (drawn.axes[3], "width"))]  # fmt: skip
    assert sums[0] == pytest.approx(terms.sum(0))
    assert sums[1] == pytest.approx(terms.sum(1))
    image = drawn.axes[2].images[0]
    assert image.get_cmap().name == "attnflow"
    assert image.get_clim() == pytest.approx((-np.abs(terms).max(), np.abs(terms).max()))
    assert "99th percentile" not in words(drawn)


@pytest.mark.parametrize("layers", [20, 30])
def test_many_components_are_collapsed_by_layer_and_the_leading_ones_are_named(layers):
    result = made(layers=layers)
    result.raw[1, 3, 5] = 4.0  # far beyond all others
    result.expected[:] = torch.einsum("k,kqc->qc", result.weights, result.raw)
    drawn = figure(result, key=1)
    table = cells(drawn)
    assert table.shape == (1 + layers, 1 + layers)
    terms = centred(result)[1]
    assert table[2, 3] == pytest.approx(float(terms[3:5, 5:7].sum()))
    assert np.sum(table) == pytest.approx(float(terms.sum()))
    shown, _ = bars(drawn)
    assert next(iter(shown)) == "L1 attention × L2 attention"
    assert f"{(2 * layers + 1) ** 2 - 10} other terms" in {name.replace("\u202f", "") for name in shown}
    names = [text.get_text() for text in drawn.axes[2].get_yticklabels()]
    assert names == ["embedding", *(f"L{number}" for number in range(layers))]
    limit = np.quantile(np.abs(table), 0.99, method="higher")
    beyond = int((np.abs(table) > limit).sum())
    assert drawn.axes[2].images[0].get_clim()[1] == pytest.approx(limit)
    assert re.search(rf"colours end at ±[\d.]+, the 99th percentile; {beyond} cells? beyond, up to \+", words(drawn))


def tokens_of(drawn):
    axes = [axes for axes in drawn.axes if axes.images and "constant" in words(axes.yaxis)][-1]
    return axes, np.asarray(axes.images[0].get_array())


def test_tokens_show_weights_and_a_score_that_the_lines_below_it_make():
    result = made(layers=6, keys=7)
    axes, table = tokens_of(figure(result, picture="tokens"))
    assert table[0] == pytest.approx(table[1:].sum(0))
    assert table[0] == pytest.approx((result.scores - result.weights @ result.scores).numpy())
    assert [text.get_text() for text in axes.get_xticklabels()] == [token.strip() for token in result.tokens]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[-2:] == ["8 others at the key", "constant"]
    weights = [patch.get_height() for patch in axes.figure.axes[0].patches]
    assert weights == pytest.approx(result.weights.tolist())


def test_of_three_hundred_tokens_those_with_the_largest_weights_are_shown_and_the_share_is_said():
    result = made(keys=300)
    drawn = figure(result)
    axes, _ = tokens_of(drawn)
    best = result.weights.topk(48).indices
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"word{index}" for index in best.tolist()]
    share = percent(float(result.weights[best].sum()))
    assert f"the 48 of 300 keys with the largest weights, {share} of all" in words(drawn)
    assert drawn.get_size_inches().max() <= 12


def test_the_head_that_looks_at_another_token_is_chosen_and_named():
    result = made(heads=3)
    best = int(result.weights[:, 1:-1].max(dim=1).values.argmax())
    row = row_of(result)
    assert row.head == best
    assert row.index == int(result.weights[best].argmax())
    assert f"head {best}" in words(figure(result))
    other = (best + 1) % 3
    shown, _ = bars(figure(result, head=other, key=2, picture="terms"))
    assert list(shown.values())[-1] == pytest.approx(
        float(centred(result, other)[2].sum() + row_constant(result, other))
    )


def row_constant(result, head):
    values = result.constants["biases"][head]
    return float(values[2] - result.weights[head] @ values)


def test_cross_attention_has_components_of_its_own_at_the_key():
    keys = (ComponentName(None, "embedding", "", "encoder"), ComponentName(0, "attention", "", "encoder"))
    result = made(attention="cross", key_components=keys)
    drawn = figure(result, picture="map")
    assert cells(drawn).shape == (5, 2)
    assert [text.get_text() for text in drawn.axes[2].get_xticklabels()] == [
        "encoder embedding",
        "encoder L0 attention",
    ]
    assert "head 3 of its cross-attention" in words(figure(result))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": 1}, r"head must be one of the attributed \[3\], got 1"),
        ({"key": 9}, "key must be a position that query 4 may attend to, 0 to 4, got 9"),
        ({"count": 0}, "count"),
    ],
)
def test_what_is_not_there_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        figure(made(), **options)


def extents(drawn, axes):
    """The boxes of the names and of the numbers of bars, in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawn).draw()
    return [[text.get_window_extent() for text in texts] for texts in (axes.get_yticklabels(), axes.texts)]


def test_numbers_of_bars_stand_clear_of_names_and_inside_the_picture():
    long = tuple(ComponentName(n, "a component with a long name:", "") for n in range(9))
    drawn = figure(replace(made(layers=4, seed=1), components=long, key_components=long), key=1)
    _, axes = bars(drawn)
    names, values = extents(drawn, axes)
    assert len(names) == len(values)
    assert min(box.x0 for box in values) > max(box.x1 for box in names)
    assert max(box.x1 for box in values) <= drawn.bbox.x1
    assert not any(one.overlaps(bar.get_window_extent()) for one in values for bar in axes.patches)


def test_a_great_count_draws_sixty_bars_and_sums_the_others():
    shown, axes = bars(figure(made(layers=10), picture="terms", key=1, count=400))
    assert len(shown) == 60 + 3
    assert "381 other terms" in shown
    assert axes.get_figure(root=True).get_size_inches()[1] < 16


def test_lines_of_zeros_are_left_out():
    result = made(layers=2)
    for values in (*result.constants.values(), *result.expected_constants.values()):
        values.zero_()
    shown, _ = bars(figure(result, picture="terms"))
    assert not any("constant" in name for name in shown)
    drawn = figure(result, picture="tokens")
    names = [text.get_text() for axes in drawn.axes for text in axes.get_yticklabels()]
    assert not {"constant", "0 others at the key"} & set(names)


def test_zero_has_one_sign():
    result = made()
    result.raw.mul_(-0.0)
    result.expected.zero_()
    numbers = {text.get_text() for text in bars(figure(result, picture="terms", raw=True))[1].texts}
    assert "−0" not in numbers


def test_a_key_with_nearly_all_of_the_weight_is_remarked():
    result = made()
    assert "nearly all" not in parse_page(page(result).html).text
    sure = replace(result, weights=torch.tensor([0.95, 0.05, 0, 0, 0], dtype=torch.float64))
    assert "This key has nearly all of the weight, so the row’s mean is nearly its own score" in (
        parse_page(page(sure).html).text
    )
    text = parse_page(page(made(keys=1)).html).text
    assert text.count("The query can attend to no other token, so that this weight is 1 whatever the score.") == 2
    assert "largest term of this score" not in text


def test_the_section_names_its_head_query_and_key_on_a_page_of_many_parts():
    result = made()
    lead = page(result).sections[0].body.markup
    row = row_of(result)
    assert f"In layer 2 head 3, “word4” (4) looks at “word{row.index}” ({row.index}) with weight" in lead


def test_a_part_explains_another_key_and_raw_terms():
    result = made()
    key = int(result.weights.argmin())
    shown = build([attribution_part(result, Context(), key=key, raw=True)], None, {}, {})
    text = parse_page(shown.html).text
    assert f"looks at “word{key}” ({key}) with weight {result.weights[key]:.3f}" in text
    assert "less its mean" not in text
    assert "the row’s mean" not in text
    cells = np.abs(result.raw[key].numpy())
    table = shown.sections[0].body.markup
    assert f"{float(result.scores[key]):+.2f}".replace("-", "−") in table
    assert f"{cells.max():.2f}" in table


def test_an_unknown_picture_is_named():
    draw = inspect.unwrap(attribution_chart)  # without the checker of types
    with pytest.raises(ValueError, match="got 'pie'"):
        draw(made(), picture="pie")


def test_the_page_says_what_is_shown_and_what_is_not():
    result = made(layers=20, keys=300)
    shown = page(result)
    assert [section.name for section in shown.sections] == ["why", "pairs", "received"]
    text = parse_page(shown.html).text
    row = row_of(result)
    best = leading(result, row, 40)
    assert f"“word{row.index}” ({row.index})" in text
    assert f"{row.weights[row.index]:.3f}" in text
    assert "1 641" in text  # other terms of 41 x 41
    assert "5e-07 of the row’s range" in text
    assert "weighted by attention" in text
    table = shown.sections[0].body.markup
    assert table.count("<tr>") == 1 + len(best.terms) + len(best.constants) + 2
    prompt = shown.sections[2].body.markup
    assert prompt.count('class="token') == 300
    assert prompt.count(" traced") == 1
    above = int((result.scores > result.weights @ result.scores).sum())
    assert prompt.count("token for-") == above
    assert len(shown.html) < 2_000_000


def test_two_keys_are_compared_by_their_terms_less_each_other():
    result = geometry.attribute(tiny("Llama", torch.float32), [5, 6, 7, 8, 9], 1, 1, 4, 2, against=3)
    row = row_of(result)
    best = leading(result, row, 4)
    expected = [(term.query_component, term.key_component, term.value) for term in result.contrast(4)]
    assert [(query, key) for query, key, _ in best.terms] == [(query, key) for query, key, _ in expected]
    assert [value for *_, value in best.terms] == pytest.approx([value for *_, value in expected], abs=1e-6)
    assert best.total == pytest.approx(float(result.scores[0] - result.scores[1]), abs=1e-4)
    text = parse_page(page(result).html).text
    assert "above “9” (3)" in text or "above “8” (3)" in text
    assert "all of them sum to the difference of the two scores" in text


def test_the_page_leads_with_the_largest_term_for_looking_there():
    result = made()
    row = row_of(result)
    largest = max(value for *_, value in leading(result, row, 10).terms)
    assert (
        f"The largest term for looking there, {signed(largest)} logits above the row’s mean"
        in parse_page(page(result).html).text
    )


def test_weights_are_drawn_from_nothing_to_all():
    axes, _ = tokens_of(figure(made(), picture="tokens"))
    bars = axes.figure.axes[0]
    assert bars.get_ylim() == (0, 1)
    assert [label.get_text() for label in bars.get_yticklabels()] == ["0", "50 %", "100 %"]
