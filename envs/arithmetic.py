"""Arithmetic with exact answers: the smallest tasks a language model can learn from, alone or with a calculator.

Invariant: a problem is a function of the seed alone, and a fixed tenth of all problems, chosen by the problem's text,
appears in no training episode: a held-out score is of problems never trained on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from fr_lightning.envs.base import TextEnv

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
HELD_OUT_PARTS = 10


class ArithmeticEnv(TextEnv):
    """One question, one answer, exactly graded: reward 1 if the answer is right, else 0.

    Args:
        digits: most digits of an operand: the grade of difficulty.
        operations: which of `+`, `-`, `*` may occur.
        terms: operands in a problem; `*` binds tighter than `+` and `-`, as usual.
        answer: what counts as the answer: `last_number` in the reply, or the `whole` reply.
        instruction: the question, with {problem} in it.
        system_prompt: put before the first question; None: the chat template's own, if it has one.
    """

    def __init__(
        self,
        digits: int = 2,
        operations: str = "+",
        terms: int = 2,
        answer: Literal["last_number", "whole"] = "last_number",
        instruction: str = "What is {problem}?",
        system_prompt: str | None = None,
    ):
        if digits < 1 or terms < 2 or not operations or not set(operations) <= OPERATORS.keys():
            raise ValueError(
                f"arithmetic needs digits ≥ 1, terms ≥ 2 and operations out of {''.join(OPERATORS)}; got "
                f"digits={digits}, terms={terms}, operations={operations!r}"
            )
        if "{problem}" not in instruction:
            raise ValueError("the instruction must contain {problem}")
        self._digits = digits
        self._operations = sorted(set(operations))
        self._terms = terms
        self._answer_form = answer
        self._instruction = instruction
        self.system_prompt = system_prompt
        self.problem = ""
        self.answer = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        held_out = (options or {}).get("split", "train") != "train"
        for _ in range(10_000):
            self.problem = self._draw(self.np_random)
            if is_held_out(self.problem) == held_out:
                break
        else:
            raise RuntimeError("no problem of the wanted split in 10,000 draws: allow more digits or operations")
        self.answer = evaluate(self.problem)
        return self._instruction.format(problem=self.problem), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        given = last_integer(action) if self._answer_form == "last_number" else whole_integer(action)
        right = given == self.answer
        return "", float(right), True, False, {"success": right}

    def expert_action(self, skill: float = 1.0) -> str:
        """The answer; unskilled, a guess of about its size."""
        return str(self.answer) if self.np_random.random() < skill else self._guess()

    def _guess(self) -> str:
        size = max(2, abs(self.answer))
        return str(int(self.np_random.integers(2 * size)) - (size if self.answer < 0 else 0))

    def _draw(self, rng: np.random.Generator) -> str:
        text = str(rng.integers(10 ** int(rng.integers(1, self._digits + 1))))
        for _ in range(self._terms - 1):
            number = rng.integers(10 ** int(rng.integers(1, self._digits + 1)))
            text += f" {self._operations[int(rng.integers(len(self._operations)))]} {number}"
        return text


class CalculatorEnv(ArithmeticEnv):
    """Arithmetic too hard to do in one's head, and a `calculator` to do it with, over several turns.

    A reply that holds `<tool_call>{"name": "calculator", "arguments": {"expression": "…"}}</tool_call>` is answered by
    the tool; any other reply is the final answer. A malformed call gets an error message, not a crash, and counts as a
    call. Reward 1 for the right final answer, else 0.

    Args:
        digits, operations, terms, instruction: see `ArithmeticEnv`.
        max_calls: a further call ends the episode with reward 0.
    """

    tools = [  # noqa: RUF012 (read-only)
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluate an arithmetic expression with +, -, * and parentheses.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string"}},
                    "required": ["expression"],
                },
            },
        }
    ]

    def __init__(
        self,
        digits: int = 3,
        operations: str = "+-*",
        terms: int = 2,
        max_calls: int = 3,
        instruction: str = "What is {problem}?",
    ):
        super().__init__(digits=digits, operations=operations, terms=terms, instruction=instruction)
        self._max_calls = max_calls
        self._calls = 0
        self._observed: str | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        self._calls = 0
        self._observed = None
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        call = re.search(r"<tool_call>(.*?)(?:</tool_call>|$)", action, re.DOTALL)
        if call is None:
            return super().step(action)
        self._calls += 1
        info = {"success": False, "tool_calls": 1, "role": "tool"}
        if self._calls > self._max_calls:
            return "Too many calls.", 0.0, True, False, info
        self._observed = calculate(call[1])
        return self._observed, 0.0, False, False, info

    def expert_action(self, skill: float = 1.0) -> str:
        """Call the calculator, then say what it said; unskilled, guess without calling it."""
        if self._observed is not None:
            return self._observed
        if self.np_random.random() >= skill:
            return self._guess()
        arguments = {"name": "calculator", "arguments": {"expression": self.problem}}
        return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


def calculate(call: str) -> str:
    """The calculator's answer to the text of a tool call: a number, or what was wrong with the call."""
    try:
        parsed = json.loads(call)
        if parsed["name"] != "calculator":
            return f"Error: there is no tool {parsed['name']!r}, only calculator."
        return str(evaluate(str(parsed["arguments"]["expression"])))
    except (json.JSONDecodeError, KeyError, TypeError, IndexError):
        return 'Error: call as {"name": "calculator", "arguments": {"expression": "1 + 2"}}.'
    except (ValueError, RecursionError, MemoryError) as error:
        return f"Error: {error}"


def evaluate(expression: str) -> int:
    """Value of an expression of integers, `+`, `-`, `*` and parentheses; nothing else is ever executed.

    Raises:
        ValueError: anything else is in it, or it is too long.
    """
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise ValueError("the expression cannot be read") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
    raise ValueError("only integers, +, -, * and parentheses are allowed")


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the tenth kept for evaluation."""
    return hashlib.blake2b(problem.encode(), digest_size=4).digest()[0] % HELD_OUT_PARTS == 0


NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")  # 1,234 · -7 · 3.5, but not x12


def last_integer(text: str) -> int | None:
    """The last number in a text, if it is an integer; `5 - 3 = 2` ends in 2, and so does `12-2`."""
    found = NUMBER.findall(text)
    return _integer(found[-1]) if found else None


def whole_integer(text: str) -> int | None:
    """The integer that the text is, and nothing but."""
    return _integer(text.strip()) if re.fullmatch(r"\s*-?\d+\s*", text) else None


def _integer(digits: str) -> int | None:
    whole, _, fraction = digits.replace(",", "").partition(".")
    return int(whole) if len(whole) <= 40 and not fraction.strip("0") else None
