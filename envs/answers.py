"""Which part of a response is its answer, and the choices on which graders disagree.

Invariant: at most one answer is read from a response, the one it commits to last, and a response that hedges, stops
inside its box or inside its thinking has none. Linear in the response's length, whatever the model wrote.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

RESPONSE_CHARS = 65_536
"""Only this many last characters of a response are read, and of them `BOXES` boxes."""
BOXES = 64


@dataclass(frozen=True)
class AnswerPolicy:
    """The choices on which graders disagree; the table in `fr_lightning.envs.verifier` explains each.

    Raises:
        ValueError: an option outside its listed values.
    """

    think_tags: tuple[str, str] = ("<think>", "</think>")
    thinking_must_end: bool = False
    unboxed: bool = True
    several_boxes: Literal["hedge", "last"] = "hedge"
    units: Literal["agree", "ignore", "require"] = "agree"
    percent: Literal["sign_optional", "exact", "ignore"] = "sign_optional"
    base: Literal["optional", "require"] = "optional"
    list_order: Literal["ignore", "keep"] = "ignore"
    relative_tolerance: float = 0.0
    max_answer_chars: int = 1000

    def __post_init__(self) -> None:
        allowed = {
            "several_boxes": ("hedge", "last"),
            "units": ("agree", "ignore", "require"),
            "percent": ("sign_optional", "exact", "ignore"),
            "base": ("optional", "require"),
            "list_order": ("ignore", "keep"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}")
        if not 0.0 <= self.relative_tolerance < 1.0:
            raise ValueError(f"relative_tolerance must be in [0, 1), got {self.relative_tolerance}")
        if self.max_answer_chars < 1:
            raise ValueError(f"max_answer_chars must be positive, got {self.max_answer_chars}")


@dataclass(frozen=True)
class Extraction:
    """`answer` is what the response commits to, or None and `reason` says why there is none.

    `listed` holds the boxes of a closing statement that names several. Alone they are a hedge; they are an answer if
    the reference answer is a list of as many.
    """

    answer: str | None
    reason: str = ""
    listed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Box:
    start: int
    end: int
    content: str | None  # None: never closed


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]{0,8}(\{)?")
_IN_BOX = re.compile(r"\\.|[{}]|\n[ \t]{0,64}\n", re.DOTALL)
_BARE_BOX = re.compile(r"(?:\\[A-Za-z]+(?:\{[^{}\n]{0,80}\}|\d){0,2}|[^\s${}\\]){1,120}")
_SENTENCE_END = re.compile(r"[.!?。](?=\s|$|[*_])|\n")
_WORD = re.compile(r"[^\W\d_]{2,}")
_HEDGE_WORD = re.compile(
    r"\W*(?:and\b\W*)?(?:(?:or|alternatively|otherwise|maybe|perhaps|possibly|either)\b|"
    r"(?:it\s+)?(?:could|might|may)(?:\s+(?:also|well))?\s+be\b)",
    re.IGNORECASE,
)
_JOINING_WORDS = frozenset(
    ["and", "or", "also", "as", "well", "either", "maybe", "perhaps", "possibly", "else", "text", "quad", "qquad"]
)
_BLANK = re.compile(r"(?:\\[,;:! ]|\\q?quad|\\(?:text|mbox)\s*\{\s*\}|[\s~${}?.-])*+")

_FINAL = re.compile(
    r"(?:\banswer\b(?:\s+to\s+[^.:\n]{1,80}?)?[*_\s]{0,4}(?:\bis\b|\bare\b|:|=)[*_\s:]{0,6}|^[ \t]{0,8}####[ \t]{0,8})"
    r"(?:(?:thus|therefore|simply|just|then|hence|exactly)\s{1,4})?(?=(?P<rest>[^\n]{1,400}))",
    re.IGNORECASE | re.MULTILINE,
)
_FINAL_WITHIN = 400  # an "answer is" further from the end than this was not final
_MATH_SPAN = re.compile(r"\$\$?([^$]{1,400})\$\$?|\\\((.{1,400}?)\\\)|\\\[(.{1,400}?)\\\]")
_CLAUSE_END = re.compile(r"[.!?](?=\s|$)|[,;]?\s+(?:because|since|as|which|where|so|when|i\.e\.)\b|\s*(?:—|--)\s*")

_UNIT_AFTER = re.compile(r"[*_ ]{0,4}([\\%°A-Za-z][A-Za-z/^2-3 ]{0,30})[*_ ]{0,4}(?=[.,;]|$)")
_NO_UNIT = frozenset(
    ["and", "or", "but", "for", "if", "in", "on", "at", "to", "of", "with", "is", "as", "so", "because", "since"]
)


def extract(response: str, policy: AnswerPolicy) -> Extraction:
    """The answer of a response: its last closed box after the thinking, else an unboxed "the answer is" if allowed."""
    opening, closing = policy.think_tags
    text = response.rpartition(closing)[2]
    if policy.thinking_must_end and closing not in response:
        return Extraction(None, "the thinking never ends")
    if opening in text:
        return Extraction(None, "the response stops while thinking")
    text = text[-RESPONSE_CHARS:]
    boxes = _boxes(text)[-BOXES:]
    if not boxes:
        return _unboxed(text) if policy.unboxed else Extraction(None, "no box")
    last = boxes[-1].content
    if last is None:
        return Extraction(None, "the last box is never closed")
    if _BLANK.fullmatch(last):
        return Extraction(None, "the last box is empty")
    listed = _closing_statement(text, boxes) if policy.several_boxes == "hedge" else [last]
    if len({"".join(content.split()) for content in listed}) > 1:
        return Extraction(None, "several different boxes in the closing statement", tuple(listed))
    return Extraction(last)


def _boxes(text: str) -> list[_Box]:
    """Outermost boxes in order. As in TeX, a box cannot run over a blank line: one that does is unclosed."""
    boxes: list[_Box] = []
    position = 0
    while command := _BOX.search(text, position):
        if command[1]:
            end, position = _closing_brace(text, command.end())
            content = None if end is None else _BOX.sub(r"\1", text[command.end() : end]).strip()
        else:
            bare = _BARE_BOX.match(text, command.end())
            position = bare.end() if bare else command.end()
            content = bare.group().rstrip(".,;:!?") if bare else None
        boxes.append(_Box(command.start(), position, content))
    return boxes


def _closing_brace(text: str, start: int) -> tuple[int | None, int]:
    """Where the brace opened before `start` closes, or None, and where to go on reading."""
    depth = 1
    for token in _IN_BOX.finditer(text, start):
        mark = token.group()
        if mark[0] == "\n":
            return None, token.start()
        depth += {"{": 1, "}": -1}.get(mark, 0)
        if depth == 0:
            return token.start(), token.end()
    return None, len(text)


def _closing_statement(text: str, boxes: list[_Box]) -> list[str]:
    """The boxes of the last statement: going back from the last one until a new sentence with words of its own."""
    listed = [boxes[-1].content or ""]
    for earlier, later in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[earlier.end : later.start][-2000:]
        ends = list(_SENTENCE_END.finditer(between))
        new_sentence = between[ends[-1].end() :] if ends else ""
        words = [word for word in _WORD.findall(between) if word.lower() not in _JOINING_WORDS]
        if words and ends and not _HEDGE_WORD.match(new_sentence):
            break
        if earlier.content is not None and not _BLANK.fullmatch(earlier.content):
            listed.append(earlier.content)
    return listed[::-1]


def _unboxed(text: str) -> Extraction:
    text = text.rstrip()
    found = list(_FINAL.finditer(text, max(0, len(text) - 2 * _FINAL_WITHIN)))
    if not found or len(text) - found[-1].start("rest") > _FINAL_WITHIN:
        return Extraction(None, "neither a box nor a closing 'the answer is'")
    rest = found[-1]["rest"].strip()
    spans = list(_MATH_SPAN.finditer(rest))
    if spans and spans[0].start() == 0:
        answer, end = "", 0
        for span in spans:  # "$x = 2$ and $x = 5$" is one answer; "$2$ because $1 + 1$" ends at the first
            joint = rest[end : span.start()].strip()
            if end and joint not in {",", "and", "or", ", and", ", or"}:
                break
            answer += f"{joint} {next(part for part in span.groups() if part is not None)} "
            end = span.end()
        if (unit := _UNIT_AFTER.match(rest, end)) and unit[1].split()[0].lower() not in _NO_UNIT:
            answer += unit[1]
    else:
        answer = _CLAUSE_END.split(rest, maxsplit=1)[0]
    answer = answer.strip().strip("*_`\"' ").rstrip(".,;:!").strip()
    if not answer or _BLANK.fullmatch(answer):
        return Extraction(None, 'the closing "the answer is" names nothing')
    return Extraction(answer)
