"""Metrics of several ranks as one."""

import math

import pytest
import torch

from fr_lightning import parallel
from fr_lightning.trajectory import Trajectory, TrajectoryBatch


def test_names_and_values_that_a_rank_lacks_are_left_to_the_others(monkeypatch):
    ranks = [{"a": 1.0, "lag/max": 2.0, "only": 5.0, "none": math.nan}, {"a": 3.0, "lag/max": 7.0, "none": math.nan}]
    ranks.append({"a": math.nan, "lag/max": 1.0})
    monkeypatch.setattr(parallel, "gather_objects", lambda value: [(one, 1.0) for one in ranks])
    merged = parallel.over_ranks(ranks[0])
    assert {name: merged[name] for name in ("a", "lag/max", "only")} == {"a": 2.0, "lag/max": 7.0, "only": 5.0}
    assert math.isnan(merged["none"])


def test_one_rank_leaves_its_values_as_they_are():
    assert parallel.over_ranks({"a": 1.5, "b/max": -1.0}) == {"a": 1.5, "b/max": -1.0}


def test_ranks_weigh_as_much_as_they_have_to_say(monkeypatch):
    monkeypatch.setattr(parallel, "gather_objects", lambda value: [({"a": 1.0}, 3), ({"a": 5.0}, 1)])
    assert parallel.over_ranks({"a": 1.0}, 3) == {"a": 2.0}


def batch_of(*lengths):
    return TrajectoryBatch(
        Trajectory(torch.ones(n), [False] + [True] * (n - 1), torch.zeros(n), torch.zeros(n), reward=float(n))
        for n in lengths
    )


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (((10, 11), (12, 9)), [[0, 1], [2, 3]]),  # even enough: nobody moves
        (((100, 90), (5, 5)), [[0], [1, 2, 3]]),
        (((40, 30, 20), (10, 10, 10)), [[0, 3, 4], [1, 2, 5]]),
    ],
)
def test_trajectories_change_ranks_where_one_has_much_more_to_do(monkeypatch, ranks, expected):
    batches = [batch_of(*lengths) for lengths in ranks]

    def gather(value):
        return [one.lengths if isinstance(value, list) else one.trajectories for one in batches]

    monkeypatch.setattr(parallel, "gather_objects", gather)
    everything = [one for batch in batches for one in batch]
    for rank, numbers in enumerate(expected):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        mine, found = parallel.share_evenly(batches[rank])
        assert found == numbers
        assert [one.reward for one in mine] == [everything[number].reward for number in numbers]


def test_one_rank_keeps_its_batch():
    batch = batch_of(100, 3)
    assert parallel.share_evenly(batch) == (batch, [0, 1])
