"""How a run is asked to stop, and stops with everything saved.

Invariant: after a first SIGINT, SIGTERM or SLURM's signal, the step being made is finished, published and booked, and a
checkpoint is written by whoever was asked to on exceptions (`ModelCheckpoint(save_on_exception=True)`), on all ranks at
the same step. Nothing is saved from within a signal handler: it may have interrupted an optimizer's step half-way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException

_by_hand = False


def by_hand() -> bool:
    """Whether Ctrl-C ended the run."""
    return _by_hand


def exit_code() -> int:
    """Of a run that was asked to stop, as shells count: 130 after Ctrl-C, else 143, also when SLURM's signal asked."""
    return 128 + (signal.SIGINT if _by_hand else signal.SIGTERM)


class Interruption(pl.Callback):
    """Ctrl-C once finishes the step and saves, twice stops at once; SLURM's requeue signal saves and requeues.

    Both are turned into SIGTERM, which Lightning carries to all ranks. `FlashReinforce` brings this callback along.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._stoppable = False
        self._interrupted = False
        self._requeue = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._stoppable = self._interrupted = self._requeue = False
        _remember(by_hand=False)  # of an earlier run in this process

        def on_interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted and "TORCHELASTIC_RUN_ID" in os.environ:
                return  # torchrun passes on the Ctrl-C that the terminal has sent to every process already
            _remember(by_hand=True)
            if not self._stoppable or self._interrupted:
                _save_nothing(trainer)
                raise KeyboardInterrupt
            self._interrupted = True
            print("\nCtrl-C: finishing this step and saving; once more stops at once", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)

        def on_requeue(number: int, frame: FrameType | None) -> None:
            _remember(by_hand=False)
            self._requeue = True
            os.kill(os.getpid(), signal.SIGTERM)

        self._handle(signal.SIGINT, on_interrupt)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            # Lightning's own handler, which steps back where there is one, would save from within it.
            self._handle(environment.requeue_signal or signal.SIGUSR1, on_requeue)

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stoppable = True  # Lightning listens to SIGTERM by now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stoppable = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stoppable = False
        if self._requeue and isinstance(exception, SIGTERMException):
            # Where Lightning looks for it when SLURM starts the job again.
            trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(str(trainer.default_root_dir)))
            if trainer.is_global_zero:
                _requeue_job()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stoppable = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, handler: Any) -> None:
        try:
            self._previous[number] = signal.signal(number, handler)
        except ValueError:  # not in the main thread: whoever runs the trainer there handles signals
            return


def _remember(*, by_hand: bool) -> None:
    global _by_hand
    _by_hand = by_hand


def _save_nothing(trainer: pl.Trainer) -> None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback.save_on_exception = False


def _requeue_job() -> None:
    job = os.environ.get("SLURM_JOB_ID", "")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=False)
        problem = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        rank_zero_warn(f"The run is saved, but `scontrol requeue {job}` failed: {problem}")
    else:
        rank_zero_info(f"The run is saved, and SLURM will start job {job} again")
