"""bfloat16 where the machine has units for it, float32 where it has none.

Invariant: weights stay as they are; only matrix products are affected, as by Lightning's `bf16-mixed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from lightning.pytorch.plugins.precision import Precision

from fr_lightning.models import fast_dtype


class AutoPrecision(Precision):
    """Lightning's `bf16-mixed` where `fast_dtype` says so, else `32-true`.

    In YAML: `trainer.plugins: {class_path: fr_lightning.precision.AutoPrecision}`, with `trainer.precision` left out.
    """

    def __init__(self) -> None:
        devices = ("cuda",) if torch.cuda.is_available() else ("cpu",)
        fast = all(fast_dtype(device) == torch.bfloat16 for device in devices)
        self.precision = "bf16-mixed" if fast else "32-true"  # what Trainer.precision says

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if fast_dtype(device) == torch.bfloat16:
                    stack.enter_context(torch.autocast(device, torch.bfloat16))
            yield
