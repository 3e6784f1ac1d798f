"""LightningCLI with the parts every run has: the learner, the rollouts, weight publication, checkpoints, pictures.

Invariant: what a user may drop or replace is in the YAML; what may not be dropped (WeightSync) is added here.
"""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from fr_lightning.callbacks import Transcripts, WeightSync
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.module import FlashReinforce


class WrongSetting(ValueError):
    """A setting the parts refuse when they are put together; the message names it."""


class FlashCLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` of `FlashReinforce` on `RolloutDataModule`."""

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

    def after_validate(self) -> None:
        self._print_scores()

    def after_test(self) -> None:
        self._print_scores()

    def _print_scores(self) -> None:
        score = self.model.last_evaluation
        if score is None or not self.trainer.is_global_zero:
            return
        print(f"tasks {score.tasks}, samples {score.samples}, could not be played {score.unplayed}")
        print(f"success avg@k {score.success}   reward {score.reward}")
        for k, value in score.pass_at.items():
            print(f"pass@{k} {value}")
        for name, value in score.metrics.items():
            print(f"{name} {value}")
