"""Where the time goes: waiting, learning, generating."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.parallel import over_ranks


class Cost(pl.Callback):
    """Per update, in seconds unless said otherwise.

    `time/step`: from the end of the last update to the end of this one. `time/wait`: of it, waiting for a batch.
    `time/generate`, `time/env`, `time/queue`: per trajectory, mean. `throughput/tokens`: policy tokens trained per
    second. `throughput/learner_idle`: time/wait ÷ time/step. `rollouts/*`: the ledger's counts, failed
    attempts by kind, and trajectories dropped as stale by their number of policy tokens.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, RolloutDataModule)
        now = time.perf_counter()
        step, self._last = now - self._last, now
        timings = [trajectory.timing for trajectory in batch]
        values = {
            "time/step": step,
            "time/wait": data.seconds_waited,
            "time/generate": sum(t.generate for t in timings) / len(timings),
            "time/env": sum(t.env for t in timings) / len(timings),
            "time/queue": sum(t.queue for t in timings) / len(timings),
            "throughput/tokens": float(batch.policy_lengths.sum()) / step,
            "throughput/learner_idle": data.seconds_waited / step,
            **{f"rollouts/{name}": float(count) for name, count in data.ledger.counts.items()},
            **{f"rollouts/dropped_{tokens}": float(n) for tokens, n in dict(data.pool.queue.dropped_by_length).items()},
            **{f"rollouts/failed_{kind}": float(count) for kind, count in dict(data.pool.failures).items()},
        }
        pl_module.log_dict(over_ranks(values, len(batch)), batch_size=len(batch))
