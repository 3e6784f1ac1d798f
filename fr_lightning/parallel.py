"""What several ranks need of each other: a strategy, objects gathered, work shared, a failure that ends them all.

A team is the ranks that hold each layer among them (tensor parallelism) and so learn from the same trajectories; mostly
a team is one rank. Ranks of a team have numbers next to each other.

Invariant: with one rank, everything here leaves things as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fr_lightning.packing import balanced_parts
from fr_lightning.trajectory import TrajectoryBatch

T = TypeVar("T")

UNEVEN = 1.1
"""Tokens of the busiest rank ÷ the mean, above which trajectories change ranks. All ranks wait for the busiest one; the
exchange, 21 bytes a token and its routes where they are replayed, is small beside what a token costs to learn from."""


class FSDP2(ModelParallelStrategy):
    """Weights, gradients and optimizer states sharded over all ranks of all nodes.

    Lightning's own strategy reads its defaults as tensor parallelism within a node; here that is asked for.

    Args:
        tensor_parallel_size: ranks of a team, which compute each layer together: above 1 where one layer, or the
            activations of one trajectory, are too large for a device. A divisor of the ranks of a node.
        save_distributed_checkpoint: a folder that every rank writes its part of, or one whole file.
        process_group_backend: null: `nccl` on GPUs, `gloo` on CPUs.
        timeout: seconds until a rank that waits for a lost one gives up.
        offload: keep weights, gradients and optimizer states in host memory. The optimizer then computes on the CPU,
            and each layer's weights come to the device when it is their turn. Not yet run on a GPU.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: float = 600.0,
        offload: bool = False,
    ):
        if tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be ≥ 1, got {tensor_parallel_size}")
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
        )
        self.team_size = tensor_parallel_size
        self.offload = offload

    def setup_environment(self) -> None:
        if self.num_processes % self.team_size:
            raise ValueError(
                f"trainer.devices {self.num_processes} must be a multiple of "
                f"trainer.strategy.init_args.tensor_parallel_size {self.team_size}: a team lies on one node"
            )
        self._data_parallel_size = self.num_nodes * self.num_processes // self.team_size
        super().setup_environment()

    def model_to_device(self) -> None:
        if self.offload:  # buffers are there already; what is on the CPU shall stay there, but batches go to the device
            assert self.lightning_module is not None
            self.lightning_module._device = self.root_device
        else:
            super().model_to_device()

    def _get_process_group_backend(self) -> str:
        chosen = super()._get_process_group_backend()
        # norms, checkpoints and publications gather what lies in host memory
        return "cpu:gloo,cuda:nccl" if self.offload and chosen == "nccl" else chosen


class FailedRank(pl.Callback):
    """A rank that fails ends, and by that the others; it begins nothing collective, for they are somewhere else. So
    `save_on_exception` is switched off then: the latest regular checkpoint is what a run goes on from. SIGTERM, which
    Lightning tells to all ranks at the same step, still saves. `FlashReinforce` brings this callback along.
    """

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.world_size == 1 or isinstance(exception, SIGTERMException):
            return
        for callback in trainer.checkpoint_callbacks:  # Lightning runs them after all others
            if isinstance(callback, ModelCheckpoint):
                callback.save_on_exception = False


def gather_objects(value: T) -> list[T]:
    """The values of all ranks, in their order. Collective: every rank must call it, the same number of times."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    gathered: list[T] = [value] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def of_team(batch: TrajectoryBatch, size: int) -> TrajectoryBatch:
    """The batches of all ranks of this one's team as one, in their order. Collective."""
    if size == 1:
        return batch
    of_ranks = gather_objects(batch.trajectories)
    first = torch.distributed.get_rank() // size * size
    return TrajectoryBatch(trajectory for of_rank in of_ranks[first : first + size] for trajectory in of_rank)


def share_evenly(batch: TrajectoryBatch, team_size: int = 1) -> tuple[TrajectoryBatch, list[int]]:
    """What this rank's team learns from, of the batches of all ranks, so that none has much more to do than the others.

    Returns:
        its trajectories, and their numbers among those of all ranks, which count rank by rank. Collective.
    """
    of_ranks = gather_objects(batch.lengths)
    lengths = [length for of_rank in of_ranks for length in of_rank]
    rank = torch.distributed.get_rank() if len(of_ranks) > 1 else 0
    if team_size == 1 and max(map(sum, of_ranks)) <= UNEVEN * sum(lengths) / len(of_ranks):
        first = sum(map(len, of_ranks[:rank]))
        return batch, list(range(first, first + len(batch)))
    everything = [trajectory for of_rank in gather_objects(batch.trajectories) for trajectory in of_rank]
    mine = balanced_parts(lengths, len(of_ranks) // team_size)[rank // team_size]
    return TrajectoryBatch(everything[row] for row in mine), mine


def over_ranks(values: Mapping[str, float], weight: float = 1.0) -> dict[str, float]:
    """Metrics of all ranks as one: the largest of those called `…max`, the mean of the others. Collective, one exchange
    for all of them; a rank may lack a name or hold NaN for it, and then says nothing about it.

    Args:
        values: of this rank.
        weight: of this rank in the means, such as the number of trajectories behind them.
    """
    of_ranks = gather_objects((dict(values), weight))
    merged = {}
    for name in dict.fromkeys(name for of_rank, _ in of_ranks for name in of_rank):
        found = [(of_rank[name], w) for of_rank, w in of_ranks if not math.isnan(of_rank.get(name, math.nan))]
        if not found:
            merged[name] = math.nan
        elif name.endswith("max"):
            merged[name] = max(value for value, _ in found)
        else:
            merged[name] = sum(value * w for value, w in found) / sum(w for _, w in found)
    return merged
