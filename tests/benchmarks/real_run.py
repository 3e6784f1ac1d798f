"""A short real run on environments that sleep, measured: what `tests.benchmarks.simulate --check` holds itself against.

    python -m tests.benchmarks.real_run --ranks 1 --batch 16 --seats 32 --updates 20 --output measured.json

Every rank has the embedded policy, an embedded engine and seats of its own. Written: seconds per update, share of them
that the learner waited, mean policy lag of a trajectory's oldest token, and the rates of the parts that a simulation
needs. The run's own rates are used, since engine, learner and environments share the cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from fr_lightning.callbacks import Cost, WeightSync
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.module import FlashReinforce
from fr_lightning.parallel import over_ranks
from fr_lightning.policy import PolicyConfig
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.runner import EpisodeLimits
from tests.benchmarks.overlap import Sleepy


class Measured(pl.Callback):
    """One row per update, of all ranks."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        update = outputs["update"]
        own = {
            "tokens": float(batch.policy_lengths.sum()),
            "generate": sum(trajectory.timing.generate for trajectory in batch),
            "lag": statistics.mean(float(trajectory.policy_lag(update.version).max()) for trajectory in batch),
        }
        times = {name: float(trainer.callback_metrics[f"time/{name}"]) for name in ("step", "wait", "publish")}
        self.rows.append(over_ranks(own) | times)

    def summary(self, warm_up: int, batch: int) -> dict[str, float]:
        total = {name: sum(row[name] for row in self.rows[warm_up:]) for name in self.rows[0]}
        updates = len(self.rows) - warm_up
        return {
            "seconds": total["step"] / updates,
            "idle": total["wait"] / total["step"],
            "lag": total["lag"] / updates,
            "tokens_of_turn": total["tokens"] / (updates * batch * 2),
            "conversation_tokens": total["tokens"] / total["generate"],
            "learner_tokens": total["tokens"] / (total["step"] - total["wait"] - total["publish"]),
            "publish_seconds": total["publish"] / updates,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="more than one: start it with torchrun")
    parser.add_argument("--batch", type=int, default=16, help="over all ranks")
    parser.add_argument("--seats", type=int, default=32, help="episodes in flight on each rank")
    parser.add_argument("--max-lag", type=int, default=None)
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    parser.add_argument("--env-mean", type=float, default=4.0)
    parser.add_argument("--env-sigma", type=float, default=1.0)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = Measured()
    data = RolloutDataModule(
        env=functools.partial(Sleepy, args.env_mean, args.env_sigma),
        engine=EmbeddedEngine(max_context=256),
        mode=args.mode,
        batch_size=args.batch,
        concurrency=args.seats,
        lag=LagLimit(args.max_lag),
        sampling=Sampling(max_tokens=8),
        limits=EpisodeLimits(max_context=200),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", devices=args.ranks, strategy=DDPStrategy() if args.ranks > 1 else "auto",
            max_steps=args.updates + args.warm_up, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
            default_root_dir=folder, callbacks=[WeightSync(check=None), Cost(), measured],
        )  # fmt: skip
        trainer.fit(FlashReinforce(PolicyConfig()), datamodule=data)
    if int(os.environ.get("RANK", "0")) == 0:
        with open(args.output, "w", encoding="utf-8") as file:
            json.dump(measured.summary(args.warm_up, args.batch // args.ranks), file)


if __name__ == "__main__":
    main()
