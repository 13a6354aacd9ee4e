"""Three vector figures for a paper: a mask with its tokens, its Hasse diagram with a path, and an answer's flow."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af

tokens = ["[all]", "The", "cat", "sat", ".", "A", "dog", "ran", ".", "[end]"]
packed = af.masks.document([1, 4, 4, 1])
reads = [(9, key) for key in range(9)] + [(query, 0) for query in range(10)]  # the last reads all, all read the first
mask = packed | af.masks.from_edges(reads, 10)
flow = af.order.analyze(mask)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()  # load your own with af.load_model
answer = af.explain.answer(model, torch.arange(5, 15))

figures = {
    "mask.pdf": af.report.figure(mask, labels=tokens, title="Two documents between tokens that all share"),
    "order.pdf": af.report.figure(flow, labels=tokens, highlight=flow.path(0, 9), title="What may reach what"),
    "flow.pdf": af.report.figure(answer, title="Which heads carried the answer, from which tokens"),
}
for name, figure in figures.items():
    figure.savefig(name)  # .svg and .png, too
    print("wrote", name)
