"""The conversations themselves: numbers say that something changed, transcripts say what.

Invariant: shows the tokens as trained on, special tokens and tool output included; nothing is prettified.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from fr_lightning.callbacks.base import run_folder
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.trajectory import Trajectory


class Transcripts(pl.Callback):
    """Appends a few conversations to `transcripts.txt` in the run's folder; `fr-lightning predict` prints all of them.

    Args:
        every: updates between two samples; 0: none.
        count: conversations per sample.
    """

    def __init__(self, every: int = 20, count: int = 2):
        if every < 0 or count < 1:
            raise ValueError(f"transcripts need every ≥ 0 and count ≥ 1, got {every} and {count}")
        self._every = every
        self._count = count

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        version = outputs["update"].version
        if not self._every or version % self._every or not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "transcripts.txt").open("a", encoding="utf-8") as file:
            for trajectory in list(batch)[: self._count]:
                file.write(f"=== update {version + 1} · {self._shown(trainer, trajectory)}\n\n")

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        for result in outputs:
            shown = self._shown(trainer, result) if isinstance(result, Trajectory) else f"not played: {result}"
            print(f"=== {shown}\n", flush=True)

    def _shown(self, trainer: pl.Trainer, trajectory: Trajectory) -> str:
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(data, RolloutDataModule)
        words = data.pool.runner.chat.tokenizer.decode(trajectory.token_ids.tolist())
        ending = "truncated" if trajectory.truncated else "ended"
        return (
            f"{trajectory.task_id} · reward {trajectory.reward:g} · {len(trajectory.turns)} turns · "
            f"{trajectory.num_policy_tokens} policy tokens · {trajectory.tool_calls} tool calls · {ending}\n{words}"
        )
