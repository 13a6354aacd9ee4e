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
                "Given weights are those of cross-attention, an entry for each neuron, if and only if d_k and d_E "
                "reach their ranks; at d_E = d full ranks do not fit. The same function may have other weights that "
                "do: ReLU neurons can be rescaled.",
                (
                    _EQUIVALENT,
                    "tests/knowledge/test_conditions.py::"
                    "test_where_it_says_exact_cross_attention_of_these_widths_is_the_layer",
                    "tests/knowledge/test_conditions.py::test_where_it_denies_a_rank_forbids_it",
                    "tests/knowledge/test_conditions.py::"
                    "test_it_is_a_statement_about_the_weights_and_not_about_the_function",
                ),
            ),
        ),
        Claim(
            "K3",
            "sec. 2.1, 5",
            'A feed-forward layer is "two linear transformations with a non-linear activation function (typically GeLU '
            'or ReLU) in between", and so cross-attention.',
            Settled(
                "corrected",
                "So it is in GPT-2, BERT and their like. LLaMA, Mistral, Qwen and Gemma are gated. With a gate of "
                "SiLU, GELU or ReLU no finite number of entries with one key is the layer, whatever the activation; "
                "with two keys an entry it is. A polynomial gate is the exception.",
                (
                    "docs/maths.md#why-a-gate-is-not-of-this-form",
                    "tests/knowledge/test_conditions.py::"
                    "test_a_gated_neuron_is_no_finite_sum_of_entries_but_for_a_polynomial_gate",
                    "tests/knowledge/test_conditions.py::"
                    "test_a_layer_with_an_identity_gate_is_cross_attention_with_squares",
                ),
            ),
        ),
        Claim(
            "K4",
            "sec. 5.2",
            "Trained jointly, both architectures perform identically.",
            Measured("knowledge_twins"),
            'no difference: "identical performance on any task"',
        ),
        Claim(
            "K5",
            "sec. 3.1, 5.3",
            "One shared base serves all layers by their own projections.",
            Settled(
                "corrected",
                "With given weights, exact if its entries have room for all layers, or each layer sees its own; at "
                "d_E = d full ranks do not fit.",
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
            "O(N d |E|) to O(N d |E'|) + R",
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
            "O(d |E|) to O(d |E'|)",
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
        Claim(
            "K15",
            "sec. 3.1",
            "One base for all layers makes parameters go further than a store of each layer's own.",
            Measured("knowledge_twins"),
        ),
        Claim(
            "K16", "sec. 4.1", "Softmax hinders retrieval: ReLU in its place is better.", Measured("knowledge_twins")
        ),
        Claim(
            "K17",
            "sec. 4.2",
            "A threshold of zero for all entries is not enough: a network B1 on the entry is better.",
            Measured("knowledge_twins"),
        ),
        Claim(
            "K18",
            "sec. 4.3",
            "A bias b2 bridges the spaces of knowledge and of tokens.",
            Measured("knowledge_twins"),
        ),
        Claim(
            "K19",
            "sec. 3.1, 7",
            "Layers need views of the base of their own: projections for each are better than the same keys and values "
            "for all.",
            Measured("knowledge_twins"),
        ),
        Claim(
            "K20",
            "sec. 1, 5.3",
            "Knowledge in feed-forward entries can be changed fact by fact, without retraining.",
            Measured("editing"),
        ),
        Claim(
            "K21",
            "sec. 6.2, 7",
            "An external store can be plugged into a language model, in place of text in its context.",
            Measured("reader"),
            'Table 1: "potentially lower with external KBs"',
        ),
        Claim(
            "K22",
            "sec. 6.2",
            "The structure of knowledge in a store bears on retrieval, reasoning and management.",
            Settled(
                "not testable here",
                "The paper names no structure, no task and no measure; all that it defines are single entries. What "
                "was compared are entries of one kind: made of texts (K13, K14, K21) and of neurons (K12, K20).",
            ),
        ),
    ),
)
