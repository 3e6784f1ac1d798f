"""How a model writes that it wants Python run, and how it is told what came of it.

Invariant: whatever the model wrote gives a list of calls, each either code to run or a message that says how to write
a call; nothing it writes raises. What stands in its thinking is not a call.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

ToolFormat = Literal["hermes", "markdown", "tags"]

EXAMPLE = '{"name": "python", "arguments": {"code": "print(1 + 1)"}}'
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code and see what it prints. Names and files live on from call to call.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source"}},
            "required": ["code"],
        },
    },
}
_PATTERNS = {
    "hermes": re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL),
    "markdown": re.compile(r"^[ \t]*```(?:python|py)[ \t]*\r?\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE),
    "tags": re.compile(r"<python>(.*?)(?:</python>|(?=<python>)|\Z)", re.DOTALL),
}


@dataclass(frozen=True)
class Call:
    """One call: `code` to run, or, where it cannot be read, `problem` to tell the model."""

    code: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ToolCalls:
    """Reads and answers calls in one format.

    | format | call | tool output | how the model knows |
    | --- | --- | --- | --- |
    | `hermes` | `<tool_call>{"name": "python", …}</tool_call>` | the template's tool role | the template's `tools` |
    | `markdown` | a fenced block of `python` | a fenced block of `output`, from the user | `instructions` |
    | `tags` | `<python>…</python>` | `<output>…</output>`, from the user | `instructions` |
    """

    format: ToolFormat = "hermes"
    end_of_thinking: str = "</think>"

    def __post_init__(self) -> None:
        if self.format not in get_args(ToolFormat):
            raise ValueError(f"tool_format must be one of {get_args(ToolFormat)}, got {self.format!r}")

    @property
    def schema(self) -> list[dict[str, Any]] | None:
        """For the chat template; None where the instructions tell all."""
        return [SCHEMA] if self.format == "hermes" else None

    @property
    def instructions(self) -> str | None:
        """For the system prompt; None where the chat template tells all."""
        shown = {
            "hermes": None,
            "markdown": "a fenced block:\n```python\nprint(1 + 1)\n```\nStop after it: an output block then follows",
            "tags": "tags: <python>print(1 + 1)</python>\nStop after them: <output>2</output> then follows",
        }[self.format]
        return shown and f"You can run Python. Write the code between {shown}. Names live on from one run to the next."

    @property
    def role(self) -> str:
        return "tool" if self.format == "hermes" else "user"

    def find(self, text: str) -> list[Call]:
        """The calls in what the model wrote in one turn, in order."""
        text = text.rpartition(self.end_of_thinking)[2]
        found = [match[1] for match in _PATTERNS[self.format].finditer(text)]
        return [_read_json(body) if self.format == "hermes" else Call(body) for body in found]

    def write(self, code: str) -> str:
        """A call as a model should write it; `find` reads it back."""
        match self.format:
            case "markdown":
                return f"```python\n{code}\n```"
            case "tags":
                return f"<python>{code}</python>"
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        return f"<tool_call>\n{call}\n</tool_call>"

    def show(self, outputs: list[str]) -> str:
        """The observation after a turn's calls; numbered if there are several."""
        if len(outputs) > 1:
            outputs = [f"[{number}] {output}" for number, output in enumerate(outputs, 1)]
        text = "\n".join(output.rstrip("\n") for output in outputs)
        match self.format:
            case "markdown":
                return f"```output\n{text}\n```"
            case "tags":
                return f"<output>\n{text}\n</output>"
        return text


def _read_json(body: str) -> Call:
    """A Hermes call. Arguments may be an object or, as some models write them, JSON in a string."""
    how = f"Write a call as {EXAMPLE}, with line breaks in the code as \\n."
    try:
        call = json.loads(body, strict=False)  # line breaks inside strings are understood
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            call["arguments"] = json.loads(call["arguments"], strict=False)
    except ValueError as error:
        return Call(problem=f"Error: the tool call is not valid JSON ({error}). {how}")
    except RecursionError:
        return Call(problem=f"Error: the tool call is nested too deeply. {how}")
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return Call(problem=f"Error: a tool call needs a name and arguments. {how}")
    if call.get("name") != "python":
        return Call(problem=f"Error: there is no tool {str(call.get('name'))[:80]!r}, only python. {how}")
    code = call["arguments"].get("code")
    if not isinstance(code, str):
        return Call(problem=f"Error: the argument `code` must be a string. {how}")
    return Call(code)
