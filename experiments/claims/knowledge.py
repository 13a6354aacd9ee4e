"""Decoupling Knowledge and Reasoning in Transformers."""

from __future__ import annotations

from typing import Final

from experiments.claims.claim import Claim, Measured, Paper, Settled

_TABLE: Final = "docs/maths.md#what-the-paper-claims-and-what-is-right"
_EQUIVALENT: Final = "docs/maths.md#what-is-equivalent-to-what"

KNOWLEDGE: Final = Paper(
    "knowledge",
    "Decoupling Knowledge and Reasoning in Transformers: A Modular Architecture with Generalized Cross-Attention",
    (
        Claim(
            "K1",
            "eq. 16-21",
            "Cross-attention to fixed entries folds into a feed-forward layer.",
            Settled(
                "confirmed",
                "Always and exactly.",
                (_EQUIVALENT, "tests/knowledge/test_attention.py::test_folded_relu_is_the_ordinary_feed_forward_layer"),
            ),
        ),
        Claim(
            "K2",
            "sec. 5.2",
            "A feed-forward layer is such cross-attention, so that both architectures are equivalent.",
            Settled(
                "corrected",
                "An entry for each neuron, if and only if d_k and d_E reach the ranks of the "
                "weights; at d_E = d it is not.",
                (
                    _EQUIVALENT,
                    "tests/knowledge/test_conditions.py::"
                    "test_where_it_says_exact_cross_attention_of_these_widths_is_the_layer",
                    "tests/knowledge/test_conditions.py::test_where_it_denies_a_rank_forbids_it",
                ),
            ),
        ),
        Claim(
            "K3",
            "sec. 5",
            "This covers the feed-forward layers of today's models.",
            Settled(
                "refuted",
                "LLaMA, Mistral, Qwen and Gemma are gated, which is not of this form for any "
                "activation; with two keys an "
                "entry it is.",
                (_EQUIVALENT, _TABLE),
            ),
        ),
        Claim(
            "K4", "sec. 5.2", "Trained jointly, both architectures perform identically.", Measured("knowledge_twins")
        ),
        Claim(
            "K5",
            "sec. 3.1, 5.3",
            "One shared base serves all layers by their own projections.",
            Settled(
                "corrected",
                "Exact if its entries have room for all layers, or each layer sees its own; otherwise not.",
                (_EQUIVALENT, "tests/knowledge/test_layered.py::test_layout_tiles_the_entry"),
            ),
        ),
        Claim("K6", "sec. 4.1", "ReLU enforces sparsity: entries are selected.", Measured("knowledge_twins")),
        Claim(
            "K7",
            "sec. 4.2",
            "Thresholds can be a network on the entry.",
            Settled(
                "corrected",
                "They can, but a network must not be made to memorise them: the entry carries its threshold.",
                (_TABLE, "tests/knowledge/test_attention.py::test_orders_compute_the_equations"),
            ),
        ),
        Claim(
            "K8",
            "Table 2",
            "Retrieval lowers the cost to O(N d |E'|) + R.",
            Settled(
                "corrected",
                "R of an exact search is itself O(N d_k |E|): it saves the value product alone.",
                (_TABLE,),
            ),
        ),
        Claim(
            "K9",
            "Table 2",
            "Memory falls to O(d |E'|).",
            Settled(
                "corrected",
                "E has to be kept somewhere, and the tokens of a text together touch a good part of it.",
                (_TABLE,),
            ),
        ),
        Claim(
            "K10",
            "sec. 4, 6.3",
            "Reading the best entries alone changes little.",
            Settled(
                "confirmed",
                "With an exact search and ReLU what is missing has a bound, zero where the k-th score is not positive.",
                (
                    "docs/maths.md#what-retrieval-promises",
                    "tests/knowledge/test_certificate.py::test_the_bound_holds_and_completeness_is_exact",
                ),
            ),
        ),
        Claim(
            "K11",
            "sec. 2.2, 6",
            "Knowledge and reasoning scale independently: a larger store in place of a larger model.",
            Measured("knowledge_scaling"),
        ),
        Claim(
            "K12",
            "sec. 1, 5.3",
            "Entries are knowledge that can be pinpointed and changed one by one.",
            Measured("knowledge_ablation"),
        ),
        Claim("K13", "sec. 6.2", "Facts are inserted, corrected and deleted at run time.", Measured("facts")),
        Claim(
            "K14",
            "sec. 6.2",
            "Top-k retrieval can be trained through, jointly with an embedding model.",
            Measured("knowledge_answers"),
        ),
    ),
)
