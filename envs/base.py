"""Text environments: Gymnasium's five-tuple with text for observation and action.

Invariant: an environment judges the task and nothing else. It raises when its machinery fails (the episode is then
retried or excluded, and counted); it never turns such a failure into a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import gymnasium
from gymnasium.spaces import Text

T = TypeVar("T")
CHARACTERS = "".join(chr(code) for code in (*range(32, 127), 9, 10, 13))


class AnyText(Text):
    """The space of all strings up to a length. Gymnasium's `Text` admits a listed alphabet; models write any."""

    def __init__(self, max_length: int = 1 << 20):
        super().__init__(max_length=max_length, min_length=0, charset=CHARACTERS)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        length = int(self.np_random.integers(1, 64))
        return "".join(self.np_random.choice(list(CHARACTERS), size=length))


class NotReady(RuntimeError):
    """An environment cannot work on this machine or with these settings; the message says what to change.

    At the start of a run the command line shows it as it is, without a traceback.
    """


class TextEnv(gymnasium.Env[str, str]):
    """Base of every environment. Override `reset` and `step`; both may block, they run off the event loop.

    `reset(options={"task": row, "split": "train" | "validation"})` starts the named task; without a row the
    environment makes one up from the seed. `step(action)` takes all the policy wrote in one turn and returns
    `(observation, reward, terminated, truncated, info)`. `info` may hold:

    | key | meaning | default |
    | --- | --- | --- |
    | `success` | bool: the task is solved (by what the environment holds true, not by reward) | reward > 0 at the end |
    | `tool_calls` | int: tool calls made by this action | 0 |
    | `role` | chat role of the observation: `user` or `tool` | `user` |
    | `metrics` | dict of numbers to average over trajectories | {} |

    Whatever it raises is a failure of its machinery: counted as `env_error`, or as the class attribute `failure_kind`
    of the error says, `tool_unavailable` or `verifier_unverifiable`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"]}
    observation_space = AnyText()
    action_space = AnyText()

    system_prompt: str | None = None
    """Put in the conversation before the first observation."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas handed to the model's chat template."""
    fresh_context: bool = False
    """Every observation is a prompt of its own: the policy sees of what came before only what the observation tells."""

    def prepare(self) -> dict[str, str]:
        """Called once per process before the first episode: start what all episodes share.

        Returns:
            what should be recorded with the run, such as the isolation of a sandbox.

        Raises:
            NotReady: it cannot be started.
        """
        return {}

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]] | None:
        """The dataset rows of a split, or None when every seed is a task."""
        return None

    def expert_action(self, skill: float = 1.0) -> str:
        """What an agent of this skill would write now: 1 is perfect, less makes the mistakes typical of the task.

        Needed for a supervised warm start only. Chance comes from `self.np_random`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expert; a warm start needs `expert_action`")

    async def areset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        return await in_thread(lambda: self.reset(seed=seed, options=options))

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return await in_thread(lambda: self.step(action))

    async def aclose(self) -> None:
        await in_thread(self.close)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking call in a daemon thread of its own: one that never returns costs that thread and nothing else.

    A thread pool would lose a worker to it for good, and wait for it when the process ends.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # the caller gave up
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit) as stopped:
            # A future cannot carry the first, and the others would end the event loop of all environments.
            error = RuntimeError(f"the environment raised {stopped!r}")
            error.__cause__ = stopped
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await done
