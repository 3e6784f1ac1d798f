"""The learner's parameters, however they are sharded: as whole tensors an engine can load, and their gradient.

Invariant: one parameter at a time is whole, so the extra memory is that of the largest one; every rank walks the same
parameters in the same order, since gathering a shard is collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gather each tensor from its shards (a no-op for plain tensors), detached, under the names given."""
    for name, tensor in named:
        tensor = tensor.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # FSDP2, tensor parallel


@torch.no_grad()
def clip_gradient(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which takes parameters of one mesh only: under tensor parallelism some are
    split over teams, and some not. Collective.

    Args:
        parameters: all of them; those without a gradient are passed over.
        limit: of the Euclidean norm; null: leave the gradient as it is.

    Returns:
        the norm that it had, a plain scalar.
    """
    of_meshes: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            of_meshes.setdefault(mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([one.grad for one in of_mesh]) for of_mesh in of_meshes.values()]  # pyright: ignore[reportArgumentType]
    norm = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
    if limit is not None:
        for of_mesh in of_meshes.values():
            torch.nn.utils.clip_grads_with_norm_(of_mesh, limit, norm)
    return norm
