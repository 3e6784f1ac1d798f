"""The learner: one optimizer step per fresh batch, inside Lightning.

Invariant: the gradient of a step is that of the whole batch, whatever the micro-batches, their order, the padding and
the number of ranks: every micro-batch is weighted by global denominators and nothing is averaged in between. The policy
version is the number of optimizer steps made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from fr_lightning.advantage import Baseline, advantages
from fr_lightning.checkpoints import make_checkpoints_survive
from fr_lightning.evaluation import Evaluation, Outcome, evaluate
from fr_lightning.interruption import Interruption
from fr_lightning.loaders import PlayedEpisodes
from fr_lightning.lora import check_installed, merged
from fr_lightning.objective import ImportanceRatio, Objective, policy_loss
from fr_lightning.packing import micro_batches
from fr_lightning.parallel import FailedRank, gather_objects, of_team, over_ranks, share_evenly
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.ledger import ResumeRefused
from fr_lightning.rollout.runner import EpisodeFailed
from fr_lightning.sharding import sharded_policy
from fr_lightning.trajectory import Trajectory, TrajectoryBatch
from fr_lightning.weights import clip_gradient, whole_tensors


@dataclass
class Update:
    """What one optimizer step saw, for callbacks: one value per trajectory this rank learnt from, in batch order [B].

    `entropy` is the mean full-vocabulary entropy over a trajectory's policy tokens, in nats. `ratio_*` are of the
    importance ratio over all its micro-batches.
    """

    version: int
    batch: TrajectoryBatch
    drift: Tensor
    admitted: Tensor
    kept_tokens: Tensor
    entropy: Tensor
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    loss: float = 0.0
    gradient_norm: float = 0.0
    micro_batches: int = 0


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """AdamW as published (PAPER, "Published settings")."""
    return torch.optim.AdamW(parameters, lr=1e-6, weight_decay=0.1)


class FlashReinforce(pl.LightningModule):
    """FlashREINFORCE on any Hugging Face causal LM.

    Args:
        policy: the language model.
        objective: importance ratio, drift gate, reduction.
        baseline: what is subtracted from rewards: the `batch` mean, the `group` mean (same prompt) or `none`.
        positive_only: ablation: negative advantages count as zero.
        optimizer: class_path and init_args of an optimizer.
        lr_scheduler: class_path and init_args of a scheduler, stepped once per update.
        gradient_clip: largest gradient norm; null: no clipping.
        max_tokens_per_micro_batch: rows × longest row of one forward and backward pass. Only memory and speed depend
            on it.
        updates_per_batch: 1 uses a batch once, fresh; k > 1 splits it into k sequential updates (ablation).
    """

    def __init__(
        self,
        policy: PolicyConfig = PolicyConfig(),  # noqa: B008 (frozen)
        objective: Objective = Objective(),  # noqa: B008
        baseline: Baseline = "batch",
        positive_only: bool = False,
        optimizer: OptimizerCallable = default_optimizer,
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip: float | None = 1.0,
        max_tokens_per_micro_batch: int = 8192,
        updates_per_batch: int = 1,
    ):
        super().__init__()
        if max_tokens_per_micro_batch < 1 or updates_per_batch < 1:
            raise ValueError("model.max_tokens_per_micro_batch and model.updates_per_batch must be ≥ 1")
        if policy.lora is not None:
            check_installed()
        self.automatic_optimization = False
        self.policy_config = policy
        self.objective = objective
        self.policy: Policy | None = None
        self.policy_version = 0
        """Number of optimizer steps made; stamped on every token the engine samples under these weights."""
        self.last_evaluation: Evaluation | None = None
        self.baseline: Baseline = baseline
        self._positive_only = positive_only
        self._make_optimizer = optimizer
        self._make_scheduler = lr_scheduler
        self._gradient_clip = gradient_clip
        self._max_tokens = max_tokens_per_micro_batch
        self.updates_per_batch = updates_per_batch
        self._outcomes: list[Outcome] = []

    @property
    def model_name(self) -> str:
        """What the engine loads."""
        return self.policy_config.name

    @property
    def routing_replay(self) -> bool:
        """Whether the engine must record where it sends tokens."""
        return self.policy_config.routing_replay

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        mesh = self.device_mesh  # of Lightning's ModelParallelStrategy
        if mesh is None:
            self.policy = Policy(self.policy_config)
        else:
            offload = getattr(self.trainer.strategy, "offload", False)
            self.policy = sharded_policy(self.policy_config, mesh, offload=offload)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [FailedRank(), Interruption()]

    def setup(self, stage: str) -> None:
        make_checkpoints_survive(self.trainer)

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer([one for one in self.parameters() if one.requires_grad])
        if self._make_scheduler is None:
            return optimizer
        return [optimizer], [self._make_scheduler(optimizer)]

    def published_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their names in the Hugging Face model, one at a time; collective across ranks.

        Adapters are merged into the weights they belong to. All parameters come, frozen ones too: an engine takes a
        whole set or none, so that one that starts anew needs nothing but the latest.
        """
        assert self.policy is not None
        whole = whole_tensors(self.policy.named_published_parameters())
        lora = self.policy_config.lora
        return whole if lora is None else merged(whole, lora.scale)

    # -- training ----------------------------------------------------------------------------------------------------

    def training_step(self, batch: TrajectoryBatch, batch_idx: int) -> Mapping[str, Any]:
        rewards = self._of_all_ranks(batch.rewards)
        centred = advantages(
            rewards,
            baseline=self.baseline,
            groups=self._of_all_ranks(batch.groups),
            positive_only=self._positive_only,
        )
        if self.updates_per_batch == 1:
            batch, numbers = share_evenly(batch, self.team_size)
            update = self._update(batch, centred[numbers])
        else:  # ranks must split alike: each team learns from its own
            batch = of_team(batch, self.team_size)
            mine = centred[self.global_rank // self.team_size * len(batch) :][: len(batch)]
            parts = _split(len(batch), self.updates_per_batch)
            *_, update = [self._update(batch.subset(rows), mine[list(rows)]) for rows in parts]
        uniform = float((rewards == rewards[0]).all())
        self._log_update(update, rewards, uniform)
        return {"loss": torch.tensor(update.loss), "update": update}

    def _update(self, batch: TrajectoryBatch, centred: Tensor) -> Update:
        """One optimizer step on whole trajectories with their advantages [B]."""
        assert self.policy is not None
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        policy_lengths = self._of_all_ranks(batch.policy_lengths)  # those of a team once from each of its ranks
        num_trajectories, num_tokens = (n // self.team_size for n in (len(policy_lengths), int(policy_lengths.sum())))
        groups = micro_batches(batch.lengths, self._max_tokens, packed=self.policy.packed)
        groups += [[]] * (max(gather_objects(len(groups))) - len(groups))  # every rank runs as many
        update = Update(
            version=self.policy_version,
            batch=batch,
            drift=torch.zeros(len(batch), dtype=torch.float64),
            admitted=torch.zeros(len(batch), dtype=torch.bool),
            kept_tokens=torch.zeros(len(batch), dtype=torch.int64),
            entropy=torch.zeros(len(batch)),
            micro_batches=len(groups),
        )
        ratios: list[tuple[int, ImportanceRatio]] = []
        failed = batch.failed
        optimizer.zero_grad()
        for index, rows in enumerate(groups):
            real = rows or [0]  # an empty micro-batch keeps a rank in step: a row of weight zero
            padded = batch.pad(real).to(self.device)
            with self._gradients_synchronized(index == len(groups) - 1):
                out = self.policy(padded)
                row_advantages = centred[real] if rows else torch.zeros(1, dtype=centred.dtype)
                result = policy_loss(
                    out.logprobs,
                    padded.behavior_logprobs,
                    row_advantages.to(self.device, out.logprobs.dtype),
                    padded.policy_mask,
                    self.objective,
                    num_trajectories=num_trajectories,
                    num_tokens=num_tokens,
                    entropies=out.entropies,
                    failed=failed[real].to(self.device),
                )
                self.manual_backward(result.loss)
            if rows:
                tokens = padded.policy_mask.sum(dim=1)
                update.drift[rows] = result.drift.cpu()
                update.admitted[rows] = result.admitted.cpu()
                update.kept_tokens[rows] = result.kept_tokens.cpu()
                update.entropy[rows] = (out.entropies.sum(dim=1) / tokens).float().cpu()
                update.loss += result.loss.item()
                ratios.append((int(tokens.sum()), result.importance_ratio))
        update.ratio_mean = sum(n * float(r.mean) for n, r in ratios) / sum(n for n, _ in ratios)
        update.ratio_max = max(float(r.max) for _, r in ratios)
        teams = self.world_size // self.team_size
        if teams > 1:
            # Strategies average gradients over teams; the objective is a sum over them. Put right here and not in the
            # loss: models compute parts of their backward in float32, where a factor of 3 would round.
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(teams)
        update.loss = sum(gather_objects(update.loss)) / self.team_size  # each team has the part of its rows
        update.gradient_norm = self._clip()
        optimizer.step()
        schedulers = self.lr_schedulers()
        if schedulers is not None and not isinstance(schedulers, list):
            schedulers.step()  # pyright: ignore[reportCallIssue]
        self.policy_version += 1
        return update

    def _clip(self) -> float:
        norm = clip_gradient(self.parameters(), self._gradient_clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of update {self.policy_version + 1} is not finite: lower the learning rate or use "
                "precision 32-true; the last checkpoint is untouched"
            )
        return float(norm)

    @contextlib.contextmanager
    def _gradients_synchronized(self, wanted: bool) -> Iterator[None]:
        """Ranks exchange gradients in the last micro-batch only: once per update."""
        strategy = self.trainer.strategy
        fsdp_sync = getattr(self.policy, "set_requires_gradient_sync", None)
        if fsdp_sync is not None:
            fsdp_sync(wanted)
            yield
        elif not wanted and hasattr(strategy, "block_backward_sync"):
            with strategy.block_backward_sync():  # pyright: ignore[reportAttributeAccessIssue]
                yield
        else:
            yield

    @property
    def world_size(self) -> int:
        return self.trainer.world_size

    @property
    def team_size(self) -> int:
        """Ranks that hold each layer among them and learn from the same trajectories."""
        return 1 if self.device_mesh is None else self.device_mesh["tensor_parallel"].size()

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        return torch.cat(gather_objects(values))

    def _log_update(self, update: Update, rewards: Tensor, uniform: float) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        values = {
            "train/reward": float(rewards.mean()),
            "train/success": float((~update.batch.failed).float().mean()),
            "train/uniform_batch": uniform,
            "train/loss": update.loss,
            "train/gradient_norm": update.gradient_norm,
            "train/learning_rate": float(optimizer.param_groups[0]["lr"]),  # torchao's is a tensor
            "train/importance_ratio_mean": update.ratio_mean,
            "train/importance_ratio_max": update.ratio_max,
            "train/micro_batches": float(update.micro_batches),
        }
        self.log_dict(over_ranks(values, len(update.batch)), batch_size=len(update.batch))
        self.log("reward", values["train/reward"], prog_bar=True, logger=False, batch_size=len(update.batch))

    # -- evaluation --------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self._outcomes = []

    def validation_step(self, batch: PlayedEpisodes, batch_idx: int) -> None:
        for task, result in batch.played:
            played = isinstance(result, Trajectory)
            success, reward = (result.success, result.reward) if played else (None, None)
            metrics = result.metrics if played else {}
            self._outcomes.append(Outcome(task.id, success, reward, task.set, metrics))

    def on_validation_epoch_end(self) -> None:
        self._report_evaluation("val")

    def on_test_epoch_start(self) -> None:
        self._outcomes = []

    def test_step(self, batch: PlayedEpisodes, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._report_evaluation("test")

    def predict_step(self, batch: PlayedEpisodes, batch_idx: int) -> Iterable[Trajectory | EpisodeFailed]:
        """The episodes as they were played."""
        return batch

    def _report_evaluation(self, split: str) -> None:
        outcomes = [outcome for of_rank in gather_objects(self._outcomes) for outcome in of_rank]
        result = self.last_evaluation = evaluate(outcomes)
        values = {
            f"{split}/success": result.success.mean,
            f"{split}/success_standard_error": result.success.standard_error,
            f"{split}/reward": result.reward.mean,
            f"{split}/reward_standard_error": result.reward.standard_error,
            f"{split}/unplayed": float(result.unplayed),
            **{f"{split}/pass@{k}": score.mean for k, score in result.pass_at.items() if k > 1},
        }
        if result.sets:
            values[f"{split}/success_mean_of_sets"] = result.mean_of_sets.mean
            values |= {f"{split}/success/{name}": of_set.success.mean for name, of_set in result.sets.items()}
        for name, score in result.metrics.items():
            values[f"{split}/env/{name}"] = score.mean
            values[f"{split}/env/{name}_standard_error"] = score.standard_error
        self.log_dict(values, rank_zero_only=False, sync_dist=False)
        if self.trainer.sanity_checking:  # the score before the first update, which Lightning would not log
            for logger in self.trainer.loggers:
                logger.log_metrics(values, step=self.policy_version)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["policy_version"] = self.policy_version
        checkpoint["policy"] = self._policy_facts()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the version.

        Raises:
            ResumeRefused: the checkpoint is of another model.
        """
        now = self._policy_facts()
        for name, then in ({"lora": None} | checkpoint["policy"]).items():
            if then != now[name] and name != "name":
                raise ResumeRefused(
                    f"the checkpoint is of a policy with {name} {then}, this run's has {now[name]}: set "
                    + (
                        "model.policy.lora to what it began with"
                        if name == "lora"
                        else f"model.policy.name to the model it began with ({checkpoint['policy']['name']})"
                    )
                )
        self.policy_version = checkpoint["policy_version"]

    def _policy_facts(self) -> dict[str, Any]:
        assert self.policy is not None
        lora = self.policy_config.lora
        return {
            "name": self.policy_config.name,
            "architecture": type(self.policy.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.policy.parameters()),
            "lora": None if lora is None else dataclasses.asdict(lora),
        }


def _split(count: int, parts: int) -> list[range]:
    """Contiguous parts of sizes as equal as can be."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds) if high > low]
