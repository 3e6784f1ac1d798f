"""What an evaluation plays: which held-out tasks, how often each, and how tokens are drawn.

Invariant: the tasks depend on the plan and the environment alone, not on `data.seed`: every run is judged by the same.
What came of them is summed up in `evaluation.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fr_lightning.engines.base import Sampling
from fr_lightning.rollout.runner import derived_seed
from fr_lightning.trajectory import Task


@dataclass(frozen=True)
class SetPlan:
    """What is different for one of several sets of tasks; null: as for the others."""

    tasks: int | None = None
    samples: int | None = None
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        if min(1 if number is None else number for number in (self.tasks, self.samples)) < 1:
            raise ValueError(f"an evaluation needs ≥ 1 tasks and samples, got {self}")


@dataclass(frozen=True)
class EvaluationPlan:
    """What is played at validation.

    Attributes:
        tasks: number of held-out tasks; with a dataset, the first so many validation rows of each of its sets. null:
            all rows.
        samples: k, how often each is played (avg@k, pass@k).
        sampling: how tokens are drawn, `max_tokens` and `stop` included; null: as in training.
        sets: what is different for a set of tasks, by its name (the `set` of its rows).
    """

    tasks: int | None = 128
    samples: int = 1
    sampling: Sampling | None = None
    sets: dict[str, SetPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.tasks is not None and self.tasks < 1):
            raise ValueError(f"an evaluation needs ≥ 1 tasks and samples, got {self}")

    def tasks_of(self, split: str, rows: Sequence[Mapping[str, Any]] | None) -> list[Task]:
        """The tasks of a split: of the environment's rows, or, where it has none, made from seeds.

        Raises:
            ValueError: there is no end to them, or a set is planned for that no row is of.
        """

        def task(index: int, **of_row: Any) -> Task:
            identity = f"{split}/{of_row.pop('name', index)}"
            return Task(identity, derived_seed("evaluation", split, index), split=split, group=index, **of_row)

        if rows is None:
            if self.tasks is None:
                raise ValueError("data.evaluation.tasks must be a number: this environment makes tasks without end")
            return [task(index) for index in range(self.tasks)]
        unknown = self.sets.keys() - {str(row.get("set", "")) for row in rows}
        if unknown:
            raise ValueError(f"data.evaluation.sets names {', '.join(sorted(unknown))}, but no {split} task is of it")
        taken: Counter[str] = Counter()
        tasks = []
        for index, row in enumerate(rows):
            name = str(row.get("set", ""))
            most = self._of(name).tasks or self.tasks
            if most is None or taken[name] < most:
                taken[name] += 1
                tasks.append(task(index, name=row.get("id", index), row=row, set=name))
        return tasks

    def samples_of(self, task: Task) -> int:
        return self._of(task.set).samples or self.samples

    def sampling_of(self, task: Task) -> Sampling | None:
        """None: as in training."""
        return self._of(task.set).sampling or self.sampling

    def _of(self, name: str) -> SetPlan:
        return self.sets.get(name, SetPlan())
