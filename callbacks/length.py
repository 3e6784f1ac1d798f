"""How much the policy writes: length is where reward hacking and token-mean reductions show first."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class Length(UpdateCallback):
    """Policy tokens T_i (all turns) and turns per trajectory: mean and maximum over the batch.

    `length/solved` and `length/failed` are mean policy tokens by outcome, NaN if none; `length/total`
    counts prompt and observation tokens too.
    """

    def measure(self, update: Update) -> dict[str, float]:
        tokens = update.batch.policy_lengths.float()
        failed = update.batch.failed
        turns = [len(trajectory.turns) for trajectory in update.batch]
        return {
            "length/mean": float(tokens.mean()),
            "length/max": float(tokens.max()),
            "length/total": sum(update.batch.lengths) / len(update.batch),
            "length/turns": sum(turns) / len(turns),
            "length/failed": float(tokens[failed].mean()),
            "length/solved": float(tokens[~failed].mean()),
        }
