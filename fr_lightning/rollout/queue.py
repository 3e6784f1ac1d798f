"""Where finished trajectories wait for the learner, and who may be taken when: admission by policy lag.

Policy lag of a token = learner version at the update − version it was sampled under. Without a bound, the learner takes
the next B completed trajectories, whoever they are. With `max_policy_lag` L there are two ways to keep it:

* `wait`: nothing is thrown away. At most (L + 1)·B trajectories exist between their start and the publication of the
  update that used them, the oldest go first, and the learner waits for a running one rather than let it exceed L. Long
  episodes are therefore waited for, never lost: no length bias.
* `drop`: the learner never waits for a straggler; a trajectory older than L when its turn comes is dropped, and counted
  by length, since what is dropped is mostly long.

Invariant (`wait`): no trajectory handed out has a token older than L versions. By induction: before and after every
update, at most (j + 1)·B outstanding trajectories fall due within the next j updates.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fr_lightning.trajectory import Trajectory

LagPolicy = Literal["wait", "drop"]
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class LagLimit:
    """How stale a trajectory may be when it is trained on.

    Attributes:
        max_policy_lag: L, in updates; None: no bound.
        policy: what happens to those about to exceed it: `wait` for them or `drop` them.
    """

    max_policy_lag: int | None = 4
    policy: LagPolicy = "wait"

    def __post_init__(self) -> None:
        if self.max_policy_lag is not None and self.max_policy_lag < 0:
            raise ValueError(f"max_policy_lag must be ≥ 0 updates or null, got {self.max_policy_lag}")
        if self.policy not in ("wait", "drop"):
            raise ValueError(f"lag policy must be wait or drop, got {self.policy!r}")


@dataclass
class _Outstanding:
    version: int  # the policy at its start: the oldest any of its tokens can have
    trajectory: Trajectory | None = None
    finished: float = 0.0
    in_training: bool = False


class CompletionQueue:
    """Trajectories from their start to the publication of the update that used them. Safe from any thread.

    Args:
        batch_size: B.
        lag: the bound.
        max_outstanding: most trajectories that may be running, waiting or in training at once.
        on_space: called, from any thread, whenever `has_space` may have become true.
        on_drop: called with the id of a trajectory dropped as stale.
    """

    def __init__(
        self,
        batch_size: int,
        lag: LagLimit,
        max_outstanding: int,
        *,
        on_space: Callable[[], None] = lambda: None,
        on_drop: Callable[[str], None] = lambda rollout_id: None,
    ):
        self.batch_size = batch_size
        self.lag = lag
        self.max_outstanding = max_outstanding
        if lag.policy == "wait" and lag.max_policy_lag is not None:
            self.max_outstanding = min(max_outstanding, (lag.max_policy_lag + 1) * batch_size)
        if self.max_outstanding < batch_size:
            raise ValueError(
                f"only {self.max_outstanding} trajectories may exist at once, fewer than the batch of {batch_size}: "
                "raise data.concurrency or data.max_queued"
            )
        self.dropped_by_length: Counter[str] = Counter()
        self._all: dict[str, _Outstanding] = {}
        self._condition = threading.Condition()
        self._on_space = on_space
        self._on_drop = on_drop

    # -- the pool's side ---------------------------------------------------------------------------------------------

    @property
    def has_space(self) -> bool:
        """Whether one more episode may start. Only the pool's thread starts any, so its answer holds there."""
        with self._condition:
            return len(self._all) < self.max_outstanding

    def start(self, rollout_id: str, version: int) -> None:
        """Take a place for an episode about to start under `version`, or to start afresh after a failure."""
        with self._condition:
            self._all[rollout_id] = _Outstanding(version)

    def complete(self, trajectory: Trajectory) -> None:
        with self._condition:
            entry = self._all[trajectory.rollout_id]
            entry.trajectory, entry.finished = trajectory, time.perf_counter()
            self._condition.notify_all()

    def give_up(self, rollout_id: str) -> None:
        """The episode gives no trajectory after all: free its place."""
        with self._condition:
            del self._all[rollout_id]
            self._condition.notify_all()
        self._on_space()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def waiting(self) -> list[Trajectory]:
        """What is completed and not yet taken, oldest policy first."""
        with self._condition:
            return [entry.trajectory for entry in self._ready() if entry.trajectory is not None]

    def restore(self, waiting: Iterable[Trajectory], version: int) -> list[Trajectory]:
        """Before any episode starts, put back what waited when a checkpoint was made, oldest policy first.

        Args:
            waiting: the trajectories.
            version: of the learner that goes on from it.

        Returns:
            those that this queue has room for, within its lag: the settings may have changed since.
        """
        taken: list[Trajectory] = []
        limit = self.lag.max_policy_lag
        for trajectory in waiting:
            trained = version + len(taken) // self.batch_size  # the learner's version when its turn comes
            fresh = limit is None or trained - trajectory.oldest_version <= limit
            if fresh and len(taken) < self.max_outstanding:
                taken.append(trajectory)
        with self._condition:
            self._all.clear()  # of a state that was restored before this one
            for trajectory in taken:
                entry = _Outstanding(trajectory.oldest_version, trajectory, time.perf_counter())
                self._all[trajectory.rollout_id] = entry
        return taken

    # -- the learner's side ------------------------------------------------------------------------------------------

    def take(self, version: int, check: Callable[[], None] = lambda: None) -> list[Trajectory]:
        """Wait for the next batch of B trajectories and take it, to make update number `version` + 1 of it.

        Args:
            version: of the learner.
            check: called every 50 ms while waiting; whatever it raises ends the wait.
        """
        while True:
            with self._condition:
                stale = self._drop_stale(version)
                batch = self._choose(version)
                if batch is None and not stale:
                    self._condition.wait(POLL_SECONDS)
            for rollout_id in stale:
                self._on_drop(rollout_id)
            if stale:
                self._on_space()
            if batch is not None:
                return batch
            check()

    def published(self) -> list[str]:
        """The update made of the batch taken last is in the engine: free its places; returns its rollout ids."""
        with self._condition:
            done = [rollout_id for rollout_id, entry in self._all.items() if entry.in_training]
            for rollout_id in done:
                del self._all[rollout_id]
        self._on_space()
        return done

    @property
    def running(self) -> int:
        with self._condition:
            return sum(entry.trajectory is None and not entry.in_training for entry in self._all.values())

    def _ready(self) -> list[_Outstanding]:
        ready = (entry for entry in self._all.values() if entry.trajectory is not None)
        return sorted(ready, key=lambda entry: (entry.version, entry.finished))

    def _choose(self, version: int) -> list[Trajectory] | None:
        pending = [entry for entry in self._all.values() if not entry.in_training]
        ready = self._ready()
        if len(ready) < self.batch_size:
            return None
        chosen = ready[: self.batch_size]
        limit = self.lag.max_policy_lag
        if self.lag.policy == "wait" and limit is not None:
            taken = set(map(id, chosen))
            left = [entry for entry in pending if id(entry) not in taken]
            for updates in range(limit):  # what falls due within so many further updates must fit into them
                due = sum(entry.version + limit <= version + updates for entry in left)
                if due > updates * self.batch_size:
                    return None
        now = time.perf_counter()
        batch: list[Trajectory] = []
        for entry in chosen:
            entry.in_training = True
            assert entry.trajectory is not None
            timing = replace(entry.trajectory.timing, queue=now - entry.finished)
            batch.append(replace(entry.trajectory, timing=timing))
            entry.trajectory = None
        return batch

    def _drop_stale(self, version: int) -> list[str]:
        limit = self.lag.max_policy_lag
        if self.lag.policy != "drop" or limit is None:
            return []
        stale = []
        for rollout_id, entry in list(self._all.items()):
            if entry.trajectory is not None and version - entry.trajectory.oldest_version > limit:
                self.dropped_by_length[_length_bucket(entry.trajectory.num_policy_tokens)] += 1
                del self._all[rollout_id]
                stale.append(rollout_id)
        return stale


def _length_bucket(tokens: int) -> str:
    """Powers of two: `16-31`."""
    low = 1 << (tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"
