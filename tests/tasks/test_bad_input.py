"""Every argument of the room that is refused, with what the error says; where it advises something, that helps."""

import re

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import attnflow as af
from attnflow import masks, tasks
from attnflow.tasks import Collator, Label, Task, Token
from tests.models import tiny

IDS = [11, 12, 13, 14, 15, 16]
DATA = [Token(id, i) for i, id in enumerate(IDS)]
CAUSAL = tasks.causal_lm(IDS)
UNDECODABLE = "Jamba", "FalconH1", "Bloom", "T5", "Mamba2"
LABELS = Collator(tasks.causal_lm)([[5, 6, 7]])["labels"]
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
WINDOW = Task(DATA[:3], [], masks.sliding_window(3, 2))
BLIND = Task(DATA[:3], [Label(1, DATA[3])], masks.from_edges([(1, 0), (2, 0)], 3))
LAYERED = Task(DATA[:3], [], [masks.causal(3)] * 2)
UNEQUAL = Task(DATA[:3], [], [masks.causal(3), masks.full(3)])
PAIRS = [(0, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 2), (3, 3)]
TWINS = Task([Token(5, 0, ())] * 2 + DATA[1:3], [], masks.from_edges(PAIRS, 4))


def llama(attention: str = "sdpa", **options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **options}, attn_implementation=attention))


def spec(**change: object) -> Task:
    return Task.from_dict({"inputs": [5], "labels": [], "mask": {"name": "causal", "parameters": {"n": 1}}, **change})


def target(**more: object) -> list[object]:
    return [{"position": 0, "target": {"id": 1, "position": 1}, **more}]


def verify(family: object, model: object = None, merged: object = None, **options: object) -> object:
    return tasks.verify(family, merged or tasks.merge(family), model or llama(), **options)


def write(ids: object = (3, 7), block: int = 2, name: str = "Llama", **options: object) -> object:
    return tasks.generate_blocks(
        tiny(name, torch.float32), ids, block, **{"max_new_tokens": 4, "mask_token": 0, **options}
    )


def fill(left: object, right: object, length: int = 2, name: str = "Llama") -> object:
    return tasks.infill(tiny(name, torch.float32), left, right, length, mask_token=0)


def score(requests: object, name: str = "Llama") -> object:
    return tasks.score(tiny(name, torch.float32), requests)


def grouped(*groups: object) -> object:
    return Collator(tasks.rollouts)(groups)


def by_value(tokens: list[int]) -> object:
    """A family that looks at values."""
    return tasks.causal_lm(tokens[: tokens.index(5) + 1] if 5 in tokens[1:] else tokens)


def by_tensor(tokens: list[int]) -> object:
    """A family that looks at values in a way that leaves no trace."""
    return tasks.masked_lm(tokens, [int(torch.tensor(tokens)[0]) % 2], mask_token=0)


TOKENS = [
    (lambda: Token(-1, 0), "id must be at least 0, got -1"),
    (lambda: Token(["7"], 0), ""),
    (lambda: Token((), 0), "empty sequence"),
    (lambda: Token(1, -1), "position must be at least 0"),
    (lambda: Token(1, 0, (-2,)), "provenance must be at least 0"),
    (lambda: Token(1, 0, 2), r"provenance must be a collection of data indices, such as \(2,\), got 2"),
    (lambda: Label(-1, Token(1, 0)), "position of a label"),
    (lambda: Label(0, Token((1, 2), 0)), "one vocabulary id of at most one data token"),
    (lambda: Label(0, Token(1, 0, (0, 1))), "one vocabulary id of at most one data token"),
    (lambda: Label(0, Token(1, 0), weight=float("nan")), "must be finite, got nan"),
    (lambda: Label(0, Token(1, 0), task=-1), "task of a label"),
]
TASKS = [
    (lambda: Task(DATA[:2], [], masks.full(2, 3)), r"square, got shape \(2, 3\)"),
    (lambda: Task(DATA[:2], [], masks.causal(3)), r"as long as the inputs \(2\), got shape \(3, 3\)"),
    (lambda: Task(DATA[:2], [Label(2, DATA[0])], masks.causal(2)), "within the 2 inputs, got position 2"),
    (lambda: Task(DATA[:1], [], torch.ones(1, 1, dtype=torch.bool)), r"af\.masks\.from_dense\(tensor\)"),
    (lambda: Task([5], [], masks.causal(1)), "expected a Token, got 5 of type int"),
    (lambda: Task(DATA[:1], [5], masks.causal(1)), "expected a Label, got 5 of type int"),
    (lambda: Task(DATA[:3], [], []), "at least one mask per layer, got an empty sequence"),
    (lambda: Task(DATA[:3], [], [masks.causal(3), masks.causal(2)]), r"\(3\), got shape \(2, 2\)"),
    (lambda: LAYERED.mask, r"a mask per layer \(2\), not one for all: use task.masks"),
    (lambda: LAYERED.densified(), "has no dense form"),
    (lambda: LAYERED.sparsified(), "cannot be sparsified"),
    (lambda: spec(masks={}), "unknown name 'masks': did you mean mask"),
    (lambda: spec(version=2), "reads version 1, got version 2"),
    (lambda: spec(inputs=3), "task: inputs: expected a list, got 3"),
    (lambda: spec(inputs=[{"id": 3}]), r"inputs\[0\]: token lacks position"),
    (lambda: spec(inputs=["x"]), r"inputs\[0\]: id: expected an integer, got the text 'x'"),
    (lambda: spec(labels=target(weight="1")), "weight: expected a number"),
    (lambda: spec(labels=[{"position": 0}]), r"labels\[0\]: label lacks target"),
    (lambda: spec(mask={"name": "from_dense"}), "mask: unknown mask 'from_dense'; known: attention_sink, "),
    (lambda: spec(mask="causal"), "mask: expected a JSON object, got the text 'causal'"),
    (lambda: Task.from_dict({**LAYERED.to_dict(), "masks": ["no mask"]}), "task: masks"),
    (lambda: Task.from_dict({"inputs": [], "labels": []}), "task lacks mask"),
    (lambda: tasks.check(CAUSAL), r"check each task of a family, or af\.tasks\.merge\(family\)"),
    (lambda: tasks.check(WINDOW, layers=-1), "layers must be at least 0"),
    (lambda: tasks.check(LAYERED, layers=3), "layers must be at most 2, got 3"),
]
FAMILIES = [
    (lambda: tasks.causal_lm([]), "at least 2 tokens, got 0"),
    (lambda: tasks.causal_lm("ab"), ""),
    (lambda: tasks.causal_lm(np.array([[1, 2], [3, 4]])), "one-dimensional"),
    (lambda: tasks.butterfly(IDS, masked=[1]), "masked needs block"),
    (lambda: tasks.butterfly(IDS, block=6, mask_token=0), "at least 2 blocks, got 6 tokens in 1 block of 6"),
    (lambda: tasks.block_two_stream([5, 6], 2, mask_token=0), "more tokens, a smaller block, or predict_first=True"),
    (lambda: tasks.block_two_stream(IDS, 4, mask_token=0), "multiple of block = 4, got 6; pad to 8"),
    (lambda: tasks.block_two_stream(IDS, 0, mask_token=0), "block must be at least 1, got 0"),
    (lambda: tasks.block_diffusion(IDS, 2, masked=[], mask_token=0), "at least one place"),
    (lambda: tasks.block_diffusion(IDS, 2, masked="some", mask_token=0), r'"random", got \'some\''),
    (lambda: tasks.block_diffusion(IDS, 2, mask_token=0, clean="no"), '"block" or "causal", got \'no\''),
    (lambda: tasks.masked_lm(IDS, [], mask_token=0), "at least one place"),
    (lambda: tasks.masked_lm(IDS, [1, 1], mask_token=0), "each once"),
    (lambda: tasks.masked_lm(IDS, [6], mask_token=0), r"positions in \[0, 6\), got 6"),
    *(
        (make, r"mask_token is required: pass tokenizer\.mask_token_id")
        for make in (
            lambda: tasks.masked_lm(IDS, [1]),
            lambda: tasks.block_two_stream(IDS, 2),
            lambda: tasks.block_diffusion(IDS, 2),
            lambda: tasks.permutation_lm(IDS, range(6)),
            lambda: tasks.butterfly(IDS, block=2),
            lambda: write(mask_token=None),
            lambda: tasks.infill(tiny("Llama", torch.float32), [1], [2], 2),
        )
    ),
    (lambda: tasks.masked_lm(IDS, [1], mask_token=-1), "mask_token must be at least 0, got -1"),
    (lambda: tasks.multi_token_prediction(IDS, 0), "horizon must be at least 1, got 0"),
    (lambda: tasks.permutation_lm(IDS, [0, 1], mask_token=0), r"permutation of range\(6\)"),
    (lambda: tasks.rollouts([1], []), "responses must have at least one entry, got none"),
    (lambda: tasks.rollouts([1], [[], []]), "response must have a token, got 2 without any"),
    (lambda: tasks.rollouts([], [[1]]), "prompts must have at least one entry"),
    (lambda: tasks.rollouts([[1], []], [[1], [2]]), "prompt 1 is empty: nothing predicts the first token"),
    (lambda: tasks.rollouts([[1], [2]], [[1], [2], [3]]), "for all 3 responses or one for each, got 2 prompts"),
    (lambda: tasks.rollouts([1], [[2, -100]]), "token ids must be at least 0, got -100: leave padding out"),
    (lambda: tasks.rollouts([1], [[2, 3]], [1.0, 2.0]), "an entry for each of the 1 responses, got 2"),
    (lambda: tasks.rollouts([1], [[2, 3]], [[1.0]]), r"weights\[0\] must be one number or one for each of the 2"),
    (lambda: tasks.rollouts([1], [[2, 3]], [float("nan")]), r"weights\[0\] must be finite, got nan"),
]
MERGING = [
    (lambda: tasks.merge([]), "at least one task, got none"),
    (lambda: tasks.merge(CAUSAL[0]), r"pass \[task\]"),
    (lambda: tasks.merge([DATA]), "a family is a sequence of Task, got list"),
    (lambda: tasks.merge([CAUSAL[0], TWINS]), r"position 2 of task 1 reads .*\[0, 1\].*key_bias=True.*provenance"),
    (lambda: tasks.merge([UNEQUAL]), r"task 0 has a mask per layer \(2\), and they differ: merge tasks with one mask"),
    (lambda: tasks.merge([LAYERED, CAUSAL[0]]), "task 1 is for any number of layers, but task 0 for 2"),
    (lambda: tasks.merge(CAUSAL, key_bias=2), "key_bias must be"),
    (lambda: tasks.merge(CAUSAL).embeds([]), "at least one task, got none"),
    (lambda: tasks.merge(CAUSAL).embeds([UNEQUAL]), "task 0 has a mask per layer"),
    (lambda: verify(CAUSAL[1:], merged=tasks.merge(CAUSAL)), r"pass af\.tasks\.merge"),
    (lambda: verify(CAUSAL, llama().requires_grad_(False)), "pass gradients=False"),
    (lambda: verify(CAUSAL, llama(vocab_size=8)), "below the 8 entries of the embedding, got 15"),
    (lambda: verify([Task(DATA[:1], [], masks.causal(1))]), "no task of the family has a label"),
    (lambda: verify([BLIND], merged=tasks.merge([BLIND.densified()])), "allow it to attend to itself"),
    (lambda: verify(tasks.causal_lm([1, 99])), "target ids must be below the vocabulary of 20, got 99"),
    (lambda: verify(CAUSAL, tiny("Mamba2")), "position_ids"),
    (lambda: verify(CAUSAL, tiny("T5")), "position_ids|encoder and a decoder"),
    (lambda: verify(CAUSAL, LlamaModel(LlamaConfig(**SMALL))), "gives no logits"),
    (lambda: verify(CAUSAL, torch.nn.Linear(2, 2)), "Linear has no get_input_embeddings"),
    (lambda: verify(CAUSAL, llama("flex_attention")), r'model\.set_attn_implementation\("sdpa"\) or "eager"'),
]
BATCHES = [
    (lambda: Collator([1, 2]), ""),
    (lambda: Collator(tasks.causal_lm, dtype=torch.int64), r"floating-point type, got torch\.int64"),
    (lambda: Collator(tasks.causal_lm, pad_to_multiple_of=0), "pad_to_multiple_of must be at least 1"),
    (lambda: Collator(tasks.causal_lm, pad_to_multiple_of=2**40), "pad_to_multiple_of must be at most"),
    (lambda: Collator(tasks.causal_lm, min_width=0), "min_width must be at least 1"),
    (lambda: Collator(tasks.causal_lm, masks="rows"), "masks must be one of 'dense', 'intervals', got 'rows'"),
    (lambda: Collator(tasks.causal_lm)([]), "at least one sample, got none"),
    (lambda: Collator(tasks.causal_lm)([[1, 2], [1]]), "sample 1 of the batch: this family needs at least 2 tokens"),
    (lambda: Collator(tasks.causal_lm)([{"ids": [1, 2]}]), r"mapping with \"input_ids\", got the keys \['ids'\]"),
    (lambda: Collator(tasks.causal_lm)([{"input_ids": [1, 2], "attention_mask": [1]}]), "in length: 2 and 1"),
    (lambda: Collator(tasks.causal_lm)([torch.zeros(2, 2, dtype=torch.int64)]), "one-dimensional"),
    (lambda: Collator(tasks.causal_lm)([torch.tensor([0.5, 1.5])]), "must hold integers"),
    (lambda: Collator(by_value, by_length=True)([IDS]), r"reads the values .*use Collator\(..., by_length=False\)"),
    (lambda: Collator(by_tensor, by_length=True)([[5, 6, 7]]), "tasks depend on the tokens, .*by_length=False"),
    (lambda: Collator(tasks.causal_lm)([{}]), r"got the keys \[\]; a Trainer drops .* set remove_unused_columns=False"),
    (lambda: grouped({}), "prompts and responses, got no entry; .* remove_unused_columns=False"),
    (lambda: grouped([1, 2, 3]), "sample 0 of the batch: a group of rollouts must be a mapping"),
    (lambda: grouped({"prompts": [1]}), "sample 0 of the batch: a group of rollouts lacks responses"),
    (lambda: grouped({"prompts": [1], "responses": [[2]], "weight": 1}), "unknown name 'weight': did you mean weights"),
    (
        lambda: Collator(lambda _: LAYERED)([[1, 1]]),
        r"sample 0 of the batch: this task has a mask per layer \(2\), not one for all",
    ),
    (lambda: tasks.average_embeddings(torch.nn.Linear(2, 2)), "Linear has no get_input_embeddings"),
    (lambda: tasks.loss(torch.zeros(1, 3, 9), LABELS), r"expected logits \[1, 2\] \+ \[vocabulary\].*got \[1, 3, 9\]"),
    (lambda: tasks.loss(torch.zeros(1, 5, 9), torch.zeros(1, 5, dtype=torch.int64)), r"got \(1, 5\): make the batch"),
    (lambda: tasks.loss(torch.zeros(1, 2, 9), None), r"labels of an af\.tasks\.Collator batch, got NoneType"),
    (lambda: tasks.loss(3, LABELS), "expected logits"),
    (lambda: tasks.loss(torch.zeros(1, 2, 9), LABELS, reduction="each"), '"mean", "sum" or "none", got \'each\''),
    (lambda: llama()(**Collator(tasks.causal_lm)([[5, 6, 7]])), ""),  # HF would shift these labels: no silent training
]
DECODING = [
    (lambda: write(list(range(3, 40)), max_new_tokens=64), "64 positions.*would take 102"),
    (lambda: write(per_pass=3), "per_pass must be at most 2"),
    (lambda: write(threshold=0.5), "threshold needs per_pass"),
    (lambda: write(temperature=0.0), "temperature must be above 0, got 0.0; leave it out"),
    (lambda: write([3, 77]), "ids must hold ids of the 50 entries.*got 77"),
    (lambda: write(mask_token=50), "mask_token must hold ids of the 50 entries"),
    (lambda: write(eos_token=-2), "eos_token must be at least -1"),
    *((lambda n=name: write(name=n), "attention|cache|position_ids|encoder") for name in UNDECODABLE),
    (lambda: fill([3], [[4], [5]]), "got 1 and 2"),
    (lambda: fill([], []), "at least one side"),
    (lambda: fill([3], [77]), "left and right must hold ids of the 50 entries.*got 77"),
    (lambda: fill([3], [4], 63), "64 positions, but the text would take 65"),
    (lambda: fill([3], [4], name="Jamba"), "outside its attention"),
    (lambda: tasks.generate(llama(), CAUSAL, [5]), r"a plan that af\.tasks\.decoder\(family\) made, got tuple"),
    (lambda: score([([5], [6]), ([], [6])]), "request 1: the context has no token"),
    (lambda: score([[5, 6, 7]]), "request 0 must be a pair"),
    (lambda: score([([5], [])]), "request 0: the continuation has no token"),
    (lambda: score([("w1", "w2")]), "request 0: texts need a tokenizer"),
    (lambda: score([("w1", [5])]), "request 0: context and continuation must both be texts or both be token ids"),
    (lambda: score([([5] * 64, [6, 7])]), "a request has 65 tokens, but the model reads at most 64"),
    (lambda: score([([5], [6]), ([5], [77])]), r"request 1: token ids must lie in \[0, 50\), the vocabulary; got 77"),
    (lambda: score([([-1], [6])]), r"in \[0, 50\), the vocabulary; got -1"),
    (lambda: score(tasks.causal_lm([3, 77])), "vocabulary of 50, got 77|50 entries"),
    (lambda: score(CAUSAL, "Bloom"), "does not take"),
]
CASES = [*TOKENS, *TASKS, *FAMILIES, *MERGING, *BATCHES, *DECODING]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[f"{i}: {case[1][:40]}" for i, case in enumerate(CASES)])
def test_it_is_refused(call, message):
    with pytest.raises((ValueError, TypeError, af.UnsupportedArchitecture, TypeCheckError)) as caught:
        call()
    assert isinstance(caught.value, TypeCheckError) or re.search(message, str(caught.value)), caught.value
    assert "densified" not in str(caught.value)  # it changes what a task computes


def test_the_advice_of_an_error_helps():
    assert Collator(by_value, by_length=False)([[6, 5, 7, 8]])["input_ids"].tolist() == [[6]]
    assert tasks.check(tasks.merge(tasks.block_two_stream(IDS, 6, predict_first=True, mask_token=0))).ok
    assert all(tasks.check(task).ok for task in CAUSAL)
    assert tasks.merge([TWINS], key_bias=True).multiplicity.tolist() == [[1, 0, 2]]
    apart = Task([Token(5, 0, (i,)) for i in (7, 8)] + DATA[1:3], [], TWINS.mask)
    assert tasks.merge([apart]).task == apart

    assert verify(CAUSAL, llama().requires_grad_(False), gradients=False).ok
    flex = llama("flex_attention")
    for implementation in ("sdpa", "eager"):
        flex.set_attn_implementation(implementation)
        assert verify(CAUSAL, flex).ok
    assert Collator(tasks.rollouts)([{"prompts": [1], "responses": [[2, 3]], "weights": None}])["labels"].ndim == 4
