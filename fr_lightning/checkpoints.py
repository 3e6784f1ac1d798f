"""Checkpoints that survive: a disk that is full, a file that is damaged, a run that does not know where it left off.

Invariants: a checkpoint that cannot be written costs that checkpoint and no other; what is resumed from was read to its
end and found whole; nothing is loaded that could run code.
"""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

SUFFIX = ".ckpt"
UNFINISHED = ".ckpt.part"


class NoCheckpoint(RuntimeError):
    """There is nothing whole to resume from; the message says what was looked at."""


def resumable(path: str | Path) -> Path | None:
    """The checkpoint to go on from.

    Args:
        path: a checkpoint, or a folder such as a run's `default_root_dir`, which stands for the newest one under it.

    Returns:
        it, or the newest whole one of its run where it is damaged (with a warning); None: a folder that is not there
        yet or holds no checkpoint, so that one command line begins a run and goes on with it.

    Raises:
        NoCheckpoint: the named file is missing, or all there are are damaged.
    """
    path = Path(path)
    if path.suffix == SUFFIX:
        if not path.exists():
            raise NoCheckpoint(f"--ckpt_path {path} is not there{_instead(path.parent)}")
        candidates = [path, *(other for other in _newest_first(_run_folder(path)) if other != path)]
    else:
        candidates = _newest_first(path)
        if not candidates:
            rank_zero_info(f"No checkpoint under {path} yet: the run begins anew")
            return None
    problems = []
    for candidate in candidates:
        problem = damage(candidate)
        if problem is None:
            if problems:
                rank_zero_warn(f"{'; '.join(problems)}. Going on from {candidate} instead")
            return candidate
        problems.append(f"The checkpoint {candidate} is damaged ({problem})")
    raise NoCheckpoint(f"{'; '.join(problems)}. No whole one is left: begin anew without --ckpt_path")


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, found by reading all of it, checksums included; None: nothing."""
    if checkpoint.is_dir():  # of a sharded run: every rank's part, and the list of parts that is written last
        missing = [name for name in (".metadata", "meta.pt") if not (checkpoint / name).is_file()]
        return f"it lacks {' and '.join(missing)}" if missing else None
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            first_bad = archive.testzip()
            return None if first_bad is None else f"its part {first_bad} has the wrong checksum"
    except (zipfile.BadZipFile, EOFError, OSError, zlib.error) as error:
        return f"{type(error).__name__}: {error}"


def _run_folder(checkpoint: Path) -> Path:
    """Of a run and those it went on from: Lightning's loggers give each a `version_…/checkpoints`."""
    version = checkpoint.parent.parent
    return version.parent if version.name.startswith("version_") else checkpoint.parent


def _newest_first(folder: Path) -> list[Path]:
    found = [path for path in folder.rglob(f"*{SUFFIX}") if path.is_file() or (path / "meta.pt").exists()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _instead(folder: Path) -> str:
    there = _newest_first(folder) if folder.is_dir() else []
    return f"; the newest in its folder is {there[0].name}" if there else ", and its folder has no other"


class SurvivingCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but a disk that is full (or gone) does not end the run, and no code is ever loaded.

    A local checkpoint has its name only once it is whole and on the disk (Lightning copies it there from the folder for
    temporary files). While the latest could not be written, none is removed: the last good one may be the only one.
    """

    def __init__(self) -> None:
        self.unsaved: str | None = None
        """What became of the latest checkpoint, if it could not be written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        try:
            if "://" in str(path):
                super().save_checkpoint(checkpoint, path, storage_options)
            else:
                _write(checkpoint, Path(path))
            self.unsaved = None
        except OSError as error:
            self.unsaved = f"The checkpoint {path} could not be written: {error}"
            rank_zero_warn(f"{self.unsaved}. Training goes on; earlier checkpoints are kept")

    def remove_checkpoint(self, path: str | Path) -> None:
        if self.unsaved is None:
            super().remove_checkpoint(path)

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if weights_only is False:
            raise ValueError(
                "weights_only=False would run whatever code a checkpoint holds; those of fr_lightning need none: "
                "leave it out"
            )
        return super().load_checkpoint(path, map_location or (lambda storage, loc: storage), weights_only=True)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for left_behind in path.parent.glob(f"*{UNFINISHED}"):  # by a run that was killed while it wrote
        left_behind.unlink(missing_ok=True)
    unfinished = path.with_name(path.name.removesuffix(SUFFIX) + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            try:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            except (OSError, RuntimeError) as error:  # torch wraps the system's error in one of its own
                written = f"{file.tell() / 2**20:,.0f} MiB of it were written"
                reason = next((one for one in (error, error.__context__) if isinstance(one, OSError)), None)
                if reason is None:
                    raise
                raise OSError(reason.errno, f"{reason.strerror}, {written}") from error
        if path.is_dir():  # a sharded checkpoint of that name
            shutil.rmtree(path)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def make_checkpoints_survive(trainer: pl.Trainer) -> SurvivingCheckpointIO | None:
    """Give the trainer a `SurvivingCheckpointIO`, unless the user chose another or its strategy has its own."""
    chosen = trainer.strategy.checkpoint_io
    if isinstance(chosen, SurvivingCheckpointIO):
        return chosen
    if type(chosen) is not TorchCheckpointIO:
        return None
    trainer.strategy.checkpoint_io = mine = SurvivingCheckpointIO()
    return mine
