"""What vLLM finds of this package by itself, in each of its processes: a `vllm.general_plugins` entry point.

Invariant: to load it costs nothing and changes nothing but what is asked for by name. It makes the weight transfer
backend "fr_lightning" known, and ties the life of vLLM's processes to the process that started them, if that asked
for it through `PARENT`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

BACKEND = "fr_lightning"
"""Name of the transfer in `fr_lightning.engines.vllm_transfer`, for `--weight-transfer-config`."""

PARENT = "FR_LIGHTNING_PARENT"
"""Environment variable: id of the process without which vLLM's processes must not go on."""


def register() -> None:
    """Called by vLLM, perhaps more than once."""
    parent = os.environ.get(PARENT)
    if parent and parent != str(os.getpid()):
        die_with_parent()
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # already there
        WeightTransferEngineFactory.register_engine(
            BACKEND, "fr_lightning.engines.vllm_transfer", "SafetensorsTransfer"
        )


def die_with_parent() -> None:
    """A parent killed outright cannot end its children: the kernel does. Strictly, with the thread that started us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
