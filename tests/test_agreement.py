"""Engine and learner weigh the same tokens alike: what importance sampling stands on."""

import lightning.pytorch as pl
import torch

from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.envs.base import TextEnv
from fr_lightning.module import FlashReinforce
from fr_lightning.objective import Objective, policy_loss
from fr_lightning.packing import micro_batches
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.runner import EpisodeLimits
from fr_lightning.trajectory import Trajectory, TrajectoryBatch


class Talk(TextEnv):
    """Asks four times, whatever is answered."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return f"Tell me about {int(self.np_random.integers(1000))}.", {}

    def step(self, action):
        self.turn += 1
        role = "tool" if self.turn % 2 else "user"
        return f"And about {self.turn * 37}?", 0.0, self.turn == 4, False, {"role": role}


class Collect(FlashReinforce):
    """A learner that only keeps what it is given."""

    collected: list[Trajectory]

    def validation_step(self, batch, batch_idx):
        self.collected += [result for result in batch if isinstance(result, Trajectory)]

    def on_validation_epoch_end(self):
        return


def test_ten_thousand_tokens_of_conversations(tiny_model, tmp_path):
    from fr_lightning.callbacks import WeightSync
    from fr_lightning.evaluation_plan import EvaluationPlan

    for temperature in (1.0, 0.7):
        module = Collect(PolicyConfig(name=tiny_model))
        module.collected = []
        data = RolloutDataModule(
            env=Talk,
            engine=EmbeddedEngine(max_context=512, max_sequences=32),
            batch_size=8,
            concurrency=64,
            sampling=Sampling(temperature=temperature, max_tokens=40),
            limits=EpisodeLimits(max_context=400),
            evaluation=EvaluationPlan(tasks=100),
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
            callbacks=[WeightSync()],
        )
        trainer.validate(module, datamodule=data, verbose=False)
        batch = TrajectoryBatch(module.collected)
        assert int(batch.policy_lengths.sum()) >= 10_000
        assert all(len(t.turns) == 4 for t in batch)

        policy = Policy(PolicyConfig(name=tiny_model))
        worst = 0.0
        with torch.no_grad():
            for rows in micro_batches(batch.lengths, 16_384):
                padded = batch.pad(rows)
                out = policy(padded)
                gap = (out.logprobs - padded.behavior_logprobs)[padded.policy_mask].abs().max()
                worst = max(worst, float(gap))
                loss = policy_loss(
                    out.logprobs, padded.behavior_logprobs, torch.zeros(len(rows)), padded.policy_mask, Objective()
                )
                assert float(loss.drift.max()) < 1e-6
        assert worst < 1e-4
