"""Keys are hidden as a mask hides them, what is kept of a bias is what it says, and the judge follows its rules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnflow.bias import GuidanceConfig, attach
from experiments.bias_faithfulness.changed import changed, hide, keep
from experiments.bias_faithfulness.faithful import Prompts, predicted
from experiments.bias_faithfulness.recipe import judge
from experiments.bias_faithfulness.summary import FAITHFUL
from experiments.runner.files import write
from tests.models import tiny


def test_hidden_keys_are_those_that_a_mask_forbids_and_signs_add_up() -> None:
    model, tokens = tiny("Llama", torch.float32).eval(), torch.randint(5, 30, (2, 7))
    with torch.no_grad(), attach(model, GuidanceConfig(hidden_dim=8, init="kaiming", layers="every")) as handle:
        keys = torch.tensor([[False, True, False, False, True, False, False]] * 2)
        layers = range(model.config.num_hidden_layers)
        mine = predicted(model, Prompts(tokens, tokens[:, 0]), dict.fromkeys(layers, keys))
        allow = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7).clone()
        allow[:, 0, -1] &= ~keys
        theirs = model(input_ids=tokens, attention_mask=allow).logits[:, -1].double().log_softmax(dim=-1)
        whole = model(input_ids=tokens).logits
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        assert (mine - whole[:, -1].double().log_softmax(dim=-1)).abs().max() > 1e-3

        def both(bias: Tensor, layer: int) -> Tensor:
            return keep(-1)(bias, layer) + keep(1)(bias, layer)

        with changed(model, both):
            torch.testing.assert_close(model(input_ids=tokens).logits, whole)
        with changed(model, keep(0)):
            none = model(input_ids=tokens).logits
        handle.enabled = False
        torch.testing.assert_close(none, model(input_ids=tokens).logits)
        assert (none - whole).abs().max() > 1e-3


@pytest.mark.parametrize(("sign", "verdict"), [(1, "confirmed"), (-1, "refuted"), (0, "no effect")])
def test_claims_are_judged_by_intervals(sign: int, verdict: str, tmp_path: Path) -> None:
    def row(task: str, quantity: str, mean: float) -> dict[str, object]:
        return {"task": task, "quantity": quantity, "t": [mean, mean - 0.004, mean + 0.004]}

    tasks = ("sums", "recall", "text")
    rows = [row(task, f"faithfulness of the {name}", 0.5) for task in tasks for name in ("bias", "weights")]
    rows += [row(task, FAITHFUL, 0.2 * sign) for task in tasks]
    rows += [row("recall", f"distracted: loss, {name}", 1.0) for name in ("as trained", "none")]
    rows += [
        row("recall", f"distracted: loss, positive less {name}", 0.1 * sign) for name in ("as trained", "negative")
    ]
    rows += [row("text", f"clipped: loss, {name}", 1.0) for name in ("as trained", "none")]
    rows += [row("sums", f"lost without the operand, {one}, from =", 0.4) for one in ("first", "second")]
    rows += [row("sums", "right without the operand, none, from =", 0.9)]
    write(tmp_path / "results.json", {"quantities": rows})
    found = {one.claim: one.verdict for one in judge(tmp_path)}
    assert [found[claim] for claim in ("D29", "D30", "D31", "D32", "D33")] == [
        verdict,
        verdict,
        "refuted",
        "no effect",
        "refuted",
    ]
    assert found["D34"] == ("refuted" if sign else "confirmed"), "equally important"
    assert hide({})(torch.ones(1), 0).tolist() == [1.0]
