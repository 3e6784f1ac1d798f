"""One whole set of weights in anonymous shared memory, written by one process and read by another.

Invariant: a buffer is filled with a complete, finite set of parameters of the right names and shapes, or `fill` raises
and the buffer counts as empty. It has no name in any file system, so nothing is left behind however its holders die.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_ALIGNMENT = 64


@dataclass(frozen=True)
class WeightLayout:
    """Where each parameter lies in a buffer.

    Attributes:
        tensors: shape and dtype by name, in the order in which they are stored.
        aliases: other names of the same parameter (a tied output head), each with the name in `tensors`.
    """

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> WeightLayout:
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            canonical = first.setdefault(id(tensor), name)
            if canonical == name:
                tensors[name] = (tuple(tensor.shape), tensor.dtype)
            else:
                aliases[name] = canonical
        return cls(tensors, aliases)

    def views(self, memory: mmap.mmap) -> dict[str, Tensor]:
        views, offset = {}, 0
        for name, (shape, dtype) in self.tensors.items():
            count = math.prod(shape)
            views[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            offset += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return views

    @property
    def nbytes(self) -> int:
        return sum(
            -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in self.tensors.values()
        )


class SharedWeights:
    """A buffer known by its file descriptor, which the reading process inherits."""

    def __init__(self, fd: int | None = None):
        if fd is not None:
            self.fd = fd
        elif hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("fr_lightning-weights")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def fill(self, layout: WeightLayout, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Copy the tensors in, one per step of the returned iterator, so that the caller can do other things between.

        Raises:
            ValueError: a name the model lacks, a wrong shape, a value that is not finite, or a parameter not given.
        """
        os.ftruncate(self.fd, layout.nbytes)
        views = layout.views(mmap.mmap(self.fd, layout.nbytes))
        seen: set[str] = set()
        try:
            for given, tensor in named_tensors:
                name = layout.aliases.get(given, given)
                if name not in views:
                    raise ValueError(f"the engine's model has no parameter {given!r}")
                if name != given and name in seen:
                    continue  # a tied head beside the embedding it shares
                view = views[name]
                if tensor.shape != view.shape:
                    raise ValueError(f"{given!r} has shape {tuple(tensor.shape)}; the engine's is {tuple(view.shape)}")
                view.copy_(tensor.detach())
                if not torch.isfinite(view).all():
                    raise ValueError(f"{given!r} holds a value that is not finite in {view.dtype}")
                seen.add(name)
                yield
            if missing := [name for name in views if name not in seen]:
                raise ValueError(f"update lacks {len(missing)} parameters of the engine's model, e.g. {missing[0]!r}")
        except BaseException:
            del views
            self.empty()
            raise

    def load_into(self, layout: WeightLayout, model: nn.Module) -> None:
        """Copy the buffer into a model of this layout."""
        parameters = model.state_dict(keep_vars=True)
        views = layout.views(mmap.mmap(self.fd, layout.nbytes))
        with torch.no_grad():
            for name, view in views.items():
                parameters[name].copy_(view)

    def empty(self) -> None:
        """Give the memory back; no process may be reading."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        os.close(self.fd)
