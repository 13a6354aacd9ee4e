"""Share prefixes in TRL's GRPO under DDP on two processes, under a guard: the same steps from fewer tokens.

    torchrun --nproc-per-node 2 share_prefixes_trl_ddp.py [--leak]

The model is tiny, and drawn at random. With `--leak` one layer on rank 1 reads the next token, and all ranks stop.
"""

import argparse
import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from ranks import memory, say
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import attnflow as af

warnings.filterwarnings("ignore", category=FutureWarning)  # of trl's options
WORDS, GROUP, PROMPT, COMPLETION = 60, 4, 24, 8


def tokenizer() -> PreTrainedTokenizerFast:
    """Of the words w0 to w59."""
    words = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(WORDS))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, padding_side="left", **special)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Short words are better."""
    return [-len(completion) / COMPLETION for completion in completions]


def next_token(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + output.roll(-1, 1)


def trained(share: bool, leak: bool) -> tuple[GRPOTrainer, Any]:
    """Two steps of GRPO: a trainer and its handle of shared prefixes."""
    torch.manual_seed(0)
    size = {"vocab_size": WORDS + 3, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    special = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**size, **special, num_attention_heads=4))
    draw = torch.randint(WORDS, (8, PROMPT), generator=torch.Generator().manual_seed(1)).tolist()
    options = GRPOConfig(
        tempfile.mkdtemp(),
        num_generations=GROUP,
        per_device_train_batch_size=GROUP,
        max_completion_length=COMPLETION,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        seed=5,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model,
        reward,
        options,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{word}" for word in words) for words in draw]}),
        processing_class=tokenizer(),
        callbacks=[af.audit.GuardCallback()],
    )
    trainer.remove_callback(PrinterCallback)
    handle = af.tasks.share_prefixes(trainer) if share else None  # before the trainer wraps the model for DDP
    if leak:
        model.model.layers[0].mlp.register_forward_hook(next_token)
    trainer.train()
    return trainer, handle


parser = argparse.ArgumentParser()
parser.add_argument("--leak", action="store_true")
options = parser.parse_args()
try:
    stock, _ = trained(share=False, leak=options.leak and int(os.environ["RANK"]) == 1)
    shared, handle = trained(share=True, leak=False)
except af.AttnflowError as leak:  # LeakFound on the rank that leaks, RankFailed on the others
    say(f"{type(leak).__name__}: {leak}")
    sys.exit(1)
for one, two in zip(stock.state.log_history, shared.state.log_history, strict=True):
    if "grad_norm" in one and dist.get_rank() == 0:
        print(f"reward {one['reward']:.4f} and {two['reward']:.4f} shared", end=", ")
        print(f"norm of the gradient {one['grad_norm']:.5f} and {two['grad_norm']:.5f} shared", flush=True)
report = handle.report
say(f"{report.last_before} tokens in the last batch, {report.last_after} after sharing; {memory(shared.model)}")
dist.destroy_process_group()
