"""What kind of thing an answer is: words, a value, a list, an interval, an equation, ...

Invariant: reading loses nothing that could make two answers differ; what is not understood stays in a value's text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fr_lightning.envs.answer_latex import Undecidable, canonical, partners, spaceless
from fr_lightning.envs.answer_units import split_unit


@dataclass(frozen=True)
class Words:
    """A worded answer, a name or the letter of a choice."""

    text: str


@dataclass(frozen=True)
class Value:
    """One expression; `base` is the subscript of digits such as 52_8.

    `product` is the whole text if the unit is a lone letter that could be a variable: "2 m".
    """

    body: str
    unit: str | None = None
    percent: bool = False
    base: int | None = None
    product: str | None = None


@dataclass(frozen=True)
class Items:
    """Several forms. `kind` is `list`, `set`, `union`, brackets such as `()`, `(]` or `<>`, or `matrix2x2`."""

    kind: str
    items: tuple[Form, ...]


@dataclass(frozen=True)
class Range:
    """An inequality in one variable, and the interval (or union) it means."""

    variable: str
    interval: Items


@dataclass(frozen=True)
class Assigned:
    """`name = value`, or a chain of equal values; all of them are claimed."""

    name: str
    values: tuple[Form, ...]


@dataclass(frozen=True)
class Relation:
    r"""`lhs op rhs` between expressions; op is `=`, `<`, `\le` or `\ne`."""

    op: str
    lhs: str
    rhs: str


Form = Words | Value | Items | Range | Assigned | Relation


_SEPARATOR = re.compile(
    r"[,;]|\\text\s*\{[\s,]*(?:and|or)[\s,]*\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])|\\(?:lor|land|vee|wedge)(?![A-Za-z])"
)
_RELATION = re.compile(r"\\(?:le|ge|ne|approx|in)(?![A-Za-z])|:?=+|[<>]")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{(.?)(?:small)?(matrix|array)\}(?:\{[clr|@ ]*\})?(.*)\\end\{\1(?:small)?\2\}", re.DOTALL)
_LETTER = (
    r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|"
    r"chi|psi|omega|ell|Delta|Gamma|Theta|Omega)(?![A-Za-z]))(?:_\{\w{1,10}\})?"
)
VARIABLE = re.compile(_LETTER)
_NAME = re.compile(
    rf"(?:\\text\{{[^{{}}]*\}}|{_LETTER}|[A-Za-z]{{2,20}})(?:_\{{[\w, ]{{1,10}}\}})?'{{0,2}}(?:\([^=<>]{{0,60}}\))?|"
    rf"(?!.*\b(?:not|never|no)\b)[A-Za-z][A-Za-z ]{{1,40}}|\({_LETTER}(?:, ?{_LETTER}){{1,5}}\)|"
    r"m?\s*\\(?:angle|overline|vec|hat|triangle|bar)\s*\{?[A-Za-z ]{1,4}\}?|\|[A-Z]{1,3}\||\[[A-Z]{3,6}\]"
)
_CONSTANT_COMMANDS = frozenset(
    ["pi", "sqrt", "frac", "cdot", "div", "infty", "ln", "log", "sin", "cos", "tan", "binom", "circ"]
)
_REALS = frozenset({r"\mathbb{R}", "all real numbers", "all reals", "the set of all real numbers"})
_LINE = Items("()", (Value(r"-\infty"), Value(r"\infty")))


def read(text: str, max_chars: int = 1000) -> Form:
    """The form of an answer in LaTeX, Unicode or plain text.

    Raises:
        Undecidable: it is empty, malformed, or beyond the limits.
    """
    return _read(canonical(text, max_chars), 0)


def _read(text: str, depth: int) -> Form:
    text = text.strip()
    if not text:
        raise Undecidable("empty")
    if depth > 12:
        raise Undecidable("nested too deeply")

    def inner(part: str) -> Form:
        return _read(part, depth + 1)

    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix, inner)
    if text in _REALS:
        return _LINE
    text = _drop_thousands_commas(text)
    if len(parts := list(_split(text, _UNION))) > 1:
        return _union([inner(part) for part, _ in parts])
    parts = [(part, mark) for part, mark in _split(text, _SEPARATOR) if part.strip()]
    if len(parts) > 1:
        return _listed([inner(part) for part, _ in parts], {mark for _, mark in parts})
    parts = [(part.strip(), mark) for part, mark in _split(parts[0][0] if parts else text, _RELATION)]
    if len(parts) > 1:
        return _related([part for part, _ in parts], [mark for _, mark in parts[:-1]], inner)
    text = parts[0][0]
    if (bracketed := _bracketed(text, inner)) is not None:
        return bracketed
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
        lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
        return Items("list", (inner(upper), inner(lower)))
    if (words := _words(text)) is not None:
        return words
    if (wrapped := re.fullmatch(r"\\text\{([^{}]*)\}", text)) and wrapped[1].strip():
        return inner(wrapped[1])
    return _value(text)


_THOUSANDS = re.compile(r"(?<![\w.,{}])\d{1,3}(?:,\d{3})+(?!\d|,\d)|(?<![\w.,{}])^-?\d{1,3}(?: \d{3})+(?!\S)")


def _drop_thousands_commas(text: str) -> str:
    """1,234 is one number, except in brackets, where it is two."""

    def drop(number: re.Match[str]) -> str:
        before = text[: number.start()]
        outside = all(before.count(left) <= before.count(right) for left, right in ("()", "[]", "{}"))
        return number.group().replace(",", "").replace(" ", "") if outside else number.group()

    return _THOUSANDS.sub(drop, text)


def _split(text: str, separator: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """(part, separator after it) at the top level of brackets and environments."""
    token = re.compile(
        rf"\\begin\{{|\\end\{{|\\langle(?![A-Za-z])|\\rangle(?![A-Za-z])|[(\[{{}}\])]|{separator.pattern}"
    )
    depth = start = 0
    for mark in token.finditer(text):
        name = mark.group()
        if name == r"\begin{":
            depth += 2  # its brace, and the environment
        elif name == r"\end{":
            pass  # its brace opens, the environment closes
        elif name in {"(", "[", "{", r"\langle"}:
            depth += 1
        elif name in {")", "]", "}", r"\rangle"}:
            depth -= 1
        elif depth == 0:
            yield text[start : mark.start()], name
            start = mark.end()
    yield text[start:], ""


def _matrix(match: re.Match[str], inner: Callable[[str], Form]) -> Items:
    style, content = match[1], match[3].strip().removesuffix(r"\\")
    rows = [row.split("&") for row in content.split(r"\\")]
    if len({len(row) for row in rows}) != 1 or r"\begin" in content:
        raise Undecidable("a matrix with rows of different lengths")
    kind = "determinant" if style in {"v", "V"} else "matrix"
    return Items(f"{kind}{len(rows)}x{len(rows[0])}", tuple(inner(cell) for row in rows for cell in row))


def _union(parts: Sequence[Form]) -> Items:
    items = [
        item for part in parts for item in (part.items if isinstance(part, Items) and part.kind == "union" else (part,))
    ]
    if all(isinstance(item, Items) and item.kind == "set" for item in items):
        return Items("set", tuple(value for item in items if isinstance(item, Items) for value in item.items))
    return Items("union", tuple(items))


def _listed(items: list[Form], separators: set[str]) -> Form:
    names = [item.name for item in items if isinstance(item, Assigned)]
    one_name = len(set(names)) == 1 and (len(names) == len(items) or isinstance(items[0], Assigned))
    if one_name and all(isinstance(item, (Assigned, Value)) for item in items):
        # "x = 2 or x = 5" and "x = 2, 5" list values; "x = 2, y = 5" does not
        items = [item.values[-1] if isinstance(item, Assigned) else item for item in items]
    ranges = [item for item in items if isinstance(item, Range)]
    either = any("or" in mark or "vee" in mark for mark in separators)
    if either and len(ranges) == len(items) and len({item.variable for item in ranges}) == 1:
        return Range(ranges[0].variable, _union([item.interval for item in ranges]))
    flat = [
        part for item in items for part in (item.items if isinstance(item, Items) and item.kind == "list" else (item,))
    ]
    return Items("list", tuple(flat))


def _related(parts: list[str], ops: list[str], inner: Callable[[str], Form]) -> Form:
    ops = ["=" if "=" in op else op for op in ops]
    if ops == [r"\in"]:
        if not _NAME.fullmatch(parts[0]):
            raise Undecidable("membership of an expression")
        return inner(parts[1])
    if not parts[0] and ops[0] in {"=", r"\approx"}:  # "= 5"
        parts, ops = parts[1:], ops[1:]
        if not ops:
            return inner(parts[0])
    if not all(parts):
        raise Undecidable("a relation without a side")
    if set(ops) <= {"=", r"\approx"}:
        return _equal(parts, ops, inner)
    if len(ops) == 1 and ops[0] == r"\ne" and VARIABLE.fullmatch(parts[0]) and _constant(parts[1]):
        hole = inner(parts[1])
        low, high = Value(r"-\infty"), Value(r"\infty")
        return Range(parts[0], Items("union", (Items("()", (low, hole)), Items("()", (hole, high)))))
    if set(ops) <= {">", r"\ge"}:
        parts, ops = parts[::-1], [{">": "<", r"\ge": r"\le"}[op] for op in ops[::-1]]
    if not set(ops) <= {"<", r"\le"}:
        if len(ops) == 1 and ops[0] == r"\ne":
            return Relation(r"\ne", parts[0], parts[1])
        raise Undecidable("a chain of mixed relations")
    if (interval := _interval(parts, ops, inner)) is not None:
        return interval
    if len(ops) == 1:
        return Relation(ops[0], parts[0], parts[1])
    return Items("chain" + "".join(ops), tuple(inner(part) for part in parts))


def _interval(parts: list[str], ops: list[str], inner: Callable[[str], Form]) -> Range | None:
    if len(parts) == 2 and VARIABLE.fullmatch(parts[0]):
        parts, ops = [r"-\infty", *parts], ["<", *ops]
    elif len(parts) == 2:
        parts, ops = [*parts, r"\infty"], [*ops, "<"]
    if len(parts) != 3 or not VARIABLE.fullmatch(parts[1]) or not (_constant(parts[0]) and _constant(parts[2])):
        return None
    kind = ("(" if ops[0] == "<" else "[") + (")" if ops[1] == "<" else "]")
    return Range(parts[1], Items(kind, (inner(parts[0]), inner(parts[2]))))


def _equal(parts: list[str], ops: list[str], inner: Callable[[str], Form]) -> Form:
    named = _NAME.fullmatch(parts[0]) is not None and not _constant(parts[0])
    if r"\approx" in ops and (rounded := ops.index(r"\approx") + 1) > (1 if named else 0):
        parts = parts[:rounded]  # "x = 1/3 ≈ 0.333" claims 1/3
    if named and len(parts) > 1:
        values = [part for part in parts[1:] if _constant(part)] if _constant(parts[-1]) else parts[1:]
        return Assigned(spaceless(parts[0]), tuple(inner(value) for value in values))
    if len(parts) == 1 or all(_constant(part) for part in parts):
        return Assigned("", tuple(inner(part) for part in parts))
    if len(parts) == 2:
        return Relation("=", parts[0], parts[1])
    raise Undecidable("a chain of equations")


def _constant(text: str) -> bool:
    text = re.sub(r"\\text\{[^{}]*\}", "", text)
    commands = {command.strip("\\") for command in re.findall(r"\\[A-Za-z]+", text)}
    return commands <= _CONSTANT_COMMANDS and not re.search(r"[A-Za-df-hj-z]", re.sub(r"\\[A-Za-z]+", "", text))


def _bracketed(text: str, inner: Callable[[str], Form]) -> Form | None:
    opening, closing = text[0], text[-1]
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        content, kind = text[7:-7], "<>"
    elif text.startswith(r"\{") and text.endswith(r"\}") and partners(text).get(1) == len(text) - 1:
        content, kind = text[2:-2], "set"
        builder = list(_split(content, re.compile(r"[|:]")))
        if len(builder) == 2 and VARIABLE.fullmatch(builder[0][0].strip()):
            return inner(builder[1][0])  # {x | x > 2}
    elif opening in "([" and closing in ")]" and partners(text).get(0) == len(text) - 1:
        content, kind = text[1:-1], opening + closing
    else:
        return None
    if ", " in content:
        content = _drop_thousands_commas(content)  # (0, 1,000)
    parts = [part for part, _ in _split(content, re.compile("[,;]"))]
    if kind == "set" and not content.strip():
        return Value(r"\emptyset")
    if len(parts) == 1 and kind == "set":
        item = inner(content)
        return Items("set", item.items if isinstance(item, Items) and item.kind == "list" else (item,))
    if len(parts) == 1:
        return None
    return Items(kind, tuple(inner(part) for part in parts))


_WORDED = re.compile(r"[^\W\d_][^\W_]*(?:[ ,.'’:/-]+[^\W_]+)*[.!]?")
_BARE_WORDS = re.compile(r"(?=.*([^\W\d_]{3}|[^\x00-\x7f]))[^\W\d_]+(?:[ '’-][^\W\d_]+)*")


def _words(text: str) -> Words | None:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    wrapped = plain != text
    plain = " ".join(plain.split())
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", plain):
        plain = plain.strip("() ")
    plain = plain.strip(" .,!")
    if not _WORDED.fullmatch(plain):
        return None
    if wrapped or _BARE_WORDS.fullmatch(plain) or re.fullmatch("[A-J]", plain):
        return Words(plain)
    return None


_BASED = re.compile(
    r"\(?([0-9][0-9A-Za-z]{0,60}|\\text\{[0-9A-Za-z]{1,60}\})\)?_\{(?:\\text\{)?([0-9]{1,2}|[a-z]{3,11})\}?\}"
)
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASE_NAMES |= {"eleven": 11, "twelve": 12, "sixteen": 16}


def _value(text: str) -> Value:
    text = text.removeprefix("+").strip() if text[0] == "+" and len(text) > 1 else text
    if based := _BASED.fullmatch(text):
        digits = re.sub(r"\\text\{|\}", "", based[1]).lower()
        base = _BASE_NAMES.get(based[2]) or (int(based[2]) if based[2].isdigit() else 0)
        if 2 <= base <= 36 and all(int(digit, 36) < base for digit in digits):
            return Value(digits.lstrip("0") or "0", base=base)
    if text.endswith(r"\%"):
        return Value(text[:-2].strip(), percent=True) if text[:-2].strip() else Value(text)
    body, unit = split_unit(text)
    if not body:
        return Value(text)
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", body):
        body = body.replace(",", "")
    return Value(body, unit, product=text if re.search(r"\d\s*[A-Za-z]$", text) and unit else None)
