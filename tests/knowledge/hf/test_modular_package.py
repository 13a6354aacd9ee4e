"""Masks, biases, audits and geometry of this package on a modular model, as on any other."""

import pytest
import torch

import attnflow as af
from tests.models import modular, tokens


def flow(model, ids):
    """Which tokens' embeddings each output depends on."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
    rows = [
        torch.autograd.grad(logits[q].square().sum(), embedded, retain_graph=True)[0][0] for q in range(len(logits))
    ]
    return torch.stack(rows).abs().sum(-1) > 0


@pytest.mark.parametrize("entries_per_token", [None, 5])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks(implementation, entries_per_token):
    model, ids = modular(torch.float32, entries_per_token=entries_per_token), tokens(1, 8)
    for mask in (af.masks.sliding_window(8, 3), af.masks.attention_sink(8, 2, 2), af.masks.prefix_lm(8, 3)):
        with af.masks.attach(model, mask, backend=implementation):
            # Two blocks: what reaches a token in two steps; reading entries lets nothing flow between tokens.
            one = mask.dense().bool() | torch.eye(8, dtype=torch.bool)
            assert torch.equal(flow(model, ids), (one.float() @ one.float()) > 0)
    causal = model(input_ids=ids).logits
    with af.masks.attach(model, af.masks.causal(8)):
        torch.testing.assert_close(model(input_ids=ids).logits, causal, rtol=1e-4, atol=1e-4)


def test_geometry_scores_attention_alone(tmp_path):
    """The readers' projections are called query and key, too, but are none of attention."""
    model = modular(torch.float32)
    model.save_pretrained(tmp_path)
    for scored in (af.geometry.score(model, attention="all"), af.geometry.score(tmp_path, attention="all")):
        assert not scored.notes
        assert [(row.layer, row.head) for row in scored if row.head != "all"] == [
            (layer, head) for layer in range(2) for head in range(4)
        ]
        attention = model.model.layers[1].self_attn
        query = attention.q_proj.weight.double().unflatten(0, (4, 8))[2]
        key = attention.k_proj.weight.double().unflatten(0, (2, 8))[1]
        form = query.T @ key
        (row,) = [row for row in scored if (row.layer, row.head) == (1, 2)]
        symmetric, skew = (form + form.T) / 2, (form - form.T) / 2
        expected = (symmetric.square().sum() - skew.square().sum()) / form.square().sum()
        assert row.symmetry == pytest.approx(expected.item(), abs=1e-6)
