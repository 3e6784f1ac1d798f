"""Whether the policy uses its tools. A policy can forget them: watch this beside the reward."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class ToolCalls(UpdateCallback):
    """Tool calls per trajectory (mean over the batch), and the share of trajectories with at least one."""

    def measure(self, update: Update) -> dict[str, float]:
        calls = [trajectory.tool_calls for trajectory in update.batch]
        return {
            "tool_calls/mean": sum(calls) / len(calls),
            "tool_calls/share": sum(count > 0 for count in calls) / len(calls),
        }
