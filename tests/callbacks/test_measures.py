"""Each metric against a batch small enough to work out by hand."""

import math

import pytest
import torch

from fr_lightning.callbacks import (
    Curves,
    Drift,
    Entropy,
    EnvironmentMetrics,
    Lag,
    Length,
    ToolCalls,
    Transcripts,
    Truncation,
)
from fr_lightning.module import Update
from fr_lightning.trajectory import Timing, Trajectory, TrajectoryBatch, Turn


def trajectory(tokens, versions, *, success, turns, calls=0, truncated=False, seconds=1.0):
    return Trajectory(
        token_ids=[1] * (tokens + 2),
        policy_mask=[False, False] + [True] * tokens,
        behavior_logprobs=[0.0] * (tokens + 2),
        policy_versions=[-1, -1, *versions],
        reward=float(success),
        success=success,
        truncated=truncated,
        turns=turns,
        tool_calls=calls,
        timing=Timing(generate=seconds, env=0.5),
    )


@pytest.fixture
def update() -> Update:
    batch = TrajectoryBatch(
        [
            trajectory(2, [3, 3], success=True, turns=(Turn(2, 4, "stop"),), calls=0),
            trajectory(
                6, [1, 1, 1, 2, 2, 2], success=False, turns=(Turn(2, 5, "stop"), Turn(5, 8, "length")), calls=3,
                truncated=True, seconds=4.0,
            ),
        ]
    )  # fmt: skip
    return Update(
        version=3,
        batch=batch,
        drift=torch.tensor([0.0, 0.5], dtype=torch.float64),
        admitted=torch.tensor([True, False]),
        kept_tokens=torch.tensor([2, 0]),
        entropy=torch.tensor([1.0, 2.0]),
    )


def test_entropy_is_a_mean_over_tokens(update):
    assert Entropy().measure(update) == {"entropy/mean": 1.75, "entropy/failed": 2.0, "entropy/solved": 1.0}


def test_what_a_batch_does_not_show_is_nan(update):
    update.batch = update.batch.subset([0, 0])
    for measured in (Entropy().measure(update), Length().measure(update)):
        assert all(math.isnan(value) == name.endswith("/failed") for name, value in measured.items())


def test_environment_metrics_average_over_those_that_report(update):
    update.batch[0].metrics["moves"] = 3.0
    assert EnvironmentMetrics().measure(update) == {"env/moves": 3.0}
    update.batch[1].metrics.update(moves=5.0, doors=1.0)
    assert EnvironmentMetrics().measure(update) == {"env/doors": 1.0, "env/moves": 4.0}


def test_length(update):
    assert Length().measure(update) == {
        "length/mean": 4.0,
        "length/max": 6.0,
        "length/total": 6.0,
        "length/turns": 1.5,
        "length/failed": 6.0,
        "length/solved": 2.0,
    }


def test_truncation(update):
    assert Truncation().measure(update) == {"truncation/episodes": 0.5, "truncation/turns": pytest.approx(1 / 3)}


def test_tool_calls(update):
    assert ToolCalls().measure(update) == {"tool_calls/mean": 1.5, "tool_calls/share": 0.5}


def test_drift_and_what_the_gate_cost(update):
    assert Drift().measure(update) == {
        "drift/mean": 0.25,
        "drift/max": 0.5,
        "drift/rejected": 0.5,
        "drift/rejected_tokens": 0.75,
        "drift/rejected_seconds": 4.5,
    }


def test_lag_over_tokens(update):
    assert Lag().measure(update) == {"lag/mean": (3 * 2 + 3 * 1) / 8, "lag/max": 2.0, "lag/mixed": 0.5}


def test_curves_travel_in_the_checkpoint_and_draw_what_there_is():
    curves = Curves(smooth=2)
    curves.updates = [{"update": 1.0, "train/reward": 0.0}, {"update": 2.0, "train/reward": 1.0}]
    curves.evaluations = [{"update": 0.0, "reward": 0.25, "standard_error": 0.1}]
    resumed = Curves(smooth=2)
    resumed.load_state_dict(curves.state_dict())
    figure = resumed.figure()
    reward = figure.axes[0]
    drawn = {line.get_label(): line.get_ydata() for line in reward.lines}
    assert list(drawn["train/reward"]) == [0.0, 1.0]
    assert list(drawn["mean of 2"]) == [0.0, 0.5]
    assert len(figure.axes) == 6


def test_bad_settings_are_refused():
    with pytest.raises(ValueError):
        Transcripts(count=0)
