"""Which rollouts each update was made of, written down outside the checkpoint, and checked against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class Audit(pl.Callback):
    """Appends a line per update to `path`: its number and the rollouts it was made of."""

    def __init__(self, path: str):
        self.path = Path(path)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {"update": pl_module.policy_version, "rollouts": [one.rollout_id for one in batch]}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def problems(audit: Path, checkpoint: Path) -> list[str]:
    """What is wrong with the accounts of a run, however often it was killed and resumed; none: exactly once.

    Updates after the checkpoint that a run went on from are undone with their weights: an update's last line counts.
    """
    (rank,) = torch.load(checkpoint, weights_only=True)["RolloutDataModule"]["ranks"]
    ledger = rank["ledger"]
    history: dict[int, list[str]] = {}
    for line in audit.read_text().splitlines():
        entry = json.loads(line)
        history[entry["update"]] = entry["rollouts"]
        history = {update: rollouts for update, rollouts in history.items() if update <= entry["update"]}
    trained = [rollout for rollouts in history.values() for rollout in rollouts]
    drawn = {f"rollout-{number}" for number in range(ledger["next"])}
    still_open = {f"rollout-{number}" for number in ledger["open"]}
    found = []
    if sorted(history) != list(range(1, max(history) + 1)):
        found.append("updates are missing")
    if len(set(trained)) != len(trained):
        found.append(f"{len(trained) - len(set(trained))} rollouts were trained on twice")
    if len(trained) != ledger["closed"].get("trained", 0):
        found.append(f"{len(trained)} were trained on, the ledger says {ledger['closed']}")
    if sum(ledger["closed"].values()) + len(still_open) != ledger["next"]:
        found.append(f"{ledger['next']} were drawn, {ledger['closed']} closed and {len(still_open)} open")
    if set(trained) & still_open:
        found.append("some are trained on and still open")
    others = sum(count for reason, count in ledger["closed"].items() if reason != "trained")
    neither = len(drawn - set(trained) - still_open)
    if neither != others:
        found.append(f"{neither} are neither trained on nor open, {others} have a reason")
    return found
