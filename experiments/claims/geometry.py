"""The underlying structures of self-attention."""

from __future__ import annotations

from typing import Final

from experiments.claims.claim import Claim, Measured, Paper, Settled

_TABLE: Final = "docs/maths.md#what-the-paper-prints-and-what-is-right_1"

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
                    "tests/experiments/test_geometry_theory.py::test_proposition_2_2_on_the_attention_of_real_models",
                    "tests/experiments/test_geometry_theory.py::"
                    "test_gradients_of_the_projections_follow_from_that_of_the_form",
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
            "G6", "Fig. 2a, Table S2", "Encoders are more symmetric than decoders.", Measured("geometry_checkpoints")
        ),
        Claim(
            "G7", "Fig. 2b, Table S3", "Decoders are more directional than encoders.", Measured("geometry_checkpoints")
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
        Claim("G13", "Table 1", "Symmetric initialisation ends at a lower loss.", Measured("geometry_init")),
        Claim(
            "G14",
            "Table 1, Fig. S5a",
            "It reaches the other's final loss up to 73 % earlier.",
            Measured("geometry_init"),
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
                "refuted",
                "There is such a w for rows as well, in any matrix; and a larger variance may lie below the mean.",
                (
                    _TABLE,
                    "tests/experiments/test_geometry_theory.py::"
                    "test_theorem_2_3_as_printed_holds_for_rows_as_for_columns",
                ),
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
            "A step on W_q and W_k moves M by two rank-1 matrices.",
            Settled(
                "corrected",
                "By -(G W_k^T W_k + W_q^T W_q G), whose terms have rank head_dim at most.",
                (
                    _TABLE,
                    "tests/experiments/test_geometry_theory.py::"
                    "test_gradients_of_the_projections_follow_from_that_of_the_form",
                ),
            ),
        ),
        Claim(
            "G21",
            "tables S2, S3",
            "LLaMA-3, Mistral, MobileLLM and others have S of about 0.",
            Settled(
                "corrected",
                "Query heads were paired with the wrong key heads, fused projections cut wrongly, "
                "three rows are random "
                "weights.",
                (
                    _TABLE,
                    "tests/geometry/test_factored.py::test_heads_that_share_a_key_head_are_neighbours",
                    "tests/geometry/test_published.py::test_records_that_are_wrong_say_why",
                ),
            ),
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
    ),
)
