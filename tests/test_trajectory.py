"""A trajectory refuses what could not have happened, and a batch pads without touching the content."""

import pytest
import torch

from fr_lightning.trajectory import Trajectory, TrajectoryBatch, Turn

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
        ({"routed_experts": [[[0, 1]], [[0, 1]]]}, "routed experts of 3 tokens"),
        ({"routed_experts": [[0, 1], [0, 1], [0, 1]]}, "routed experts of 3 tokens"),
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


ROUTES = [[[0, 5], [-1, -1]], [[3, 1], [-1, -1]], [[-1, -1], [-1, -1]]]  # [3 tokens, 2 layers, 2 experts]


def test_routed_experts_are_kept_narrow_and_padded_with_none():
    routed = Trajectory(**GOOD, routed_experts=ROUTES)
    assert routed.routed_experts.dtype == torch.int8
    assert Trajectory(**GOOD, routed_experts=torch.full((3, 1, 1), 128)).routed_experts.dtype == torch.int16
    longer = {name: [*value, value[-1]] for name, value in GOOD.items() if name != "reward"}
    rows = TrajectoryBatch([routed, Trajectory(**longer, reward=0.0)]).pad([1, 0])
    assert rows.routed_experts.tolist() == [[[[-1] * 2] * 2] * 4, [*ROUTES, [[-1] * 2] * 2]]
    assert torch.equal(rows.to("cpu").routed_experts, rows.routed_experts)
    unrouted = TrajectoryBatch([Trajectory(**GOOD)]).pad([0])
    assert unrouted.routed_experts is None
    assert unrouted.to("cpu").routed_experts is None
    with pytest.raises(ValueError, match="differ in layers"):
        TrajectoryBatch([routed, Trajectory(**GOOD, routed_experts=torch.zeros(3, 1, 2))]).pad([0, 1])


@pytest.mark.parametrize("routes", [None, ROUTES])
def test_a_checkpoint_holds_all_of_it_and_is_loaded_without_running_code(routes, tmp_path):
    before = Trajectory(**GOOD, routed_experts=routes, turns=(Turn(1, 3, "stop"),))
    torch.save(before.state_dict(), tmp_path / "state")
    after = Trajectory.from_state_dict(torch.load(tmp_path / "state", weights_only=True))
    for name, value in vars(before).items():
        found = getattr(after, name)
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value, name
    old = {name: value for name, value in before.state_dict().items() if name != "routed_experts"}
    assert Trajectory.from_state_dict(old).routed_experts is None  # of a checkpoint from before there were any


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError):
        TrajectoryBatch([])


def test_lightning_leaves_a_batch_whole():
    from lightning.fabric.utilities import move_data_to_device

    batch = TrajectoryBatch([Trajectory(**GOOD)])
    assert move_data_to_device(batch, torch.device("cpu")) is batch
