"""Baselines against values computed by hand."""

import pytest
import torch

from fr_lightning.advantage import advantages


def test_batch_baseline():
    assert advantages(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist() == [0.5, -0.5, -0.5, 0.5]


def test_group_baseline_has_no_standard_deviation():
    rewards = torch.tensor([1.0, 0.0, 3.0, 5.0], dtype=torch.float64)
    result = advantages(rewards, baseline="group", groups=torch.tensor([7, 7, 2, 2]))
    assert result.tolist() == [0.5, -0.5, -1.0, 1.0]
    assert result.dtype == torch.float64


def test_none_and_positive_only():
    assert advantages(torch.tensor([1.0, -2.0]), baseline="none").tolist() == [1.0, -2.0]
    assert advantages(torch.tensor([1.0, 0.0]), positive_only=True).tolist() == [0.5, 0.0]


def test_equal_rewards_give_exact_zeros():
    assert advantages(torch.full((3,), 0.1)).tolist() == [0.0, 0.0, 0.0]


def test_integer_rewards_are_computed_in_float32():
    result = advantages(torch.tensor([1, 0]))
    assert result.dtype == torch.float32
    assert result.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": torch.tensor([])}, "non-empty"),
        ({"rewards": torch.ones(2, 2)}, "vector"),
        ({"rewards": torch.tensor([1.0, float("nan")])}, r"rows \[1\]"),
        ({"rewards": torch.ones(2), "baseline": "group"}, "groups"),
        ({"rewards": torch.ones(2), "baseline": "median"}, "median"),
    ],
)
def test_bad_inputs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        advantages(**arguments)
