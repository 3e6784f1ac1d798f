"""Fresh completions that nothing is trained on: for comparing an engine's log-probabilities with a learner's."""

from __future__ import annotations

import dataclasses

from fr_lightning.rollout.conversation import Conversation
from fr_lightning.rollout.runner import Runner, derived_seed
from fr_lightning.trajectory import Trajectory

PROBES = (
    "Hello!",
    "What is 17 + 26?",
    "Name three rivers.",
    "Where is the key?",
    "Schreibe einen Satz über Öl.",
    "1, 1, 2, 3, 5,",
    "日本語で「猫」は?",
    "def f(x):",
)
"""What an engine is asked when only its log-probabilities matter."""


async def probe(runner: Runner, number: int, tokens: int) -> Trajectory:
    """One completion, of up to so many tokens, drawn as episodes are; the same prompt for the same number."""
    conversation = Conversation(runner.chat, PROBES[number % len(PROBES)])
    conversation.cut(max(1, runner.limits.max_context - tokens))
    sampling = dataclasses.replace(
        runner.sampling,
        max_tokens=tokens,
        stop_token_ids=runner.chat.stop_token_ids,
        seed=derived_seed("probe", number),
    )
    conversation.add_completion(await runner.engine.generate(list(conversation.token_ids), sampling))
    return Trajectory(
        token_ids=conversation.token_ids,  # pyright: ignore[reportArgumentType]
        policy_mask=conversation.policy_mask,  # pyright: ignore[reportArgumentType]
        behavior_logprobs=conversation.behavior_logprobs,  # pyright: ignore[reportArgumentType]
        policy_versions=conversation.policy_versions,  # pyright: ignore[reportArgumentType]
        reward=0.0,
        temperature=sampling.temperature,
        routed_experts=conversation.routed_experts,  # pyright: ignore[reportArgumentType]
    )
