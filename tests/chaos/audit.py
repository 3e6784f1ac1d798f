"""Which rollouts each update was made of, written down outside the checkpoint, and checked against it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


class Audit(pl.Callback):
    """Appends a line per update to a file in `folder`, one for each rank: its number and the rollouts behind it."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        line = {"update": pl_module.policy_version, "rollouts": [one.rollout_id for one in batch]}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def updates(folder: Path) -> dict[int, list[str]]:
    """The rollouts behind each update in the history that led to the end, of all ranks together.

    Updates after the checkpoint that a run went on from are undone with their weights: an update's last line counts.
    """
    history: dict[int, list[str]] = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        of_rank: dict[int, list[str]] = {}
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            of_rank = {update: rollouts for update, rollouts in of_rank.items() if update < entry["update"]}
            of_rank[entry["update"]] = entry["rollouts"]
        for update, rollouts in of_rank.items():
            history[update] += rollouts
    return history


def problems(folder: Path, checkpoint: Path) -> list[str]:
    """What is wrong with the accounts of a run, however often it was killed and resumed; none: exactly once.

    Args:
        folder: of its `Audit`.
        checkpoint: made at its end.
    """
    ledgers = [rank["ledger"] for rank in torch.load(checkpoint, weights_only=True)["RolloutDataModule"]["ranks"]]
    drawn = {
        f"rollout-{number}"
        for rank, ledger in enumerate(ledgers)
        for number in range(rank, ledger["next"], ledger["stride"])
    }
    still_open = {f"rollout-{number}" for ledger in ledgers for number in ledger["open"]}
    closed = sum((Counter(ledger["closed"]) for ledger in ledgers), Counter())
    history = updates(folder)
    trained = [rollout for rollouts in history.values() for rollout in rollouts]
    found = []
    if sorted(history) != list(range(1, max(history) + 1)):
        found.append("updates are missing")
    if len(set(trained)) != len(trained):
        found.append(f"{len(trained) - len(set(trained))} rollouts were trained on twice")
    if len(trained) != closed["trained"]:
        found.append(f"{len(trained)} were trained on, the ledger says {dict(closed)}")
    if closed.total() + len(still_open) != len(drawn):
        found.append(f"{len(drawn)} were drawn, {dict(closed)} closed and {len(still_open)} open")
    if set(trained) & still_open:
        found.append("some are trained on and still open")
    neither, others = len(drawn - set(trained) - still_open), closed.total() - closed["trained"]
    if neither != others:
        found.append(f"{neither} are neither trained on nor open, {others} have a reason")
    return found
