"""One whole set of weights in shared memory, written by one process and read by others.

Invariant: a buffer is filled with a complete, finite set of parameters of the right names and shapes, or `fill` raises
and the buffer counts as empty. A full one is a safetensors file, whoever reads it. Unless a folder is asked for (one
that other machines see), it has no name in any file system, so nothing is left behind however its holders die.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

_ALIGNMENT = 64

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
        # Wide types first: the format has no gaps, and each tensor must lie at a multiple of its item's size.
        return cls(dict(sorted(tensors.items(), key=lambda item: -item[1][1].itemsize)), aliases)

    @functools.cached_property
    def header(self) -> bytes:
        """What a safetensors file begins with."""
        entries, offset = {}, 0
        for name, (shape, dtype) in self.tensors.items():
            end = offset + math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
            offset = end
        text = json.dumps(entries).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    def views(self, memory: mmap.mmap) -> dict[str, Tensor]:
        views, offset = {}, len(self.header)
        for name, (shape, dtype) in self.tensors.items():
            count = math.prod(shape)
            views[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            offset += count * dtype.itemsize
        return views

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())


class SharedWeights:
    """A buffer known by its file descriptor, which a child process inherits, and by its `path`, which others can open.

    Args:
        fd: of a buffer that another object made.
        folder: where to keep the buffer as a file, for readers on other machines; None: in memory, without a name.
    """

    def __init__(self, fd: int | None = None, *, folder: Path | None = None):
        self._file: Path | None = None
        if fd is not None:
            self.fd = fd
        elif folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.fd, name = tempfile.mkstemp(prefix="weights-", suffix=".safetensors", dir=folder)
            self._file = Path(name)
        elif hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("fr_lightning-weights")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    @property
    def path(self) -> str:
        """Where a process of the same user can open the buffer while this one lives."""
        return str(self._file or f"/proc/{os.getpid()}/fd/{self.fd}")

    def fill(self, layout: WeightLayout, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Copy the tensors in, one per step of the returned iterator, so that the caller can do other things between.

        Raises:
            ValueError: a name the model lacks, a wrong shape, a value that is not finite, or a parameter not given.
        """
        os.ftruncate(self.fd, layout.nbytes)
        memory = mmap.mmap(self.fd, layout.nbytes)
        memory[: len(layout.header)] = layout.header
        views = layout.views(memory)
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
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
