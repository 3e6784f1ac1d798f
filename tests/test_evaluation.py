"""Scores against hand-worked numbers and brute force."""

import itertools

import pytest

from fr_lightning.evaluation import Outcome, evaluate, mean_with_error, pass_at_k


def test_averages_over_tasks_with_their_standard_error():
    outcomes = [Outcome("a", True, 1.0), Outcome("a", False, 0.0), Outcome("b", True, 3.0), Outcome("b", True, 1.0)]
    result = evaluate(outcomes)
    assert (result.tasks, result.samples, result.unplayed) == (2, 4, 0)
    assert result.success.mean == 0.75
    assert result.success.standard_error == pytest.approx(0.25)  # means 0.5 and 1: deviation 0.3536 / √2
    assert result.reward.mean == 1.25
    assert result.pass_at[1].mean == 0.75
    assert result.pass_at[2].mean == 1.0


def test_the_unplayed_are_reported_and_not_scored():
    result = evaluate([Outcome("a", True, 1.0), Outcome("b", None, None)])
    assert (result.tasks, result.samples, result.unplayed) == (2, 2, 1)
    assert result.success.mean == 1.0
    with pytest.raises(ValueError, match="none of the 1"):
        evaluate([Outcome("a", None, None)])


def test_sets_are_scored_apart_and_weigh_the_same_in_their_mean():
    large = [Outcome(f"l{n}", n < 2, float(n < 2), "large") for n in range(8)]  # 2 of 8
    small = [Outcome("s", True, 1.0, "small"), Outcome("s", False, 0.0, "small"), Outcome("t", True, 1.0, "small")]
    result = evaluate([*large, *small, Outcome("u", None, None, "unplayed")])
    assert set(result.sets) == {"large", "small"}
    assert result.unplayed == 1
    assert (result.sets["large"].success.mean, result.sets["small"].success.mean) == (0.25, 0.75)
    assert result.mean_of_sets.mean == 0.5
    # large: deviation √(2·0.75² + 6·0.25²)/7 = 0.46291, / √8 = 0.16366; small: 0.35355 / √2 = 0.25
    assert result.mean_of_sets.standard_error == pytest.approx((0.163663**2 + 0.25**2) ** 0.5 / 2, rel=1e-5)
    assert result.success.mean == pytest.approx((2 + 0.5 + 1) / 10)
    assert evaluate(large).sets == {}
    assert evaluate(large).mean_of_sets.mean == 0.25


def test_the_environments_numbers_are_scored_over_the_tasks_that_report_them():
    outcomes = [
        Outcome("a", True, 1.0, metrics={"steps": 4.0, "success/seen": 1.0}),
        Outcome("a", False, 0.0, metrics={"steps": 8.0, "success/seen": 0.0}),
        Outcome("b", True, 1.0, metrics={"steps": 2.0, "success/unseen": 1.0}),
        Outcome("c", None, None),
    ]
    metrics = evaluate(outcomes).metrics
    assert {name: score.mean for name, score in metrics.items()} == {
        "steps": 4.0,
        "success/seen": 0.5,
        "success/unseen": 1.0,
    }
    assert metrics["steps"].standard_error == pytest.approx(2.0)  # of the tasks' means 6 and 2


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (4, 4, 2), (6, 0, 3), (6, 1, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_refuses_nonsense():
    for bad in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError):
            pass_at_k(*bad)


def test_one_value_has_no_error():
    assert mean_with_error([0.5]).standard_error == 0.0
