"""What Lightning iterates over: fresh batches for training, played episodes for evaluation.

Invariant: neither prefetches. Each has a length: without one, Lightning would fetch a batch ahead, which is a step of
staleness, and a batch lost on resume.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fr_lightning.rollout.runner import EpisodeFailed
from fr_lightning.trajectory import Task, Trajectory, TrajectoryBatch


class PlayedEpisodes:
    """Some evaluation episodes and what came of each. No `Sequence`, as `TrajectoryBatch` is none."""

    def __init__(self, played: Sequence[tuple[Task, Trajectory | EpisodeFailed]]):
        self.played = played

    def __iter__(self) -> Iterator[Trajectory | EpisodeFailed]:
        return (result for _, result in self.played)


@dataclass(frozen=True)
class FreshBatches:
    """The training loader: endless and re-entrant. Episodes start with the first batch asked for.

    Attributes:
        next_batch: waits for one.
        length: only where Lightning draws the line between epochs.
    """

    next_batch: Callable[[], TrajectoryBatch]
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TrajectoryBatch]:
        while True:
            yield self.next_batch()


@dataclass(frozen=True)
class EvaluationEpisodes:
    """Evaluation episodes in chunks, so that the progress bar knows where it is.

    Attributes:
        episodes: tasks, each with the number of its sample.
        play: plays them, and yields what came of each in their order.
    """

    episodes: list[tuple[Task, int]] = field(repr=False)
    play: Callable[[list[tuple[Task, int]]], Iterator[Trajectory | EpisodeFailed]]
    chunk: int = 8

    def __len__(self) -> int:
        return -(-len(self.episodes) // self.chunk)

    def __iter__(self) -> Iterator[PlayedEpisodes]:
        results = zip((task for task, _ in self.episodes), self.play(self.episodes), strict=True)
        for _ in range(len(self)):
            yield PlayedEpisodes(list(itertools.islice(results, self.chunk)))
