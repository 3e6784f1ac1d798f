"""Admission by lag, played out against random episodes."""

import heapq
import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_lightning.rollout.queue import CompletionQueue, LagLimit
from fr_lightning.trajectory import Trajectory


def trajectory(rollout_id: str, version: int, tokens: int = 1) -> Trajectory:
    return Trajectory(
        token_ids=[1] * (tokens + 1),
        policy_mask=[False] + [True] * tokens,
        behavior_logprobs=[0.0] * (tokens + 1),
        policy_versions=[-1] + [version] * tokens,
        reward=0.0,
        rollout_id=rollout_id,
    )


class Stuck(Exception):
    pass


def stuck():
    raise Stuck


def test_takes_the_next_completed_whoever_started_first():
    queue = CompletionQueue(2, LagLimit(None), 10)
    for name in "abc":
        queue.start(name, 0)
    queue.complete(trajectory("c", 0))
    with pytest.raises(Stuck):
        queue.take(0, stuck)
    queue.complete(trajectory("a", 0))
    assert {t.rollout_id for t in queue.take(0, stuck)} == {"a", "c"}
    assert queue.running == 1
    assert queue.published() == ["a", "c"]


def test_waits_for_a_running_episode_about_to_exceed_the_bound():
    queue = CompletionQueue(1, LagLimit(1, "wait"), 10)
    queue.start("slow", 0)
    queue.start("fast", 0)
    queue.complete(trajectory("fast", 0))
    assert [t.rollout_id for t in queue.take(0, stuck)] == ["fast"]  # one more update may pass before slow is due
    queue.published()
    queue.start("new", 1)
    queue.complete(trajectory("new", 1))
    with pytest.raises(Stuck):
        queue.take(1, stuck)  # at version 1, slow must be in the batch
    queue.complete(trajectory("slow", 0))
    assert [t.rollout_id for t in queue.take(1, stuck)] == ["slow"]


def test_drop_counts_by_length_and_names_the_dropped():
    dropped = []
    queue = CompletionQueue(1, LagLimit(1, "drop"), 10, on_drop=dropped.append)
    queue.start("old", 0)
    queue.start("new", 2)
    queue.complete(trajectory("old", 0, tokens=20))
    queue.complete(trajectory("new", 2))
    assert [t.rollout_id for t in queue.take(2, stuck)] == ["new"]
    assert dropped == ["old"]
    assert queue.dropped_by_length == {"16-31": 1}


def test_time_in_the_queue_is_recorded():
    queue = CompletionQueue(1, LagLimit(None), 10)
    queue.start("a", 0)
    queue.complete(trajectory("a", 0))
    assert queue.take(0, stuck)[0].timing.queue > 0


def test_a_waiting_learner_wakes_when_a_trajectory_comes():
    queue = CompletionQueue(1, LagLimit(None), 10)
    queue.start("a", 0)
    threading.Timer(0.05, lambda: queue.complete(trajectory("a", 0))).start()
    assert queue.take(0)[0].rollout_id == "a"


def test_a_batch_that_can_never_fill_is_refused():
    with pytest.raises(ValueError, match="concurrency"):
        CompletionQueue(64, LagLimit(None), 32)


@pytest.mark.parametrize("settings", [{"max_policy_lag": -1}, {"policy": "skip"}])
def test_bad_limits_are_refused(settings):
    with pytest.raises(ValueError):
        LagLimit(**settings)


def play_out(queue: CompletionQueue, seed: int, concurrency: int, updates: int) -> list[int]:
    """Discrete-event run: heavy-tailed episodes, an update every so often; returns the largest lag of every batch."""
    chance = random.Random(seed)
    clock, version = 0.0, 0
    running: list[tuple[float, str, int]] = []
    names = (f"r{n}" for n in itertools.count())
    lags: list[int] = []
    versions: dict[str, int] = {}

    def fill():
        while len(running) < concurrency and queue.has_space:
            name = next(names)
            queue.start(name, version)
            versions[name] = version
            heapq.heappush(running, (clock + chance.lognormvariate(0, 1.5), name, version))

    while len(lags) < updates:
        fill()
        try:
            batch = queue.take(version, stuck)
        except Stuck:
            assert running, "nothing runs and no batch comes: a deadlock"
            clock, name, started = heapq.heappop(running)
            queue.complete(trajectory(name, started, tokens=chance.randint(1, 40)))
            continue
        lags.append(max(version - versions[t.rollout_id] for t in batch))
        learned = clock + chance.expovariate(0.5)
        while running and running[0][0] < learned:  # episodes end, and others start, while the learner learns
            clock, name, started = heapq.heappop(running)
            queue.complete(trajectory(name, started))
            fill()
        clock, version = learned, version + 1
        queue.published()
    return lags


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 6),
    limit=st.integers(0, 4),
    concurrency=st.integers(6, 40),
)
def test_wait_never_hands_out_more_than_the_bound_and_never_deadlocks(seed, batch, limit, concurrency):
    queue = CompletionQueue(batch, LagLimit(limit, "wait"), concurrency + batch)
    queue_poll_free(queue)
    assert max(play_out(queue, seed, concurrency, updates=30)) <= limit


def test_without_a_bound_lag_does_exceed_it():
    queue = CompletionQueue(2, LagLimit(None), 42)
    queue_poll_free(queue)
    assert max(play_out(queue, 0, 40, updates=100)) > 4  # else the test above would prove nothing


def queue_poll_free(queue: CompletionQueue) -> None:
    """Simulated time: waiting for another thread makes no sense."""
    queue._condition.wait = lambda timeout=None: True  # type: ignore[method-assign]


def test_what_waited_is_put_back_within_lag_and_room_and_a_second_state_replaces_the_first():
    queue = CompletionQueue(2, LagLimit(1, "wait"), 10)  # (1 + 1)·2 = 4 may exist
    old = [trajectory(name, 4) for name in "abcdef"]
    # a, b are trained at version 5 with lag 1; whoever comes third would be at version 6 with lag 2
    assert [t.rollout_id for t in queue.restore(old, 5)] == ["a", "b"]
    assert [t.rollout_id for t in queue.restore([trajectory(name, 5) for name in "uvwxyz"], 5)] == list("uvwx")
    assert [t.rollout_id for t in queue.take(5, stuck)] == ["u", "v"]
    queue.published()
    assert [t.rollout_id for t in queue.waiting()] == ["w", "x"]
    assert queue.restore([], 6) == []
    assert queue.waiting() == []
