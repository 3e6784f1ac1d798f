"""How stale the data is: measured on every token, never inferred from a queue's depth."""

from __future__ import annotations

import torch

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class Lag(UpdateCallback):
    """Policy lag = learner version at the update − version the token was sampled under, over all policy tokens.

    `lag/mixed`: share of trajectories sampled by more than one version (weights changed while they ran).
    """

    def measure(self, update: Update) -> dict[str, float]:
        lags = [trajectory.policy_lag(update.version) for trajectory in update.batch]
        tokens = torch.cat(lags).float()
        return {
            "lag/mean": float(tokens.mean()),
            "lag/max": float(tokens.max()),
            "lag/mixed": sum(bool(lag.min() != lag.max()) for lag in lags) / len(lags),
        }
