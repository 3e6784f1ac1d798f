"""Mathematical problems for an agent with a Python tool, over several turns.

Invariant: only the final answer is graded, which is the first turn without a tool call. A sandbox that fails raises, so
that the episode is played again; what the agent's code does wrong is the agent's to read.
"""

from __future__ import annotations

from typing import Any

from fr_lightning.envs.math_data import ProblemMix
from fr_lightning.envs.math_problems import MathEnv
from fr_lightning.envs.sandbox import SandboxSession, SandboxUnavailable
from fr_lightning.envs.sandbox.shared import SandboxSettings, shared_sandbox
from fr_lightning.envs.tool_calls import Call, ToolCalls, ToolFormat
from fr_lightning.envs.verifier import AnswerPolicy

LAST_CALL = "[No further calls: give the final answer now.]"


class PythonToolEnv(MathEnv):
    """One problem and a Python interpreter of the episode's own; reward 1 if the final answer is right, else 0.

    A turn with tool calls is answered with what they print; a turn without any is the final answer. Calls that cannot
    be read get a message that says how to write one, and count as calls.

    Args:
        problems, prompt, answers, verifier_workers, verifier_timeout: see `MathEnv`.
        tool_format: how calls are written (the table in `fr_lightning.envs.tool_calls`).
        max_calls: calls in an episode; a further one ends it, with reward 0.
        sandbox: quotas of the interpreter, and its isolation.
    """

    def __init__(
        self,
        problems: ProblemMix = ProblemMix(),  # noqa: B008 (frozen)
        prompt: str = "chat",
        tool_format: ToolFormat = "hermes",
        max_calls: int = 8,
        answers: AnswerPolicy = AnswerPolicy(),  # noqa: B008
        sandbox: SandboxSettings = SandboxSettings(),  # noqa: B008
        verifier_workers: int = 1,
        verifier_timeout: float = 3.0,
    ):
        super().__init__(
            problems, prompt, answers=answers, verifier_workers=verifier_workers, verifier_timeout=verifier_timeout
        )
        if max_calls < 1:
            raise ValueError(f"max_calls must be ≥ 1, got {max_calls}")
        self._calls = ToolCalls(tool_format, end_of_thinking=answers.think_tags[1])
        self.tools = self._calls.schema
        self.system_prompt = "\n\n".join(filter(None, (self.system_prompt, self._calls.instructions))) or None
        self._max_calls = max_calls
        self._sandbox = shared_sandbox(sandbox)
        self._session: SandboxSession | None = None
        self._made = self._errors = 0
        self._seconds = 0.0
        self._observed: str | None = None

    def prepare(self) -> dict[str, str]:
        self._sandbox.start()
        return {**super().prepare(), "sandbox_isolation": self._sandbox.isolation_in_force}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        self._end_session()
        self._made = self._errors = 0
        self._seconds = 0.0
        self._observed = None
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        calls = self._calls.find(action)
        if not calls:
            observation, reward, terminated, truncated, info = super().step(action)
            self._end_session()
            return observation, reward, terminated, truncated, self._reported(info, 0)
        outputs = [self._answered(call) for call in calls[: self._max_calls - self._made]]
        self._made += len(outputs)
        self._observed = outputs[0] if outputs else self._observed
        over = len(outputs) < len(calls)
        if over:
            self._end_session()
        observation = self._calls.show(outputs) + (f"\n{LAST_CALL}" if self._made == self._max_calls else "")
        info = self._reported({"success": False, "role": self._calls.role}, len(calls))
        return observation, 0.0, over, False, info

    def close(self) -> None:
        self._end_session()
        super().close()

    def expert_action(self, skill: float = 1.0) -> str:
        """Run a program that prints the answer, then give what it printed; unskilled, guess without calling it."""
        if self._observed is not None:
            return f"\\boxed{{{self._observed.strip()}}}"
        if self.np_random.random() >= skill or "program" not in self._row:
            return super().expert_action(0.0)
        return self._calls.write(self._row["program"])

    def _answered(self, call: Call) -> str:
        if call.problem:
            self._errors += 1
            return call.problem
        if self._session is None:
            self._session = self._sandbox.session().result()
        result = self._sandbox.run(self._session, call.code).result()
        if result.status == "unavailable":
            raise SandboxUnavailable(result.output)
        self._errors += result.status != "ok"
        self._seconds += result.seconds
        return result.output

    def _reported(self, info: dict, calls: int) -> dict:
        metrics = {"tool_errors": float(self._errors), "tool_seconds": self._seconds}
        return {**info, "tool_calls": calls, "metrics": {**info.get("metrics", {}), **metrics}}

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._sandbox.end(session)
