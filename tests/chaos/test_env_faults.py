"""Whatever an environment does, every task drawn is trained on once or closed under a name, and the others play on."""

import asyncio
import itertools
import random
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fr_lightning.assets.embedded import build_tokenizer
from fr_lightning.envs.base import in_thread
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.rollout.ledger import Ledger, TaskSource
from fr_lightning.rollout.loop_thread import LoopThread
from fr_lightning.rollout.pool import Pool, PoolFailed
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.retry import Retries, RetryPolicy
from fr_lightning.rollout.runner import EpisodeLimits, Runner
from tests.chaos.faulty_env import FAULTS, FaultyEnv
from tests.rollout.scripted_engine import ScriptedEngine

HANG = 4.0
"""Seconds: more than any deadline here, little enough for the tests to end."""


@pytest.fixture
def thread():
    thread = LoopThread("test", workers=40)
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(build_tokenizer(["What is 1 + 2? The answer is 3."]))


def make_pool(thread, chat, env, *, batch_size=8, concurrency=8, max_queued=8, env_timeout=1.0, **settings) -> Pool:
    FaultyEnv.attempts.clear()
    FaultyEnv.constructed = 0
    engine = ScriptedEngine(chat, lambda prompt: "ok")
    return Pool(
        thread,
        Runner(engine, chat, limits=EpisodeLimits(max_context=512, env_timeout=env_timeout)),
        lambda: in_thread(env),
        Ledger(TaskSource(None, seed=0)),
        batch_size=batch_size,
        concurrency=concurrency,
        max_queued=max_queued,
        engine_version=lambda: engine.version,
        **{"lag": LagLimit(None), "retry": RetryPolicy(backoff=0.0, max_failure_share=0.9), **settings},
    )


def train(pool: Pool, updates: int) -> list:
    pool.start()
    seen = []
    for version in range(updates):
        seen += pool.next_batch(version)
        pool.published()
    pool.stop()
    assert pool.ledger.drawn == sum(pool.ledger.counts.values())
    assert pool.ledger.counts["trained"] == len({one.rollout_id for one in seen}) == updates * pool.batch_size
    return seen


@pytest.mark.parametrize("fault", FAULTS)
def test_one_episode_in_five_goes_wrong(thread, chat, fault):
    patience = 1.0 if fault.endswith("hangs") else 30.0  # on a busy machine nothing else may count as hanging
    pool = make_pool(thread, chat, lambda: FaultyEnv((fault,), hang=HANG), env_timeout=patience)
    seen = train(pool, 300 if fault == "constructor_hangs" else 5)  # the first waits for few environments
    kind = FAULTS[fault]
    assert set(pool.failures) == ({kind} if kind else set())
    if kind:
        assert pool.failures[kind] > 0
    # every task was played, at the first attempt or the second (which too long a prompt is not given)
    assert set(pool.ledger.counts) - {"prompt_too_long"} == {"trained", "open"}
    source = TaskSource(None, seed=0)
    tasks = {f"rollout-{draw}": source.task(draw) for draw in range(pool.ledger.drawn)}
    if fault != "returns_100_mb":  # cut off by the context before the second turn, which gives the reward
        assert all(one.reward == tasks[one.rollout_id].seed % 2 for one in seen)


def test_a_task_that_always_fails_is_closed_under_the_name_of_its_failure(thread, chat):
    pool = make_pool(
        thread, chat, lambda: FaultyEnv(("step_raises", "tool_is_down", "reward_nan"), lasting=True),
        retry=RetryPolicy(
            backoff=0.0, max_failure_share=0.95, by_kind={"tool_unavailable": Retries(5, 0.0, 0.95)}
        ),
    )  # fmt: skip
    train(pool, 10)
    counts = pool.ledger.counts
    assert counts["env_error"] > 0
    assert counts["tool_unavailable"] > 0
    assert pool.failures["env_error"] >= 3 * counts["env_error"]
    assert pool.failures["tool_unavailable"] >= 5 * counts["tool_unavailable"]


def test_all_faults_at_once(thread, chat):
    faults = tuple(fault for fault in FAULTS if fault != "returns_100_mb")
    pool = make_pool(thread, chat, lambda: FaultyEnv(faults, share=0.15, hang=HANG), concurrency=16)
    train(pool, 12)
    assert set(pool.failures) <= {kind for kind in FAULTS.values() if kind}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("reset_raises", "in env.reset; the latest: env_error in env.reset: ConnectionResetError: the game server"),
        ("constructor_raises", "the environment's constructor: FileNotFoundError: games/train.json"),
        ("step_hangs", "timeout in env.step: no answer within 1 s"),
        ("tool_is_down", "tool_unavailable in env.step: ToolDown: the sandbox does not answer"),
        ("returns_no_text", "observation must be a str, got int 17"),
        ("reward_huge_int", "reward is no number: int 1"),
    ],
)
def test_a_run_in_which_most_episodes_fail_stops_and_says_why(thread, chat, fault, says):
    broken = partial(FaultyEnv, (fault,), share=0.95, lasting=True, hang=HANG)
    with pytest.raises(PoolFailed) as caught:
        train_for_ever(make_pool(thread, chat, broken, retry=RetryPolicy()))
    assert says in str(caught.value)
    assert "% of the latest" in str(caught.value)


def test_one_kind_of_failure_has_a_share_of_its_own(thread, chat):
    strict = RetryPolicy(backoff=0.0, by_kind={"tool_unavailable": Retries(max_failure_share=0.05)})
    with pytest.raises(PoolFailed, match="episodes failed with tool_unavailable"):
        train_for_ever(make_pool(thread, chat, lambda: FaultyEnv(("tool_is_down",), share=0.3), retry=strict))


def train_for_ever(pool: Pool) -> None:
    pool.start()
    for version in itertools.count():
        pool.next_batch(version)
        pool.published()


def test_kinds_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"data.retry.by_kind names tool_error; failures are of the kinds env_"):
        RetryPolicy(by_kind={"tool_error": Retries()})


def test_a_slow_learner_does_not_let_trajectories_pile_up(thread, chat):
    pool = make_pool(thread, chat, FaultyEnv, max_queued=8)
    pool.start()
    for version in range(3):
        pool.next_batch(version)
        time.sleep(0.5)  # thousands of episodes could be played
        assert len(pool.queue.waiting()) <= 16
        assert pool.ledger.counts["open"] <= 16
        pool.published()
    pool.stop()


def test_the_wall_clock_may_jump(thread, chat, monkeypatch):
    jumps, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice([-1e6, 0.0, 1e6]))
    pool = make_pool(thread, chat, FaultyEnv)
    seen = train(pool, 5)
    assert not pool.failures
    assert all(0 <= one.timing.env < 60 and 0 <= one.timing.queue < 60 for one in seen)


def test_nothing_decides_by_the_wall_clock():
    root = Path(__file__).parents[2]
    files = [path for folder in ("fr_lightning", "envs", "callbacks") for path in (root / folder).rglob("*.py")]
    assert not [str(path) for path in files if "time.time(" in path.read_text() or "datetime.now" in path.read_text()]


def test_hanging_and_leaking_environments_cost_their_threads_only(thread, chat):
    before = threading.active_count()
    train(make_pool(thread, chat, lambda: FaultyEnv(("step_hangs", "leaks_threads"), hang=HANG)), 5)
    deadline = time.monotonic() + 3 * HANG
    while threading.active_count() > before + 2:
        assert time.monotonic() < deadline, [one.name for one in threading.enumerate()]
        time.sleep(0.1)


LEAKY = """
import threading, time
from fr_lightning import cli

cli.PATIENCE_SECONDS = 0.5
cli.main = lambda: threading.Thread(target=time.sleep, args=(3600,), name="the leaked one").start() or 7
cli.console()
"""


def test_threads_that_an_environment_leaves_do_not_keep_the_process():
    done = subprocess.run([sys.executable, "-c", LEAKY], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    assert done.stderr.strip() == "fr-lightning: left behind threads that do not end: the leaked one"


def test_a_hundred_megabytes_hold_up_nobody(chat):
    """The event loop is shared by all episodes: what one environment returns may not block it."""
    worst = 0.0

    async def play() -> None:
        nonlocal worst
        engine = ScriptedEngine(chat, lambda prompt: "ok")
        runner = Runner(engine, chat, limits=EpisodeLimits(max_context=512))
        source = TaskSource(None, seed=0)
        episodes = [
            asyncio.create_task(runner.play(source.task(n), FaultyEnv((fault,), share=1.0), rollout_id=str(n), seed=n))
            for n, fault in enumerate(["returns_100_mb", "prompt_of_100_mb"])
        ]
        last = time.thread_time()
        while not all(one.done() for one in episodes):
            await asyncio.sleep(0.01)
            worst, last = max(worst, time.thread_time() - last), time.thread_time()
        await asyncio.gather(*episodes, return_exceptions=True)

    FaultyEnv.attempts.clear()
    asyncio.run(play())
    assert worst < 1.0  # of processor time; tokenising 100 MB takes tens of seconds
