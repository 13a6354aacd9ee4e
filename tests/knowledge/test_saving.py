"""A converted model is saved as the plain one: by transformers, Trainer, accelerate and PEFT, and training resumes."""

import copy
import pickle

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge import from_ffn, to_ffn
from attnflow.models import load_model
from attnflow.models.weights.checkpoints.files import BadCheckpoint
from tests.models import ZOO, outputs, tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")  # about their own names

TEXT = torch.tensor([3 + (i * i + 3 * i) % 11 for i in range(8 * 12)]).view(8, 12)
DATA = [{"input_ids": row, "labels": row} for row in TEXT]
FAMILIES = ["Llama", "GPT2", "Phi3", "OPT", "Bert", "T5", "Albert", "Mixtral", "GptOss", "Qwen2Moe", "Jamba", "CLIP"]


def weights(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same(some, others):
    return set(some) == set(others) and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def trained(model):
    """Weights of one step of training, so that nothing can come from the plain model that was converted."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model(input_ids=TEXT, labels=TEXT).loss.backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_are_those_of_the_plain_model(name, tmp_path):
    model = ZOO[name].build()
    converted = from_ffn(model, check=name != "CLIP")  # which takes an image besides
    model.save_pretrained(tmp_path / "plain")
    copy.deepcopy(converted).save_pretrained(tmp_path / "saved")
    assert same(weights(tmp_path / "saved"), weights(tmp_path / "plain"))
    for file in (tmp_path / "plain").glob("*.json"):
        assert (tmp_path / "saved" / file.name).read_text() == file.read_text()
    with torch.no_grad():
        kept = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
        for parameter in converted.parameters():
            parameter.neg_()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(not found for found in converted.load_state_dict(plain))
    assert same(converted.state_dict(), kept)
    assert same(plain, model.state_dict())


@pytest.mark.parametrize("how", ["sharded", "pickled", "given", "merged"])
def test_a_trained_model_is_read_by_transformers_alone(how, tmp_path):
    model = trained(from_ffn(tiny("Llama", torch.float32)))
    expected, options = outputs(model, input_ids=TEXT), {}
    saved = model
    if how == "sharded":
        options = {"max_shard_size": "10KB"}
    elif how == "pickled":
        saved = pickle.loads(pickle.dumps(model))
    elif how == "given":
        options = {"state_dict": model.state_dict(), "is_main_process": True}
        saved = copy.deepcopy(model)
        saved.load_state_dict({name: tensor * 0 for name, tensor in model.state_dict().items() if "entries" in name}, 0)
    else:
        saved = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).merge_and_unload()
    saved.save_pretrained(tmp_path, **options)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (how == "sharded")
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path, tokenizer=False).model):
        torch.testing.assert_close(outputs(again, input_ids=TEXT), expected, rtol=1e-5, atol=1e-5)
        assert same(again.state_dict(), to_ffn(model).state_dict())


def test_a_part_that_can_be_saved_alone_is_saved_so(tmp_path):
    converted = trained(from_ffn(tiny("Llama", torch.float32)))
    converted.model.save_pretrained(tmp_path)
    again = type(converted.model).from_pretrained(tmp_path)
    assert isinstance(again, PreTrainedModel)
    assert same(again.state_dict(), to_ffn(converted).model.state_dict())


def test_more_entries_are_a_wider_model(tmp_path):
    converted = from_ffn(tiny("Llama", torch.float32))
    base = converted.knowledge
    for layer in range(base.num_layers):
        base.insert(layer, torch.randn(3, base.entry_dim).index_fill(1, torch.tensor([-1, -2]), 0))
    converted.save_pretrained(tmp_path)
    assert converted.config.intermediate_size == 48
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.intermediate_size == 51
    torch.testing.assert_close(outputs(again, input_ids=TEXT), outputs(converted, input_ids=TEXT))
    base.delete(base.ids[:1])
    with pytest.raises(ValueError, match="the same number of entries in all layers"):
        converted.save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError, match="the same number of entries in all layers"):
        converted.load_state_dict(again.state_dict())


def test_what_cannot_be_saved_writes_nothing(tmp_path):
    converted = from_ffn(tiny("Llama", torch.float32))
    with pytest.raises(ValueError, match="distributed_checkpoint=True"):
        converted.save_pretrained(tmp_path / "model", distributed_checkpoint=True)
    converted.knowledge.update([0], torch.ones(1, converted.knowledge.entry_dim))
    with pytest.raises(ValueError, match=r"has no bias, but its entries now have thresholds: set them to 0"):
        converted.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_plain_states_that_do_not_fit():
    plain = tiny("Llama", torch.float32)
    converted, name = from_ffn(plain), "model.layers.1.mlp.up_proj.weight"
    state = plain.state_dict()
    kept = state.pop(name)
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        converted.load_state_dict(state)
    found = converted.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([name], [])
    with pytest.raises(RuntimeError, match=f"{name} has shape"):
        converted.load_state_dict({**state, name: kept[:1]})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"model.layers.1.mlp.up_proj.bias"'):
        converted.load_state_dict({**state, name: kept, "model.layers.1.mlp.up_proj.bias": kept[:, 0]})


def trainer(model, folder, steps, **options):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "report_to": [], "save_steps": 2, "seed": 3, **options}
    arguments = TrainingArguments(str(folder), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, **settings)
    return Trainer(model, arguments, train_dataset=DATA)


@pytest.mark.parametrize("name", ["Llama", "OPT", "GPT2"])
def test_training_resumes_bit_for_bit(name, tmp_path):
    model = tiny(name, torch.float32)
    whole, part, rest = (from_ffn(model) for _ in range(3))
    trainer(whole, tmp_path / "whole", 4).train()
    trainer(part, tmp_path / "part", 4, lr_scheduler_type="constant").train()
    trainer(rest, tmp_path / "rest", 4, lr_scheduler_type="constant").train(
        resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2")
    )
    assert same(rest.state_dict(), part.state_dict())
    for folder in ("checkpoint-2", "checkpoint-4"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / folder)
        assert same(again.state_dict(), to_ffn(whole).state_dict()) == (folder == "checkpoint-4")


def test_a_converted_model_trains_as_its_plain_model_does(tmp_path):
    """The plain model has no thresholds, so that none may be learned, which no file of it could hold."""
    plain = tiny("Llama", torch.float32)
    converted = from_ffn(plain)
    assert converted.knowledge.entries.requires_grad
    trainer(plain, tmp_path / "plain", 3).train()
    trainer(converted, tmp_path / "converted", 3).train()
    for name, tensor in to_ffn(converted).state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_accelerate_saves_and_restores(tmp_path):
    accelerator = Accelerator(cpu=True)
    converted = from_ffn(tiny("Llama", torch.float32))
    model = accelerator.prepare(trained(converted))
    kept = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
    accelerator.save_state(str(tmp_path / "state"))
    trained(converted)
    assert not same(converted.state_dict(), kept)
    accelerator.load_state(str(tmp_path / "state"))
    assert same(converted.state_dict(), kept)
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(tmp_path / "model", state_dict=state)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), to_ffn(converted).state_dict())


def test_adapters_of_attention_are_saved_alone_and_fit_the_plain_model(tmp_path):
    plain = tiny("Llama", torch.float32)
    adapted = get_peft_model(from_ffn(plain), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    made = trainer(adapted, tmp_path / "run", 2)
    made.train()
    made.save_model(str(tmp_path / "adapter"))
    assert all("lora" in name for name in weights(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(outputs(again, input_ids=TEXT), outputs(adapted.eval(), input_ids=TEXT))


@pytest.mark.parametrize("settings", [{"target_parameters": ["knowledge.entries"]}, {"modules_to_save": ["knowledge"]}])
def test_adapters_of_entries_are_refused(settings):
    converted = from_ffn(tiny("Llama", torch.float32))
    adapted = get_peft_model(converted, LoraConfig(target_modules=["q_proj"], **settings))
    with pytest.raises(ValueError, match=r"lies around the entries.*adapt the plain model, to_ffn\(model\), merge"):
        adapted(input_ids=tokens())


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("targets", [["q_proj", "gate_proj"], ["down_proj"]])
def test_adapters_of_feed_forward_layers_are_merged_first(targets, wrapped):
    adapted = get_peft_model(tiny("Llama", torch.float32), LoraConfig(target_modules=targets, init_lora_weights=False))
    with pytest.raises(UnsupportedArchitecture, match=r"Merge the adapter first \(model.merge_and_unload\(\)"):
        from_ffn(adapted if wrapped else adapted.get_base_model())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(
        outputs(from_ffn(merged), input_ids=TEXT), outputs(merged, input_ids=TEXT), rtol=1e-4, atol=1e-5
    )


def test_layers_in_adapters_are_left_to_the_model_on_request():
    config = LoraConfig(target_modules=["gate_proj"], layers_to_transform=[1], init_lora_weights=False)
    adapted = get_peft_model(tiny("Llama", torch.float32), config).get_base_model()
    with pytest.raises(UnsupportedArchitecture, match=r"layers.1.mlp.*\(5 matrices beside 1 parts.*Merge the adapter"):
        from_ffn(adapted)
    converted = from_ffn(adapted, partial=True)
    assert converted.knowledge.num_layers == 1
    torch.testing.assert_close(outputs(converted, input_ids=TEXT), outputs(adapted, input_ids=TEXT))


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out")
def test_other_adapters_are_merged_first_too():
    config = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False)
    with pytest.raises(UnsupportedArchitecture, match="Merge the adapter first"):
        from_ffn(get_peft_model(tiny("Llama", torch.float32), config))


@pytest.mark.parametrize("partial", [False, True])
def test_a_folder_with_entries_in_place_of_weights_is_refused(partial, tmp_path):
    model = tiny("Llama", torch.float32)
    model.save_pretrained(tmp_path)
    converted = from_ffn(model)
    save_file(converted.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"that knowledge.from_ffn converted.*into from_ffn\(model\)"):
        load_model(tmp_path, tokenizer=False, partial=partial)
    rescued = from_ffn(tiny("Llama", torch.float32))
    rescued.load_state_dict(load_file(tmp_path / "model.safetensors"))
    rescued.save_pretrained(tmp_path / "rescued")
    assert same(load_model(tmp_path / "rescued", tokenizer=False).model.state_dict(), model.state_dict())


def test_a_plain_model_keeps_nothing_of_this():
    converted = from_ffn(tiny("Llama", torch.float32))
    plain = to_ffn(copy.deepcopy(converted))
    named = [name for module in plain.modules() for name in vars(module)]
    ours = [name for name in named if "attnflow" in name or name == "save_pretrained"]
    assert (ours, len(plain._load_state_dict_pre_hooks), len(plain._forward_pre_hooks)) == ([], 0, 0)
    assert len(converted._load_state_dict_pre_hooks) == len(converted._forward_pre_hooks) == 1
    assert transformers.LlamaForCausalLM.save_pretrained is PreTrainedModel.save_pretrained
