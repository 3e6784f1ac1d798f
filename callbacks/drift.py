"""How far the policy has moved from the one that sampled the batch, and what the gate cost."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class Drift(UpdateCallback):
    """Sequence drift D̄_i = (1/T_i) Σ_t d(μ_t, π_t), in nats, d the KL divergence of "this token or any other".

    `drift/mean`, `drift/max` over the batch; `drift/rejected`, `drift/rejected_tokens`: share of trajectories, and of
    policy tokens, that the gate (or a filter) kept out of the gradient; `drift/rejected_seconds`: seconds of rollout
    spent on rejected trajectories.
    """

    def measure(self, update: Update) -> dict[str, float]:
        tokens = update.batch.policy_lengths
        seconds = [t.timing.generate + t.timing.env for t in update.batch]
        return {
            "drift/mean": float(update.drift.mean()),
            "drift/max": float(update.drift.max()),
            "drift/rejected": float((~update.admitted).float().mean()),
            "drift/rejected_tokens": float(1 - update.kept_tokens.sum() / tokens.sum()),
            "drift/rejected_seconds": sum(s for s, ok in zip(seconds, update.admitted, strict=True) if not ok),
        }
