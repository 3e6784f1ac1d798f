"""A long run with every fault injector on, watched from outside: throughput, memory, descriptors, processes, files.

    python -m tests.chaos.soak --minutes 60 --output soak

The policy is the embedded one, in `async` mode. One episode in ten goes wrong, in each of the ways of `faulty_env`; the
engine lies, dies or stalls every few hundred requests; a checkpoint is written every 20 updates to a disk on which only
one fits, so that most of them find it full, until it is emptied again. Written to `--output`: `samples.csv`,
`soak.png`, the audit and the log; at the end the accounts are checked.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import psutil

from tests.chaos.audit import problems
from tests.chaos.faulty_engine import FAULTS as ENGINE_FAULTS
from tests.chaos.faulty_env import FAULTS as ENV_FAULTS

REPOSITORY = Path(__file__).parents[2]
DISK_BYTES = 30_000_000
SAVES = "lightning.pytorch.callbacks.ModelCheckpoint"
OFTEN = "every_n_train_steps: 20, save_top_k: -1"
LAST = "every_n_train_steps: 1000000, save_on_exception: true"  # on a disk that is not full
UNSUITED = {"constructor_hangs"}
"""Holds up a seat for `env_timeout` at every replacement: nothing but waiting would be measured."""

COLUMNS = {
    "updates": "updates made",
    "trainer_mib": "memory of the trainer, MiB",
    "engine_mib": "memory of the engine, MiB",
    "threads": "threads of the trainer",
    "descriptors": "file descriptors of the trainer",
    "processes": "processes",
    "files": "names in /tmp and /dev/shm",
    "failed": "checkpoints that found the disk full",
}


def command(output: Path, updates: int) -> list[str]:
    faults = [fault for fault in ENV_FAULTS if fault not in UNSUITED]
    runs = output / "runs"
    callbacks = [
        f"{{class_path: tests.chaos.audit.Audit, init_args: {{folder: {output / 'audit'}}}}}",
        "{class_path: fr_lightning.callbacks.Cost}",
        f"{{class_path: {SAVES}, init_args: {{{OFTEN}}}}}",
        f"{{class_path: {SAVES}, init_args: {{dirpath: {output / 'last'}, {LAST}}}}}",
    ]
    limits = "every: 400, max_context: 256, max_restarts: 100000, stall_timeout: 5"
    engine = f"{{faults: [{', '.join(ENGINE_FAULTS)}], {limits}}}"
    return [
        *("bwrap", "--dev-bind", "/", "/", "--size", str(DISK_BYTES), "--tmpfs", str(runs), "--die-with-parent"),
        *(sys.executable, "-m", "fr_lightning", "fit", "--config", str(REPOSITORY / "configs" / "quickstart.yaml")),
        *("--data.env", f"{{class_path: tests.chaos.faulty_env.FaultyEnv, init_args: "
          f"{{faults: [{', '.join(faults)}], share: 0.1, hang: 20}}}}"),
        *("--data.engine", f"{{class_path: tests.chaos.faulty_engine.FaultyEngine, init_args: {engine}}}"),
        *("--data.limits.env_timeout", "3", "--data.limits.generate_timeout", "60", "--data.sampling.max_tokens", "24"),
        *("--data.batch_size", "32", "--data.concurrency", "32", "--data.retry.max_failure_share", "0.9"),
        *("--trainer.max_steps", str(updates), "--trainer.limit_val_batches", "0"),
        *("--trainer.num_sanity_val_steps", "0"),
        *("--trainer.enable_progress_bar", "false", "--trainer.callbacks", f"[{', '.join(callbacks)}]"),
        *("--trainer.default_root_dir", str(runs), "--trainer.logger", "false", "--transcripts.every", "0"),
        *("--model.lr_scheduler", "null", "--model.optimizer.init_args.lr", "1e-5"),
    ]  # fmt: skip


def sample(trainer: psutil.Process, began: float, output: Path) -> dict[str, float]:
    engines = [one for one in trainer.children() if any("embedded_worker" in part for part in one.cmdline())]
    audit = output / "audit" / "0.jsonl"
    return {
        "minutes": (time.monotonic() - began) / 60,
        "updates": len(audit.read_text().splitlines()) if audit.exists() else 0,
        "trainer_mib": trainer.memory_info().rss / 2**20,
        "engine_mib": sum(one.memory_info().rss for one in engines) / 2**20,
        "threads": trainer.num_threads(),
        "descriptors": trainer.num_fds(),
        "processes": 1 + len(trainer.children(recursive=True)),
        "files": len(os.listdir("/tmp")) + len(os.listdir("/dev/shm")),
        "failed": (output / "log.txt").read_text(errors="replace").count("could not be written"),
    }


def trainer_of(run: subprocess.Popen) -> psutil.Process | None:
    """The trainer, behind bubblewrap; None: it is not there (any more)."""
    return next((one for one in psutil.Process(run.pid).children(recursive=True) if "fit" in one.cmdline()), None)


def draw(rows: list[dict[str, float]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(15, 6), constrained_layout=True)
    minutes = [row["minutes"] for row in rows]
    for (name, title), axis in zip(COLUMNS.items(), axes.flat, strict=True):
        axis.plot(minutes, [row[name] for row in rows], linewidth=1)
        axis.set(title=title, xlabel="minutes")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--output", type=Path, default=Path("soak"))
    args = parser.parse_args()
    output = args.output.resolve()
    (output / "runs").mkdir(parents=True)
    rows: list[dict[str, float]] = []
    saved: list[Path] = []
    with (output / "log.txt").open("w") as log, (output / "samples.csv").open("w") as table:
        writer = csv.DictWriter(table, ["minutes", *COLUMNS])
        writer.writeheader()
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        run = subprocess.Popen(command(output, 1_000_000), env=env, stdout=log, stderr=log, start_new_session=True)
        began = time.monotonic()
        while time.monotonic() - began < 60 * args.minutes and run.poll() is None:
            time.sleep(args.every)
            trainer = trainer_of(run)
            if trainer is None:
                continue
            checkpoints = Path(f"/proc/{trainer.pid}/root{output}/runs")
            saved = sorted(checkpoints.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
            if len(rows) % 6 == 5:  # somebody makes room, once a minute
                for path in saved[:-1]:
                    path.unlink()
            rows.append(sample(trainer, began, output))
            writer.writerow(rows[-1])
            table.flush()
        trainer = trainer_of(run)
        if trainer is None:
            print(f"the run ended by itself, with {run.poll()}: see {output / 'log.txt'}")
            return 1
        family = trainer.children(recursive=True)
        trainer.terminate()
        run.wait(60)
    _, alive = psutil.wait_procs(family, timeout=10)
    draw(rows, output / "soak.png")
    log_text = (output / "log.txt").read_text(errors="replace")
    (last,) = (output / "last").glob("*.ckpt")
    found = problems(output / "audit", last)
    print(f"{rows[-1]['updates']:.0f} updates in {rows[-1]['minutes']:.1f} minutes; exit code {run.returncode}")
    print(re.findall(r"[\d,]+ tasks drawn: .*", log_text)[-1])
    restarts = len(re.findall(r"restart \d+ of \d+ of the engine", log_text))
    print(f"the engine was replaced {restarts} times, {rows[-1]['failed']:.0f} checkpoints found the disk full")
    for name in ("trainer_mib", "engine_mib", "threads", "descriptors", "processes", "files"):
        tenth = max(1, len(rows) // 10)
        early, late = rows[tenth : 2 * tenth], rows[-tenth:]
        first, then = (max(row[name] for row in part) for part in (early, late))
        print(f"{COLUMNS[name]}: at most {first:.0f} in the second tenth of the time, {then:.0f} in the last")
    print(f"left behind: {[one.cmdline() for one in alive]}; accounts: {found or 'balance'}")
    return int(bool(found or alive))


if __name__ == "__main__":
    sys.exit(main())
