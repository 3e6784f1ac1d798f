"""LightningCLI with the parts every run has: the learner, the rollouts, weight publication, checkpoints, pictures.

Invariant: what a user may drop or replace is in the YAML; what may not be dropped (WeightSync) is added here.
"""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from fr_lightning.callbacks import Transcripts, WeightSync
from fr_lightning.checkpoints import NoCheckpoint, SurvivingCheckpointIO, resumable
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.evaluation import Evaluation
from fr_lightning.module import FlashReinforce

LIGHTNINGS_OWN = ("best", "last", "hpc", "registry")
"""What `--ckpt_path` may say besides a path."""


class WrongSetting(ValueError):
    """A setting the parts refuse when they are put together; the message names it."""


class Unsaved(RuntimeError):
    """A run came to its end, but its latest checkpoint could not be written."""


class FlashCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` of `FlashReinforce` on `RolloutDataModule`.

    `--ckpt_path` may be a folder, which stands for the newest whole checkpoint in it.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(WeightSync, "weight_sync")
        parser.add_lightning_class_args(Transcripts, "transcripts")
        parser.set_defaults(
            {
                "trainer.accelerator": "auto",
                "trainer.devices": 1,
                "trainer.max_epochs": -1,
                "trainer.check_val_every_n_epoch": None,
                "trainer.log_every_n_steps": 1,
            }
        )

    def _parse_ckpt_path(self) -> None:
        """Lightning would take settings from the checkpoint here; ours come from the command line alone."""
        subcommand = self.config["subcommand"]
        path = self.config[subcommand].get("ckpt_path")
        if path is None or path in LIGHTNINGS_OWN or "://" in path:
            return
        found = resumable(path)
        if found is None and subcommand != "fit":
            raise NoCheckpoint(f"--ckpt_path {path}: there is no checkpoint to {subcommand}")
        self.config[subcommand]["ckpt_path"] = None if found is None else str(found)

    def before_instantiate_classes(self) -> None:
        assert self.subcommand is not None
        trainer = self.config[self.subcommand].trainer
        if trainer.enable_progress_bar is False:  # Lightning would refuse the combination
            trainer.callbacks = [
                callback for callback in trainer.callbacks or [] if not callback.class_path.endswith("Progress")
            ]

    def instantiate_classes(self) -> None:
        """Build trainer, learner and rollouts from the settings.

        Raises:
            WrongSetting: one of them refused its settings.
        """
        try:
            super().instantiate_classes()
        except (ValueError, ImportError, FileNotFoundError, MisconfigurationException) as error:
            raise WrongSetting(str(error)) from error

    @staticmethod
    def run() -> FlashCLI:
        """Run the subcommand of `sys.argv` with its options."""
        return FlashCLI(
            FlashReinforce,
            RolloutDataModule,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfigCallback,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"default_env": False},
        )

    def after_fit(self) -> None:
        storage = self.trainer.strategy.checkpoint_io
        if isinstance(storage, SurvivingCheckpointIO) and storage.unsaved is not None:
            raise Unsaved(f"{storage.unsaved}. Free some space, then go on from an earlier one with --ckpt_path FOLDER")

    def after_validate(self) -> None:
        self._print_scores()

    def after_test(self) -> None:
        self._print_scores()

    def _print_scores(self) -> None:
        score = self.model.last_evaluation
        if score is None or not self.trainer.is_global_zero:
            return
        console = Console()
        if not console.is_terminal:  # a file or a pipe has no width: do not break lines for one
            console.width = 160
        console.print(score_table(score))
        if score.metrics:
            console.print(metrics_table(score))


def score_table(score: Evaluation) -> Table:
    """Scores as a table: a row for each set of tasks, for all together, and for the mean of sets."""
    table = Table(box=SIMPLE, title="mean ± standard error over tasks")
    for column in ("set", "tasks", "samples", "not played", "success avg@k", "reward", "pass@k"):
        table.add_column(column, justify="left" if column in ("set", "pass@k") else "right")
    for name, one in (*score.sets.items(), ("all tasks", score)):
        passed = "   ".join(f"@{k} {value}" for k, value in one.pass_at.items() if k > 1)
        counts = map(str, (one.tasks, one.samples, one.unplayed))
        table.add_row(name, *counts, str(one.success), str(one.reward), passed)
    if score.sets:
        table.add_row("mean of sets", "", "", "", str(score.mean_of_sets), "", "")
    return table


def metrics_table(score: Evaluation) -> Table:
    """What the environment itself reports of its episodes."""
    table = Table(box=SIMPLE, title="the environment's own metrics: mean ± standard error over tasks")
    table.add_column("metric")
    table.add_column("mean", justify="right")
    for name, value in score.metrics.items():
        table.add_row(name, str(value))
    return table
