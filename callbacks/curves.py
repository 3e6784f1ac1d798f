"""The run as one picture: reward, entropy, length, tool calls, drift and lag over updates.

Invariant: the picture shows the whole run, resumed parts included: what it has seen travels in the checkpoint. It is
written at the end of training, also when an exception or a signal ends it.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fr_lightning.callbacks.base import run_folder
from fr_lightning.module import FlashReinforce

PANELS: dict[str, tuple[str, ...]] = {
    "reward": ("train/reward",),
    "entropy (nats)": ("entropy/mean", "entropy/solved", "entropy/failed"),
    "policy tokens per trajectory": ("length/mean", "length/max"),
    "tool calls and turns per trajectory": ("tool_calls/mean", "length/turns"),
    "drift (nats)": ("drift/mean", "drift/max"),
    "policy lag (updates)": ("lag/mean", "lag/max"),
}
EXTRA = ("drift/rejected", "truncation/episodes", "time/wait", "time/step", "throughput/tokens")


class Curves(pl.Callback):
    """Writes `curves.png` into the run's log folder.

    Args:
        smooth: updates in the moving average drawn over the training reward.
    """

    def __init__(self, smooth: int = 10):
        self.smooth = smooth
        self.updates: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        wanted = {name for names in PANELS.values() for name in names} | set(EXTRA)
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name in wanted}
        seen = {name: value for name, value in values.items() if not math.isnan(value)}
        self.updates.append({"update": float(outputs["update"].version + 1), **seen})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FlashReinforce)
        score = pl_module.last_evaluation
        if score is not None and trainer.state.fn == "fit":
            self.evaluations.append(
                {
                    "update": float(pl_module.policy_version),
                    "reward": score.reward.mean,
                    "standard_error": score.reward.standard_error,
                }
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.updates:
            self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "evaluations": self.evaluations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates = list(state_dict["updates"])
        self.evaluations = list(state_dict["evaluations"])

    def _write(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "curves.png"
        self.figure().savefig(path, dpi=110)
        if len(self.evaluations) > 1:
            first, last = self.evaluations[0], self.evaluations[-1]
            scores = " → ".join(
                f"{score['reward']:.3f} ± {score['standard_error']:.3f} (update {score['update']:.0f})"
                for score in (first, last)
            )
            print(f"Held-out reward: {scores}")
        print(f"Curves of the run: {path}")

    def figure(self) -> Figure:
        """All panels as a matplotlib figure."""
        figure = Figure(figsize=(13, 6.5), layout="constrained")
        for axes, (title, names) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
            self._panel(axes, title, names)
        return figure

    def _panel(self, axes: Axes, title: str, names: tuple[str, ...]) -> None:
        for name in names:
            points = [(row["update"], row[name]) for row in self.updates if name in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            faint = name == "train/reward"
            axes.plot(steps, values, linewidth=1, alpha=0.3 if faint else 0.9, label=name)
            if faint:
                axes.plot(steps, _moving_mean(values, self.smooth), linewidth=2, label=f"mean of {self.smooth}")
        if title == "reward" and self.evaluations:
            axes.errorbar(
                [row["update"] for row in self.evaluations],
                [row["reward"] for row in self.evaluations],
                yerr=[row["standard_error"] for row in self.evaluations],
                fmt="ko-",
                capsize=3,
                label="held out",
            )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("update", fontsize=8)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)


def _moving_mean(values: tuple[float, ...], window: int) -> list[float]:
    return [sum(part := values[max(0, i + 1 - window) : i + 1]) / len(part) for i in range(len(values))]
