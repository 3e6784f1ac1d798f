"""The policy's parameters sharded over ranks with FSDP2.

Invariant: sharding is applied to the policy itself, whose `forward` is what the learner calls and where every parameter
is used; names and values of the parameters stay as they are.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fr_lightning.policy import Policy


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
