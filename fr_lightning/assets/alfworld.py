"""Builds the embedded ALFWorld policy: a tiny chat model that has watched others search, and not for long.

`python -m fr_lightning.assets.alfworld` makes the folder `alfworld_policy` beside this file anew. It is the embedded
policy's architecture with a vocabulary of ALFWorld's words. Demonstrators on the embedded training games first teach it
well: they look through the room in order, and what they do follows from what was seen, so that there is something to
learn from every word. Then they err now and then, and it sees what comes of that. The rest is left to reinforcement
learning.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
CORPUS_SKILL = 0.6  # the vocabulary should know what mistakes are answered with, too
BATCH_SIZE = 16
OBSERVATION_WEIGHT = 0.3
DEMONSTRATORS = 4
MAX_CONTEXT = 1536
MAX_STEPS = 30


@dataclass(frozen=True)
class Phase:
    """Some demonstrations of one skill, and how long they are imitated."""

    skill: float
    demonstrations: int
    steps: int
    learning_rate: float


PHASES = (Phase(1.0, 3000, 500, 2e-3), Phase(0.9, 1800, 280, 1e-3))
"""First without a mistake, then with some."""


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
            action = env.expert_action(CORPUS_SKILL)
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
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    torch.manual_seed(chosen.seed)
    tokenizer = build_tokenizer(corpus(chosen.corpus), VOCABULARY)
    newborn(tokenizer, chosen.output, VOCABULARY)
    policy = Policy(PolicyConfig(name=str(chosen.output)))
    for number, phase in enumerate(PHASES):
        played = play(ChatFormat(tokenizer), phase.skill, phase.demonstrations, chosen.seed + number)
        count = len(played)
        print(
            f"{count} demonstrations of skill {phase.skill}: {sum(t.success for t in played) / count:.2f} won, "
            f"{sum(map(len, played)) / count:.0f} tokens, {sum(len(t.turns) for t in played) / count:.1f} turns",
            flush=True,
        )
        losses = train(
            policy,
            shuffled(played, chosen.seed + number),
            steps=phase.steps,
            batch_size=BATCH_SIZE,
            learning_rate=phase.learning_rate,
            observation_weight=OBSERVATION_WEIGHT,
            dtype=fast_dtype(),
        )
        for step, loss in enumerate(losses):
            if step % 20 == 0 or step == phase.steps - 1:
                print(f"step {step}: {loss:.4f} nats per token", flush=True)
    save(policy, tokenizer, chosen.output, torch.bfloat16)


if __name__ == "__main__":
    main()
