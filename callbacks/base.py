"""What the diagnostic callbacks share: one hook per update, one way to log.

Invariant: a callback measures and never changes training. It reads `Update`, the record of one optimizer step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from fr_lightning.module import Update
from fr_lightning.parallel import over_ranks


def run_folder(trainer: pl.Trainer) -> Path:
    """Where rank 0 writes. `trainer.log_dir` is a broadcast, and one that only rank 0 joins puts ranks out of step."""
    logger = trainer.loggers[0] if trainer.loggers else None
    folder = getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None)
    return Path(folder or trainer.default_root_dir)


class UpdateCallback(pl.Callback):
    """Logs numbers computed from each update."""

    @abstractmethod
    def measure(self, update: Update) -> Mapping[str, float]:
        """Metric names and values of one update of this rank, merged by `over_ranks`.

        NaN for what this update did not show: Lightning would repeat a missing one's last value.
        """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        update: Update = outputs["update"]
        values = {name: float(value) for name, value in self.measure(update).items()}
        pl_module.log_dict(over_ranks(values, len(update.batch)), batch_size=len(update.batch))
