"""Scores of an evaluation: avg@k and pass@k with standard errors, over tasks played k times each.

Invariant: a denominator never shrinks in silence. Tasks are the unit of sampling, samples of one task are not
independent; a sample that could not be played is reported beside the score, and the score is over those played.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Outcome:
    """What came of one sample of one task; `success` and `reward` are None where it could not be played.

    `task_set` names the set that the task belongs to, such as a benchmark; "" if there is only one. `metrics` are the
    environment's own numbers; not every task need report the same.
    """

    task_id: str
    success: bool | None
    reward: float | None
    task_set: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """A mean with its standard error over tasks (0 for a single task)."""

    mean: float
    standard_error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"


@dataclass(frozen=True)
class Evaluation:
    """Scores over all tasks. `unplayed` counts samples that failed for good, out of `samples`.

    `sets` holds the same of each set of tasks by name, where there are several; a set of which nothing was played has
    no scores and is not in it. `metrics` holds a score of each of the environment's numbers, over the tasks that report
    it.
    """

    tasks: int
    samples: int
    unplayed: int
    success: Score
    reward: Score
    pass_at: dict[int, Score]
    sets: dict[str, Evaluation] = field(default_factory=dict)
    metrics: dict[str, Score] = field(default_factory=dict)

    @property
    def mean_of_sets(self) -> Score:
        """Success with every set weighing the same, however many tasks it has. Sets are independent, so the standard
        error is √Σ se² / number of sets.
        """
        scores = [one.success for one in self.sets.values()] or [self.success]
        error = math.sqrt(sum(score.standard_error**2 for score in scores))
        return Score(sum(score.mean for score in scores) / len(scores), error / len(scores))


def evaluate(outcomes: Sequence[Outcome]) -> Evaluation:
    """Summarise outcomes.

    avg@k is the mean over tasks of the mean over a task's samples. The standard error is that of the mean over tasks.
    pass@k is unbiased, for every k that is a power of two up to the number of samples (and that number itself).

    Raises:
        ValueError: nothing was played.
    """
    by_task: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.success is not None:
            by_task[outcome.task_id].append(outcome)
    if not by_task:
        raise ValueError(f"none of the {len(outcomes)} evaluation episodes could be played")
    by_set: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_set[outcome.task_set].append(replace(outcome, task_set=""))
    fewest = min(map(len, by_task.values()))
    ks = sorted({1 << power for power in range(fewest.bit_length())} | {fewest})
    wins = {task: sum(bool(outcome.success) for outcome in played) for task, played in by_task.items()}
    return Evaluation(
        tasks=len({outcome.task_id for outcome in outcomes}),
        samples=len(outcomes),
        unplayed=sum(outcome.success is None for outcome in outcomes),
        success=mean_with_error([wins[task] / len(played) for task, played in by_task.items()]),
        reward=mean_with_error(
            [sum(outcome.reward or 0.0 for outcome in played) / len(played) for played in by_task.values()]
        ),
        pass_at={
            k: mean_with_error([pass_at_k(len(played), wins[task], k) for task, played in by_task.items()]) for k in ks
        },
        sets={
            name: evaluate(of_set)
            for name, of_set in by_set.items()
            if len(by_set) > 1 and any(outcome.success is not None for outcome in of_set)
        },
        metrics=_metrics(list(by_task.values())),
    )


def _metrics(tasks: Sequence[Sequence[Outcome]]) -> dict[str, Score]:
    """Of every number: mean over the tasks that report it of the mean over a task's samples."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for played in tasks:
        for name in sorted({name for outcome in played for name in outcome.metrics}):
            values = [outcome.metrics[name] for outcome in played if name in outcome.metrics]
            by_name[name].append(sum(values) / len(values))
    return {name: mean_with_error(values) for name, values in sorted(by_name.items())}


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples succeeds) from n samples: 1 − C(n − c, k)/C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    if not 0 < k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"need 0 < k ≤ n and 0 ≤ c ≤ n, got n={samples}, c={successes}, k={k}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def mean_with_error(values: Sequence[float]) -> Score:
    """Mean and standard error of the mean (sample standard deviation, n − 1)."""
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return Score(mean, 0.0)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return Score(mean, math.sqrt(variance / n))
