"""Runs of the quick start killed with −9 at random times and resumed to their end, with their accounts checked.

    python -m tests.chaos.kill_runs --runs 30
    python -m tests.chaos.kill_runs --runs 3 --mode sync

Each run is started by one command line, again and again: `--ckpt_path FOLDER` begins it and goes on with it. It is
killed up to `--kills` times, at a random time after its start, and every process of it must be gone within 10 s. At the
end the ledger must account for every task drawn, and each must have been trained on at most once. In `async` mode the
rewards are compared with those of as many unbroken runs as `--unbroken`; in `sync` mode each run's weights must equal
those of an unbroken run bit for bit.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from tests.chaos.audit import problems

REPOSITORY = Path(__file__).parents[2]


def command(args: argparse.Namespace, seed: int) -> list[str]:
    checkpointing = "every_n_train_steps: 5, save_top_k: 2, monitor: step, mode: max"
    callbacks = [
        "{class_path: tests.chaos.audit.Audit, init_args: {folder: audit}}",
        f"{{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {{{checkpointing}}}}}",
    ]
    return [
        *(sys.executable, "-m", "fr_lightning", "fit", "--config", "quickstart.yaml", "--ckpt_path", "runs/quickstart"),
        *("--trainer.max_steps", str(args.updates), "--trainer.val_check_interval", str(args.updates)),
        *("--trainer.num_sanity_val_steps", "0", "--trainer.callbacks", f"[{', '.join(callbacks)}]"),
        *("--trainer.enable_progress_bar", "false", "--data.batch_size", str(args.batch), "--data.mode", args.mode),
        *("--data.seed", str(seed), "--seed_everything", str(seed), "--data.evaluation.tasks", "100"),
    ]


def start(args: argparse.Namespace, seed: int, folder: Path) -> subprocess.Popen:
    log = (folder / "log.txt").open("a")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command(args, seed), cwd=folder, env=env, stdout=log, stderr=log)


def kill(run: subprocess.Popen) -> float:
    """Seconds until the last process of the run was gone."""
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    run.send_signal(signal.SIGKILL)
    began = time.monotonic()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    if alive:
        raise RuntimeError(f"still there 10 s after its parent was killed: {[one.cmdline() for one in alive]}")
    return time.monotonic() - began


def play(args: argparse.Namespace, seed: int, folder: Path, kills: Sequence[float]) -> list[float]:
    """One run, killed so many seconds after each start; returns how long its processes took to go."""
    folder.mkdir(parents=True)
    gone = []
    for seconds in kills:
        run = start(args, seed, folder)
        try:
            run.wait(seconds)
            break  # it was faster
        except subprocess.TimeoutExpired:
            gone.append(kill(run))
    run = start(args, seed, folder)
    if run.wait(600):
        raise RuntimeError(f"it ended with {run.returncode}:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return gone


def newest_checkpoint(folder: Path) -> Path:
    return max(folder.glob("runs/**/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def reward(folder: Path) -> float:
    """Held-out, at the end; NaN where the kill came between the last update's checkpoint and its evaluation."""
    found = math.nan
    for table in sorted(folder.glob("runs/**/metrics.csv"), key=lambda path: path.stat().st_mtime_ns):
        with table.open() as file:
            found = next((float(row["val/reward"]) for row in csv.DictReader(file) if row.get("val/reward")), found)
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(newest_checkpoint(folder), weights_only=True)["state_dict"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--kills", type=int, default=3, help="most of each run")
    parser.add_argument("--unbroken", type=int, default=3)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    parser.add_argument("--longest", type=float, default=45.0, help="seconds from a start to a kill, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    rewards: dict[str, list[float]] = {"unbroken": [], "killed": []}
    bad = killed = resumed = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        for number in range(args.unbroken if args.mode == "async" else args.runs):
            folder = Path(name) / f"unbroken-{number}"
            play(args, number, folder, [])
            rewards["unbroken"].append(reward(folder))
            print(f"unbroken {number}: reward {rewards['unbroken'][-1]:.3f}", flush=True)
        for number in range(args.runs):
            folder = Path(name) / f"killed-{number}"
            times = [chance.uniform(2.0, args.longest) for _ in range(chance.randint(1, args.kills))]
            gone = play(args, number, folder, times)
            found = problems(folder / "audit", newest_checkpoint(folder))
            if args.mode == "sync":
                ours, theirs = weights(folder), weights(Path(name) / f"unbroken-{number}")
                if not all(torch.equal(ours[key], theirs[key]) for key in theirs):
                    found.append("its weights differ from the unbroken run's")
            rewards["killed"].append(reward(folder))
            went_on = len(re.findall("Restored all states", (folder / "log.txt").read_text()))
            bad, killed, resumed = bad + bool(found), killed + len(gone), resumed + went_on
            slowest = max(slowest, *gone, 0.0)
            (account,) = re.findall(r"[\d,]+ tasks drawn: .*", (folder / "log.txt").read_text())[-1:]
            when = ", ".join(f"{seconds:.1f}" for seconds in times[: len(gone)])
            print(f"run {number}: killed after {when} s, went on from a checkpoint {went_on} times")
            print(f"    reward {rewards['killed'][-1]:.3f}; {account}; {found or 'accounts balance'}", flush=True)
    print(f"{args.runs} runs, {killed} kills, {resumed} resumed from a checkpoint; accounts that do not balance: {bad}")
    print(f"the last process of a killed run was gone after {slowest:.1f} s at most")
    for name, found in rewards.items():
        values = [value for value in found if not math.isnan(value)]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"final held-out reward, {name}: {statistics.mean(values):.3f} ± {spread:.3f} (n = {len(values)})")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
