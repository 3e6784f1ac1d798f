"""Supervised warm start: a model learns to imitate an environment's own expert, as far as it is let.

Invariant: demonstrations are ordinary trajectories, played by the same runner through the same token-exact
conversation as training; only the words come from `TextEnv.expert_action`. What is learned here is therefore exactly
the format that reinforcement learning will meet.

A model without pretraining learns more from the same demonstrations if it also has to foresee what the environment says
(`observation_weight`): that is most of the text, and teaches it to copy names from its context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from fr_lightning.engines.base import Completion, Sampling
from fr_lightning.envs.base import TextEnv
from fr_lightning.packing import micro_batches
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.rollout.runner import EpisodeLimits, Runner, derived_seed
from fr_lightning.trajectory import Task, Trajectory, TrajectoryBatch

WARM_VERSION = 0


@dataclass(frozen=True)
class Lesson:
    """One environment to imitate, and how well it is played."""

    make_env: Callable[[], TextEnv]
    skill: float = 1.0
    weight: float = 1.0


class _Expert:
    """Looks like an engine to the runner, and speaks the expert's words."""

    def __init__(self, env: TextEnv, chat: ChatFormat, skill: float):
        self._env, self._chat, self._skill = env, chat, skill

    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion:
        words = self._env.expert_action(self._skill)
        ids = [*self._chat.tokenizer(words, add_special_tokens=False)["input_ids"], self._chat.stop_token_ids[0]]  # pyright: ignore[reportGeneralTypeIssues]
        return Completion(ids, [0.0] * len(ids), [WARM_VERSION] * len(ids), "stop")

    async def forget(self, session: str) -> None:
        return


def demonstrations(
    lessons: Sequence[Lesson],
    chat: ChatFormat,
    seed: int,
    max_context: int,
    max_turns: int = EpisodeLimits.max_turns,
) -> Iterator[Trajectory]:
    """An endless stream of expert episodes, lessons mixed by weight."""
    chance = random.Random(seed)
    envs = [lesson.make_env() for lesson in lessons]
    limits = EpisodeLimits(max_turns=max_turns, max_context=max_context)
    number = 0
    while True:
        which = chance.choices(range(len(lessons)), [lesson.weight for lesson in lessons])[0]
        task = Task(id=f"warm-start/{number}", seed=derived_seed("warm-start", seed, number))
        runner = Runner(_Expert(envs[which], chat, lessons[which].skill), chat, limits=limits)
        yield asyncio.run(runner.play(task, envs[which], rollout_id=task.id, seed=0))
        number += 1


def train(
    policy: Policy,
    stream: Iterator[Trajectory],
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    max_tokens_per_micro_batch: int = 8192,
    observation_weight: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Iterator[float]:
    """Maximise the mean log-probability of the expert's tokens; yields the loss (nats per token) of every step.

    Args:
        policy: trained in place.
        stream: demonstrations.
        steps: optimizer steps.
        batch_size: demonstrations per step.
        learning_rate: the peak, after a warm-up of 50 steps and before a cosine to a twentieth.
        max_tokens_per_micro_batch: rows × longest row of one pass.
        observation_weight: what a token of the environment's counts for beside one of the expert's. Not part of the
            loss that is yielded.
        dtype: of the matrix products.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    for _ in range(steps):
        batch = TrajectoryBatch(next(stream) for _ in range(batch_size))
        tokens = int(batch.policy_lengths.sum())
        optimizer.zero_grad()
        total = 0.0
        for rows in micro_batches(batch.lengths, max_tokens_per_micro_batch):
            padded = batch.pad(rows)
            said = padded.policy_mask  # [b, N]
            if observation_weight:
                padded = dataclasses.replace(padded, policy_mask=_all_but_first(padded.attention_mask))
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                logprobs = policy(padded).logprobs
            (-(logprobs * torch.where(said, 1.0, observation_weight)).sum() / tokens).backward()
            total -= float((logprobs.detach() * said).sum()) / tokens
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield total


def _all_but_first(mask: Tensor) -> Tensor:
    """[b, N] bool. Nothing comes before a row's first token that it could be foreseen from."""
    mask = mask.clone()
    mask[:, 0] = False
    return mask


def command(arguments: list[str]) -> int:
    """`fr-lightning warm-start`."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        "fr-lightning warm-start", description="Supervised training of a model on an environment's own expert."
    )
    parser.add_argument("--config", action="config")
    parser.add_argument("--model", type=str, required=True, help="a Hugging Face name, folder or GGUF file")
    parser.add_argument("--env", type=Callable[[], TextEnv], required=True, help="class_path of the environment")
    parser.add_argument("--output", type=str, required=True, help="folder for the trained model")
    parser.add_argument("--skill", type=float, default=1.0, help="of the expert, 0 to 1")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=32, help="demonstrations per step")
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--max_context", type=int, default=2048, help="tokens per demonstration")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    built: Any = parser.instantiate_classes(chosen)

    from fr_lightning.models import load_tokenizer

    torch.manual_seed(chosen.seed)
    tokenizer = load_tokenizer(chosen.model)
    policy = Policy(PolicyConfig(name=chosen.model))
    stream = demonstrations([Lesson(built.env, chosen.skill)], ChatFormat(tokenizer), chosen.seed, chosen.max_context)
    losses = train(policy, stream, steps=chosen.steps, batch_size=chosen.batch_size, learning_rate=chosen.learning_rate)
    for step, loss in enumerate(track(losses, total=chosen.steps, description="warm start")):
        if step % 20 == 0:
            print(f"step {step}: {loss:.4f} nats per token")
    save(policy, tokenizer, Path(chosen.output))
    return 0


def save(policy: Policy, tokenizer: Any, folder: Path, dtype: torch.dtype | None = None) -> None:
    """The model as a plain Hugging Face folder."""
    model = policy.model
    if dtype is not None:
        torch.nn.Module.to(model, dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"saved to {folder}")
