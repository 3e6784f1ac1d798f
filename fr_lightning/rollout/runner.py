"""One episode: an environment and an engine take turns until the task ends or a limit does.

Invariant: an episode ends either in a whole trajectory or in an `EpisodeFailed` that names whose fault it was; no
fault of the machinery ever becomes a reward, and no await here lacks a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import reprlib
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, get_args

from fr_lightning.engines.base import Completion, EngineError, PromptTooLong, Sampling
from fr_lightning.rollout.conversation import ChatFormat, Conversation
from fr_lightning.trajectory import Task, Timing, Trajectory, Turn

T = TypeVar("T")
FailureKind = Literal[
    "env_error", "tool_unavailable", "verifier_unverifiable", "engine_error", "timeout", "prompt_too_long"
]
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)

CHARACTERS_PER_TOKEN = 64
"""Roughly the longest tokens of usual vocabularies: a text of more than the context times that cannot fit in it."""
MAX_METRICS = 256


class EpisodeFailed(RuntimeError):
    """An episode that gave no trajectory. `kind` says whose fault it was, `where` at what, `retry` if one may help."""

    def __init__(self, kind: FailureKind, where: str, cause: object, *, retry: bool = True):
        described = f"{type(cause).__name__}: {cause}" if isinstance(cause, BaseException) else str(cause)
        super().__init__(f"{kind} in {where}: {described}")
        self.kind: FailureKind = kind
        self.where = where
        self.retry = retry
        self.task_id = ""

    @classmethod
    def of_environment(cls, where: str, error: Exception) -> EpisodeFailed:
        """An environment is anybody's code: whatever it raises is its failure. Its error may say which kind, by an
        attribute `failure_kind`: that of a tool or of a verifier."""
        kind = getattr(error, "failure_kind", None)
        return cls(kind if kind in FAILURE_KINDS else "env_error", where, error)


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode is cut off. Cut episodes are trained on as they are, marked `truncated`.

    Attributes:
        max_turns: calls of the engine.
        max_tokens: policy tokens over all turns; None: as many as the context holds.
        max_context: tokens of what the policy sees, prompts and observations included.
        max_observation_tokens: of one observation of the environment; of a longer one (a tool's output) the middle is
            left out, and the policy is told so.
        env_timeout: seconds for one `reset` or `step`; a longer one is a `timeout` failure, not a reward.
        generate_timeout: seconds for one turn's generation, waiting for a place included.
    """

    max_turns: int = 16
    max_tokens: int | None = None
    max_context: int = 2048
    max_observation_tokens: int | None = None
    env_timeout: float = 60.0
    generate_timeout: float = 600.0

    def __post_init__(self) -> None:
        bounds = (self.max_turns, self.max_context, self.max_tokens, self.max_observation_tokens)
        if any(bound is not None and bound < 1 for bound in bounds):
            raise ValueError(f"episode limits must be ≥ 1, got {self}")
        if min(self.env_timeout, self.generate_timeout) <= 0:
            raise ValueError(f"episode deadlines must be > 0 seconds, got {self}")


class Environment(Protocol):
    """What a runner needs of an environment (`fr_lightning.envs.TextEnv` is one)."""

    system_prompt: str | None
    tools: list[dict[str, Any]] | None
    fresh_context: bool

    async def areset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, dict]: ...

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict]: ...

    async def aclose(self) -> None: ...


class Generator(Protocol):
    """What a runner needs of an engine."""

    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion: ...

    async def forget(self, session: str) -> None: ...


@dataclass(frozen=True)
class Runner:
    """Plays episodes of one kind. Holds no state between them, so one runner serves every seat of a pool."""

    engine: Generator
    chat: ChatFormat
    sampling: Sampling = field(default_factory=Sampling)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)

    async def play(self, task: Task, env: Environment, *, rollout_id: str, seed: int) -> Trajectory:
        """Play one task to its end.

        Args:
            task: given to `env.reset`.
            env: exclusively this episode's; after a failure its state is unknown and it should be replaced.
            rollout_id: names this attempt; also the engine's session.
            seed: of the policy's dice.

        Raises:
            EpisodeFailed: no trajectory came of it.
        """
        try:
            return await self._play(task, env, rollout_id, seed)
        except EpisodeFailed:
            raise
        except Exception as error:  # such as an `info` that holds what no reader of it can use
            raise EpisodeFailed("env_error", "the episode", error) from error
        finally:
            await self.engine.forget(rollout_id)

    async def _play(self, task: Task, env: Environment, rollout_id: str, seed: int) -> Trajectory:
        clock = _Clock()
        reset = env.areset(seed=task.seed, options=task.reset_options())
        observation, info = _pair(await self._env(reset, "env.reset", clock))
        conversation = Conversation(
            self.chat, self._text(observation, "env.reset"), system_prompt=env.system_prompt, tools=env.tools
        )
        turns: list[Turn] = []
        reward, terminated, truncated, metrics = 0.0, False, False, {}
        while True:
            room = self._room(conversation)
            if room < 1:
                if not turns:
                    raise EpisodeFailed(
                        "prompt_too_long",
                        "env.reset",
                        f"the first prompt of task {task.id} takes {len(conversation)} of max_context "
                        f"{self.limits.max_context} tokens: raise data.limits.max_context or shorten the prompt",
                        retry=False,
                    )
                conversation.cut(turns[-1].stop)
                truncated = True
                break
            start, spent = len(conversation), clock.env
            began = time.perf_counter()
            sampling = replace(
                self.sampling,
                max_tokens=min(self.sampling.max_tokens, room),
                stop_token_ids=self.chat.stop_token_ids,
                seed=derived_seed(seed, len(turns)),
            )
            completion, words = await self._generate(conversation, sampling, rollout_id)
            seconds = time.perf_counter() - began
            clock.generate += seconds

            step = await self._env(env.astep(words), "env.step", clock)
            observation, step_reward, terminated, truncated, info = _five(step)
            reward += step_reward
            metrics |= _metrics(info)
            calls = int(info.get("tool_calls", 0))
            turns.append(Turn(start, len(conversation), completion.finish_reason, calls, seconds, clock.env - spent))
            if terminated or truncated:
                break
            if len(turns) == self.limits.max_turns:
                truncated = True
                break
            shown = self._text(observation, "env.step")
            if self.limits.max_observation_tokens is not None:
                shown = self.chat.shortened(shown, self.limits.max_observation_tokens)
            if env.fresh_context:
                await self.engine.forget(rollout_id)  # a session's calls extend one another, and this one does not
                conversation.begin_anew(shown)
            else:
                conversation.add_observation(shown, info.get("role", "user"))
        return Trajectory(
            token_ids=conversation.token_ids,  # pyright: ignore[reportArgumentType]
            policy_mask=conversation.policy_mask,  # pyright: ignore[reportArgumentType]
            behavior_logprobs=conversation.behavior_logprobs,  # pyright: ignore[reportArgumentType]
            policy_versions=conversation.policy_versions,  # pyright: ignore[reportArgumentType]
            reward=reward,
            success=bool(info.get("success", reward > 0)),
            terminated=terminated,
            truncated=truncated,
            task_id=task.id,
            rollout_id=rollout_id,
            group=task.group,
            turns=tuple(turns),
            tool_calls=sum(turn.tool_calls for turn in turns),
            temperature=self.sampling.temperature,
            metrics=metrics,
            timing=Timing(generate=clock.generate, env=clock.env),
            contexts=tuple(conversation.contexts),
            routed_experts=conversation.routed_experts,  # pyright: ignore[reportArgumentType]
        )

    def _text(self, observation: Any, where: str) -> str:
        if not isinstance(observation, str):
            raise EpisodeFailed("env_error", where, f"observation must be a str, got {_brief(observation)}")
        most = CHARACTERS_PER_TOKEN * self.limits.max_context
        if len(observation) <= most:
            return observation
        # It cannot fit anyway, and tokenising it would hold up all other episodes: a hundred megabytes take minutes.
        left_out = len(observation) - most
        return f"{observation[: most // 2]}\n[{left_out} characters left out]\n{observation[-(most // 2) :]}"

    def _room(self, conversation: Conversation) -> int:
        room = self.limits.max_context - len(conversation.context)
        if self.limits.max_tokens is not None:
            room = min(room, self.limits.max_tokens - conversation.num_policy_tokens)
        return room

    async def _generate(self, conversation: Conversation, sampling: Sampling, session: str) -> tuple[Completion, str]:
        try:
            async with asyncio.timeout(self.limits.generate_timeout):
                completion = await self.engine.generate(conversation.context, sampling, session=session)
            return completion, conversation.add_completion(completion)
        except TimeoutError as error:
            raise EpisodeFailed(
                "timeout",
                "engine.generate",
                f"no turn within {self.limits.generate_timeout:g} s (data.limits.generate_timeout)",
            ) from error
        except PromptTooLong as error:
            raise EpisodeFailed("prompt_too_long", "engine.generate", error, retry=False) from error
        except (EngineError, ValueError) as error:
            raise EpisodeFailed("engine_error", "engine.generate", error) from error

    async def _env(self, call: Awaitable[T], where: str, clock: _Clock) -> T:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.limits.env_timeout):
                return await call
        except TimeoutError as error:
            raise EpisodeFailed(
                "timeout", where, f"no answer within {self.limits.env_timeout:g} s (data.limits.env_timeout)"
            ) from error
        except Exception as error:
            raise EpisodeFailed.of_environment(where, error) from error
        finally:
            clock.env += time.perf_counter() - began


@dataclass
class _Clock:
    generate: float = 0.0
    env: float = 0.0


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts and on nothing else (Python's own `hash` differs between runs)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _pair(result: Any) -> tuple[Any, dict]:
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EpisodeFailed("env_error", "env.reset", f"must return (observation, info), got {_brief(result)}")
    return result


def _five(result: Any) -> tuple[Any, float, bool, bool, dict]:
    if not (isinstance(result, tuple) and len(result) == 5 and isinstance(result[4], dict)):
        raise EpisodeFailed(
            "env_error",
            "env.step",
            f"must return (observation, reward, terminated, truncated, info), got {_brief(result)}",
        )
    observation, reward, terminated, truncated, info = result
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed("env_error", "env.step", f"reward is no number: {_brief(reward)}") from error
    if not math.isfinite(value):
        raise EpisodeFailed("env_error", "env.step", f"reward is not finite: {value}")
    return observation, value, bool(terminated), bool(truncated), info


def _metrics(info: dict) -> dict[str, float]:
    metrics = info.get("metrics", {})
    if len(metrics) > MAX_METRICS:
        raise EpisodeFailed("env_error", "env.step", f"info['metrics'] has {len(metrics)} > {MAX_METRICS} names")
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeFailed("env_error", "env.step", f"info['metrics'] must hold numbers: {_brief(metrics)}") from error


def _brief(value: object) -> str:
    """What it is, in a line. `reprlib` looks at the first few parts of it only: it may be huge."""
    return f"{type(value).__name__} {reprlib.repr(value)}"
