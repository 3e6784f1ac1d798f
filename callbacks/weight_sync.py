"""Publishes the learner's weights to the engine, and proves that they arrive.

Invariants: when the learner asks for the batch of update v + 1, the engine holds the weights of version v; and no
training step is made before engine and learner were found to weigh the same tokens alike, under weights that the engine
can only have from a publication. Training refuses to run without this callback; the command line always adds it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.module import FlashReinforce
from fr_lightning.parallel import of_team
from fr_lightning.trajectory import TrajectoryBatch

FLOAT32_TOLERANCE = 1e-3
TOLERANCE = 1e-1
"""Largest mean |Δ log-prob| per token where engine or learner computes in 16 bits.

Measured on SmolLM2-135M, bfloat16 engine and bfloat16-mixed learner: rounding makes 0.05 of it, and 0.06 under the
weights of the proof, where one stale layer of thirty makes 0.13, a stale tied head 0.29 and stale norms 0.39.
"""

CLEARLY = 5.0
"""How many tolerances the weights of the proof move log-probs, so that a part of them that did not arrive shows too."""


class Disagreement(RuntimeError):
    """Engine and learner weigh the same tokens differently: importance ratios would be wrong from the first update."""


@dataclass(frozen=True)
class AgreementCheck:
    """How engine and learner are compared: both weigh the tokens of some probes that the engine samples.

    Attributes:
        prompts: probes per comparison.
        tokens: sampled for each.
        max_difference: largest mean |log-prob of the engine - log-prob of the learner| per token; null: 0.001 where
            both compute in float32, else 0.1.
        prove_sync: before training, also publish weights that are moved away from the model's, and back: an engine
            that loaded the right model agrees with the learner even if no publication ever reaches it.
    """

    prompts: int = 8
    tokens: int = 24
    max_difference: float | None = None
    prove_sync: bool = True

    def __post_init__(self) -> None:
        if min(self.prompts, self.tokens) < 1 or (self.max_difference is not None and self.max_difference <= 0):
            raise ValueError(f"a check needs ≥ 1 prompts and tokens and max_difference > 0, got {self}")


class WeightSync(pl.Callback):
    """Logs `time/publish`: seconds from the end of the update until the engine samples under it, `time/pause`: of them,
    how long generation stood still, and `agreement/difference`: mean |Δ log-prob| at the latest check.

    Args:
        check: compares engine and learner after the first publication and after the first update; null: never.
    """

    def __init__(self, check: AgreementCheck | None = AgreementCheck()):
        self.check = check
        self.difference = float("nan")
        self._checked = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._publish_if_stale(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        data, seconds = self._publish_if_stale(trainer, pl_module)
        values = {"time/publish": seconds, "time/pause": data.engine.pause_seconds}
        if self.check is not None:
            values["agreement/difference"] = self.difference
        pl_module.log_dict(values, batch_size=1)

    def _publish_if_stale(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[RolloutDataModule, float]:
        assert isinstance(pl_module, FlashReinforce)
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(data, RolloutDataModule):
            raise TypeError(f"WeightSync publishes to a RolloutDataModule, the trainer has {type(data).__name__}")
        if data.published_version == pl_module.policy_version:
            return data, 0.0
        if data.published_version is None:
            self._checked = 0
        began = time.perf_counter()
        data.publish(pl_module.published_parameters(), pl_module.policy_version)
        seconds = time.perf_counter() - began
        if self.check is not None and self._checked < 2:
            # Lightning evaluates in inference mode, whose tensors (FSDP would keep some) cannot be trained with.
            with torch.inference_mode(False), torch.no_grad():
                comparison = _Comparison(self.check, trainer, pl_module, data)
                self.difference = comparison.run(first=self._checked == 0)
            self._checked += 1
        return data, seconds


class _Comparison:
    """Of one engine with one learner. Every rank runs the same forward passes, whatever its own engine says."""

    def __init__(self, check: AgreementCheck, trainer: pl.Trainer, module: FlashReinforce, data: RolloutDataModule):
        self.check, self.trainer, self.module, self.data = check, trainer, module, data
        exact = data.engine.dtype == "float32" and str(trainer.precision) in ("32-true", "64-true")
        exact = exact and module.policy_config.dtype in ("float32", "float64")
        self.tolerance = check.max_difference or (FLOAT32_TOLERANCE if exact else TOLERANCE)

    def run(self, *, first: bool) -> float:
        """The mean difference; the first time before training, also prove that publications arrive.

        Raises:
            Disagreement: a difference is above the tolerance.
        """
        probes = self._probe()
        difference = self._difference(probes)
        if not difference <= self.tolerance:
            raise Disagreement(
                self._says(difference)
                + (
                    "Likely causes: the engine serves another model or revision, or computes in another dtype than "
                    "the learner; its log-probs are not those of the sampling distribution (temperature, filters); "
                    "quantised weights or keys and values; a publication that did not arrive whole (a tied head)."
                    if first
                    else "They agreed before the first update: the publication of that update did not arrive whole."
                )
            )
        if first and self.check.prove_sync and self.trainer.state.fn == "fit":
            self._prove(probes)
        return difference

    def _prove(self, probes: TrajectoryBatch) -> None:
        """Publish weights that only a publication can have brought, compare, and put everything back bit for bit."""
        parameters = [_local(parameter) for parameter in self.module.parameters()]
        originals = [parameter.clone() for parameter in parameters]
        before = self._logprobs(probes)
        strength = 2**-7
        moved = 0.0
        while moved < CLEARLY * self.tolerance and strength < 0.5:
            strength *= 2
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_(original)
                flat = parameter.view(-1)
                flat[::2] *= 1 + strength
                flat[1::2] *= 1 - strength
            moved = self._of_all_ranks(self._mean(self._logprobs(probes), before, probes))
        try:
            self.data.load(self.module.published_parameters(), self.module.policy_version)
            moved_probes = self._probe()
            difference = self._difference(moved_probes)
        finally:
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_(original)
        if not difference <= self.tolerance:
            unmoved = self._difference(moved_probes)
            raise Disagreement(
                self._says(difference)
                + "They agreed under the model's own weights, and no longer after others were published. "
                + (
                    "The engine still samples under the old ones: the publication did nothing."
                    if unmoved <= self.tolerance
                    else "Likely causes: some layers were not updated (an output head that is tied to the embeddings, "
                    "or packed copies of weights), or the weights were rounded to another dtype on their way."
                )
            )
        self.data.load(self.module.published_parameters(), self.module.policy_version)
        difference = self._difference(self._probe())
        if not difference <= self.tolerance:
            raise Disagreement(self._says(difference) + "They agreed before: the second publication went wrong.")

    def _probe(self) -> TrajectoryBatch:
        return of_team(self.data.probe(self.check.prompts, self.check.tokens), self.module.team_size)

    def _difference(self, probes: TrajectoryBatch) -> float:
        ours = self._logprobs(probes)
        theirs = probes.pad(range(len(probes))).behavior_logprobs.to(ours)
        return self._of_all_ranks(self._mean(ours, theirs, probes))

    def _logprobs(self, probes: TrajectoryBatch) -> Tensor:
        """The learner's log-probs of the probes' tokens, computed as in training."""
        assert self.module.policy is not None
        rows = probes.pad(range(len(probes))).to(self.module.device)
        with self.trainer.precision_plugin.forward_context():
            return self.module.policy(rows).logprobs

    def _mean(self, ours: Tensor, theirs: Tensor, probes: TrajectoryBatch) -> Tensor:
        mask = probes.pad(range(len(probes))).policy_mask.to(ours.device)
        return (ours - theirs).abs()[mask].mean()

    def _of_all_ranks(self, value: Tensor) -> float:
        """The worst of all ranks, so that all stop or none."""
        return float(self.trainer.strategy.reduce(value.double(), reduce_op="max"))

    def _says(self, difference: float) -> str:
        return (
            f"engine and learner differ by {difference:.3g} in the mean log-probability of a token, more than "
            f"{self.tolerance:g} (weight_sync.check.max_difference). "
        )


def _local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory."""
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
