"""What several ranks need of each other: the policy sharded over them, objects gathered, a failure that ends them all.

Invariant: with one rank, everything here leaves things as they are. Sharding is applied to the policy itself, whose
`forward` is what the learner calls and where every parameter is used; names and values of parameters do not change.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fr_lightning.packing import balanced_parts
from fr_lightning.policy import Policy
from fr_lightning.trajectory import TrajectoryBatch

T = TypeVar("T")

UNEVEN = 1.1
"""Tokens of the busiest rank ÷ the mean, above which trajectories change ranks. All ranks wait for the busiest one; the
exchange, 21 bytes a token, is small beside what a token costs to learn from."""


class FSDP2(ModelParallelStrategy):
    """Weights, gradients and optimizer states sharded over all ranks of all nodes.

    Lightning's own strategy reads its defaults as tensor parallelism within a node; here every rank is data-parallel.

    Args:
        save_distributed_checkpoint: a folder that every rank writes its part of, or one whole file.
        process_group_backend: null: `nccl` on GPUs, `gloo` on CPUs.
        timeout: seconds until a rank that waits for a lost one gives up.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: float = 600.0,
    ):
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


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


def share_evenly(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, list[int]]:
    """What this rank learns from, of the batches of all ranks, so that none has much more to do than the others.

    Returns:
        its trajectories, and their numbers among those of all ranks, which count rank by rank. Collective.
    """
    of_ranks = gather_objects(batch.lengths)
    lengths = [length for of_rank in of_ranks for length in of_rank]
    rank = torch.distributed.get_rank() if len(of_ranks) > 1 else 0
    if max(map(sum, of_ranks)) <= UNEVEN * sum(lengths) / len(of_ranks):
        first = sum(map(len, of_ranks[:rank]))
        return batch, list(range(first, first + len(batch)))
    everything = [trajectory for of_rank in gather_objects(batch.trajectories) for trajectory in of_rank]
    mine = balanced_parts(lengths, len(of_ranks))[rank]
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


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Shard each decoder layer by itself, so that one layer at a time is whole, and the rest (embeddings, head, final
    norm) as the root.

    Args:
        policy: with all its parameters in place; changed.
        mesh: one-dimensional, over the ranks that share a copy of the policy.

    Raises:
        ValueError: the model's decoder is not a list of layers.
    """
    for layer in _layers(policy.model.get_decoder()):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def _layers(decoder: nn.Module) -> nn.ModuleList:
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(decoder).__name__} has no list of layers to shard: use strategy ddp")
    return max(lists, key=len)
