"""Streams fresh batches of completed trajectories from running episodes to the learner.

Invariant: a batch is handed out once, and the next only after the update made of the last one is in the engine. The
engine, its event loop and the episodes live exactly as long as the trainer's stage: they start with the first batch
asked for and are closed at its end, by whatever way it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import gymnasium
import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fr_lightning.engines.base import Engine, Sampling
from fr_lightning.envs.base import TextEnv, in_thread
from fr_lightning.evaluation_plan import EvaluationPlan
from fr_lightning.loaders import EvaluationEpisodes, FreshBatches, PlayedEpisodes
from fr_lightning.parallel import gather_objects
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.rollout.ledger import Ledger, ResumeRefused, TaskSource
from fr_lightning.rollout.loop_thread import LoopThread, wait
from fr_lightning.rollout.pool import Pool
from fr_lightning.rollout.probe import probe
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.retry import RetryPolicy
from fr_lightning.rollout.runner import EpisodeFailed, EpisodeLimits, Runner
from fr_lightning.trajectory import Task, Trajectory, TrajectoryBatch


class Learner(Protocol):
    """What the rollouts need to know of the learner."""

    model_name: str
    policy_version: int
    baseline: str
    updates_per_batch: int
    routing_replay: bool


class RolloutDataModule(pl.LightningDataModule):
    """Episodes of an environment, played by an engine, as batches for the learner.

    Args:
        env: the environment: a class_path (its init_args are the environment's settings) or a Gymnasium id such as
            `fr_lightning/Calculator-v0`.
        engine: the generation engine.
        batch_size: B, trajectories per update, over all ranks together; each rank plays its share.
        mode: `async`: episodes run while the learner learns. `sync`: the learner and the episodes take turns, and two
            runs of the same seed are equal bit for bit (for tests and debugging).
        concurrency: episodes in flight on each rank.
        max_queued: completed trajectories that may wait for the learner before no further episode starts, on each rank;
            null: its share of B.
        lag: how stale a trajectory may be when it is trained on.
        sampling: how tokens are drawn, and what ends a turn beside the chat template's end-of-turn token: `max_tokens`,
            and `stop`, strings such as ["</answer>"]. Training needs the full distribution: no top-p, top-k or min-p.
        limits: where an episode is cut off.
        rollouts_per_task: how often each task is played in a row; above 1 only for the `group` baseline.
        retry: what happens to episodes that fail.
        evaluation: what is played at validation.
        seed: of tasks, their order and the policy's dice.
        template_kwargs: passed to the chat template, such as {enable_thinking: false}.
    """

    def __init__(
        self,
        env: Callable[[], TextEnv] | str,
        engine: Engine,
        batch_size: int = 64,
        mode: Literal["async", "sync"] = "async",
        concurrency: int = 64,
        max_queued: int | None = None,
        lag: LagLimit = LagLimit(),  # noqa: B008 (frozen)
        sampling: Sampling = Sampling(),  # noqa: B008
        limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008
        rollouts_per_task: int = 1,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008
        evaluation: EvaluationPlan = EvaluationPlan(),  # noqa: B008
        seed: int = 0,
        template_kwargs: dict[str, Any] | None = None,
    ):
        super().__init__()
        if min(batch_size, concurrency, rollouts_per_task) < 1:
            raise ValueError("data.batch_size, data.concurrency and data.rollouts_per_task must be ≥ 1")
        if batch_size % rollouts_per_task:
            raise ValueError("data.batch_size must be a multiple of data.rollouts_per_task")
        if not sampling.full_support:
            raise ValueError(
                "training samples from the whole distribution (importance sampling divides by its probabilities): set "
                "data.sampling to temperature > 0, top_p 1, top_k 0, min_p 0. Filters belong in "
                "data.evaluation.sampling"
            )
        self.engine = engine
        self.batch_size = batch_size
        self.mode = mode
        self.evaluation = evaluation
        self._make_env = _env_factory(env)
        self._concurrency = concurrency
        self._max_queued = max_queued
        self._lag = lag
        self._sampling = sampling
        self._limits = limits
        self._rollouts_per_task = rollouts_per_task
        self._retry = retry
        self._seed = seed
        self._template_kwargs = template_kwargs
        self._thread: LoopThread | None = None
        self._pool: Pool | None = None
        self._ledger: Ledger | None = None
        self._state: _RolloutState | None = None
        self._reference_env: TextEnv | None = None
        self.published_version: int | None = None
        """Version of the weights last put into the engine; None: none yet."""
        self._closing = threading.Lock()
        self.seconds_waited = 0.0
        """How long the learner waited for its latest batch."""
        self.failures: Mapping[str, int] = {}
        """Attempts that failed in the latest stage, by kind; whether or not a further one succeeded."""

    # -- Lightning's hooks -------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Start the engine's event loop and, on it, the engine; weights follow with the first publication."""
        if self._thread is not None:
            return
        model, share = self._learner.model_name, self._share()
        if stage == "fit":
            self._check_learner()
        self._reference_env = self._make_env()
        facts = self._reference_env.prepare()
        for logger in self.trainer.loggers if facts else []:  # pyright: ignore[reportOptionalMemberAccess]
            logger.log_hyperparams({f"environment/{name}": value for name, value in facts.items()})
        self._thread = LoopThread("rollouts", workers=2 * self._concurrency + 8)
        self.engine.record_routes = self._learner.routing_replay
        starting = self._thread.submit(self.engine.start(model))
        chat = ChatFormat(self._tokenizer(model), template_kwargs=self._template_kwargs)
        wait(starting, self._check)
        room = getattr(self.engine, "max_context", None)
        if room is not None and room < self._limits.max_context:
            raise ValueError(
                f"data.limits.max_context is {self._limits.max_context} tokens but the engine holds {room}: raise "
                "data.engine.init_args.max_context or lower the limit"
            )
        source = TaskSource(self._reference_env.tasks("train"), self._seed, rollouts_per_task=self._rollouts_per_task)
        self._ledger = Ledger(source, rank=self.trainer.global_rank, world_size=self.trainer.world_size)  # pyright: ignore[reportOptionalMemberAccess]
        self._pool = Pool(
            self._thread,
            Runner(self.engine, chat, self._sampling, self._limits),
            lambda: in_thread(self._make_env),
            self._ledger,
            batch_size=share,
            concurrency=self._concurrency,
            max_queued=share if self._max_queued is None else self._max_queued,
            lag=self._lag,
            retry=self._retry,
            engine_version=lambda: self.engine.version,
        )
        if self._state is not None and stage == "fit":
            self._go_on()

    def train_dataloader(self) -> Iterable[TrajectoryBatch]:
        max_steps = self.trainer.max_steps  # pyright: ignore[reportOptionalMemberAccess]
        return FreshBatches(self.next_batch, max_steps if max_steps > 0 else 1_000_000)

    def val_dataloader(self) -> Iterable[PlayedEpisodes]:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> Iterable[PlayedEpisodes]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> Iterable[PlayedEpisodes]:
        return self._evaluation_loader("validation")

    def state_dict(self) -> dict[str, Any]:
        if self._pool is None and self._state is None:
            return {}
        now = self._state_now()
        return {"version": now.version, "ranks": gather_objects(now.rollouts)}  # Lightning saves what rank 0 returns

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        trainer = self.trainer
        if trainer is None or trainer.state.fn != "fit" or "ranks" not in state_dict:
            return  # an evaluation draws no training tasks
        ranks = state_dict["ranks"]
        if len(ranks) != trainer.world_size:
            raise ResumeRefused(
                f"the checkpoint was made by {len(ranks)} ranks, this run has {trainer.world_size}: resume with as many"
            )
        self._state = _RolloutState(ranks[trainer.global_rank], state_dict["version"])
        self._go_on()

    def teardown(self, stage: str) -> None:
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()

    # -- what the learner calls --------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        assert self._ledger is not None, "the data module is not set up"
        return self._ledger

    @property
    def pool(self) -> Pool:
        assert self._pool is not None, "the data module is not set up"
        return self._pool

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Put the learner's weights into the engine and free the places of the trajectories they were made of."""
        self.pool.trained()
        self.load(named_tensors, version)
        self.published_version = version
        self.pool.published()

    def load(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Put weights into the engine and nothing else: no update was made."""
        assert self._thread is not None
        self._thread.run(self.engine.update_weights(named_tensors, version), self._check)

    def probe(self, prompts: int, tokens: int) -> TrajectoryBatch:
        """Some fresh completions, of up to so many tokens each, with the engine's own account of them."""
        assert self._thread is not None

        async def all_of_them() -> list[Trajectory]:
            return await asyncio.gather(*(probe(self.pool.runner, number, tokens) for number in range(prompts)))

        return TrajectoryBatch(self._thread.run(all_of_them(), self._check))

    def next_batch(self) -> TrajectoryBatch:
        """The fresh batch for the learner's next update; waits for it."""
        version = self._learner.policy_version
        if self.published_version != version:
            raise RuntimeError(
                f"the learner is at version {version}, the weights in the engine at {self.published_version}: "
                "training needs the fr_lightning.callbacks.WeightSync callback (the command line adds it by itself)"
            )
        began = time.perf_counter()
        if self.mode == "sync":
            trajectories = self.pool.play_batch(self._check)
            assert self._thread is not None
            self._thread.run(self.engine.sleep(), self._check)
        else:
            self.pool.start()
            trajectories = self.pool.next_batch(version, self._check)
        self.seconds_waited = time.perf_counter() - began
        return TrajectoryBatch(trajectories)

    def close(self) -> None:
        """Stop the episodes and the engine. Safe to call twice, and from an exception's way out."""
        with self._closing:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            if self._pool is not None:
                self._state = self._state_now()
                self.failures = self._pool.failures
                if self._pool.ledger.drawn:
                    rank_zero_info(self._account())
            pool, self._pool = self._pool, None
            with contextlib.ExitStack() as ending:  # each step is taken whatever becomes of the others
                ending.callback(thread.stop)
                ending.callback(lambda: thread.submit(self.engine.close()).result(timeout=60.0))
                if pool is not None:
                    ending.callback(pool.stop)
                if self._reference_env is not None:
                    ending.callback(self._reference_env.close)
            self.published_version = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _share(self) -> int:
        """This rank's part of a batch."""
        ranks = self.trainer.world_size  # pyright: ignore[reportOptionalMemberAccess]
        if self.batch_size % (ranks * self._rollouts_per_task):
            raise ValueError(
                f"data.batch_size {self.batch_size} must be a multiple of ranks × data.rollouts_per_task = "
                f"{ranks} × {self._rollouts_per_task}"
            )
        return self.batch_size // ranks

    def _state_now(self) -> _RolloutState:
        version = self._learner.policy_version
        if self._pool is None:
            assert self._state is not None
            return self._state
        if self.published_version != version:
            self._pool.trained()  # stopped between the optimizer's step and its publication
        return _RolloutState(self._pool.state_dict(), version)

    def _account(self) -> str:
        """What became of the tasks, in a line."""
        counts = {name: count for name, count in self.ledger.counts.items() if count}
        told = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
        failed = ", ".join(f"{count:,} {kind}" for kind, count in self.failures.items())
        return (
            f"{self.ledger.drawn:,} tasks drawn: {told}"
            + (" (in flight or waiting; kept for a resumed run)" if "open" in counts else "")
            + (f". Failed attempts: {failed}" if failed else "")
        )

    def _go_on(self) -> None:
        assert self._state is not None
        self.pool.load_state_dict(self._state.rollouts, self._state.version, use_waiting=self.mode == "async")

    def _check_learner(self) -> None:
        """Refuse combinations of settings that would train on something else than they say."""
        learner = self._learner
        if learner.updates_per_batch > 1 and self._lag.policy == "wait" and self._lag.max_policy_lag is not None:
            raise ValueError(
                "model.updates_per_batch > 1 makes several versions of one batch, which a bounded lag cannot count: "
                "set data.lag.max_policy_lag to null, or data.lag.policy to drop"
            )
        if self.engine.sleep_while_learning and self.mode != "sync":
            raise ValueError(
                "data.engine.init_args.sleep_while_learning needs data.mode sync: in async mode episodes run while the "
                "learner learns"
            )
        if learner.baseline == "group" and (self._rollouts_per_task < 2 or self.mode != "sync"):
            raise ValueError(
                "model.baseline group needs every rollout of a prompt in one batch: set data.rollouts_per_task to 2 or "
                "more and data.mode to sync"
            )

    @property
    def _learner(self) -> Learner:
        assert self.trainer is not None
        return cast(Learner, self.trainer.lightning_module)

    def _tokenizer(self, model: str) -> Any:
        from fr_lightning.models import load_tokenizer  # transformers takes seconds to import: not for --help

        return load_tokenizer(model)

    def _check(self) -> None:
        """Polled wherever the learner waits: SIGTERM must not find it asleep."""
        trainer = self.trainer
        if trainer is not None and trainer.received_sigterm:
            from lightning.pytorch.utilities.exceptions import SIGTERMException

            raise SIGTERMException

    def _evaluation_loader(self, split: str) -> EvaluationEpisodes:
        trainer = self.trainer
        assert trainer is not None
        assert self._reference_env is not None
        tasks = self.evaluation.tasks_of(split, self._reference_env.tasks(split))
        mine = tasks[trainer.global_rank :: trainer.world_size]
        episodes = [(task, sample) for task in mine for sample in range(self.evaluation.samples_of(task))]
        return EvaluationEpisodes(episodes, self.play)

    def play(self, episodes: list[tuple[Task, int]]) -> Iterator[Trajectory | EpisodeFailed]:
        """Evaluation episodes, each played once, in the order given."""
        runner = self.pool.runner

        def runner_of(task: Task) -> Runner:
            return dataclasses.replace(runner, sampling=self.evaluation.sampling_of(task) or self._sampling)

        return self.pool.evaluate(episodes, runner_of, lockstep=self.mode == "sync", check=self._check)


@dataclass(frozen=True)
class _RolloutState:
    """Of this rank's rollouts, when the learner was at this version."""

    rollouts: Mapping[str, Any]
    version: int


def _env_factory(env: Callable[[], TextEnv] | str) -> Callable[[], TextEnv]:
    if not isinstance(env, str):
        return env
    try:
        spec = gymnasium.spec(env)
    except gymnasium.error.Error as error:
        raise ValueError(
            f"data.env {env!r} is neither a class_path that imports from here nor an environment registered with "
            f"Gymnasium: {error}"
        ) from error

    def make() -> TextEnv:
        made = gymnasium.make(spec).unwrapped
        if not isinstance(made, TextEnv):
            raise TypeError(f"{env} is a {type(made).__name__}; fr_lightning plays TextEnv environments")
        return made

    return make
