"""A trajectory refuses what could not have happened, and a batch pads without touching the content."""

import pytest
import torch

from fr_lightning.trajectory import Trajectory, TrajectoryBatch

GOOD = {
    "token_ids": [5, 6, 7],
    "policy_mask": [False, True, True],
    "behavior_logprobs": [0.0, -1.0, -0.5],
    "policy_versions": [-1, 3, 4],
    "reward": 1.0,
}


def test_lengths_versions_and_lag():
    trajectory = Trajectory(**GOOD)
    assert len(trajectory) == 3
    assert trajectory.num_policy_tokens == 2
    assert trajectory.oldest_version == 3
    assert trajectory.policy_lag(5).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5, 6]}, "one length"),
        ({"policy_mask": [False, False, False]}, "no policy token"),
        ({"policy_mask": [True, True, True]}, "starts with a prompt"),
        ({"behavior_logprobs": [0.0, -1.0, 0.5]}, "log-probability"),
        ({"behavior_logprobs": [0.0, -1.0, float("nan")]}, "log-probability"),
        ({"policy_versions": [-1, 3, -1]}, "no policy version"),
        ({"contexts": (0, 1)}, "starts with a prompt"),
        ({"contexts": ()}, "ascending slots of 3, from 0"),
        ({"contexts": (1,)}, "ascending slots of 3, from 0"),
        ({"contexts": (0, 3)}, "ascending slots of 3, from 0"),
        ({"contexts": (0, 2, 1)}, "ascending slots of 3, from 0"),
    ],
)
def test_impossible_trajectories_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Trajectory(**{**GOOD, **change})


def test_contexts_are_marked_where_they_begin_and_kept_with_the_rest():
    two = Trajectory(
        token_ids=[1, 2, 3, 4],
        policy_mask=[False, True, False, True],
        behavior_logprobs=[0.0, -1.0, 0.0, -2.0],
        policy_versions=[-1, 0, -1, 0],
        reward=0.0,
        contexts=(0, 2),
    )
    rows = TrajectoryBatch([Trajectory(**GOOD), two]).pad([0, 1])
    assert rows.context_starts.tolist() == [[True, False, False, False], [True, False, True, False]]
    assert Trajectory.from_state_dict(two.state_dict()).contexts == (0, 2)


def test_a_batch_pads_on_the_right_in_the_order_asked_for():
    longer = Trajectory(
        token_ids=[1, 2, 3, 4],
        policy_mask=[False, False, False, True],
        behavior_logprobs=[0.0, 0.0, 0.0, -2.0],
        policy_versions=[-1, -1, -1, 0],
        reward=0.0,
        success=False,
        temperature=0.5,
        group=9,
    )
    batch = TrajectoryBatch([Trajectory(**GOOD, success=True), longer])
    rows = batch.pad([1, 0], pad_token_id=99)
    assert rows.token_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 99]]
    assert rows.attention_mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert rows.policy_mask.tolist() == [[False] * 3 + [True], [False, True, True, False]]
    assert rows.behavior_logprobs.tolist() == [[0.0, 0.0, 0.0, -2.0], [0.0, -1.0, -0.5, 0.0]]
    assert rows.temperature.tolist() == [0.5, 1.0]
    assert batch.rewards.tolist() == [1.0, 0.0]
    assert batch.failed.tolist() == [False, True]
    assert batch.policy_lengths.tolist() == [2, 1]
    assert batch.groups.tolist() == [0, 9]
    assert batch.lengths == [3, 4]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError):
        TrajectoryBatch([])


def test_lightning_leaves_a_batch_whole():
    from lightning.fabric.utilities import move_data_to_device

    batch = TrajectoryBatch([Trajectory(**GOOD)])
    assert move_data_to_device(batch, torch.device("cpu")) is batch
