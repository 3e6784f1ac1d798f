"""The learner through Lightning's own trainer: the gradient of a batch is the gradient of the batch."""

import lightning.pytorch as pl
import pytest
import torch

from fr_lightning.module import FlashReinforce
from fr_lightning.objective import Objective
from fr_lightning.policy import PolicyConfig
from fr_lightning.trajectory import Trajectory, TrajectoryBatch


def random_batch(seed=0, size=7, vocabulary=500) -> TrajectoryBatch:
    """Mixed lengths, several turns, mixed versions."""
    generator = torch.Generator().manual_seed(seed)
    trajectories = []
    for number in range(size):
        length = int(torch.randint(5, 30, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.5
        mask[0], mask[-1] = False, True
        logprobs = -5 * torch.rand(length, generator=generator) * mask
        trajectories.append(
            Trajectory(
                token_ids=torch.randint(9, vocabulary, (length,), generator=generator),
                policy_mask=mask,
                behavior_logprobs=logprobs,
                policy_versions=torch.where(mask, 0, -1),
                reward=float(torch.rand(1, generator=generator)),
                success=bool(number % 2),
                rollout_id=str(number),
                group=number // 2,
                temperature=1.0 if number else 0.7,
            )
        )
    return TrajectoryBatch(trajectories)


def gradient(tiny_model, batch, *, max_tokens=10_000, dtype="float64", **settings) -> torch.Tensor:
    """What one step of plain SGD with learning rate 1 takes away from the weights."""
    module = FlashReinforce(
        PolicyConfig(name=tiny_model, dtype=dtype),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        gradient_clip=None,
        max_tokens_per_micro_batch=max_tokens,
        **settings,
    )
    module.configure_model()
    before = torch.cat([p.detach().clone().flatten() for p in module.parameters()])
    fit(module, [batch])
    return before - torch.cat([p.detach().flatten() for p in module.parameters()])


class Loader:
    """Lightning takes a plain list for a list of loaders."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def fit(module, batches):
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=len(batches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_dataloaders=Loader(batches))
    return trainer


@pytest.mark.parametrize(
    ("objective", "tolerance", "dtype"),
    [
        (Objective(delta=0.5), 1e-10, "float64"),
        (Objective(gate="token", delta=0.1, reduction="token_mean"), 1e-10, "float64"),
        (Objective(gate="none", reduction="constant", length_scale=20.0), 1e-10, "float64"),
        (Objective(delta=0.5, failure_token_fraction=0.5), 1e-10, "float64"),
        (Objective(delta=0.5), 1e-5, "float32"),
    ],
)
def test_micro_batching_and_order_leave_the_gradient_as_it_is(tiny_model, objective, tolerance, dtype):
    batch = random_batch()
    whole = gradient(tiny_model, batch, objective=objective, dtype=dtype)
    assert whole.abs().max() > 0
    generator = torch.Generator().manual_seed(1)
    for max_tokens in (1, 40, 90):
        order = torch.randperm(len(batch), generator=generator).tolist()
        other = gradient(tiny_model, batch.subset(order), objective=objective, dtype=dtype, max_tokens=max_tokens)
        assert (other - whole).norm() <= tolerance * whole.norm()


def test_the_gradient_is_autograds_own(tiny_model):
    """Against the formula written out over full logits of one unpadded trajectory at a time."""
    from transformers import AutoModelForCausalLM

    batch = random_batch()
    ours = gradient(tiny_model, batch, objective=Objective(gate="none"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    rewards = batch.rewards
    for trajectory, advantage in zip(batch, rewards - rewards.mean(), strict=True):
        ids = trajectory.token_ids[None]
        logp = (model(ids).logits[0, :-1] / trajectory.temperature).log_softmax(-1)
        logp = logp.gather(-1, ids[0, 1:, None])[:, 0][trajectory.policy_mask[1:]]
        mu = trajectory.behavior_logprobs[trajectory.policy_mask].double()
        ratio = (logp.detach() - mu).clamp(-30, 30).exp()
        (-advantage / (len(batch) * len(logp)) * (ratio * logp).sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert ours.shape == expected.shape
    # behavior log-probs and temperatures are float32 data; the rest is float64
    assert (ours - expected).norm() <= 1e-6 * expected.norm()


def test_one_optimizer_step_per_batch_and_the_version_counts_them(tiny_model):
    module = FlashReinforce(PolicyConfig(name=tiny_model), max_tokens_per_micro_batch=30)
    trainer = fit(module, [random_batch(seed) for seed in range(3)])
    assert module.policy_version == 3
    assert trainer.global_step == 3
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {3}


def test_k_sequential_updates_of_one_batch(tiny_model):
    module = FlashReinforce(PolicyConfig(name=tiny_model), updates_per_batch=3)
    fit(module, [random_batch()])
    assert module.policy_version == 3


def test_a_uniform_batch_moves_nothing(tiny_model):
    batch = random_batch()
    for trajectory in batch:
        trajectory.reward = 1.0
    assert (gradient(tiny_model, batch) == 0).all()


def test_rejected_trajectories_count_in_the_denominators_only(tiny_model):
    batch = random_batch()
    certain = batch[3].policy_mask
    batch[3].behavior_logprobs[certain] = 0.0  # it was sure of what the policy finds unlikely: rejected
    with_gate = gradient(tiny_model, batch, objective=Objective(delta=3.0))
    assert not torch.allclose(with_gate, gradient(tiny_model, batch, objective=Objective(gate="none")))
    # the same by hand: all others, with their advantages in the whole batch, divided by the whole B
    mean = float(batch.rewards.mean())
    others = batch.subset(row for row in range(len(batch)) if row != 3)
    for trajectory in others:
        trajectory.reward -= mean
    alone = gradient(tiny_model, others, objective=Objective(gate="none"), baseline="none")
    expected = alone * len(others) / len(batch)
    assert (with_gate - expected).norm() <= 1e-6 * expected.norm()


def test_the_norm_is_clipped(tiny_model):
    module = FlashReinforce(
        PolicyConfig(name=tiny_model),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        gradient_clip=1e-3,
        objective=Objective(gate="none"),
    )
    module.configure_model()
    before = torch.cat([p.detach().clone().flatten() for p in module.parameters()])
    trainer = fit(module, [random_batch()])
    moved = (before - torch.cat([p.detach().flatten() for p in module.parameters()])).norm()
    assert moved == pytest.approx(1e-3, rel=1e-3)
    assert trainer.callback_metrics["train/gradient_norm"] > 1e-3


def test_a_nan_reward_is_refused(tiny_model):
    batch = random_batch()
    batch[2].reward = float("nan")
    with pytest.raises(ValueError, match=r"rows \[2\]"):
        fit(FlashReinforce(PolicyConfig(name=tiny_model)), [batch])


def test_schedulers_step_once_per_update(tiny_model):
    module = FlashReinforce(
        PolicyConfig(name=tiny_model),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        max_tokens_per_micro_batch=30,
    )
    trainer = fit(module, [random_batch(seed) for seed in range(3)])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.125)
