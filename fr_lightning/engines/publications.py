"""The weights an engine serves, kept for whoever must load them again: one set in force, one being written.

Invariant: `latest` is whole and stays readable until a later one is in force everywhere, so that a replica that starts
anew finds it whatever the learner is doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fr_lightning.engines.shared_weights import SharedWeights, WeightLayout


@dataclass(frozen=True)
class Publication:
    """A safetensors file that a process of the same user can open, the version of the weights in it, and where the
    learner had them."""

    path: str
    version: int
    device: torch.device


class Publications:
    """Two buffers in turn.

    Args:
        layout: of the model, in the dtype that the engine computes in.
        folder: where the files go, for engines on other machines; None: shared memory.
    """

    def __init__(self, layout: WeightLayout, folder: Path | None = None):
        self.latest: Publication | None = None
        self._layout = layout
        self._in_force, self._spare = SharedWeights(folder=folder), SharedWeights(folder=folder)

    async def write(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Publication:
        """Write the next set and make it the latest; the one before stays whole until `settle`.

        Raises:
            ValueError: the tensors are not a whole, finite set of this model's parameters.
        """
        device = torch.device("cpu")

        def seen() -> Iterator[tuple[str, Tensor]]:
            nonlocal device
            for name, tensor in named_tensors:
                device = tensor.device
                yield name, tensor

        for _ in self._spare.fill(self._layout, seen()):
            await asyncio.sleep(0)  # generation goes on between two parameters
        self._in_force, self._spare = self._spare, self._in_force
        self.latest = Publication(self._in_force.path, version, device)
        return self.latest

    def settle(self) -> None:
        """The latest is in force everywhere: give the memory of the one before back."""
        self._spare.empty()

    def close(self) -> None:
        self._in_force.close()
        self._spare.close()


def layout_of(folder: str, dtype: torch.dtype, *, trust_remote_code: bool = False) -> WeightLayout:
    """Names, shapes and ties of a model's parameters, found without loading one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return WeightLayout.of(model)
