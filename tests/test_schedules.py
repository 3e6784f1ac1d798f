"""Learning rates at chosen updates, by hand."""

import itertools

import pytest
import torch

from fr_lightning.schedules import Constant, WarmupCosine


def rates(schedule, steps):
    values = []
    for _ in range(steps):
        values.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return values


def optimizer(lr=1.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_warm_up_cosine_and_floor():
    values = rates(WarmupCosine(optimizer(2.0), total_steps=100, warmup=0.03, floor=0.1), 120)
    assert values[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert values[100:] == pytest.approx([0.2] * 20)
    middle = 3 + 97 // 2
    assert values[middle] == pytest.approx(1.1, abs=0.03)
    assert all(a >= b for a, b in itertools.pairwise(values[3:]))


def test_constant_with_warm_up():
    assert rates(Constant(optimizer(), warmup_steps=3), 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("bad", [{"total_steps": 0}, {"total_steps": 9, "warmup": 1.0}, {"total_steps": 9, "floor": 2}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError):
        WarmupCosine(optimizer(), **bad)
