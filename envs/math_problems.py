"""Mathematical problems with one reference answer each, in one turn or with further attempts.

Invariant: the reward is the verdict on what the policy answered, and nothing else is. A verifier that fails raises, so
that the episode is played again; an answer that cannot be verified within the limits is not correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from fr_lightning.envs.base import NotReady, TextEnv
from fr_lightning.envs.math_data import ProblemMix
from fr_lightning.envs.verifier import AnswerPolicy, MathVerifier, Verdict

BOX = "put your final answer within \\boxed{}."
PROMPTS: dict[str, tuple[str | None, str]] = {
    "chat": (None, f"{{question}}\n\nReason step by step, and {BOX}"),
    "qwen": (f"Please reason step by step, and {BOX}", "{question}"),
    "r1": (None, f"{{question}}\nPlease reason step by step, and {BOX}"),
    "plain": (None, "{question}"),
}
"""System prompt and question of each template: Qwen2.5-Math's own, and DeepSeek-R1's, which wants no system prompt."""

AGAIN = "That is not the right answer. Look for the mistake and answer again."


class MathEnv(TextEnv):
    """One problem; the reward is 1 if the policy's final answer is shown to equal the reference answer, else 0.

    Args:
        problems: which problems, and which of them are kept for evaluation.
        prompt: a template, `chat`, `qwen`, `r1` or `plain`, or a text of your own with {question} in it.
        attempts: how often the policy may answer; after a wrong answer it is told so and asked again.
        answers: what counts as an answer and as equal (the table in `fr_lightning.envs.verifier`).
        verifier_workers: processes for algebra, shared by all environments of this process.
        verifier_timeout: seconds for one comparison.
    """

    def __init__(
        self,
        problems: ProblemMix = ProblemMix(),  # noqa: B008 (frozen)
        prompt: str = "chat",
        attempts: int = 1,
        answers: AnswerPolicy = AnswerPolicy(),  # noqa: B008
        verifier_workers: int = 1,
        verifier_timeout: float = 3.0,
    ):
        if attempts < 1:
            raise ValueError(f"attempts must be ≥ 1, got {attempts}")
        self.system_prompt, self._template = PROMPTS.get(prompt, (None, prompt))
        if "{question}" not in self._template:
            raise ValueError(f"prompt must be one of {', '.join(PROMPTS)}, or a text with {{question}}; got {prompt!r}")
        self._problems = problems
        self._attempts = attempts
        self._verifier = _verifier(answers, verifier_workers, verifier_timeout)
        self._row: Mapping[str, Any] = {}
        self._failed_attempts = 0

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Raises `ProblemSetError` for problems that cannot be found, read or graded."""
        return _rows(self._problems, split, self._verifier)

    def prepare(self) -> dict[str, str]:
        if find_spec("math_verify") is None:
            raise NotReady("grading mathematics needs the extra `math`: pip install 'fr-lightning[math]'")
        self._verifier.verify_sync("\\boxed{x + x}", "2x")  # starts the workers, or says why they cannot be started
        return {"verifier": f"math-verify {version('math-verify')}"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        options = options or {}
        row = options.get("task")
        if row is None:
            rows = self.tasks(options.get("split", "train"))
            row = rows[int(self.np_random.integers(len(rows)))]
        self._row = row
        self._failed_attempts = 0
        return self._template.replace("{question}", row["question"]), {"id": row.get("id")}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return self._judged(self._verifier.verify_sync(action, self._row["answer"]))

    def expert_action(self, skill: float = 1.0) -> str:
        """The reference answer in a box; unskilled, another integer of about its size."""
        answer = self._row["answer"]
        if self.np_random.random() >= skill:
            size = max(2, abs(int(answer))) if answer.lstrip("-").isdigit() else 20
            answer = str(int(self.np_random.integers(2 * size)))
        return f"\\boxed{{{answer}}}"

    def _judged(self, verdict: Verdict) -> tuple[str, float, bool, bool, dict]:
        self._failed_attempts += not verdict.correct
        ended = verdict.correct or self._failed_attempts >= self._attempts
        info = {
            "success": verdict.correct,
            "answer": verdict.answer,
            "verdict": verdict.status,
            "metrics": {
                "no_answer": float(verdict.status == "no_answer"),
                "unverifiable": float(verdict.status == "unverifiable"),
            },
        }
        return "" if ended else AGAIN, float(verdict.correct), ended, False, info


@lru_cache(maxsize=8)
def _verifier(answers: AnswerPolicy, workers: int, timeout: float) -> MathVerifier:
    """One per process and settings: its worker processes serve every environment, and end with the process."""
    return MathVerifier(policy=answers, workers=workers, timeout=timeout)


@lru_cache(maxsize=16)
def _rows(problems: ProblemMix, split: str, verifier: MathVerifier) -> Sequence[Mapping[str, Any]]:
    return problems.rows("train" if split == "train" else "validation", verifier.check_gold)
