"""Every advice that an error of the room gives is followed, and helps."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow import tasks
from attnflow.tasks import Collator, Label, Task, Token
from tests.refused import refused

IDS = [5, 6, 7, 8, 9, 4]


def model(attention="sdpa"):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, vocab_size=16, attn_implementation=attention))


def up_to_a_five(tokens):
    """A family that looks at values."""
    return tasks.causal_lm(tokens[: tokens.index(5) + 1] if 5 in tokens[1:] else tokens)


def test_a_family_that_looks_at_values():
    with pytest.raises(ValueError, match=r"use Collator\(..., by_length=False\)"):
        Collator(up_to_a_five, by_length=True)([IDS])
    assert Collator(up_to_a_five, by_length=False)([IDS])["input_ids"].tolist() == [IDS[:-1]]


def test_too_few_blocks():
    with pytest.raises(ValueError, match="more tokens, a smaller block, or predict_first=True"):
        tasks.block_two_stream(IDS, 6)
    for family in (
        tasks.block_two_stream(IDS * 2, 6),
        tasks.block_two_stream(IDS, 3),
        tasks.block_two_stream(IDS, 6, predict_first=True),
    ):
        assert tasks.check(tasks.merge(family)).ok
    with pytest.raises(ValueError, match="pad to 8"):
        tasks.block_two_stream(IDS, 4)
    assert tasks.block_two_stream([*IDS, 0, 0], 4)


def test_a_family_where_a_task_belongs_and_the_other_way_round():
    family = tasks.causal_lm(IDS)
    with refused(TypeError, r"check each task of a family, or af\.tasks\.merge\(family\)"):
        tasks.check(family)
    assert all(tasks.check(task).ok for task in family)
    assert tasks.check(tasks.merge(family)).ok
    with refused(TypeError, r"pass \[task\]"):
        tasks.merge(family[0])
    assert tasks.merge([family[0]]).task.size == 1


def test_a_mask_that_is_a_tensor():
    with refused(TypeError, r"af\.masks\.from_dense\(tensor\)"):
        Task([Token(5, 0)], [], torch.ones(1, 1, dtype=torch.bool))
    assert Task([Token(5, 0)], [], af.masks.from_dense(torch.ones(1, 1, dtype=torch.bool))).size == 1


def test_tasks_that_are_not_dense():
    tokens = [Token(id, i) for i, id in enumerate(IDS)]
    window = Task(tokens[:-1], [Label(4, tokens[5])], af.masks.sliding_window(5, 2))
    with pytest.raises(ValueError, match=r"\[task.densified\(\) for task in family\]"):
        tasks.merge([window])
    merged = tasks.merge([task.densified() for task in [window]])
    assert merged.task.flow.sparsify(window=2).mask.nnz < merged.task.mask.nnz
    off = Task(tokens[:1], [Label(0, tokens[1])], af.masks.from_edges([], 1))
    with pytest.raises(ValueError, match=r"Use task\.densified\(\), or allow the diagonal in its mask"):
        tasks.merge([off])
    assert tasks.merge([off.densified()]).task == tasks.merge([Task(off.inputs, off.labels, af.masks.causal(1))]).task


def test_a_verification_that_cannot_run():
    family = tasks.causal_lm(IDS)
    merged = tasks.merge(family)
    frozen = model().requires_grad_(False)
    with pytest.raises(ValueError, match="pass gradients=False"):
        tasks.verify(family, merged, frozen)
    assert tasks.verify(family, merged, frozen, gradients=False).ok
    with pytest.raises(ValueError, match=r"merged = af\.tasks\.merge\(family\)"):
        tasks.verify(family[1:], merged, model())
    assert tasks.verify(family[1:], tasks.merge(family[1:]), model()).ok
    flex = model("flex_attention")
    with pytest.raises(af.UnsupportedArchitecture, match=r'model\.set_attn_implementation\("sdpa"\) or "eager"'):
        tasks.verify(family, merged, flex)
    for implementation in ("sdpa", "eager"):
        flex.set_attn_implementation(implementation)
        assert tasks.verify(family, merged, flex).ok
    blind = [Task([Token(1, 0), Token(2, 1)], [Label(1, Token(3, 2))], af.masks.from_edges([(1, 0), (1, 1)], 2))]
    dense = tasks.merge([blind[0].densified()])
    with pytest.raises(ValueError, match="allow it to attend to itself"):
        tasks.verify(blind, dense, model())
    assert tasks.verify([Task(blind[0].inputs, blind[0].labels, af.masks.causal(2))], dense, model()).ok
