"""Many episodes at once, on one event loop in a thread of its own, beside the learner.

Invariant: every rollout drawn from the ledger ends trained or closed under the name of what went wrong; an episode that
fails is played again a bounded number of times, then closed; and when too many fail, the learner is told why instead of
waiting for ever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fr_lightning.rollout.ledger import TRAINED, Ledger, Rollout, rollout_id
from fr_lightning.rollout.lockstep import Lockstep
from fr_lightning.rollout.loop_thread import LoopThread, wait
from fr_lightning.rollout.queue import CompletionQueue, LagLimit
from fr_lightning.rollout.retry import RetryPolicy
from fr_lightning.rollout.runner import Environment, EpisodeFailed, Runner, derived_seed
from fr_lightning.trajectory import Task, Trajectory

logger = logging.getLogger(__name__)

STALE = "stale"
CLOSE_SECONDS = 10.0


class PoolFailed(RuntimeError):
    """Rollouts fail so often that waiting for a batch makes no sense; the message says in what and why."""


class Pool:
    """Plays the ledger's rollouts and hands the learner one batch after another.

    Args:
        thread: the event loop; the engine behind `runner` must have been started on it.
        runner: plays one episode.
        make_env: makes a fresh environment; each concurrent episode has its own, kept from task to task.
        ledger: of the tasks.
        batch_size: B.
        concurrency: episodes in flight.
        max_queued: completed trajectories that may wait for the learner before no further episode starts.
        lag: how stale a trajectory may be.
        retry: what happens to failed ones.
        engine_version: version of the weights in the engine now.
    """

    def __init__(
        self,
        thread: LoopThread,
        runner: Runner,
        make_env: Callable[[], Awaitable[Environment]],
        ledger: Ledger,
        *,
        batch_size: int,
        concurrency: int,
        max_queued: int,
        lag: LagLimit,
        retry: RetryPolicy,
        engine_version: Callable[[], int],
    ):
        self.ledger = ledger
        self.failures: Counter[str] = Counter()
        self.batch_size = batch_size
        self._thread = thread
        self.runner = runner
        self._make_env = make_env
        self._concurrency = concurrency
        self._retry = retry
        self._engine_version = engine_version
        self._space = asyncio.Event()
        self._seats: list[asyncio.Task[None]] = []
        self._spare_envs: list[Environment] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._recent: deque[EpisodeFailed | None] = deque(maxlen=64)
        self._broken: BaseException | None = None  # what killed a seat: a fault of our own
        self._in_training: list[str] = []
        self.queue = CompletionQueue(
            batch_size,
            lag,
            concurrency + max_queued,
            on_space=self._wake_seats,
            on_drop=lambda rollout_id: ledger.close(rollout_id, STALE),
        )

    # -- asynchronous training: seats play all the time --------------------------------------------------------------

    def start(self) -> None:
        """Fill the seats; episodes begin at once."""

        async def fill() -> None:
            for _ in range(self._concurrency):
                seat = asyncio.create_task(self._seat())
                seat.add_done_callback(self._seat_ended)
                self._seats.append(seat)

        if not self._seats:
            self._thread.run(fill())

    def next_batch(self, version: int, check: Callable[[], None] = lambda: None) -> list[Trajectory]:
        """The next B completed trajectories for update `version` + 1. `check` is polled, and raises to stop.

        Raises:
            PoolFailed: most episodes fail.
        """

        def check_all() -> None:
            check()
            self._raise_if_broken(self._retry)

        batch = self.queue.take(version, check_all)
        self._in_training += [trajectory.rollout_id for trajectory in batch]
        return batch

    async def _seat(self) -> None:
        while True:
            while not self.queue.has_space:
                self._space.clear()
                await self._space.wait()
            rollout = self.ledger.draw()
            result = await self._attempts(
                rollout.task,
                rollout.id,
                rollout.seed,
                self.runner,
                on_start=lambda rollout=rollout: self.queue.start(rollout.id, self._engine_version()),
            )
            if isinstance(result, Trajectory):
                self.queue.complete(result)
            else:
                self.ledger.close(rollout.id, result.kind)
                self.queue.give_up(rollout.id)

    def _wake_seats(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._space.set)

    def _seat_ended(self, seat: asyncio.Task[None]) -> None:
        if not seat.cancelled() and seat.exception() is not None:
            self._broken = seat.exception()

    # -- synchronous training: one batch in lockstep, the same in every run ------------------------------------------

    def play_batch(self, check: Callable[[], None] = lambda: None) -> list[Trajectory]:
        """Draw and play exactly B rollouts to their ends, more only where some fail for good; in drawing order."""
        batch: list[Trajectory] = []
        while len(batch) < self.batch_size:
            rollouts = [self.ledger.draw() for _ in range(self.batch_size - len(batch))]
            results = self._thread.run(self._play_together(rollouts, self.runner), check)
            for rollout, result in zip(rollouts, results, strict=True):
                if isinstance(result, Trajectory):
                    batch.append(result)
                else:
                    self.ledger.close(rollout.id, result.kind)
            self._raise_if_broken(self._retry)
        self._in_training += [trajectory.rollout_id for trajectory in batch]
        return batch

    async def _play_together(self, rollouts: Sequence[Rollout], runner: Runner) -> list[Trajectory | EpisodeFailed]:
        """In waves of `concurrency` episodes; those that failed play again, together, in the next wave."""
        results: dict[str, Trajectory | EpisodeFailed] = {}
        waiting = deque((rollout, 0) for rollout in rollouts)
        while waiting:
            wave = [waiting.popleft() for _ in range(min(self._concurrency, len(waiting)))]
            names = [_attempt_name(rollout.id, attempt) for rollout, attempt in wave]
            gated = replace(runner, engine=Lockstep(runner.engine, names))
            played = await asyncio.gather(
                *(self._attempt(rollout.task, rollout.id, rollout.seed, attempt, gated) for rollout, attempt in wave)
            )
            for (rollout, attempt), result in zip(wave, played, strict=True):
                if isinstance(result, EpisodeFailed) and self._again(result, attempt + 1):
                    waiting.append((rollout, attempt + 1))
                else:
                    results[rollout.id] = result
        return [results[rollout.id] for rollout in rollouts]

    # -- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        episodes: Sequence[tuple[Task, int]],
        runner_of: Callable[[Task], Runner],
        *,
        lockstep: bool,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[Trajectory | EpisodeFailed]:
        """Play (task, sample number) pairs, each once, and yield what came of each in the order given.

        Args:
            episodes: the pairs.
            runner_of: how a task is played: tasks of different sets may be sampled differently.
            lockstep: in waves, repeatable bit for bit, or as seats come free.
            check: called while waiting; may raise.

        Raises:
            PoolFailed: nothing can be played.
        """

        def check_all() -> None:
            check()
            self._raise_if_broken(PLAY_ON)

        rollouts = [
            Rollout(f"{task.id}#{sample}", -1, task, derived_seed(task.seed, "sample", sample))
            for task, sample in episodes
        ]
        if lockstep:
            for runner, alike in itertools.groupby(rollouts, lambda rollout: runner_of(rollout.task)):
                while wave := list(itertools.islice(alike, self._concurrency)):
                    played = self._thread.run(self._play_together(wave, runner), check_all)
                    check_all()
                    yield from played
            return
        seats = asyncio.Semaphore(self._concurrency)

        async def seated(rollout: Rollout) -> Trajectory | EpisodeFailed:
            async with seats:
                return await self._attempts(rollout.task, rollout.id, rollout.seed, runner_of(rollout.task))

        futures = [self._thread.submit(seated(rollout)) for rollout in rollouts]
        try:
            for future in futures:
                result = wait(future, check_all)
                check_all()
                yield result
        finally:
            for future in futures:
                future.cancel()

    # -- one rollout -------------------------------------------------------------------------------------------------

    async def _attempts(
        self, task: Task, rollout_id: str, seed: int, runner: Runner, on_start: Callable[[], None] = lambda: None
    ) -> Trajectory | EpisodeFailed:
        """Play a task until it gives a trajectory or its attempts are used up."""
        attempt = 0
        while True:
            on_start()
            result = await self._attempt(task, rollout_id, seed, attempt, runner)
            attempt += 1
            if isinstance(result, Trajectory) or not self._again(result, attempt):
                return result
            await asyncio.sleep(self._retry.of(result.kind).backoff * 2 ** (attempt - 1))

    def _again(self, failure: EpisodeFailed, attempts: int) -> bool:
        """Whether a task that was played so often and failed like this is played once more."""
        return failure.retry and attempts < self._retry.of(failure.kind).attempts

    async def _attempt(
        self, task: Task, rollout_id: str, seed: int, attempt: int, runner: Runner
    ) -> Trajectory | EpisodeFailed:
        env: Environment | None = None
        name = _attempt_name(rollout_id, attempt)
        try:
            env = self._spare_envs.pop() if self._spare_envs else await self._fresh_env()
            trajectory = await runner.play(task, env, rollout_id=name, seed=derived_seed(seed, attempt))
        except EpisodeFailed as failure:
            failure.task_id = task.id
            await runner.engine.forget(name)
            self._book(failure)
            self._discard(env)  # its state is unknown
            return failure
        except BaseException:  # cancelled: the run ends
            self._discard(env)
            raise
        self._spare_envs.append(env)
        self._book(None)
        return replace(trajectory, rollout_id=rollout_id)

    async def _fresh_env(self) -> Environment:
        where, seconds = "the environment's constructor", self.runner.limits.env_timeout
        try:
            async with asyncio.timeout(seconds):
                return await self._make_env()
        except TimeoutError as error:
            raise EpisodeFailed(
                "timeout", where, f"not there within {seconds:g} s (data.limits.env_timeout)"
            ) from error
        except Exception as error:  # anybody's code
            raise EpisodeFailed.of_environment(where, error) from error

    def _discard(self, env: Environment | None) -> None:
        if env is not None:
            closing = asyncio.get_running_loop().create_task(env.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and closing.exception() is not None:
            logger.warning("An environment failed to close: %s", closing.exception())

    def _book(self, failure: EpisodeFailed | None) -> None:
        self._recent.append(failure)
        if failure is None:
            return
        if not self.failures[failure.kind]:
            logger.warning("An episode failed and is retried (further ones are counted): %s", failure)
        self.failures[failure.kind] += 1

    def _raise_if_broken(self, retry: RetryPolicy) -> None:
        """Tell the learner when waiting makes no sense: a seat has died, or too many of the latest attempts failed."""
        if self._broken is not None:
            raise self._broken
        recent = list(self._recent)
        if len(recent) < min(16, 2 * self._concurrency):
            return
        failed = [entry for entry in recent if entry is not None]
        self._raise_if_more(failed, "", retry.max_failure_share, len(recent))
        for kind, of_kind in retry.by_kind.items():
            alike = [entry for entry in failed if entry.kind == kind]
            self._raise_if_more(alike, f" with {kind}", of_kind.max_failure_share, len(recent))

    def _raise_if_more(self, failed: Sequence[EpisodeFailed], how: str, share: float, episodes: int) -> None:
        if len(failed) <= share * episodes:
            return
        (where, count), *_ = Counter(entry.where for entry in failed).most_common(1)
        latest = next(entry for entry in reversed(failed) if entry.where == where)
        raise PoolFailed(
            f"{len(failed) / episodes:.0%} of the latest {episodes} episodes failed{how}, {count} of them in {where}; "
            f"the latest: {latest}"
        ) from latest.__cause__

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The ledger, and the trajectories that wait for the learner."""
        waiting = self.queue.waiting()  # first: one that is completed in between is open, and will be played again
        ledger = self.ledger.state_dict()
        still_open = set(map(rollout_id, ledger["open"]))
        kept = [trajectory for trajectory in waiting if trajectory.rollout_id in still_open]
        return {"ledger": ledger, "waiting": [trajectory.state_dict() for trajectory in kept]}

    def load_state_dict(self, state: Mapping[str, Any], version: int, *, use_waiting: bool) -> None:
        """Go on from a checkpoint, before the first batch.

        Args:
            state: of a pool.
            version: of the learner.
            use_waiting: hand out the trajectories that waited; or play their tasks again, as `play_batch` must.

        Raises:
            ResumeRefused: it is a checkpoint of other tasks.
        """
        waiting = [Trajectory.from_state_dict(one) for one in state["waiting"]] if use_waiting else []
        taken = self.queue.restore(waiting, version)
        self.ledger.load_state_dict(state["ledger"], completed={trajectory.rollout_id for trajectory in taken})

    # -- bookkeeping and end -----------------------------------------------------------------------------------------

    def trained(self) -> None:
        """The update made of the last batch is done, whether or not the engine has it yet: its rollouts are trained."""
        for trained in self._in_training:
            self.ledger.close(trained, TRAINED)
        self._in_training = []

    def published(self) -> None:
        """That update is in the engine: the places of its rollouts are free."""
        self.trained()
        self.queue.published()

    def stop(self) -> None:
        """Cancel the episodes in flight and close the environments."""

        async def empty() -> None:
            for seat in self._seats:
                seat.cancel()
            await asyncio.gather(*self._seats, return_exceptions=True)
            for env in self._spare_envs:
                self._discard(env)
            self._spare_envs = []
            if self._closing:
                await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)

        self._thread.submit(empty()).result(timeout=2 * CLOSE_SECONDS)
        self._seats = []


PLAY_ON = RetryPolicy(max_failure_share=0.999)
"""An evaluation reports what could not be played, and stops only where nothing can."""


def _attempt_name(rollout_id: str, attempt: int) -> str:
    """The engine's session: a second attempt is a conversation of its own."""
    return rollout_id if attempt == 0 else f"{rollout_id}~{attempt}"
