"""Many episodes at once: overlap, retries, exactly-once accounting, and the same batch in every sync run."""

import asyncio
import random
import subprocess
import sys
import threading
import time

import pytest
from scripted_engine import ScriptedEngine

from fr_lightning.envs.base import TextEnv, in_thread
from fr_lightning.rollout.ledger import Ledger, TaskSource
from fr_lightning.rollout.loop_thread import LoopThread, wait
from fr_lightning.rollout.pool import Pool, PoolFailed
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.retry import RetryPolicy
from fr_lightning.rollout.runner import EpisodeFailed, Runner
from fr_lightning.trajectory import Task, Trajectory


class Echo(TextEnv):
    """Two turns; reward by the task's seed; naps, and fails, as told."""

    made = 0

    def __init__(self, nap=lambda: 0.0, fail=lambda env: None):
        type(self).made += 1
        self.nap, self.fail, self.turn, self.task_seed = nap, fail, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn, self.task_seed = 0, seed or 0
        self.fail(self)
        return f"task {seed}", {}

    def step(self, action):
        time.sleep(self.nap())
        self.turn += 1
        return f"turn {self.turn}", float(self.task_seed % 2), self.turn == 2, False, {}


@pytest.fixture
def thread():
    thread = LoopThread("test", workers=40)
    yield thread
    thread.stop()


def make_pool(thread, chat, *, env=Echo, engine=None, concurrency=8, batch_size=4, **settings):
    engine = engine or ScriptedEngine(chat, lambda prompt: "ok")
    defaults = {"max_queued": 4, "lag": LagLimit(None), "retry": RetryPolicy(backoff=0.0)}
    return Pool(
        thread,
        Runner(engine, chat),
        lambda: in_thread(env),
        Ledger(TaskSource(None, seed=0)),
        batch_size=batch_size,
        concurrency=concurrency,
        engine_version=lambda: engine.version,
        **{**defaults, **settings},
    )


def test_batches_come_and_every_draw_is_accounted_for(thread, chat):
    pool = make_pool(thread, chat)
    pool.start()
    seen = []
    for version in range(5):
        seen += [t.rollout_id for t in pool.next_batch(version)]
        pool.published()
    pool.stop()
    assert len(set(seen)) == 20
    assert pool.ledger.counts["trained"] == 20
    assert pool.ledger.drawn == sum(pool.ledger.counts.values()) >= 20
    assert set(pool.ledger.counts) == {"trained", "open"}


def test_episodes_overlap(thread, chat):
    pool = make_pool(thread, chat, env=lambda: Echo(nap=lambda: 0.1), concurrency=16, batch_size=16)
    pool.start()
    began = time.perf_counter()
    pool.next_batch(0)
    assert time.perf_counter() - began < 16 * 0.2 / 2  # one after another they take 3.2 s
    pool.stop()


def test_back_pressure_bounds_what_is_started(thread, chat):
    pool = make_pool(thread, chat, concurrency=4, max_queued=4)
    pool.start()
    time.sleep(0.5)
    assert pool.ledger.drawn == 8
    pool.next_batch(0)
    assert pool.ledger.drawn == 8  # places are freed by publication, not before
    pool.published()
    time.sleep(0.3)
    assert pool.ledger.drawn == 12
    pool.stop()


def test_environments_are_kept_from_task_to_task(thread, chat):
    Echo.made = 0
    pool = make_pool(thread, chat, concurrency=4)
    pool.start()
    for version in range(5):
        pool.next_batch(version)
        pool.published()
    pool.stop()
    assert Echo.made <= 4


def test_a_failed_episode_is_played_again_in_a_fresh_environment(thread, chat):
    failed = set()

    def once(env):
        if env.task_seed not in failed:
            failed.add(env.task_seed)
            raise RuntimeError("first time")

    pool = make_pool(
        thread, chat, env=lambda: Echo(fail=once), retry=RetryPolicy(attempts=2, backoff=0.0, max_failure_share=1.0)
    )
    pool.start()
    assert len(pool.next_batch(0)) == 4
    pool.stop()
    assert pool.failures["env_error"] >= 4
    assert "env_error" not in pool.ledger.counts


def test_a_hopeless_task_is_closed_by_name_and_never_trained(thread, chat):
    def odd(env):
        if env.task_seed % 4 == 1:
            raise RuntimeError("no such game")

    pool = make_pool(thread, chat, env=lambda: Echo(fail=odd), retry=RetryPolicy(attempts=2, backoff=0.0))
    pool.start()
    for version in range(10):
        assert all(t.reward in (0.0, 2.0) for t in pool.next_batch(version))
        pool.published()
    pool.stop()
    counts = pool.ledger.counts
    assert counts["env_error"] > 0
    assert counts["trained"] == 40


def test_when_most_episodes_fail_the_learner_is_told_why(thread, chat):
    def always(env):
        raise FileNotFoundError("games/train.json")

    pool = make_pool(thread, chat, env=lambda: Echo(fail=always))
    pool.start()
    with pytest.raises(PoolFailed, match=r"100% of the latest .* env\.reset.*FileNotFoundError: games/train\.json"):
        pool.next_batch(0)
    pool.stop()


def test_a_constructor_that_raises_is_a_failure_too(thread, chat):
    def broken():
        raise ImportError("no module named textworld")

    pool = make_pool(thread, chat, env=broken)
    pool.start()
    with pytest.raises(PoolFailed, match=r"constructor.*no module named textworld"):
        pool.next_batch(0)
    pool.stop()


def test_the_learners_wait_can_be_ended(thread, chat):
    pool = make_pool(thread, chat, env=lambda: Echo(nap=lambda: 5.0))
    pool.start()

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with pytest.raises(Stop):
        pool.next_batch(0, stop)
    pool.stop()


def test_dropped_trajectories_are_closed_as_stale(thread, chat):
    pool = make_pool(thread, chat, lag=LagLimit(0, "drop"), concurrency=8, max_queued=8)
    pool.start()
    time.sleep(0.3)  # all completed under version 0
    stop = threading.Event()

    def learn():
        pool.runner.engine.version = 3  # type: ignore[attr-defined]
        pool.next_batch(3)
        stop.set()

    worker = threading.Thread(target=learn)
    worker.start()
    worker.join(10)
    assert stop.is_set()
    assert pool.ledger.counts["stale"] >= 8
    pool.stop()


class Babbler(ScriptedEngine):
    """An engine whose words depend on the order of its calls: any disorder shows."""

    def __init__(self, chat):
        super().__init__(chat, lambda prompt: f"call {len(self.prompts)}")


def sync_batches(chat, naps_seed):
    thread = LoopThread("test", workers=40)
    chance = random.Random(naps_seed)
    failed = set()

    def once(env):
        if env.task_seed % 3 == 0 and env.task_seed not in failed:
            failed.add(env.task_seed)
            raise RuntimeError("first time")

    def make():
        return Echo(nap=lambda: chance.random() * 0.02, fail=once)

    pool = make_pool(
        thread,
        chat,
        env=make,
        engine=Babbler(chat),
        concurrency=3,
        batch_size=8,
        max_queued=8,
        retry=RetryPolicy(attempts=3, backoff=0.0, max_failure_share=1.0),
    )
    batches = []
    for _ in range(2):
        batches += [(t.rollout_id, t.reward, t.token_ids.tolist()) for t in pool.play_batch()]
        pool.published()
    thread.stop()
    assert pool.ledger.counts == {"trained": 16, "open": 0}
    return batches


def test_sync_batches_do_not_depend_on_timing(chat):
    assert sync_batches(chat, 1) == sync_batches(chat, 2)


@pytest.mark.parametrize("lockstep", [False, True])
def test_evaluation_plays_each_episode_once_in_order(thread, chat, lockstep):
    def odd(env):
        if env.task_seed == 3:
            raise RuntimeError("unplayable")

    pool = make_pool(thread, chat, env=lambda: Echo(fail=odd), concurrency=3)
    episodes = [(Task(id=f"validation/{n}", seed=n), sample) for n in range(5) for sample in range(2)]
    results = list(pool.evaluate(episodes, lambda task: pool.runner, lockstep=lockstep))
    assert len(results) == 10
    for (task, _), result in zip(episodes, results, strict=True):
        if task.seed == 3:
            assert isinstance(result, EpisodeFailed)
        else:
            assert isinstance(result, Trajectory)
            assert result.task_id == task.id
    assert all(r.task_id == "validation/3" for r in results if isinstance(r, EpisodeFailed))
    assert pool.ledger.drawn == 0  # evaluation draws nothing from training
    pool.stop()


@pytest.mark.parametrize("lockstep", [False, True])
def test_evaluation_retries_and_stops_early_when_nothing_works(thread, chat, lockstep):
    failed = set()

    def once(env):
        if env.task_seed not in failed:
            failed.add(env.task_seed)
            raise RuntimeError("first time")

    episodes = [(Task(id=f"validation/{n}", seed=n), 0) for n in range(100)]
    settings = {"retry": RetryPolicy(attempts=2, backoff=0.0, max_failure_share=1.0)}
    pool = make_pool(thread, chat, env=lambda: Echo(fail=once), **settings)
    assert all(
        isinstance(r, Trajectory) for r in pool.evaluate(episodes[:9], lambda task: pool.runner, lockstep=lockstep)
    )
    pool.stop()

    def always(env):
        raise FileNotFoundError("games/valid.json")

    pool = make_pool(thread, chat, env=lambda: Echo(fail=always))
    with pytest.raises(PoolFailed, match=r"games/valid\.json"):
        list(pool.evaluate(episodes, lambda task: pool.runner, lockstep=lockstep))
    pool.stop()


def test_every_environment_is_closed_in_flight_or_not(thread, chat):
    opened, closed = [], []

    class Owner(Echo):
        def __init__(self):
            super().__init__(nap=lambda: 0.05)
            opened.append(self)

        def close(self):
            closed.append(self)

    pool = make_pool(thread, chat, env=Owner)
    pool.start()
    pool.next_batch(0)
    pool.stop()
    assert len(opened) == len(closed) == len(set(map(id, closed)))


def test_a_step_that_is_made_is_booked_before_it_is_published(thread, chat):
    pool = make_pool(thread, chat)
    pool.start()
    pool.next_batch(0)
    pool.trained()  # the engine may die, or SIGTERM come, before the publication
    assert pool.ledger.counts["trained"] == 4
    pool.published()
    assert pool.ledger.counts["trained"] == 4
    pool.stop()


def test_waiting_for_a_result_that_is_there_is_not_interrupted(thread):
    def check():
        raise KeyboardInterrupt

    async def soon():
        await asyncio.sleep(0.05)
        return 7

    assert wait(thread.submit(soon()), check) == 7


HANGING = """
import asyncio, sys, time
from fr_lightning.envs.base import TextEnv

class Hangs(TextEnv):
    def step(self, action):
        time.sleep(3600)

async def main():
    try:
        async with asyncio.timeout(0.2):
            await Hangs().astep("x")
    except TimeoutError:
        print("gave up", flush=True)

asyncio.run(main())
"""


def test_an_environment_that_hangs_does_not_keep_the_process():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("gave up", 0)
