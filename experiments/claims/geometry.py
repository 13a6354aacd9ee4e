"""The underlying structures of self-attention."""

from __future__ import annotations

from typing import Final

from experiments.claims.claim import Claim, Measured, Paper, Settled

_TABLE: Final = "docs/maths.md#what-the-paper-prints-and-what-is-right_1"
_THEORY: Final = "tests/experiments/test_geometry_theory.py::"

GEOMETRY: Final = Paper(
    "geometry",
    "The underlying structures of self-attention: symmetry, directionality, and emergent dynamics in "
    "Transformer training",
    (
        Claim(
            "G1",
            "prop. 2.1",
            "Attention takes convex combinations of tokens, ordered as the scores of the bilinear form are.",
            Measured("geometry_corpus"),
        ),
        Claim(
            "G2",
            "prop. 2.2",
            "The gradient in M is a sum of rank-1 terms, one for each pair of tokens.",
            Settled(
                "corrected",
                "True with the softmax too, which the proof leaves out; but M is no parameter, and its step is not "
                "proportional to that sum.",
                (
                    _TABLE,
                    _THEORY + "test_proposition_2_2_on_the_attention_of_real_models",
                    _THEORY + "test_gradients_of_the_projections_follow_from_that_of_the_form",
                ),
            ),
        ),
        Claim(
            "G3",
            "thm. 2.3",
            "Training on the next token makes columns dominate, on average.",
            Measured("geometry_theory"),
        ),
        Claim("G4", "thm. 2.4", "Training on masked tokens makes M symmetric.", Measured("geometry_theory")),
        Claim(
            "G5",
            "def. 3.1, prop. S1.17",
            "S lies in [-1, 1], is 1 or -1 for symmetric or skew matrices alone, and vanishes for random ones.",
            Settled(
                "confirmed",
                "All three, for every matrix drawn.",
                (
                    "tests/geometry/test_scores.py::test_symmetry_is_as_defined_and_within_its_bounds",
                    "tests/geometry/test_scores.py::"
                    "test_symmetry_is_one_exactly_for_symmetric_and_minus_one_for_skew_matrices",
                    "tests/geometry/test_scores.py::test_symmetry_of_random_matrices_vanishes_from_above",
                ),
            ),
        ),
        Claim(
            "G6",
            "Fig. 2a, Table S2",
            "Encoders are more symmetric than decoders.",
            Measured("geometry_checkpoints"),
            "S 0.18 to 0.77 in encoders, 0.00 to 0.19 in decoders",
        ),
        Claim(
            "G7",
            "Fig. 2b, Table S3",
            "Decoders are more directional than encoders.",
            Measured("geometry_checkpoints"),
            "D -0.79 to -0.02 in encoders, -0.77 to +0.01 in decoders",
        ),
        Claim("G8", "Fig. S1", "Both hold for vision and audio.", Measured("geometry_checkpoints")),
        Claim(
            "G9", "Fig. 3a, S3", "In training, encoders grow more symmetric than decoders.", Measured("geometry_init")
        ),
        Claim(
            "G10", "Fig. 3b, S3", "In training, decoders grow more directional (D lower).", Measured("geometry_init")
        ),
        Claim(
            "G11",
            "Fig. 3c, S4",
            "Late layers of encoders are more symmetric than early ones.",
            Measured("geometry_init"),
        ),
        Claim(
            "G12",
            "Fig. 3d, S4",
            "Late layers of decoders are more directional than early ones.",
            Measured("geometry_init"),
        ),
        Claim(
            "G13",
            "Table 1",
            "Symmetric initialisation ends at a lower loss.",
            Measured("geometry_init"),
            "4 layers: -0.024, -0.172, -0.199 nats; 12 layers: +0.011, -0.009, -0.023",
        ),
        Claim(
            "G14",
            "Table 1, Fig. S5a",
            "It reaches the other's final loss up to 73 % earlier.",
            Measured("geometry_init"),
            "4 layers: 26, 73, 69 %; 12 layers: 0, 20, 35 %",
        ),
        Claim(
            "G15", "Fig. S5b", "Symmetric starts lose symmetry and end above random ones.", Measured("geometry_init")
        ),
        Claim("G16", "Fig. S5c", "Symmetric starts narrow the range of S over layers.", Measured("geometry_init")),
        Claim(
            "G17",
            "def. 3.2, prop. S1.18",
            "D lies in [-1, 1] and is 1 or -1 where only rows or only columns stand out.",
            Settled(
                "corrected",
                "So it is; but the published numbers sum norm - threshold, not the norms of the "
                "definition, and differ a lot.",
                (
                    _TABLE,
                    "tests/geometry/test_scores.py::test_directionality_is_as_defined_and_within_its_bounds",
                    "tests/geometry/test_scores.py::"
                    "test_directionality_is_one_exactly_if_outstanding_norms_are_only_in_rows",
                ),
            ),
        ),
        Claim(
            "G18",
            "lemma S1.11, thm. S1.12",
            "A larger variance has larger tails, so that above some w more columns than rows have their norms.",
            Settled(
                "confirmed",
                "Vacuous: wherever the norms of rows and columns are not the same numbers there is such a w, and one "
                "for rows as well; in a symmetric matrix there is neither. A larger variance may lie below the mean.",
                (_TABLE, _THEORY + "test_theorem_2_3_as_printed_is_vacuous"),
                ("empty",),
            ),
        ),
        Claim(
            "G19",
            "prop. S1.10, cor. S1.13",
            "How often a token is context and how often it is predicted differs by objective as derived.",
            Measured("geometry_corpus"),
        ),
        Claim(
            "G20",
            "remark S1.6, eq. S41",
            "A small step on W_q and W_k moves M by -(G W_k^T W_k + W_q^T W_q G), where both terms have rank 1.",
            Settled(
                "confirmed",
                "For the term of one pair, G = beta_ij x_i x_j^T, which eq. S41 is about; summed over a batch (eq. "
                "S40) both have rank head_dim at most.",
                (
                    _TABLE,
                    _THEORY + "test_a_pair_moves_m_by_two_terms_of_rank_one",
                    _THEORY + "test_gradients_of_the_projections_follow_from_that_of_the_form",
                ),
            ),
        ),
        Claim(
            "G21",
            "tables S2, S3",
            "LLaMA-3, Mistral, MobileLLM and others have S of about 0.",
            Settled(
                "corrected",
                "The authors' code pairs query heads with the wrong key heads, or cuts a fused projection wrongly; "
                "three rows are random weights. On SmolLM2 its pairing leaves S of 0.03 where 0.09 is right; none of "
                "the models of the table that are concerned could be had here.",
                (
                    _TABLE,
                    "tests/geometry/test_factored.py::test_heads_that_share_a_key_head_are_neighbours",
                    "tests/geometry/test_published.py::test_records_that_are_wrong_say_why",
                    "tests/geometry/test_initialise.py::"
                    "test_heads_of_a_group_keep_a_share_of_the_symmetry_of_their_sum",
                ),
            ),
            "S 0.00 to 0.03",
        ),
        Claim(
            "G22",
            "sec. S2.1",
            "W_k = W_q N with skew N makes M skew.",
            Settled(
                "corrected",
                "In the layout of stored weights it is N W_q, one block for each head; then S = -1 exactly.",
                (_TABLE, "tests/geometry/test_initialise.py::test_every_head_and_their_sum_are_exact"),
            ),
        ),
        Claim(
            "G23",
            "eq. S147, S148",
            "Penalties of 1 - S and 1 + S make M symmetric or skew.",
            Settled(
                "confirmed",
                "Descent reaches the target, by head and in full.",
                ("tests/geometry/test_penalty.py::test_descent_reaches_the_target",),
            ),
        ),
        Claim(
            "G24",
            "thm. 2.3, sec. 2.3",
            "Columns dominate more after training on the next token than after training on masked tokens.",
            Measured("geometry_theory"),
        ),
        Claim(
            "G25",
            "prop. S1.7",
            "As context, a token adds what it predicts to columns and itself to rows; predicted, the other way round.",
            Settled(
                "confirmed",
                "Two ways of grouping one sum of outer products.",
                (_THEORY + "test_a_token_adds_to_rows_and_columns_as_proposition_s1_7_says",),
            ),
        ),
        Claim(
            "G26",
            "prop. S1.8, cor. S1.9",
            "A token adds more to columns than to rows as context, and more to rows as prediction.",
            Settled(
                "refuted",
                "The squared norms of rows and of columns have one sum in every update, and index by index their means "
                "are equal where embeddings have one covariance. Their spread may differ, by the embeddings' tails.",
                (
                    "docs/maths.md#do-columns-grow-faster-than-rows",
                    _THEORY + "test_rows_and_columns_grow_alike_in_the_mean",
                    _THEORY + "test_directionality_of_one_update_is_that_of_the_law_of_embeddings",
                ),
            ),
        ),
        Claim(
            "G27",
            "remark S1.15",
            "Where a part of the tokens is masked, pairs of masked tokens add terms that are approximately symmetric.",
            Measured("geometry_theory"),
        ),
        Claim(
            "G28",
            "prop. S1.18.3",
            "D of a random matrix tends to 0 as it grows.",
            Settled(
                "confirmed",
                "But slowly: its spread is about 5 / sqrt(d), 0.65 at d = 64 and 0.32 at d = 256, so that D of one "
                "layer of a small model says little.",
                (_THEORY + "test_directionality_of_random_matrices_vanishes_with_their_size",),
            ),
        ),
        Claim(
            "G29",
            "sec. 3, Fig. S2",
            "Both hold in encoder-decoder models, which are less directional on the whole.",
            Measured("geometry_checkpoints"),
        ),
        Claim(
            "G30",
            "sec. 4.1, Fig. 3c",
            "In training, the middle layers of decoders become strongly skew.",
            Measured("geometry_init"),
        ),
        Claim(
            "G31",
            "sec. 4.1, Fig. 3c",
            "Late layers of encoders converge faster than early ones.",
            Measured("geometry_init"),
        ),
        Claim(
            "G32",
            "sec. 6",
            "Penalties for directional structure could help decoders to train.",
            Measured("geometry_init"),
        ),
        Claim(
            "G33",
            "sec. 6",
            "Self-attention reflects the symmetry of its weights: heads with more of it score pairs more alike.",
            Measured("geometry_in_use"),
        ),
        Claim(
            "G34",
            "sec. 6",
            "Self-attention reflects the directionality of its weights: it ranks heads as their use among tokens does.",
            Measured("geometry_in_use"),
        ),
    ),
)
