"""Run by every rank: one update of a fixed batch under each variant of the objective; rank 0 writes the gradients.

torchrun --nproc_per_node 2 -m tests.distributed.one_update --model FOLDER --strategy fsdp2 --output gradients.pt
"""

from __future__ import annotations

import argparse
import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy

from fr_lightning.module import FlashReinforce
from fr_lightning.objective import Objective
from fr_lightning.parallel import FSDP2
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.trajectory import Trajectory, TrajectoryBatch
from fr_lightning.weights import whole_tensors

VARIANTS = {
    "flash": Objective(delta=0.5),
    "token gate": Objective(gate="token", delta=0.1, reduction="token_mean"),
    "no gate": Objective(gate="none", reduction="constant", length_scale=20.0),
    "failures": Objective(delta=0.5, failure_token_fraction=0.5),
    "nothing to learn for one rank": Objective(delta=0.01),
}
BATCH = 12
"""Divisible by 1, 2 and 3 ranks."""


def noise(number: int) -> float:
    """How far the behavior of a row is from the policy: one row in the first half is out of all bounds, and the whole
    first half further away than the second.
    """
    return 2.0 if number == 3 else 0.3 if number < BATCH // 2 else 0.03


def fixed_batch(model: str) -> TrajectoryBatch:
    """Lengths from 6 to 60 in no order."""
    generator = torch.Generator().manual_seed(0)
    policy = Policy(PolicyConfig(name=model, dtype="float64"))
    trajectories = []
    for number in range(BATCH):
        length = int(torch.randint(6, 60, (1,), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0], mask[-1] = False, True
        ids = torch.randint(9, 400, (length,), generator=generator)
        row = Trajectory(ids, mask, -1.0 * mask, torch.where(mask, 0, -1), reward=0.0)
        with torch.no_grad():
            logprobs = policy(TrajectoryBatch([row]).pad([0])).logprobs[0]
        behavior = (logprobs + noise(number) * torch.randn(length, generator=generator)).clamp(max=0.0) * mask
        trajectories.append(
            Trajectory(
                token_ids=ids,
                policy_mask=mask,
                behavior_logprobs=behavior,
                policy_versions=torch.where(mask, 0, -1),
                reward=float(torch.rand(1, generator=generator)),
                success=bool(number % 2),
                rollout_id=str(number),
                group=number // 2,
            )
        )
    return TrajectoryBatch(trajectories)


class Once:
    """A loader of one batch. Lightning takes a plain list for a list of loaders."""

    def __init__(self, batch: TrajectoryBatch):
        self.batch = batch

    def __iter__(self):
        yield self.batch

    def __len__(self):
        return 1


def strategy_named(name: str) -> Strategy | str:
    match name:
        case "ddp":
            return DDPStrategy(process_group_backend="gloo")
        case "fsdp2":
            return FSDP2(process_group_backend="gloo")
        case "tensor":
            return FSDP2(tensor_parallel_size=2, process_group_backend="gloo")
    return "auto"


def gradient(args: argparse.Namespace, objective: Objective, batch: TrajectoryBatch, max_tokens: int) -> torch.Tensor:
    """What a step of plain SGD with learning rate 1 takes away from the weights, [parameters]."""
    module = FlashReinforce(
        PolicyConfig(name=args.model, dtype=args.dtype, compile=args.compile),
        objective,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        gradient_clip=None,
        max_tokens_per_micro_batch=max_tokens,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        num_nodes=args.nodes,
        strategy=strategy_named(args.strategy),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rank, ranks = trainer.global_rank, trainer.world_size
    share = BATCH // ranks
    mine = batch.subset(range(rank * share, (rank + 1) * share))
    before = FlashReinforce(PolicyConfig(name=args.model, dtype=args.dtype))
    before.configure_model()
    trainer.fit(module, train_dataloaders=Once(mine))
    after = dict(whole_tensors(module.published_parameters()))
    assert before.policy is not None
    return torch.cat(
        [(tensor - after[name]).detach().flatten() for name, tensor in before.policy.named_published_parameters()]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2", "tensor"], default="auto")
    parser.add_argument("--ranks", type=int, default=1, help="on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--compile", action="store_true", help="the decoder's layers; one variant alone")
    parser.add_argument("--output", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch, found = fixed_batch(args.model), {}
    for name, objective in list(VARIANTS.items())[: 1 if args.compile else None]:
        for number, max_tokens in enumerate((10_000, 70) if args.compile else (10_000, 1, 70, 100, 130)):
            shuffled = torch.randperm(BATCH, generator=torch.Generator().manual_seed(number)).tolist()
            order = shuffled if number else range(BATCH)
            found[name, number] = gradient(args, objective, batch.subset(order), max_tokens)
    assert all(math.isfinite(float(one.norm())) for one in found.values())
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        torch.save(found, args.output)


if __name__ == "__main__":
    main()
