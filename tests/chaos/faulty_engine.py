"""The real embedded engine, which goes wrong in a chosen way every so many requests."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import psutil

from fr_lightning.engines.base import Completion
from fr_lightning.engines.embedded import EmbeddedEngine

LIES = ("lacks_logprobs", "nan_logprobs", "short_logprobs", "empty", "positive_logprobs", "no_version")
FAULTS = ("dies", "stalls", *LIES)


class FaultyEngine(EmbeddedEngine):
    """Args:
    faults: of `FAULTS`, taken in turn.
    every: requests from one fault to the next.
    others: of `EmbeddedEngine`.
    """

    def __init__(self, faults: tuple[str, ...] = (), every: int = 50, **others: Any):
        unknown = set(faults) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such faults: {unknown}")
        super().__init__(**others)
        self._faults, self._every, self._requests = faults, every, 0
        self.injected: list[str] = []

    async def generate(self, token_ids, sampling=None, *, session=None) -> Completion:
        fault = ""
        if session is not None and self._faults:  # probes have none
            self._requests += 1
            if self._requests % self._every == 0:
                fault = self._faults[len(self.injected) % len(self._faults)]
                self.injected.append(fault)
        if fault in ("dies", "stalls"):
            signal_worker(signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
        completion = await super().generate(token_ids, sampling, session=session)
        count = len(completion.logprobs)
        if fault == "lacks_logprobs":
            return replace(completion, logprobs=[])
        if fault == "nan_logprobs":
            return replace(completion, logprobs=[float("nan")] * count)
        if fault == "positive_logprobs":
            return replace(completion, logprobs=[0.5] * count)
        if fault == "short_logprobs":
            return replace(completion, logprobs=completion.logprobs[:-1])
        if fault == "empty":
            return Completion([], [], [], "stop")
        if fault == "no_version":
            return replace(completion, policy_versions=[-1] * count)
        return completion


def signal_worker(number: int) -> None:
    """To the engine's process: the child of this one whose command line says so."""
    for child in psutil.Process().children():
        if any("embedded_worker" in argument for argument in child.cmdline()):
            os.kill(child.pid, number)
