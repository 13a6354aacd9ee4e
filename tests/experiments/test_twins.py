"""All arms of `knowledge_twins` start alike as functions, and forms lack what they are said to lack."""

from dataclasses import replace

import pytest
import torch

from experiments.knowledge_twins.models import Arm, build, sizes
from experiments.knowledge_twins.recipe import ablation, tiny
from experiments.knowledge_twins.start import targets
from experiments.runner.experiment import find
from experiments.runner.text import Text
from tests.experiments.miniature import rows

SIZE = (259, 64)  # vocabulary, length


def written(model):
    """Root mean square of what each layer writes between self-attentions, and the loss, on random letters."""
    found = []
    for layer in model.model.layers:
        module = layer.reader if hasattr(layer, "reader") else layer.mlp
        module.register_forward_hook(lambda _, __, output: found.append(float(output.square().mean().sqrt())))
    ids = torch.randint(0, 259, (16, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    return found, loss


@pytest.mark.parametrize(("name", "arm"), [*tiny().arms.items(), *ablation().arms.items()])
def test_every_arm_starts_at_the_same_scale(name, arm):
    """Of what layers write in the model; readers as the library draws them write eight times as much."""
    model = build(arm, *SIZE, seed=1)
    ordinary = build(Arm("equal parameters", 64, 4, 512, arm.gated), *SIZE, seed=1)
    shared = [key for key, value in ordinary.state_dict().items() if value.ndim > 1 and ".mlp." not in key]
    assert all(torch.equal(model.state_dict()[key], ordinary.state_dict()[key]) for key in shared)
    (outputs, loss), (others, other) = written(model), written(ordinary)
    assert outputs == pytest.approx(others, rel=0.2)
    assert loss == pytest.approx(other, abs=0.03)
    assert sum(others) / 4 == pytest.approx(targets(ordinary, 149 if arm.gated else 192)[1], rel=0.1)
    if name == "shared":
        for reader in model.readers():
            reader.attention.reset_parameters()
        assert min(written(model)[0]) > 5 * max(others)


def test_forms_have_the_parts_that_they_are_said_to_have():
    arms = ablation().arms
    trained = {name: sizes(arm, *SIZE)["between"] for name, arm in arms.items()}
    network, projections = 65 * 64 + 65, 2 * 64 * 64
    assert trained["relu"] == trained["softmax"] == 512 * 64 + 4 * 3 * 64 * 64
    assert trained["relu + B1"] - trained["relu"] == 4 * network
    assert trained["relu + B1 + b2"] - trained["relu + B1"] == 4 * 64
    assert trained["relu + B1 + b2"] - trained["common view"] == 3 * (projections + network)
    assert abs(trained["larger common view"] - trained["relu + B1 + b2"]) <= 32
    model = build(arms["relu"], *SIZE, seed=0)
    loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    reader = model.readers()[0].attention
    assert reader.output_bias.grad is None
    assert not reader.output_bias.any()
    assert not reader.thresholds(model.knowledge()).any()
    soft = build(arms["softmax"], *SIZE, seed=0).readers()[0].attention
    scores = torch.randn(3, 5)
    torch.testing.assert_close(soft.activation(scores), scores.softmax(dim=-1))


def test_an_arm_goes_on_without_the_others(monkeypatch):
    """With `--arms`, the seeds that follow the choice of a rate are run although other arms have not begun."""
    text = Text(rows(8, 0), rows(2, 1).tokens, rows(3, 2).tokens, range(270))
    monkeypatch.setattr("experiments.knowledge_twins.study.load_text", lambda *_: text)
    experiment = find("knowledge_twins")
    config = replace(experiment.miniature(tiny()), seeds=(0, 1, 2))
    plan = experiment.setup(config).plan.only(["shared"])
    done = {job: {"measured": [{"choosing": 1.0}]} for job in plan.first}

    def read(job):
        if job not in done:
            raise FileNotFoundError(job.name)
        return done[job]

    assert [job.seed for job in plan.first] == [0]
    assert [(job.arm, job.seed) for job in plan.then(read)] == [("shared", 1), ("shared", 2)]
