"""How often a limit, not the policy, ended something."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class Truncation(UpdateCallback):
    """Shares over the batch.

    `truncation/episodes`: trajectories ended by a limit (turns, tokens, context, the environment's steps).
    `truncation/turns`: turns the policy did not end itself (finish reason `length`), of all turns.
    """

    def measure(self, update: Update) -> dict[str, float]:
        turns = [turn for trajectory in update.batch for turn in trajectory.turns]
        return {
            "truncation/episodes": sum(trajectory.truncated for trajectory in update.batch) / len(update.batch),
            "truncation/turns": sum(turn.finish_reason == "length" for turn in turns) / max(1, len(turns)),
        }
