"""A progress bar that counts updates: there are no epochs to speak of in a stream of fresh batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar


class Progress(RichProgressBar):
    """Lightning's rich progress bar with updates for epochs and the mean reward of the latest batch beside it."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "updates"

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
