"""Hasse Diagrams for Attention."""

from __future__ import annotations

from typing import Final

from experiments.claims.claim import Claim, Measured, Paper, Settled

_TABLE: Final = "docs/maths.md#what-the-paper-prints-and-what-is-right"

HASSE: Final = Paper(
    "hasse",
    "Hasse Diagrams for Attention: A Partial Order Framework for Designing Transformer Masks",
    (
        Claim(
            "H1",
            "eq. 3, 4",
            "M_ij = 0 lets position j attend to i, and A is the transpose of the mask.",
            Settled(
                "corrected",
                "i attends to j, and there is no transpose: with it, causal masks come out backwards.",
                (_TABLE, "tests/order/test_flow.py::test_order_is_the_brute_force_order"),
            ),
        ),
        Claim(
            "H2",
            "lemma 2.4, 2.5, thm. 2.6",
            "With more layers reachability only grows, and once it stands still it stays: it converges.",
            Settled(
                "confirmed",
                "It does, at the depth that is reported for any mask.",
                (
                    "tests/order/test_flow.py::test_fields_after_some_layers",
                    "tests/order/test_flow.py::test_growth_counts_the_fields",
                ),
            ),
        ),
        Claim(
            "H3",
            "lemma 2.8, thm. 2.10",
            "The limit is a preorder on positions; its classes are partially ordered.",
            Settled(
                "confirmed",
                "For every mask, checked against brute force.",
                (
                    "tests/order/test_flow.py::test_order_is_the_brute_force_order",
                    "tests/order/test_flow.py::test_classes_are_topological",
                ),
            ),
        ),
        Claim(
            "H4",
            "sec. 2.3",
            "Information of a position can reach exactly the outputs above it in the Hasse diagram.",
            Settled(
                "confirmed",
                "Outputs and gradients of real models move where the order says, and nowhere else.",
                ("tests/audit/test_oracle.py", "tests/audit/test_faults.py"),
            ),
        ),
        Claim(
            "H5",
            "def. 3.5",
            "Equivalent nodes compute the same values.",
            Settled(
                "confirmed",
                "Outputs, losses and gradients of merged tasks are those of the subtasks, in double precision.",
                (
                    "tests/tasks/test_verification.py::test_llama_in_double_precision",
                    "tests/tasks/test_merging_oracle.py::test_embedded_against_the_definition",
                ),
            ),
        ),
        Claim(
            "H6",
            "thm. 3.7",
            "The quotient of all nodes by equivalence is the smallest common supergraph.",
            Settled(
                "corrected",
                "False where one down-set holds two equivalent nodes, which the quotient shrinks. Identifying nodes "
                "across tasks and keeping multiplicities embeds every task. Without such repeats the result is the "
                "smallest; with them a search decides, and it is proved where `is_minimal` says so.",
                (
                    "tests/tasks/test_merging.py::test_theorem_3_7_fails_for_two_equal_roots_under_one_node",
                    "tests/tasks/test_merging_oracle.py::test_no_smaller_common_supergraph_exists",
                ),
            ),
        ),
        Claim(
            "H7",
            "def. 3.8",
            "A sparse mask with the same Hasse diagram expresses the same task.",
            Settled(
                "corrected",
                "The diagram is the same, the values at finite depth are not; the depth that is needed is reported.",
                (
                    "tests/order/test_flow.py::test_sparse_realisation_has_the_same_diagram",
                    "tests/order/test_flow.py::test_sparsify_trades_depth_for_pairs",
                ),
            ),
        ),
        Claim(
            "H8",
            "sec. 4.1",
            "Causal attention is the minimal merged task of predicting each next token.",
            Settled(
                "confirmed",
                "It is derived from the family.",
                ("tests/tasks/test_merging.py::test_causal_is_the_closed_form",),
            ),
            effect="n - 1 nodes for n - 1 tasks",
        ),
        Claim(
            "H9",
            "sec. 4.2, eq. 45",
            "Block two-stream attention is the minimal merged task of generating blocks.",
            Settled(
                "confirmed",
                "Equation 45 is what the family derives, without a leak. It is not new: block "
                "diffusion trains with it, "
                "less two dead blocks, and with blocks of one token it is XLNet's.",
                (
                    "tests/tasks/test_merging.py::test_block_two_stream_is_eq_45",
                    "tests/masks/test_catalogue.py::"
                    "test_block_two_stream_is_block_diffusion_without_first_noised_and_last_clean_block",
                ),
            ),
            effect="2(N - 1) nodes, 2(N - 1)l positions",
        ),
        Claim(
            "H10",
            "sec. 4.3, eq. 58",
            "The printed mask of Butterfly attention is the minimal merged task of predicting each "
            "token from both sides.",
            Settled(
                "corrected",
                "Off by one: as printed n - 1 of the n subtasks are not embedded; with <= it is right.",
                (
                    "tests/tasks/test_merging.py::test_the_printed_eq_58_loses_all_centres_but_the_last",
                    "tests/tasks/test_merging.py::test_butterfly_is_eq_58_corrected",
                    "tests/tasks/test_verification.py::test_the_printed_eq_58_fails",
                ),
            ),
            effect="3n - 2 positions",
        ),
        Claim(
            "H11",
            "eq. 48-50",
            "The mask of one Butterfly subtask, and A x A = A for it.",
            Settled(
                "corrected",
                "Row and column k of ones make one class of everything; right is (j <= i <= k) or (k <= i <= j).",
                (_TABLE, "tests/tasks/test_families.py::test_butterfly"),
            ),
        ),
        Claim(
            "H12",
            "eq. 46",
            "The averaged token w'_k differs from the tokens that it averages.",
            Settled(
                "corrected",
                "Averaged with its position, w'_1 is w_2; token embeddings are to be averaged, and "
                "position k encoded after.",
                (_TABLE, "tests/tasks/test_task.py::test_averaged_tokens"),
            ),
        ),
        Claim(
            "H13",
            "sec. 1, 4.3",
            "Butterfly trains all positions bidirectionally, and no position sees its own token.",
            Settled(
                "confirmed",
                "No label leaks in the corrected mask, at any depth. All n tokens are predicted; a third of the 3n - 2 "
                "positions carry labels.",
                (
                    "tests/tasks/test_leaks.py::test_against_the_definition",
                    "tests/tasks/test_families.py::test_butterfly",
                ),
            ),
            effect="supervision density 100 %",
        ),
        Claim(
            "H14",
            "sec. 4",
            "All masks run in standard models by their mask alone, such as with FlexAttention.",
            Settled(
                "confirmed",
                "Attached to transformers models, each part follows its mask.",
                ("tests/masks/hf/test_cache.py::test_prefill_then_decode_is_one_pass",),
            ),
        ),
        Claim(
            "H15",
            "sec. 3, 4.4",
            "Training with the merged task is training every subtask at once.",
            Settled(
                "confirmed",
                "The sum of the losses and its gradients are the same, in a plain loop and in a Trainer.",
                (
                    "tests/tasks/test_collator.py::test_the_loss_is_that_of_all_subtasks",
                    "tests/tasks/test_collator.py::test_trainer_trains_what_a_plain_loop_trains",
                ),
            ),
        ),
        Claim(
            "H16",
            "sec. 4.2",
            "Models trained with block two-stream attention generate block by block without approximation.",
            Measured("hasse"),
        ),
        Claim("H17", "sec. 4", "The derived masks train useful language models on real text.", Measured("hasse")),
        Claim(
            "H18",
            "def. 3.8",
            "A sparse realisation that reaches its depth trains as well as the dense mask.",
            Measured("hasse"),
        ),
        Claim(
            "H19",
            "sec. 4.3",
            "Trained to predict from both sides, a model fills the gaps of a text as it was trained, and better than "
            "from the left (the paper fills none).",
            Measured("infilling"),
        ),
        Claim(
            "H20",
            "sec. 5",
            "Open in the paper: whether the information flow of linear attention also gives a partial order.",
            Settled(
                "confirmed",
                "It does. A residual connection is all that the theorems use. Measured layer by layer in miniatures "
                "with random weights: KDA (Kimi Linear, Ling 3.0), GDN (Qwen3-Next, OLMo-hybrid), lightning attention "
                "and RWKV give the chain of causal attention at depth 1. A KDA layer with closed gates is a window of "
                "4; the chain stays, at a larger depth. Encoders of linear cost without a direction (Nyströmformer, "
                "FNet) are one class.",
                (
                    "docs/maths.md#linear-attention",
                    "tests/audit/test_linear_attention.py::test_a_recurrence_is_a_dense_chain",
                    "tests/audit/test_linear_attention.py::test_a_gate_that_forgets_is_a_sparse_realisation",
                    "tests/audit/test_linear_attention.py::test_encoders_of_linear_cost_are_one_class",
                    "tests/audit/test_measurement.py::test_recurrent_and_hybrid_models_are_chains",
                ),
            ),
        ),
        Claim(
            "H21",
            "sec. 5",
            "With linear attention such as KDA or GDN the framework cannot be directly applied.",
            Settled(
                "corrected",
                "To read the order it can: what a mask would say is measured, and a leak of a KDA layer is found. To "
                "design it cannot in general, since a scan reads a chain and a mask may be any relation. Butterfly "
                "attention can: it is two scans and a read of both states, exactly.",
                (
                    "docs/maths.md#linear-attention",
                    "tests/audit/test_linear_attention.py::test_a_leak_of_kda_is_measured_and_found",
                    "tests/audit/test_linear_attention.py::test_two_scans_are_the_butterfly_mask",
                ),
            ),
        ),
        Claim(
            "H22",
            "sec. 5",
            "The framework is to give task families for MAE-like scenarios (future work).",
            Settled(
                "corrected",
                "Not for masked autoencoders as they are: tasks with other visible patches share no node, so that m of "
                "them need m n positions, and that is minimal. Families share with one visible set and targets decoded "
                "alone (n positions), with visible sets that grow by chunks (block two-stream attention), or with one "
                "block hidden at a time (Butterfly of blocks). Their use on images is not tested here.",
                (
                    "docs/maths.md#masked-autoencoders",
                    "tests/tasks/test_masked_autoencoders.py::"
                    "test_an_encoder_that_sees_the_visible_patches_shares_nothing",
                    "tests/tasks/test_masked_autoencoders.py::test_one_visible_set_serves_every_target",
                    "tests/tasks/test_masked_autoencoders.py::test_visible_sets_that_grow_share_an_ordered_encoder",
                ),
            ),
        ),
        Claim(
            "H23",
            "sec. 2.2",
            "The sparser the mask, the more layers are needed for convergence.",
            Settled(
                "refuted",
                "Of two masks with one order the one with fewer pairs may have the smaller depth: where pairs lie "
                "counts, not how many there are.",
                ("tests/order/test_flow.py::test_a_sparser_mask_may_need_fewer_layers",),
            ),
        ),
    ),
)
