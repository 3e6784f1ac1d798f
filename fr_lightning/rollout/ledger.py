"""Which task comes next, and what became of every one drawn.

Invariant: exactly once. A rollout drawn is open until it is closed under one name, `trained` or the reason it was not;
the counts always add up to the number drawn. The state is small and plain, so it travels in Lightning's checkpoint, and
rollouts open at the time of a checkpoint are drawn again on resume, unless their trajectories travel with it.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from fr_lightning.rollout.runner import derived_seed
from fr_lightning.trajectory import Task

TRAINED = "trained"
SAMPLED_ROWS = 64
"""Rows that stand for the whole dataset when it is compared with another."""


class ResumeRefused(ValueError):
    """A checkpoint belongs to another run: going on from it would train on something else than the settings say."""


@dataclass(frozen=True)
class TaskSource:
    """The endless, seeded order of training tasks: `task(n)` depends on n and the settings, on nothing else.

    Attributes:
        rows: the dataset, shuffled anew every epoch; None: every draw is a task of its own, made from its seed.
        seed: of the order and of the tasks.
        rollouts_per_task: consecutive draws that play the same task (1: the paper's way; more: group baselines).
    """

    rows: Sequence[Mapping[str, Any]] | None
    seed: int
    rollouts_per_task: int = 1
    split: str = "train"

    def task(self, draw: int) -> Task:
        group = draw // self.rollouts_per_task
        if self.rows is None:
            seed = derived_seed(self.seed, self.split, group)
            return Task(id=f"{self.split}/{group}", seed=seed, split=self.split, group=group)
        epoch, place = divmod(group, len(self.rows))
        index = _epoch_order(len(self.rows), self.seed, epoch)[place]
        row = self.rows[index]
        name = str(row.get("id", index))
        seed = derived_seed(self.seed, self.split, index)
        return Task(id=f"{self.split}/{name}", seed=seed, row=row, split=self.split, group=group)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the order of tasks depends on, by the names of its settings. Reads rows, once."""
        facts = {"data.seed": self.seed, "data.rollouts_per_task": self.rollouts_per_task}
        if self.rows is None:
            return {**facts, "training rows": "made from seeds"}
        count = len(self.rows)
        digest = hashlib.blake2b(digest_size=8)
        for index in sorted({place * (count - 1) // SAMPLED_ROWS for place in range(SAMPLED_ROWS + 1)}):
            digest.update(json.dumps(dict(self.rows[index]), sort_keys=True, default=repr).encode())
        return {**facts, "training rows": f"{count} ({digest.hexdigest()})"}


@lru_cache(maxsize=4)
def _epoch_order(rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(rows))
    random.Random(derived_seed(seed, "epoch", epoch)).shuffle(order)
    return tuple(order)


@dataclass(frozen=True)
class Rollout:
    """One draw: a task to play once. `seed` is of the policy's dice in the first attempt."""

    id: str
    draw: int
    task: Task
    seed: int


class Ledger:
    """Draws rollouts and books what became of them. Safe from any thread.

    Args:
        source: of the tasks.
        rank, world_size: this process draws the numbers rank, rank + world_size, rank + 2·world_size, …
    """

    def __init__(self, source: TaskSource, *, rank: int = 0, world_size: int = 1):
        self._source = source
        self._next = rank
        self._stride = world_size
        self._open: dict[str, int] = {}
        self._again: deque[int] = deque()
        self._closed: Counter[str] = Counter()
        self._lock = threading.Lock()

    def draw(self) -> Rollout:
        with self._lock:
            if self._again:
                draw = self._again.popleft()
            else:
                draw, self._next = self._next, self._next + self._stride
            rollout = Rollout(
                id=rollout_id(draw),
                draw=draw,
                task=self._source.task(draw),
                seed=derived_seed(self._source.seed, "rollout", draw),
            )
            self._open[rollout.id] = draw
            return rollout

    def close(self, rollout_id: str, reason: str) -> None:
        """Book an open rollout under `reason`, for good.

        Raises:
            KeyError: it is not open; closing twice would train or count a task twice.
        """
        with self._lock:
            if rollout_id not in self._open:
                raise KeyError(f"{rollout_id} is not open: every rollout is closed exactly once")
            del self._open[rollout_id]
            self._closed[reason] += 1

    @property
    def counts(self) -> dict[str, int]:
        """Rollouts by what became of them; `open` ones included, so that the values add up to all drawn."""
        with self._lock:
            return {**self._closed, "open": len(self._open) + len(self._again)}

    @property
    def drawn(self) -> int:
        return sum(self.counts.values())

    def state_dict(self) -> dict[str, Any]:
        source = self._source.facts  # before the lock: episodes draw under it
        with self._lock:
            return {
                "next": self._next,
                "open": sorted([*self._open.values(), *self._again]),
                "closed": dict(self._closed),
                "stride": self._stride,
                "source": source,
            }

    def load_state_dict(self, state: Mapping[str, Any], completed: Collection[str] = ()) -> None:
        """Go on from a checkpoint: what was open then is drawn again first.

        Args:
            state: of a ledger.
            completed: ids of open rollouts that need not be drawn again: their trajectories are at hand.

        Raises:
            ResumeRefused: the checkpoint was made with other tasks, another order or another number of ranks.
        """
        now = self._source.facts
        with self._lock:
            for name, then in state["source"].items():
                if then != now[name]:
                    raise ResumeRefused(
                        f"the checkpoint drew its tasks with {name} {then}, this run has {now[name]}: tasks would be "
                        "skipped or doubled. Resume with the same tasks, or go on with the weights alone: "
                        "`fr-lightning export` them and begin a new run from that folder (model.policy.name)"
                    )
            if state["stride"] != self._stride:
                raise ResumeRefused(
                    f"the checkpoint was made by {state['stride']} ranks, this run has {self._stride}: resume with "
                    "as many"
                )
            self._next = state["next"]
            self._open = {rollout_id(draw): draw for draw in state["open"] if rollout_id(draw) in completed}
            self._again = deque(draw for draw in state["open"] if rollout_id(draw) not in completed)
            self._closed = Counter(state["closed"])


def rollout_id(draw: int) -> str:
    return f"rollout-{draw}"
