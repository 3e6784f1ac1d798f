"""Builds the embedded ALFWorld policy: a tiny chat model that has watched others search, and not for long.

`python -m fr_lightning.assets.alfworld` makes the folder `alfworld_policy` beside this file anew. It is the embedded
policy's architecture with a vocabulary of ALFWorld's words, taught on the embedded training games by demonstrators who
stray to places drawn by chance before they go on with the planner's way. It is deliberately weak: what to look through,
in which order, and to keep at it, is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.progress import track

from fr_lightning.assets.embedded import build_tokenizer, newborn
from fr_lightning.envs.alfworld_env import ALFWorldEnv
from fr_lightning.models import fast_dtype
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.trajectory import Trajectory
from fr_lightning.warm_start import Lesson, demonstrations, save, train

FOLDER = Path(__file__).with_name("alfworld_policy")
VOCABULARY = 768
SKILL = 0.6
OBSERVATION_WEIGHT = 0.3
DEMONSTRATORS = 4
MAX_CONTEXT = 1536
MAX_STEPS = 30


def make_env() -> ALFWorldEnv:
    """The games of `configs/alfworld_quickstart.yaml`."""
    return ALFWorldEnv(data="embedded", list_commands=False, max_steps=MAX_STEPS, system_prompt="")


def corpus(games: int) -> list[str]:
    """What the game and a demonstrator say in so many episodes."""
    env = make_env()
    texts = []
    for seed in range(games):
        observation, _ = env.reset(seed=seed)
        texts.append(observation)
        ended = False
        while not ended:
            action = env.expert_action(SKILL)
            observation, _, won, cut, _ = env.step(action)
            texts += [action, observation]
            ended = won or cut
    env.close()
    return texts


def play(chat: ChatFormat, skill: float, count: int, seed: int) -> list[Trajectory]:
    """About so many demonstrations, by several demonstrators at a time, so that no worker process is idle."""

    def by(number: int) -> list[Trajectory]:
        stream = demonstrations([Lesson(make_env, skill)], chat, seed * DEMONSTRATORS + number, MAX_CONTEXT, MAX_STEPS)
        share = count // DEMONSTRATORS
        return list(track(itertools.islice(stream, share), total=share, disable=number > 0))

    with ThreadPoolExecutor(DEMONSTRATORS) as threads:
        return list(itertools.chain.from_iterable(zip(*threads.map(by, range(DEMONSTRATORS)), strict=True)))


def shuffled(played: list[Trajectory], seed: int) -> Iterator[Trajectory]:
    """The same demonstrations over and over, in ever new order."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(played, len(played))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=int, default=200, help="episodes that the vocabulary is made from")
    parser.add_argument("--demonstrations", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps of the warm start")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--skill", type=float, default=SKILL)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    torch.manual_seed(chosen.seed)
    tokenizer = build_tokenizer(corpus(chosen.corpus), VOCABULARY)
    newborn(tokenizer, chosen.output, VOCABULARY)
    policy = Policy(PolicyConfig(name=str(chosen.output)))
    played = play(ChatFormat(tokenizer), chosen.skill, chosen.demonstrations, chosen.seed)
    print(
        f"{len(played)} demonstrations: {sum(t.success for t in played) / len(played):.2f} won, "
        f"{sum(map(len, played)) / len(played):.0f} tokens, {sum(len(t.turns) for t in played) / len(played):.1f} turns"
    )
    losses = train(
        policy,
        shuffled(played, chosen.seed),
        steps=chosen.steps,
        batch_size=chosen.batch_size,
        learning_rate=chosen.learning_rate,
        observation_weight=OBSERVATION_WEIGHT,
        dtype=fast_dtype(),
    )
    for step, loss in enumerate(losses):
        if step % 20 == 0 or step == chosen.steps - 1:
            print(f"step {step}: {loss:.4f} nats per token", flush=True)
    save(policy, tokenizer, chosen.output, torch.bfloat16)


if __name__ == "__main__":
    main()
