"""`Trainer` with a bias: what is decayed, what is saved, and an interrupted run that ends where the whole one does."""

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import attnflow as af
from tests.bias.hf.common import EVERY_OTHER_KIND, GUIDANCE, disabled, disturb, family, outputs, tokens

KINDS = (*GUIDANCE, *EVERY_OTHER_KIND)
SENTENCES = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
DATA = [{"input_ids": ids, "labels": ids} for ids in SENTENCES] * 20
NO_PAD = pytest.mark.filterwarnings("ignore::UserWarning")


def trainer(folder, model, **options):
    settings = {
        "output_dir": str(folder),
        "max_steps": 12,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "dataloader_pin_memory": False,
    }
    return Trainer(model, TrainingArguments(**{**settings, **options}), train_dataset=DATA)


def losses(done):
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("train", ["all", "guidance"])
def test_the_loss_falls_and_only_what_should_be_trained_is(train, tmp_path):
    model = family("Llama", torch.float32)
    af.bias.attach(model, GUIDANCE, train=train)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = trainer(tmp_path, model, max_steps=30, learning_rate=3e-2 if train == "guidance" else 1e-2)
    done.train()
    assert sum(losses(done)[-5:]) < sum(losses(done)[:5]) * (0.99 if train == "guidance" else 0.9)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    ours = {name for name in before if "score_terms" in name}
    assert ours <= moved | {name for name in ours if name.endswith("output_bias")}
    assert (moved <= ours) == (train == "guidance")


def test_norms_and_biases_are_not_decayed_but_weights_are(tmp_path):
    model = family("Llama", torch.float32)
    af.bias.attach(model, KINDS)
    decayed = trainer(tmp_path, model).get_decay_parameter_names(model)
    ours = {
        name.split("score_terms.")[1]: name in decayed for name, _ in model.named_parameters() if "score_terms" in name
    }
    for name, is_decayed in ours.items():
        free = "norm" in name or name.endswith("bias")
        assert is_decayed != free, name
    assert sum(ours.values()) > 8


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly(tmp_path):
    """Also with gradients accumulated over two batches, and checkpointed: the weights are equal bit for bit."""
    options = {"gradient_accumulation_steps": 2}
    found = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = family("Llama", torch.float32)
        af.bias.attach(model, KINDS)
        disturb(model, 0.1)
        folder = tmp_path / str(interrupted)
        done = trainer(folder, model, save_strategy="steps", save_steps=4, max_steps=8, **options)
        if interrupted:
            done.add_callback(_stop_after(5))
            done.train()
            torch.manual_seed(99)
            model = family("Llama", torch.float32)
            af.bias.attach(model, KINDS)
            disturb(model)
            done = trainer(folder, model, save_strategy="steps", save_steps=4, max_steps=8, **options)
            done.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        else:
            done.train()
        found.append((losses(done)[-4:], {name: value.clone() for name, value in model.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


def _stop_after(step):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= step

    return Stop()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_accumulated_gradients_are_those_of_the_whole_batch(dtype, tmp_path):
    model, ids = family("Llama", torch.float64 if dtype == "fp32" else torch.float32), tokens(4, 8)
    af.bias.attach(model, KINDS)
    disturb(model, 0.2)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        outputs(model, input_ids=ids).float().sin().sum().backward()
        whole = [parameter.grad.clone() for parameter in af.bias.handle(model).parameters()]
        model.zero_grad()
        for part in ids.split(2):
            outputs(model, input_ids=part).float().sin().sum().backward()
    for parameter, expected in zip(af.bias.handle(model).parameters(), whole, strict=True):
        scale = float(expected.abs().max())
        tolerance = 0.1 if dtype == "bf16" else 1e-5
        torch.testing.assert_close(parameter.grad, expected, rtol=tolerance, atol=tolerance * max(scale, 1e-3))


@NO_PAD
def test_lm_evaluation_harness_sees_the_bias():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(
        WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 50)}, unk_token="<pad>")
    )
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    model = family("Llama", torch.float32)

    class Request:
        def __init__(self, *args):
            self.args = args

    requests = [Request("w5 w9 w11", " w7 w8"), Request("w3 w6", " w4"), Request("w40 w41 w42 w43", " w44")]

    def scores():
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2).loglikelihood(requests, disable_tqdm=True)

    plain = scores()
    af.bias.attach(model, GUIDANCE)
    assert scores() == plain
    disturb(model)
    moved = scores()
    assert all(abs(ours[0] - base[0]) > 1e-4 for ours, base in zip(moved, plain, strict=True))
    with disabled(model):
        assert scores() == plain
    af.bias.handle(model).remove()
    assert scores() == plain
