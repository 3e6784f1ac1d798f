"""What an environment itself reports about its episodes."""

from __future__ import annotations

from fr_lightning.callbacks.base import UpdateCallback
from fr_lightning.module import Update


class EnvironmentMetrics(UpdateCallback):
    """`env/NAME`: mean of `info["metrics"][NAME]` over the trajectories of the batch that report it."""

    def measure(self, update: Update) -> dict[str, float]:
        names = sorted({name for trajectory in update.batch for name in trajectory.metrics})
        values = {name: [t.metrics[name] for t in update.batch if name in t.metrics] for name in names}
        return {f"env/{name}": sum(found) / len(found) for name, found in values.items()}
