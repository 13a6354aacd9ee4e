"""What the study of edits makes of its runs."""

from experiments.editing.summary import figure, outcomes, table


def run(subject, before, after, kept):
    common = {"other_facts_kept": kept, "other_facts_leaked": [False], "text": 3.0}
    return {
        "fact": {"relation": "capital", "subject": subject},
        "held_out": True,
        "before": {"is_answer": before, "is_other": [False] * 3, **common, "other_facts_kept": [True]},
        "arms": {"least change": {"is_answer": [False] * 3, "is_other": after, **common, "relative_change": 0.1}},
    }


def test_shares_are_of_prompts_and_of_those_that_the_model_understood():
    runs = [
        run("Norway", [True, True, False], [True, True, False], [True]),
        run("Sweden", [True, False, False], [True, False, True], [False]),
    ]
    before, after = outcomes(runs)
    assert (before.arm, after.arm, after.count) == ("before", "least change", 2)
    means = {name: value.mean for name, value in after.quantities.items()}
    # Sweden has no paraphrase that the model understood: the mean is of Norway alone.
    assert means["paraphrases understood"] == 1
    assert (means["fact"], means["paraphrases"], means["understood"], means["kept"]) == (1, 0.5, 0.25, 0.5)
    assert "25 %" in table([before, after])
    (drawn,) = figure([before, after]).axes
    assert drawn.get_title() == "held out facts"
    nothing = outcomes([run("Sweden", [True, False, False], [True, False, True], [False])])
    assert "paraphrases understood" not in nothing[1].quantities
    assert "-" in table(nothing)
