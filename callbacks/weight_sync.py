"""Publishes the learner's weights to the engine: before the first token and after every update.

Invariant: when the learner asks for the batch of update v + 1, the engine holds the weights of version v. Training
refuses to run without this callback; the command line always adds it.
"""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.module import FlashReinforce


class WeightSync(pl.Callback):
    """Logs `time/publish`: seconds from the end of the update until the engine samples under it."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = self._publish_if_stale(trainer, pl_module)
        pl_module.log("time/publish", seconds, batch_size=1)

    def _publish_if_stale(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        assert isinstance(pl_module, FlashReinforce)
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(data, RolloutDataModule):
            raise TypeError(f"WeightSync publishes to a RolloutDataModule, the trainer has {type(data).__name__}")
        began = time.perf_counter()
        if data.published_version != pl_module.policy_version:
            data.publish(pl_module.published_parameters(), pl_module.policy_version)
        return time.perf_counter() - began
