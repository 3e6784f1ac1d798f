"""The generated tasks of reasoning-gym, with its own scorers.

Invariant: a tenth of the questions, chosen by their text, is kept for evaluation; and a scorer's consolation prize
(some give 0.01 to any answer, or to none) is not success.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from fr_lightning.envs.arithmetic import is_held_out
from fr_lightning.envs.base import NotReady, TextEnv

ASK = "Give the final answer, and nothing else, between <answer> and </answer>."


class ReasoningGymEnv(TextEnv):
    """One task of reasoning-gym; the answer between the last `<answer>` tags is scored by the task's own scorer.

    Args:
        task: name in reasoning-gym, such as `chain_sum`, `countdown` or `knights_knaves`.
        options: of its generator, such as `{min_terms: 2, max_terms: 3}`.
        size: problems made, for training and evaluation together.
        seed: of the problems.
        partial_credit: reward what the scorer gives; else 1 for a full score and 0 for less.
    """

    system_prompt = ASK

    def __init__(
        self,
        task: str = "chain_sum",
        options: dict[str, Any] | None = None,
        size: int = 2000,
        seed: int = 0,
        partial_credit: bool = False,
    ):
        self._source = (task, json.dumps(options or {}, sort_keys=True), size, seed)
        self._partial_credit = partial_credit
        self._entry: dict[str, Any] = {}

    def prepare(self) -> dict[str, str]:
        self.tasks("train")
        return {"reasoning_gym": version("reasoning-gym")}

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Raises `NotReady` without the package, for an unknown task or for options it refuses."""
        return _rows(*self._source)[split != "train"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        row = (options or {}).get("task")
        if row is None:
            rows = self.tasks((options or {}).get("split", "train"))
            row = rows[int(self.np_random.integers(len(rows)))]
        self._entry = _dataset(*self._source)[row["index"]]
        return self._entry["question"], {"id": row["id"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        answer = extract_answer(action)
        score = float(_dataset(*self._source).score_answer(answer, self._entry)) if answer else 0.0
        solved = score >= 1.0
        info = {"success": solved, "answer": answer, "metrics": {"no_answer": float(not answer), "score": score}}
        return "", score if self._partial_credit else float(solved), True, False, info


@lru_cache(maxsize=8)
def _dataset(task: str, options: str, size: int, seed: int) -> Any:
    """`options` as JSON, which a cache can tell apart."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotReady("reasoning-gym is not installed: pip install 'fr-lightning[reasoning]'") from error
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **json.loads(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise NotReady(f"reasoning-gym refuses task {task!r} with options {options}: {error}") from error


@lru_cache(maxsize=8)
def _rows(task: str, options: str, size: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of training and of evaluation, each question once."""
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    seen: set[str] = set()
    dataset = _dataset(task, options, size, seed)
    for index in range(len(dataset)):
        question = dataset[index]["question"]
        if question not in seen:
            seen.add(question)
            parts[is_held_out(question)].append({"id": f"{task}/{index}", "set": task, "index": index})
    return parts
