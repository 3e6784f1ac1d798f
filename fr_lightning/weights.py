"""From the learner's parameters, however they are sharded, to whole tensors an engine can load.

Invariant: one parameter at a time is whole, so the extra memory is that of the largest one; every rank walks the same
parameters in the same order, since gathering a shard is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather each tensor from its shards (a no-op for plain tensors), detached, under the names given."""
    for name, tensor in named:
        tensor = tensor.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # FSDP2, tensor parallel
