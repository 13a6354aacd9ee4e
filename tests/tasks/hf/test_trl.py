"""trl's trainers as they are, on rows that begin alike: the same log-probabilities, gradients and steps."""

import importlib
from functools import partial

import pytest
import torch

import attnflow as af
from attnflow.models.passes.evaluation import precision
from tests.audit.packing import EOS, PAD, WORDS, texts, tokenizer
from tests.models import CAUSAL

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
GROUP = 4
QUIET = {"report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "seed": 5}
STEPS = {"max_steps": 2, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 1e9}


def model(name="Llama"):
    torch.manual_seed(0)
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    return CAUSAL[name].make(vocab_size=WORDS + 4, max_position_embeddings=128, **special)


def prompts(count=4):
    return [" ".join(texts(3, seed, 7, 9)) for seed in range(count)]  # 21 to 27 words


def reward(completions, **_):
    return [float(len(completion) % 7) for completion in completions]


def grpo(model, folder, kind="GRPO", callbacks=(), **more):
    import trl
    from datasets import Dataset

    config, make = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    options = {"num_generations": GROUP, "per_device_train_batch_size": 8, "max_completion_length": 8, "beta": 0.0}
    arguments = config(str(folder), **{**options, **QUIET, **STEPS, **more})
    data = Dataset.from_dict({"prompt": prompts(8)})
    left = tokenizer(padding_side="left")
    return make(model, reward, arguments, train_dataset=data, processing_class=left, callbacks=list(callbacks))


def dpo(model, folder, **more):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(str(folder), **{"per_device_train_batch_size": 2, **QUIET, **STEPS, **more})
    answers = {"chosen": [f" {t}" for t in texts(8, 1)], "rejected": [f" {t}" for t in texts(8, 2)]}
    data = Dataset.from_dict({"prompt": prompts(8), **answers})
    torch.manual_seed(1)
    reference = type(model)(model.config)
    return DPOTrainer(model, reference, arguments, train_dataset=data, processing_class=tokenizer())


def sft(model, folder, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        str(folder), **{"per_device_train_batch_size": 4, "shuffle_dataset": False, **QUIET, **STEPS, **more}
    )
    (prompt,) = prompts(1)
    data = Dataset.from_dict({"prompt": [prompt] * 16, "completion": [f" {t}" for t in texts(16, 3)]})
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())


TRAINERS = {"grpo": grpo, "rloo": partial(grpo, kind="RLOO"), "dpo": dpo, "sft": sft}
TRAINERS["padding-free sft"] = partial(sft, padding_free=True, max_length=None)


def losses(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.parametrize("name", TRAINERS)
def test_loss_and_gradients_in_float64(name, tmp_path):
    one = model()
    trainer = TRAINERS[name](one, tmp_path)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))

    def run():
        one.zero_grad()
        loss = trainer.compute_loss(one, dict(inputs))
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters()}

    one.train()
    trainer.current_gradient_accumulation_steps = 1  # what `train` sets
    reference = getattr(trainer, "ref_model", None) or torch.nn.Module()
    with precision(one, torch.float64), precision(reference, torch.float64):
        stock, gradients = run()
        with af.tasks.share_prefixes(one) as handle:
            shared, others = run()
    report = handle.report
    assert (report.shared, report.stock) == (1, {})
    assert report.last_after < 0.7 * report.last_before
    assert abs(float(stock - shared)) <= 1e-9 * max(abs(float(stock)), 1.0)
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert largest > 0
    for key, gradient in gradients.items():
        assert float((gradient - others[key]).abs().max()) <= 1e-9 * largest, key


def test_a_run_of_grpo_under_a_guard_is_the_same_run(tmp_path):
    """Its first calls are those of `generate`, with a cache and left padding."""
    runs = []
    for callbacks in ((), (af.audit.GuardCallback(every=5),)):
        trainer = grpo(model(), tmp_path, callbacks=callbacks)
        trainer.train()
        runs.append((losses(trainer), trainer.model.state_dict()))
    (plain, weights), (guarded, others) = runs
    assert plain == guarded
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    guard = callbacks[0].guard
    assert len(guard.reports) > 3
    assert not any(report.violations for report in guard.reports)
    assert guard.reports[0].ok
    assert not guard.refusals


def test_log_probabilities_of_grpo_in_float64(tmp_path):
    """The loss of the first iteration is trivially equal, since its ratio is 1: these are not."""
    one = model()
    trainer = grpo(one, tmp_path, per_device_train_batch_size=32)  # all eight prompts
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    assert not bool(mask[:, 0].all())  # prompts are padded on the left

    def run():
        length = inputs["completion_ids"].shape[1]
        return trainer._get_per_token_logps_and_entropies(one, ids, mask, length, compute_entropy=True)

    with precision(one, torch.float64), torch.no_grad():
        stock = run()
        with af.tasks.share_prefixes(one) as handle:
            shared = run()
    assert handle.report.last_after < handle.report.last_before
    for a, b in zip(stock[:2], shared[:2], strict=True):
        assert float(a.abs().max()) > 0.1
        assert float((a - b).abs().max()) <= 1e-9 * float(a.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_steps_are_the_same(name, tmp_path):
    runs = []
    for share in (False, True):
        one = model()
        trainer = TRAINERS[name](one, tmp_path, gradient_checkpointing=True)
        handle = af.tasks.share_prefixes(trainer) if share else None
        trainer.train()
        runs.append((losses(trainer), {key: p.detach().clone() for key, p in one.named_parameters()}))
    report = handle.report
    assert report.shared == report.calls >= 2
    assert report.tokens_after < 0.7 * report.tokens_before
    (stock, weights), (shared, others) = runs
    assert len(stock) == 2
    torch.testing.assert_close(torch.tensor(stock), torch.tensor(shared), rtol=1e-4, atol=1e-6)
    moved = max(float((weights[key] - p.detach()).abs().max()) for key, p in model().named_parameters())
    assert moved > 1e-3
    for key, weight in weights.items():
        torch.testing.assert_close(weight, others[key], rtol=0, atol=1e-3 * moved)


@pytest.mark.slow
def test_groups_stay_whole_over_accumulated_steps_where_the_trainer_is_shared(tmp_path):
    """trl shuffles rows over `steps_per_generation` batches, which shares less, never wrongly."""
    shares = {}
    for whole in (False, True):
        trainer = grpo(model(), tmp_path, gradient_accumulation_steps=4, steps_per_generation=4, max_steps=1)
        with af.tasks.share_prefixes(trainer if whole else trainer.model) as handle:
            trainer.train()
        assert handle.report.calls == 4
        shares[whole] = handle.report.tokens_after / handle.report.tokens_before
        assert "_prepare_inputs" not in vars(trainer)
    assert shares[True] < 0.6 < shares[False] < 1.0


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_shared_trainer_shuffles_whole_groups_with_the_random_numbers_of_trl(kind, tmp_path):
    module = importlib.import_module(f"trl.trainer.{kind}_trainer")
    rows = module.shuffle_sequence_dict
    trainer = TRAINERS[kind](model(), tmp_path, gradient_accumulation_steps=4, steps_per_generation=4)
    generated = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    batches, states = {}, {}
    for share in (False, True):
        torch.manual_seed(3)
        trainer._buffered_inputs = None
        with af.tasks.share_prefixes(trainer if share else trainer.model):
            trainer._prepare_inputs(generated)
        batches[share], states[share] = trainer._buffered_inputs, torch.get_rng_state()
        assert module.shuffle_sequence_dict is rows
    assert torch.equal(states[False], states[True])
    prompts_of = {s: [tuple(r.tolist()) for b in batches[s] for r in b["prompt_ids"]] for s in batches}
    groups = prompts_of[True][::GROUP]
    assert len(batches[True]) == 4
    assert prompts_of[True] == [group for group in groups for _ in range(GROUP)]
    assert groups == list(dict.fromkeys(prompts_of[False]))  # in the order of the rows that trl draws first
    columns = {s: sorted(tuple(r.tolist()) for b in batches[s] for r in b["completion_ids"]) for s in batches}
    assert columns[False] == columns[True]


def test_a_trainer_without_groups_is_shared_as_its_model(tmp_path):
    trainer = sft(model(), tmp_path)
    with af.tasks.share_prefixes(trainer) as handle:
        assert handle.model is trainer.model
        assert "_prepare_inputs" not in vars(trainer)
