"""Plans are derived from the order of a mask; what was stored beside a checkpoint refuses other ones."""

import pickle
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from attnflow import masks, tasks
from attnflow.tasks import Decoder, Label, Task, Token
from attnflow.tasks.trained import require_trained
from tests.tasks.drafting import speculative

MASK = 99
FAMILIES = {
    "causal": tasks.causal_lm,
    "blocks": partial(tasks.block_two_stream, block=2, mask_token=MASK),
    "blocks, causal": partial(tasks.block_two_stream, block=2, mask_token=MASK, clean="causal"),
    "blocks of 4": partial(tasks.block_diffusion, block=4, mask_token=MASK),
    "gaps": partial(tasks.butterfly, block=2, mask_token=MASK),
    "means": tasks.butterfly,
    "whole": lambda text: tasks.masked_lm(text, range(len(text)), mask_token=MASK),
    "several heads": partial(tasks.multi_token_prediction, horizon=3),
    "window": lambda text: [
        Task(
            [Token(i, i) for i in text],
            [Label(i, Token(i + 1, i + 1)) for i in text],
            masks.sliding_window(len(text), 3),
        )
    ],
    "drafts": partial(speculative, horizon=3),
}
# (trained, decoded): what was trained holds all that is decoded; the last gap has nothing on its right.
PARTS = {("several heads", "causal"), ("drafts", "causal"), ("gaps", "blocks, causal")}
PERMUTED = [3, 0, 2, 1, 5, 4, 7, 6]


@pytest.fixture(params=[*FAMILIES, "permuted"])
def plan(request):
    if request.param == "permuted":
        return tasks.decoder(tasks.permutation_lm(range(8), PERMUTED, mask_token=MASK))
    return tasks.decoder(FAMILIES[request.param](range(8)))


def test_a_position_is_cached_once_everything_below_it_is_written(plan):
    """The oracle is the closure as a table, and the pass after which each data token is known."""
    task, below = plan.task, plan.task.flow.reachability().numpy()
    written = dict.fromkeys(plan.known, -1)
    for number, each in enumerate(plan.passes):
        assert not written.keys() & set(each.writes)
        written.update(dict.fromkeys(each.writes, number))
    predicted = {label.data_index for label in task.labels}
    assert set(written) == set(plan.known) | predicted
    own = {label.position: label for label in task.labels}
    fixed = np.full(task.size, -2)  # the pass after which a position's own input is what it will be
    for position, token in enumerate(task.inputs):
        label = own.get(position)
        if token.provenance:
            fixed[position] = max(written[i] for i in token.provenance)
        elif label is not None and label.target.position == token.position:
            fixed[position] = written[label.data_index]
    final = np.array([fixed[row].max() for row in below])
    cached = set()
    for number, each in enumerate(plan.passes):
        fed = set(each.feeds)
        assert fed.isdisjoint(cached)
        assert set(each.caches) == {position for position in fed if final[position] < number}
        for position in fed:
            assert set(np.flatnonzero(below[position])) <= fed | cached  # all that it reads
            assert all(written[i] < number for i in task.inputs[position].provenance)
        cached |= set(each.caches)
        for token in each.writes:
            row = [label.position for label in task.labels if label.data_index == token]
            assert fed & set(row)


def test_it_reads_what_the_task_reads(plan):
    columns: list[int] = []
    allow = plan.task.mask.dense()
    for number, each in enumerate(plan.passes):
        rows = list(each.feeds)
        assert plan.reads(number).equal(allow[rows][:, [*columns, *rows]])
        columns += each.caches


def test_it_converts(plan):
    assert Decoder.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert Decoder.from_json(plan.to_json()).passes == plan.passes
    assert len(plan.rows()) == len(plan.passes) == plan.to_csv().count("\n") - 1
    assert len(str(plan).splitlines()) == 1 + len(plan.passes)


def test_what_is_cached_is_said():
    whole, blocks = (tasks.decoder(FAMILIES[name](range(8))) for name in ("whole", "blocks"))
    assert (whole.caches, blocks.caches) == (False, True)
    assert "nothing is final before the end" in str(whole)
    assert [each.caches for each in blocks.passes] == [(0, 1), (2, 3), (4, 5)]
    assert str(tasks.decoder(FAMILIES["several heads"](range(20)))).endswith("... and 11 more passes")
    drafting = tasks.decoder(FAMILIES["drafts"](range(8)))
    assert drafting.passes[0].drafts == (2, 3)
    assert "drafts [2, 3]" in str(drafting)


def test_one_task_a_family_and_a_merged_one_have_one_plan():
    family = FAMILIES["blocks"](range(8))
    merged = tasks.merge(family)
    assert tasks.decoder(family) == tasks.decoder(merged) == tasks.decoder(merged.task)
    late = tasks.decoder(family, known=[1, 0, 2, 3])
    assert (late.known, len(late.passes)) == ((0, 1, 2, 3), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.decoder(FAMILIES["gaps"](range(8)), [0, 1, 2, 3]), r"token 4 cannot .* reads tokens \[6, 7\]"),
        (
            lambda: tasks.decoder(FAMILIES["causal"](range(3)), [1]),
            "token 0 cannot be written: no position predicts it",
        ),
        (lambda: tasks.decoder([]), "at least one task"),
        (lambda: tasks.decoder(FAMILIES["causal"](range(3)), [3]), r"positions in \[0, 3\)"),
        (lambda: tasks.decoder(Task([Token(1, 0)], [], masks.causal(1))), "the task has none: nothing is written"),
        (
            lambda: tasks.decoder(Task([Token(1, 0, (0, 1))], [Label(0, Token(1, 2))], masks.causal(1))),
            "input 0 has 1 ids, but is made of 2 data tokens",
        ),
        (lambda: tasks.decoder(Task([Token(1, 0)], [Label(0, Token(1, 1))], ~masks.causal(1))), "attends to nothing"),
        (
            lambda: tasks.decoder(Task([Token(i, i) for i in (0, 1)], [Label(1, Token(0, 0))], masks.full(2)), [1]),
            r"token 0 cannot be written: position 1, .* reads tokens \[0\]",
        ),
    ],
)
def test_what_cannot_be_written_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("trained", FAMILIES)
@pytest.mark.parametrize("decoded", FAMILIES)
def test_a_plan_fits_what_was_trained_on_texts_of_other_lengths(trained, decoded, tmp_path):
    saved = tasks.decoder(FAMILIES[trained](range(16))).save(tmp_path)
    assert saved.name == "attnflow_decoder.json"
    assert saved.stat().st_size < 20_000
    plan = tasks.decoder(FAMILIES[decoded](range(12)))
    fits = trained == decoded or (trained, decoded) in PARTS
    with nullcontext() if fits else pytest.raises(ValueError, match=r"attnflow_decoder\.json in the model's folder"):
        require_trained(plan.facts, tmp_path)


def test_the_message_says_what_differs(tmp_path):
    tasks.decoder(FAMILIES["blocks, causal"](range(16))).save(tmp_path)
    with pytest.raises(ValueError, match="token before the block, later in its block: always in the decoder, never in"):
        require_trained(tasks.decoder(FAMILIES["blocks"](range(8))).facts, tmp_path)
    with pytest.raises(ValueError, match=r"writes 4 tokens at once.*trained on 2 tokens at once"):
        require_trained(tasks.decoder(FAMILIES["blocks of 4"](range(8))).facts, tmp_path)
    other = partial(FAMILIES["blocks, causal"], mask_token=5)
    with pytest.raises(ValueError, match=r"with \[MASK\] = \[5\].*with \[MASK\] = \[99\]"):
        require_trained(tasks.decoder(other(range(8))).facts, tmp_path)


def test_what_has_no_short_description_is_not_stored(tmp_path):
    shuffled = tasks.decoder(tasks.permutation_lm(range(8), PERMUTED, mask_token=MASK))
    with pytest.raises(ValueError, match=r"no short description: .* depends on more than distance"):
        shuffled.save(tmp_path)
    assert not list(tmp_path.iterdir())
    path = shuffled.save(tmp_path / "plan.json")
    assert Decoder.from_json(path.read_text()) == shuffled
    (tmp_path / "attnflow_decoder.json").write_text('{"attnflow": "decoder description", "version": 2}')
    with pytest.raises(ValueError, match="describes no decoder that this release reads"):
        require_trained(shuffled.facts, tmp_path)


def test_a_merge_whose_keys_stand_for_several_is_refused():
    """Two equal roots under one token: the plan would drop the logarithm that the second one adds."""
    roots = [Token(1, 0, ()), Token(1, 0, ()), Token(2, 1)]
    mask = masks.from_edges([(0, 0), (1, 1), (2, 0), (2, 1), (2, 2)], 3)
    family = [Task(roots, [Label(2, Token(3, 2))], mask)]
    assert tasks.decoder(tasks.merge(family)).known
    with pytest.raises(ValueError, match="which no decoder counts: merge without key_bias"):
        tasks.decoder(tasks.merge(family, key_bias=True))


@pytest.mark.parametrize("family", [tasks.rollouts([1, 2], [[3, 4], [3, 5]]), tasks.gist([1, 2], [[3], [4, 5]], 1, 9)])
def test_a_tree_of_answers_is_not_one_text(family):
    """Two tokens for one place are no heads."""
    with pytest.raises(
        ValueError, match=r"predicts 2 tokens at place \d, alternatives as in a tree of answers: decode"
    ):
        tasks.decoder(family)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"attnflow": "decoder description", "version": 1, "kinds": 5}']
)
def test_a_damaged_file_beside_a_checkpoint_is_named(content, tmp_path):
    plan = tasks.decoder(tasks.causal_lm(range(9)))
    file = plan.save(tmp_path)
    require_trained(plan.facts, tmp_path)
    file.write_text(content)
    with pytest.raises(ValueError, match=r"attnflow_decoder.json describes no decoder that this release reads"):
        require_trained(plan.facts, tmp_path)
