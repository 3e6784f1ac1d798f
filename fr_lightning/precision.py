"""bfloat16 where the machine has units for it, float32 where it has none.

Invariant: weights stay as they are; only matrix products are affected, as by Lightning's `bf16-mixed`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from fr_lightning.models import fast_dtype


class AutoPrecision(Precision):
    """Lightning's `bf16-mixed` where `fast_dtype` says so, else `32-true`.

    In YAML: `trainer.plugins: {class_path: fr_lightning.precision.AutoPrecision}`, with `trainer.precision` left out.
    """

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.precision = "bf16-mixed" if fast_dtype(self._device) == torch.bfloat16 else "32-true"

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, torch.bfloat16, enabled=self.precision == "bf16-mixed")
