"""Entropy of the policy on what it wrote. A fall to zero ends exploration; a steady rise ends sense."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class Entropy(UpdateCallback):
    """Mean full-vocabulary entropy −Σ_v π(v) log π(v), in nats, over all policy tokens of the batch.

    `entropy/failed` and `entropy/solved` are the same over the tokens of trajectories by their outcome; NaN if none.
    """

    def measure(self, update: Update) -> dict[str, float]:
        tokens = update.batch.policy_lengths
        failed = update.batch.failed
        values = {}
        for name, rows in (("mean", failed | True), ("failed", failed), ("solved", ~failed)):
            values[f"entropy/{name}"] = float((update.entropy * tokens)[rows].sum() / tokens[rows].sum())
        return values
