"""Asynchronous against synchronous training where environments take their time.

    python -m tests.benchmarks.overlap --steps 6 --rounds 3

The same run (embedded policy, batch 32, 64 episodes at once) in both modes, interleaved. The environment of an episode
sleeps a log-normal time of mean 1 s in all (σ = 1: the longest of 32 is several times the mean), over two turns.

Lag is not bounded unless asked: an update takes a fraction of a second here, so a bound of a few updates would have the
learner wait for every straggler, which is what the comparison is about. Printed per round: wall time per update after
the first, the share of it that the learner waited, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import lightning.pytorch as pl
import torch

from fr_lightning.callbacks import Cost, WeightSync
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.envs.base import TextEnv
from fr_lightning.module import FlashReinforce
from fr_lightning.policy import PolicyConfig
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.runner import EpisodeLimits

SIGMA = 1.0


class Sleepy(TextEnv):
    """Two turns, each half of an episode's log-normal time.

    Args:
        mean: of an episode's time, in seconds.
        sigma: of its logarithm.
    """

    def __init__(self, mean: float = 1.0, sigma: float = SIGMA):
        self.mean, self.sigma = mean, sigma

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        self.nap = self.mean * float(self.np_random.lognormal(-(self.sigma**2) / 2, self.sigma)) / 2
        return "What is 1 + 2?", {}

    def step(self, action):
        time.sleep(self.nap)
        self.turn += 1
        return "Go on.", float(len(action) % 2), self.turn == 2, False, {}


class Times(pl.Callback):
    def __init__(self):
        self.steps: list[float] = []
        self.waits: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(float(trainer.callback_metrics["time/step"]))
        self.waits.append(float(trainer.callback_metrics["time/wait"]))


def run(mode: str, steps: int, max_lag: int | None) -> tuple[float, float]:
    """Mean seconds per update and share waited, the first update (start-up) left out."""
    times = Times()
    data = RolloutDataModule(
        env=Sleepy,
        engine=EmbeddedEngine(max_context=256),
        mode=mode,  # pyright: ignore[reportArgumentType]
        batch_size=32,
        concurrency=64,
        lag=LagLimit(max_lag),
        sampling=Sampling(max_tokens=24),
        limits=EpisodeLimits(max_context=200),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=steps + 1, max_epochs=-1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
            default_root_dir=folder, callbacks=[WeightSync(), Cost(), times],
        )  # fmt: skip
        trainer.fit(FlashReinforce(PolicyConfig()), datamodule=data)
    wall = sum(times.steps[1:])
    return wall / steps, sum(times.waits[1:]) / wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-lag", type=int, default=None, help="bound on policy lag, by waiting; default: none")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ratios = []
    for number in range(chosen.rounds):
        seconds = {}
        for mode in ("sync", "async"):
            seconds[mode], waited = run(mode, chosen.steps, chosen.max_lag)
            print(f"round {number} {mode:5}: {seconds[mode]:.2f} s per update, learner waited {waited:.0%}", flush=True)
        ratios.append(seconds["sync"] / seconds["async"])
    spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
    print(f"sync ÷ async: median {statistics.median(ratios):.2f} ({spread}, {chosen.rounds} interleaved rounds)")


if __name__ == "__main__":
    main()
