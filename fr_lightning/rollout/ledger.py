"""Which task comes next, and what became of every one drawn.

Invariant: exactly once. A rollout drawn is open until it is closed under one name, `trained` or the reason it was not;
the counts always add up to the number drawn. The state is small and plain, so it travels in Lightning's checkpoint, and
rollouts open at the time of a checkpoint are drawn again on resume.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fr_lightning.rollout.runner import derived_seed
from fr_lightning.trajectory import Task

TRAINED = "trained"


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
                id=f"rollout-{draw}",
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
        with self._lock:
            return {
                "next": self._next,
                "open": sorted([*self._open.values(), *self._again]),
                "closed": dict(self._closed),
                "stride": self._stride,
                "seed": self._source.seed,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: what was open then is drawn again first.

        Raises:
            ValueError: the checkpoint was made with another seed or another number of ranks.
        """
        with self._lock:
            if state["seed"] != self._source.seed:
                raise ValueError(
                    f"the checkpoint drew its tasks with data.seed {state['seed']}, this run has "
                    f"{self._source.seed}: tasks would be skipped or doubled. Set data.seed to {state['seed']}"
                )
            if state["stride"] != self._stride:
                raise ValueError(
                    f"the checkpoint was made by {state['stride']} ranks, this run has {self._stride}: resume with "
                    "as many"
                )
            self._next = state["next"]
            self._again = deque(state["open"])
            self._closed = Counter(state["closed"])
            self._open = {}
