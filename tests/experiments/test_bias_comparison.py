"""Arms that begin alike and count alike, probes with the right answers, and what a study is summarised to."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.bias.kind import layer_biases
from attnflow.bias.terms import Additive, Guidance, Offset
from attnflow.models import packages
from experiments.bias_comparison import data, probes, settings
from experiments.bias_comparison import shuffle as bias_shuffle
from experiments.bias_comparison.arms import KNOBS, arm_of, count_trained, fitted
from experiments.bias_comparison.maps import OPERANDS, WORDS, look_at_sums, similarity
from experiments.bias_comparison.recipe import EXPERIMENT
from experiments.bias_comparison.summary import contrasts, read_results
from experiments.runner.jobs import Job
from experiments.runner.statistics import fraction, interval
from experiments.runner.text import TEST, VALIDATION, split_text, word_pieces
from tests.bias.cases import config_of
from tests.experiments.miniature import rows, run_miniature

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

ARMS = ("plain", *dict.fromkeys((*settings.BATTERY[1:], *settings.TUNED)))


def model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval()


def encoder() -> BertForMaskedLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(vocab_size=50, **settings.bert(64, 2, 4))).eval()


def ids(batch: int = 5, length: int = 16) -> torch.Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(2))


def test_arms_add_equally_many_parameters() -> None:
    base = model()
    counts = {}
    for name in ARMS:
        arm = arm_of(base, name)
        with fitted(base, arm, 0) as trained:
            counts[name] = count_trained(trained)
        assert counts[name] == arm.parameters, name
    assert counts.pop("plain") == 0
    assert all(abs(count / counts["guidance"] - 1) <= 0.02 for count in counts.values())
    with pytest.raises(ValueError, match="no arm 'keys'"):
        arm_of(base, "keys")


def test_arms_of_a_real_size() -> None:
    config = LlamaConfig(  # SmolLM2-135M
        vocab_size=8,
        hidden_size=576,
        intermediate_size=8,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
        arms = {name: arm_of(made, name) for name in ("guidance", "key", "lowrank", "lora")}
    found = {name: arm.parameters for name, arm in arms.items()}
    assert found == {"guidance": 741_135, "key": 740_880, "lowrank": 737_280, "lora": 737_280}
    assert arms["lora"].ranks == (12, 14)


@pytest.mark.parametrize("make", [model, encoder])
def test_an_arm_starts_as_the_base_and_leaves_no_trace(make: Any) -> None:
    base = make()
    before, tokens = {k: v.clone() for k, v in base.state_dict().items()}, ids()
    with torch.no_grad():
        expected = base(tokens).logits
    names = ARMS if make is model else ("dense", "gate", "key", "lowrank", "guidance")
    for name in (*names, *(KNOBS if make is model else ())):
        with fitted(base, arm_of(base, name), 3) as trained, torch.no_grad():
            same = torch.equal(trained(tokens).logits, expected)
            assert same == (name not in ("alibi", "He init")), name
        assert set(base.state_dict()) == set(before)
        assert all(torch.equal(base.state_dict()[key], tensor) for key, tensor in before.items())
        assert all(parameter.requires_grad for parameter in base.parameters())
        with torch.no_grad():
            assert torch.equal(base(tokens).logits, expected), name


@pytest.mark.parametrize("make", [model, encoder])
def test_wider_layers_and_gates_are_what_they_say(make: Any) -> None:
    base, tokens = make(), ids()
    hidden: dict[str, torch.Tensor] = {}
    with fitted(base, arm_of(base, "gate"), 0, "all"):
        for module in base.modules():
            if type(module).__name__ == "Gate":
                torch.nn.init.constant_(module.up.weight, 0.0)
                module.down.weight.data.zero_()
        with torch.no_grad():
            hidden["open"] = base(tokens).logits
    with fitted(base, arm_of(base, "dense"), 0, "all"):
        units = [module for module in base.modules() if type(module).__name__ == "Units"]
        assert len(units) == base.config.num_hidden_layers
        for one in units:
            torch.nn.init.normal_(one.down.weight)
        with torch.no_grad():
            hidden["wide"] = base(tokens).logits
    with torch.no_grad():
        plain = base(tokens).logits
    assert torch.equal(hidden["open"], plain)
    assert not torch.allclose(hidden["wide"], plain)


def test_wider_layers_are_one_wider_layer() -> None:
    base, tokens = model(torch.float64), ids()
    with fitted(base, arm_of(base, "dense"), 0, "all"):
        blocks = [module for module in base.modules() if hasattr(module, "more_units")]
        for block in blocks:
            torch.nn.init.normal_(block.more_units.down.weight)
        with torch.no_grad():
            found = base(tokens).logits
        parts = [(block.mlp, block.more_units) for block in blocks]
        merged = [
            {
                "gate_proj": torch.cat([mlp.gate_proj.weight, more.gate.weight]).detach(),
                "up_proj": torch.cat([mlp.up_proj.weight, more.up.weight]).detach(),
                "down_proj": torch.cat([mlp.down_proj.weight, more.down.weight], dim=1).detach(),
            }
            for mlp, more in parts
        ]
    for (mlp, _), weights in zip(parts, merged, strict=True):
        for name, weight in weights.items():
            getattr(mlp, name).weight = torch.nn.Parameter(weight)
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, found, rtol=1e-6, atol=1e-8)


def test_a_model_too_small_for_equal_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no size gives 202 parameters within 2%"):
        arm_of(model(), "lora", 1)


@pytest.mark.parametrize("name", probes.PROBES)
def test_answers_of_probes_follow_from_what_was_shown(name: str) -> None:
    drawn = probes.PROBES[name](40, torch.Generator().manual_seed(3))
    again = probes.PROBES[name](40, torch.Generator().manual_seed(3))
    assert torch.equal(drawn.tokens, again.tokens)
    assert drawn.tokens.shape == drawn.labels.shape
    assert len(drawn.tokens) == 40
    assert drawn.tokens.max() < probes.VOCABULARY
    asked = drawn.labels != probes.IGNORED
    assert asked.any(dim=1).all()
    assert torch.equal(drawn.labels[asked], drawn.tokens[asked])
    for row, where in zip(drawn.tokens.tolist(), asked, strict=True):
        for place in where.nonzero()[:, 0].tolist():
            assert answer(name, row, place) in (None, row[place]), (name, row, place)


def answer(name: str, row: list[int], place: int) -> int | None:
    """By another way of working it out; None where nothing is asked."""
    pairs = [divmod(token - 8, 4) for token in row if 8 <= token < 72]
    number, label = row[place - 1] - 72, 88
    if name in ("recall", "rebinding"):
        return label + [value for key, value in pairs if key == number][-1]
    if name == "relation":
        (found,) = [value for key, value in pairs if key + number in (10, 18)]
        return label + found
    if name == "copy":
        return row[place - 11]
    if name == "distance":
        return row[12 - (row[place - 1] - 24)]
    if name == "flip-flop":
        bits = dict(zip(range(0, place, 2), zip(row[:place:2], row[1:place:2], strict=False), strict=False))
        return [bit for operation, bit in bits.values() if operation == 2][-1]
    if name == "counting":
        return 24 + row[1:13].count(6)
    return {15: row[5], 16: 9, 17: row[10], 18: 10, 19: row[5] + row[10] - 32}[place]


def test_recall_can_be_made_longer_and_harder() -> None:
    generator = torch.Generator().manual_seed(0)
    deep = probes.recall(6, generator, context=96, depth=0.5)
    assert deep.tokens.shape == (6, 98)
    for row, label in zip(deep.tokens.tolist(), deep.labels[:, -1].tolist(), strict=True):
        assert divmod(row[48] - 8, 4) == (row[96] - 72, label - 88), "the pair that is asked for lies in the middle"
    hard = probes.recall(6, generator, distractors=4)
    assert hard.tokens.shape[1] == 24 + 4 * 6 + 6
    keys = [[(token - 8) // 4 for token in row if 8 <= token < 72] for row in hard.tokens.tolist()]
    assert all(len(row) == len(set(row)) == 7 for row in keys)


def test_sums_are_looked_at_where_they_are() -> None:
    made = LlamaForCausalLM(LlamaConfig(vocab_size=probes.VOCABULARY, **settings.llama(32, 2, 2, 16, 64))).eval()
    bare = look_at_sums(made, torch.Generator().manual_seed(0))
    assert np.allclose(bare["bias"], 0)
    assert np.shape(bare["map"]) == (2, len(WORDS), len(WORDS))
    np.testing.assert_allclose(np.sum(bare["weights"], axis=1), 1, rtol=1e-5)
    assert [WORDS[place] for place in OPERANDS] == ["5", "6", "5", "6"]
    af.bias.attach(made, af.bias.GuidanceConfig(layers="every", hidden_dim=8, init="kaiming"))
    found = look_at_sums(made, torch.Generator().manual_seed(0))
    assert np.abs(found["bias"]).max() > 1e-3
    last = np.array(found["bias"])
    rest = [place for place in range(len(WORDS)) if place not in OPERANDS]
    np.testing.assert_allclose(
        found["contrast"], last[:, list(OPERANDS)].mean(1) - last[:, rest].mean(1), rtol=1e-4, atol=1e-7
    )


def test_similarity_of_biases() -> None:
    one = [torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))]
    assert similarity(one, [2 * one[0]]) == {"correlation": [pytest.approx(1)], "size": [pytest.approx(2)]}
    assert similarity(one, [-one[0]])["correlation"] == [pytest.approx(-1)]


def biased(kind: Any = "guidance") -> LlamaForCausalLM:
    made = model(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        af.bias.attach(made, config_of(kind, start=True, hidden_dim=8))
        with torch.no_grad():
            for parameter in af.bias.handle(made).parameters():
                parameter.mul_(3.0)
    return made


def losses(made: LlamaForCausalLM) -> list[float]:
    tokens = ids(4)
    with torch.no_grad():
        logits = made(tokens, use_cache=False).logits[:, :-1]
    found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return found.mean(dim=1).tolist()


def tiles(made: LlamaForCausalLM, tokens: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    every = slice(0, tokens.shape[1])
    for _, bias in layer_biases(made):
        bias.observer = lambda call: found.append(call.terms[0].tile(every, every).detach())
    with torch.no_grad():
        made(tokens, use_cache=False)
    for _, bias in layer_biases(made):
        bias.observer = None
    return found


def test_shuffled_queries_come_from_the_next_sequence_and_keys_stay() -> None:
    made, tokens = biased(), ids(3)
    bias = next(bias for _, bias in layer_biases(made))
    calls: list[Any] = []
    bias.observer = calls.append
    with torch.no_grad():
        made(tokens, use_cache=False)
        with bias_shuffle.shuffled(made, "queries"):
            made(tokens, use_cache=False)
    plain, other = (call.terms[0] for call in calls)
    for sequence in range(3):
        expected = plain.rows[(sequence + 1) % 3, 0, 4] + plain.columns[sequence, 0, 2]
        torch.testing.assert_close(other.rows[sequence, 0, 4] + other.columns[sequence, 0, 2], expected)
    with pytest.raises(ValueError, match="give a batch of at least 2"), bias_shuffle.shuffled(made, "queries"):
        made(tokens[:1], use_cache=False)


def test_a_key_only_bias_keeps_its_whole_effect_under_shuffled_queries() -> None:
    made = biased("key")
    plain = losses(made)
    with bias_shuffle.shuffled(made, "queries"):
        assert losses(made) == pytest.approx(plain, abs=1e-12)
    with bias_shuffle.shuffled(made, "keys"):
        assert max(abs(a - b) for a, b in zip(losses(made), plain, strict=True)) > 1e-3


def test_shuffled_keys_permute_each_row_among_its_allowed_keys() -> None:
    made, tokens = biased(), ids(2)
    plain = tiles(made, tokens)[0]
    with bias_shuffle.shuffled(made, "keys", seed=4):
        moved = tiles(made, tokens)[0]
    for row in range(16):
        assert torch.equal(moved[..., row, : row + 1].sort().values, plain[..., row, : row + 1].sort().values)
        assert torch.equal(moved[..., row, row + 1 :], plain[..., row, row + 1 :])
    assert (moved != plain).tril().float().mean() > 0.3
    assert torch.equal(tiles(made, tokens)[0], plain), "afterwards it is as it was"


def test_permutations_of_rows_are_uniform() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(3, 3)
    for _ in range(600):
        order = bias_shuffle._orders(5, generator)
        assert torch.equal(order.sort(dim=-1).values, torch.arange(5).expand(5, 5))
        assert torch.equal(order.triu(1), torch.arange(5).expand(5, 5).triu(1))
        counts[torch.arange(3), order[2, :3]] += 1
    assert ((counts - 200).abs() < 60).all()


def test_what_cannot_be_shuffled_is_refused() -> None:
    with pytest.raises(ValueError, match="'queries' or 'keys'"), bias_shuffle.shuffled(biased(), "rows"):
        pass
    term = Offset(torch.zeros(1, 3), torch.arange(3), torch.zeros(1, 2, dtype=int), torch.zeros(1, 2, dtype=int), 1)
    generator = torch.Generator()
    for way in (bias_shuffle._queries, bias_shuffle._keys):
        with pytest.raises(ValueError, match="Offset term has no"):
            way(term, generator)
    short = Guidance(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2), *[torch.zeros(1, 2)] * 3, torch.zeros(1))
    with pytest.raises(ValueError, match="all tokens of a sequence in one call"):
        bias_shuffle._keys(short, generator)
    assert bias_shuffle._queries(Additive(torch.ones(1, 1, 2), torch.ones(1, 1, 2)), generator).rows is None  # pyright: ignore


@pytest.fixture(scope="module", name="compared")
def _compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    config = EXPERIMENT.miniature(EXPERIMENT.recipes["tiny"]())
    chosen = {
        "text": ("plain", "dense", "key", "guidance"),
        "tuned": ("lora", "guidance"),
        "relation": ("plain", "guidance"),
        "recall": ("plain", "guidance"),
        "sums": ("plain", "alibi", "guidance"),
        "knobs": ("width 64", "width 128", "every layer", "He init"),
        "changes": ("same text", "new text"),
        "encoder": ("plain", "dense", "guidance"),
    }
    parts = tuple(replace(part, arms=chosen[part.name]) for part in config.parts if part.name in chosen)
    parts = (replace(parts[0], rates=(1e-3, 1e-2)), *parts[1:])
    tokenizer = word_pieces(["alpha beta"], 270)

    def texts(source: str, *_: object) -> data.Rows:
        first = 0 if source == "shakespeare" else 5
        parts = [rows(count, first + number) for number, count in enumerate((20, 4, 5))]
        return data.Rows(parts[0], parts[1].tokens, parts[2].tokens, tokenizer.mask_token_id)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its own names
        patch.setattr(data, "learned_from_training", lambda size: tokenizer)
        patch.setattr(data, "_rows", texts)
        run_miniature(EXPERIMENT, folder, replace(config, parts=parts))
    return folder


@pytest.mark.slow
def test_a_comparison_runs_every_arm_and_chooses_its_rate(compared: Path) -> None:
    names = {path.stem for path in (compared / "runs").iterdir()}
    config, results = read_results(compared)
    assert [key for key in results if key[0] == "text"] == [
        ("text", "plain"), ("text", "dense"), ("text", "key"), ("text", "guidance")
    ]  # fmt: skip
    for part in config["parts"]:
        for arm in part["arms"]:
            one = results[part["name"], arm]
            assert one.rate == min(one.tried, key=one.tried.__getitem__)
            assert set(one.runs) == {0, 1}
            assert one.steps == [0, 1, 2]
            assert {Job(f"{part['name']} {arm}", one.rate, seed).name for seed in (0, 1)} <= names
    assert len(names) == 4 * 3 + 2 * (2 + 2 + 2 + 3 + 4 + 2 + 3)
    start = results["text", "plain"].curve()
    assert results["text", "guidance"].curve()[1][0] == start[1][0], "arms of a seed begin alike"
    assert start[0][0] != start[1][0]
    assert set(results["recall", "plain"].runs[0]["extras"]["distractors"]) == {"0", "3", "4", "5"}


@pytest.mark.slow
def test_the_summary_is_written_and_judges(compared: Path) -> None:
    content = json.loads((compared / "results" / "results.json").read_text())
    assert content["first_line"].startswith("Guidance is, on text: ")
    assert (compared / "results" / "results.csv").read_text().count("\n") == 1 + 3 * 2 * len(content["arms"])
    for name in ("texts", "probes", "knobs", "depth", "sums", "map"):
        assert (compared / "results" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    said = {one.claim for one in EXPERIMENT.judge(compared / "results")}
    assert said == {"D7", "D12", "D13", "D14", "D15", "D16", "D17", "D18", "D20", "D21", "D22"}
    _, results = read_results(compared)
    found = contrasts(results)["text: loss, guidance less dense"]
    ends = [results["text", arm].end() for arm in ("guidance", "dense")]
    assert found == [ends[0][seed] - ends[1][seed] for seed in (0, 1)], "paired by seed"


def test_intervals_and_fractions() -> None:
    gains = np.full((3, 8), 0.5) + np.linspace(-0.1, 0.1, 8)
    found = interval(gains, draws=500)
    assert found.mean == pytest.approx(0.5)
    assert 0.4 < found.low < 0.5 < found.high < 0.6
    kept = fraction(gains * 0.25, gains, draws=500)
    assert kept is not None
    assert (kept.mean, kept.low, kept.high) == pytest.approx((0.25, 0.25, 0.25)), "numerator and denominator are paired"
    assert fraction(gains, gains - 0.5, draws=500) is None, "no fraction of nothing"


@pytest.mark.skipif(packages.TEXTS.find() is None, reason="the package shakespeare is not installed")
def test_the_parts_of_the_text_share_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr("experiments.runner.text.sample_text", lambda work: read.append(work) or "a b " * 40)

    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) + len(read) for word in text.split()]}  # the work's number

    split = split_text(tokenizer, 16, 2)
    assert len(read) == len(set(read)) > len(TEST) + len(VALIDATION) + 20
    assert {*TEST, *VALIDATION} <= set(read)
    parts = [set(part.tokens.flatten().tolist()) for part in (split.training, split.validation, split.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == len(read)
    assert (len(split.validation), len(split.test)) == (2 * len(VALIDATION), 2 * len(TEST))
    assert (split.test.positions == torch.arange(16)).all(), "each held-out row is one document"
