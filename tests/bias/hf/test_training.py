import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, TrainerCallback

import attnflow as af
from attnflow.bias.documents import read_documents, split_documents, tokenize
from attnflow.bias.hf.capture import strength
from attnflow.bias.hf.trainer import trainer
from attnflow.bias.kind import layer_biases
from attnflow.bias.packing import Drawn, Packed
from attnflow.bias.run import TrainingConfig, check_folder, last_checkpoint, run_settings
from attnflow.bias.trained import Trained
from attnflow.models.loaded import Loaded
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

CONFIG = af.bias.GuidanceConfig(hidden_dim=8, layers="every")
SHORT = TrainingConfig(
    steps=8, batch_size=2, learning_rate=1e-2, warmup=2, log_every=2, save_every=4, evaluate_every=4, seed=3
)
TIMES = ("runtime", "per_second")


def documents(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (length,), generator=generator).tolist() for length in lengths]


def model(dtype: torch.dtype = torch.float32, seed: int = 1, train: Any = "guidance", init: Any = "zero") -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = tiny("Llama", dtype)
        torch.manual_seed(seed)
        af.bias.attach(made, af.bias.GuidanceConfig(hidden_dim=8, layers="every", init=init), train=train)
    return made


def quiet(model: Any, rows: Any, config: TrainingConfig, folder: Path, **more: Any) -> Any:
    return trainer(model, rows, config, folder, disable_tqdm=True, log_level="error", **more)


def curve(made: Any) -> list[dict[str, float]]:
    """The log without times."""
    kept = [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in made.state.log_history]
    return [entry for entry in kept if "train_loss" not in entry]


class Stop(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_rows_are_the_documents_end_to_end() -> None:
    first, second, third = documents(5, 3, 9)
    rows = Packed([first, [], second, third], 4)
    assert rows.tokens.flatten().tolist() == [*first, *second, *third][:16]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert rows.labels[1].tolist() == [-100, -100, *second[1:]]
    assert len(rows) == 4
    assert {k: v.tolist() for k, v in rows[[1]].items()} == {k: [v.tolist()] for k, v in rows[1].items()}
    with pytest.raises(ValueError, match="17 tokens, which is not one row of 18"):
        Packed([first, second, third], 18)


def test_a_document_in_a_row_has_the_outputs_and_gradients_that_it_has_alone() -> None:
    biased = model(torch.float64, init="kaiming")
    parts = documents(7, 4, 5)
    row = Packed(parts, 16)[[0]]
    with torch.no_grad():
        packed = biased(**row, use_cache=False)
        alone = [biased(torch.tensor([part]), labels=torch.tensor([part]), use_cache=False) for part in parts]
    expected = torch.cat([each.logits[0] for each in alone])
    torch.testing.assert_close(packed.logits[0], expected, rtol=1e-6, atol=1e-6)
    counts = [len(part) - 1 for part in parts]
    mean = sum(each.loss * count for each, count in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(packed.loss.double(), mean.double(), rtol=1e-5, atol=1e-5)


def test_draws_are_a_function_of_seed_and_step() -> None:
    rows = Packed(documents(60), 5)
    drawn = Drawn(rows, 30, seed=1)
    order = [drawn.index(step) for step in range(30)]
    assert sorted(order[:12]) == sorted(order[12:24]) == list(range(12))
    assert order[:12] != order[12:24]
    later = Drawn(rows, 30, seed=1)
    assert [later.index(step) for step in (29, 3, 17)] == [order[29], order[3], order[17]]
    assert [Drawn(rows, 30, seed=2).index(step) for step in range(12)] != order[:12]
    assert torch.equal(drawn[5]["input_ids"], rows[order[5]]["input_ids"])
    with pytest.raises(IndexError):
        drawn[30]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"warmup": 9}, "warmup must be at most 8, got 9"),
        ({"save_every": 3}, "save_every must be a multiple of log_every = 2"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": math.inf}, "learning_rate must be finite, got inf"),
        ({"max_grad_norm": 0.0}, "max_grad_norm positive, got 0.01 and 0.0"),
        ({"weight_decay": math.nan}, "weight_decay must be finite"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\)"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"steps": 8, "warmup": 2, "log_every": 2, "save_every": 4} | changes)


def test_matrices_decay_and_nothing_else(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        biased = tiny("GPTNeoX", torch.float32)  # has biases and norms with biases
        af.bias.attach(
            biased,
            [af.bias.GuidanceConfig(hidden_dim=8), af.bias.CumulativeConfig(), af.bias.DotConfig()],
        )
    made = quiet(biased, Packed(documents(40), 8), SHORT, tmp_path)
    made.create_optimizer()
    names = {id(parameter): name for name, parameter in biased.named_parameters()}
    groups = {
        group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
        for group in made.optimizer.param_groups
    }
    assert set(groups) == {0.0, SHORT.weight_decay}
    assert set.union(*groups.values()) == set(names.values())
    ours = "gpt_neox.layers.0.attention.score_terms.kinds."
    decays = {name for name in groups[SHORT.weight_decay] if "score_terms" in name}
    assert decays == {ours + n for n in ("0.query.weight", "0.key.weight", "0.output_weight", "1.gate.weight")}
    others = groups[SHORT.weight_decay] - decays
    assert others
    assert all(name.endswith("weight") and "norm" not in name for name in others)


def test_strength_is_the_centred_size_over_allowed_pairs() -> None:
    biased = model(torch.float64, init="kaiming")
    inputs = Packed(documents(7, 4, 5), 16)[[0]]
    calls: list[Any] = []
    bias = next(bias for _, bias in layer_biases(biased))
    bias.observer = calls.append
    biased(**inputs, use_cache=False)
    bias.observer = None
    tile = calls[0].terms[0].tile(slice(0, 16), slice(0, 16))[0, 0].detach()
    position = inputs["position_ids"][0]
    squares = [
        (tile[i, i - p : i + 1] - tile[i, i - p : i + 1].mean()).square() for i, p in enumerate(position.tolist())
    ]
    found = strength(biased, inputs)
    assert list(found) == [0, 1]
    assert found[0] == pytest.approx(float(torch.cat(squares).mean().sqrt()), rel=1e-9)
    with torch.no_grad():
        bias.kinds[0].output_bias += 7.0  # softmax does not see it
    assert strength(biased, inputs)[0] == pytest.approx(found[0], rel=1e-9)
    assert bias.observer is None
    with pytest.raises(ValueError, match="no bias attached"):
        strength(tiny("Llama"), inputs)


def test_the_log_has_the_size_of_b_by_layer_and_a_probe(tmp_path: Path) -> None:
    made = quiet(model(), Packed(documents(80), 8), SHORT, tmp_path, probes=[lambda m: {"mine": 5.0}])
    made.train()
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 4, 6, 8]
    assert all(entry["mine"] == 5.0 and {"bias/layer_0", "bias/layer_1"} <= set(entry) for entry in entries)
    assert entries[0]["bias/layer_0"] == 0.0, "the rate of the first step is 0, and so is B"
    assert entries[-1]["bias/layer_0"] > 1e-4


def test_guidance_alone_is_trained_and_saved(tmp_path: Path) -> None:
    biased = model()
    before = {name: tensor.clone() for name, tensor in biased.state_dict().items()}
    quiet(biased, Packed(documents(80), 8), SHORT, tmp_path).train()
    changed = {name for name, tensor in biased.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".score_terms." in name for name in changed)
    files = {path.name for path in (tmp_path / "checkpoint-8").iterdir()}
    assert "bias.safetensors" in files
    assert "model.safetensors" not in files


def test_a_half_precision_base_has_a_float32_bias(tmp_path: Path) -> None:
    biased = model(torch.bfloat16)
    made = quiet(biased, Packed(documents(80), 8), SHORT, tmp_path)
    assert {parameter.dtype for parameter in af.bias.handle(biased).parameters()} == {torch.float32}
    made.train()
    assert biased.model.embed_tokens.weight.dtype == torch.bfloat16
    assert strength(biased, Packed(documents(80), 8)[[0]])[0] > 1e-4


@pytest.mark.parametrize("train", ["guidance", "all"])
@pytest.mark.parametrize("stop", [5, 7])
@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(train: str, stop: int, tmp_path: Path) -> None:
    rows, held = Packed(documents(90), 8), Packed(documents(40), 8)
    whole = quiet(model(train=train), rows, SHORT, tmp_path / "whole", held_out=held)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        quiet(model(train=train), rows, SHORT, tmp_path / "cut", held_out=held, callbacks=[Stop(stop)]).train()
    torch.manual_seed(99)
    again = quiet(model(train=train, seed=42), rows, SHORT, tmp_path / "cut", held_out=held)
    again.train(resume_from_checkpoint=True)
    assert curve(again) == curve(whole)
    assert len(curve(whole)) == 7
    for left, right in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(left, right)


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of one id per letter, with an end of text."""
    letters = ["[END]", *"abcdefghijklmnopqrstuvwxyz "]
    tokens = Tokenizer(WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="[END]"))
    tokens.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="[END]")


def test_documents_come_from_files_folders_and_lines(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "other": 3}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"words": "two"}\n')
    (tmp_path / "latin.txt.bin").write_bytes(b"\xff\xfe")
    assert read_documents(str(tmp_path)) == ["first", "second"]
    assert read_documents(str(tmp_path / "b.txt")) == ["second"]
    assert read_documents(str(tmp_path / "lines.jsonl")) == ["one", "two"]
    for name, message in (
        ("bad.jsonl", "line 2: expected an object"),
        ("empty.txt", "holds no text"),
        ("latin.txt.bin", "no UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=message):
            read_documents(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        read_documents(str(tmp_path / "none.txt"))
    assert tokenize(["ab", "c"], words()) == [[1, 2, 0], [3, 0]]


def test_a_tenth_is_held_out_by_document() -> None:
    many = [[index] for index in range(25)]
    training, held = split_documents(many)
    assert len(held) == 2
    assert sorted(training + held) == many
    assert split_documents([list(range(30))]) == ([list(range(27))], [[27, 28, 29]])


@pytest.mark.parametrize("train", ["guidance", "all"])
def test_train_saves_what_it_trained_and_goes_on(train: Any, tmp_path: Path) -> None:
    texts = ["to be or not to be that is the question " * 6, "whether tis nobler in the mind to suffer " * 6]
    biased, letters = model(train=train), words()
    lines: list[tuple[int, int, str]] = []
    arguments: dict[str, Any] = {"length": 16, "log_level": "error"}
    done = af.bias.train(
        Loaded(biased, letters), texts, tmp_path, SHORT, progress=lambda *line: lines.append(line), **arguments
    )
    assert [line[:2] for line in lines] == [(step, 8) for step in (0, 1, 2, 4, 4, 6, 8, 8)]
    assert lines[0][2] == f"held-out loss {done.before:.3f}"
    assert done.after < done.before
    written = Trained.from_json((tmp_path / "training.json").read_text())
    assert written == done
    assert [entry["step"] for entry in written.curve] == [0, 1, 2, 4, 6, 8]
    header, *lines = (tmp_path / "curve.csv").read_text().splitlines()
    assert header == "step,eval_loss,loss,learning_rate,bias/layer_0,bias/layer_1"
    assert len(lines) == 6
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    ids = torch.tensor(documents(12))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = tiny("Llama", torch.float32)
    if train == "all":
        fresh = type(fresh).from_pretrained(tmp_path / "model")
    af.bias.load(fresh, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(fresh(ids).logits, biased.eval()(ids).logits)
    arguments["tokenizer"] = letters
    again = af.bias.train(model(train=train, seed=5), texts, tmp_path, SHORT, **arguments)
    assert again.after == done.after, "there was nothing left to do"
    assert last_checkpoint(tmp_path) == 8
    with pytest.raises(ValueError, match=r"a run with other settings: length was 16 and is 8\. Go on with"):
        af.bias.train(model(train=train), texts, tmp_path, SHORT, **arguments | {"length": 8})
    other = [*texts, "for in that sleep of death what dreams may come " * 6]
    with pytest.raises(ValueError, match=r"other settings: data was [0-9a-f]{64} and is [0-9a-f]{64}\."):
        af.bias.train(model(train=train), other, tmp_path, SHORT, **arguments)


def test_another_run_in_the_folder_is_named_by_its_settings(tmp_path: Path) -> None:
    settings = run_settings(SHORT, [CONFIG], "guidance", 16)
    check_folder(tmp_path / "new" / "folder", settings)
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "model": "tiny", "data": "abc"}))
    check_folder(tmp_path, settings)
    longer = replace(SHORT, steps=12)
    wider = af.bias.GuidanceConfig(hidden_dim=16, layers="every")
    with pytest.raises(
        ValueError, match=r"settings: training.steps was 8 and is 12; bias.0.hidden_dim was 8 and is 16\."
    ):
        check_folder(tmp_path, run_settings(longer, [wider], "guidance", 16))
    with pytest.raises(ValueError, match=r"bias.0.gain was not set and is 0.0"):
        check_folder(tmp_path, run_settings(SHORT, [af.bias.DotConfig()], "guidance", 16))
    (tmp_path / "settings.json").write_text('{"training"')
    with pytest.raises(ValueError, match=r"is not JSON: .*; choose another folder, or delete this one"):
        check_folder(tmp_path, settings)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="is a file; results need a folder"):
            check_folder(folder, settings)


def test_evaluations_and_checkpoints_are_spaced_by_the_steps() -> None:
    def spacing(steps: int, **more: int) -> tuple[Any, ...]:
        config = TrainingConfig(steps=steps, **more)
        return config.log_every, config.save_every, config.evaluate_every

    assert spacing(12) == (1, 10, 50)  # of 12 steps none: they are evaluated before and after
    assert spacing(35) == (3, 12, 51)
    assert spacing(1000) == (10, 50, 100)
    assert spacing(20_000) == (10, 1000, 2000)
    assert spacing(100, evaluate_every=0, save_every=0) == (10, 0, 0)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs the model's tokenizer: pass tokenizer=..., or what af.load_model"):
        af.bias.train(model(), ["to be or not to be"], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_best_of_several_evaluations_is_loaded_at_the_end(tmp_path: Path) -> None:
    rows, held = Packed(documents(300), 16), Packed(documents(64), 16)
    wild = TrainingConfig(
        steps=8, batch_size=2, learning_rate=0.5, warmup=0, log_every=2, save_every=2, evaluate_every=2, seed=3
    )
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": None}
    made = quiet(model(), rows, wild, tmp_path, held_out=held, **best)
    made.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry}
    step = min(losses, key=losses.__getitem__)
    assert step != wild.steps  # at this rate it gets worse
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[step], rel=1e-6)
