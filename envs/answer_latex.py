"""The text of a short mathematical answer: one canonical LaTeX spelling, and the exact value of what is rational.

Invariant: text is data. It is matched against patterns and walked by a parser of fixed grammar, never evaluated, and
every number it can make is bounded; so all of this is safe in the trainer's own process.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction

MAX_RAW_CHARS = 20_000  # before enclosing brackets come off
MAX_DEPTH = 60
MAX_BITS = 16_384


class Undecidable(Exception):
    """The answer is beyond what can be compared; the message says why."""


# ---------------------------------------------------------------- canonical LaTeX

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
_SYMBOLS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"), **dict.fromkeys("×✕⨯", r"\times "), **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("°º", r"^\circ "), **dict.fromkeys("≤⩽≦", r"\le "), **dict.fromkeys("≥⩾≧", r"\ge "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""), "÷": r"\div ", "±": r"\pm ", "∓": r"\mp ", "√": " sqrt ",
    "∞": r"\infty ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R} ", "ℤ": r"\mathbb{Z} ", "⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "∖": r"\setminus ",
    "⁄": "/", "∕": "/", "′": "'", "…": r"\ldots ", "⋯": r"\ldots ", "∧": r"\land ", "∨": r"\lor ",
}  # fmt: skip
_GREEK_NAMES = r"""
\alpha \beta \gamma \delta \epsilon \zeta \eta \theta \iota \kappa \lambda \mu \nu \xi \omicron \pi \rho \varsigma
\sigma \tau \upsilon \phi \chi \psi \omega
""".split()
_GREEK = {chr(code): name + " " for code, name in zip(range(ord("α"), ord("ω") + 1), _GREEK_NAMES, strict=True)}
_CHARACTERS = re.compile("[" + re.escape("".join(_SYMBOLS) + "".join(_GREEK)) + "]")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\$", r"\\usd "),
        (r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|[bB]iggl?|[bB]iggr)\s*(?=[^A-Za-z]|\\)\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|boldsymbol|bm)(?![A-Za-z])", ""),
        (r"(?<=\d)(?:\{,\}|,\\!|\\[,!;: ]|~|\\thinspace)\s*(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\[,;:!> ]|~|\\q?quad(?![A-Za-z])|\\thinspace(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:mathrm|mathit)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\(?:mathbf|mathit|mathsf)\s*\{\s*([A-Za-z])\s*\}", r"\1"),
        (r"\\(?:mbox|text(?:rm|bf|it|normal|sf|tt)|math(?:rm|bf|it|sf)|operatorname\*?)\s*(?=\{)", r"\\text"),
        (r"\\text\{\s*(lcm|gcd|max|min)\s*\}", r"\\\1 "),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\le(?:q|qslant)(?![A-Za-z])", r"\\le "),
        (r"\\ge(?:q|qslant)(?![A-Za-z])", r"\\ge "),
        (r"\\neq(?![A-Za-z])", r"\\ne "),
        (r"<=|=<", r"\\le "),
        (r">=", r"\\ge "),
        (r"(?<=[A-Za-z\s])!=|\\not\s*=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:times|ast)(?![A-Za-z])", r"\\cdot "),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\[lr]?vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
        (r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}|\{\s*\\emptyset\s*\}", r"\\emptyset "),
        (r"\.\.\.+|\\(?:dots|cdots|dotsc|dotsb)(?![A-Za-z])", r"\\ldots "),
        (r"\\degree(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
        (r"(?<!\\)%", r"\\%"),
        (r"\\text\s*\{\s*(?:\\?%|percent(?:age)?|per cent)\s*\}", r"\\%"),
        (r"(?<![A-Za-z])(?:percent|per cent|pct)(?![A-Za-z])", r"\\%"),
        (r"(?<=\d)\s*\^?\s*\{?\s*\\text\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
        (r"(?<=\d)\^?\{?(?:st|nd|rd|th)(?![A-Za-z])\}?", ""),
        (r"(?<![A-Za-z\\])sqrt\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(sin|cos|tan|ln|log|exp)(?=[\s(^\\])", r"\\\1"),
        (r"(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", r"\1\\cdot 10^{\2}"),
    ]
]  # fmt: skip
_REPEATING = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\(?:overline|bar|dot)\s*\{\s*(\d{1,40})\s*\}")
_MIXED = re.compile(r"(?<![\w}\]).^])(\d{1,40})\s*\\frac\{(\d{1,40})\}\{(\d{1,40})\}(?![!^])")
_SPACED_MIXED = re.compile(r"(?<![\d/.])(\d{1,40}) +(\d{1,40})/(\d{1,40})(?![\d/.])")


def canonical(text: str, max_chars: int = 1000) -> str:
    """One spelling for what TeX, Unicode and plain text write in several ways. Changes no value.

    Raises:
        Undecidable: too long, nested too deeply, or braces that do not match.
    """
    if len(text) > MAX_RAW_CHARS:
        raise Undecidable("too long")
    text = _unwrap(text)
    if len(text) > max_chars:
        raise Undecidable("too long")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda run: "^{" + run.group().translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+", lambda run: "_{" + run.group().translate(_SUBSCRIPTS) + "}", text)
    text = re.sub("[¼-¾⅐-⅞↉]", _vulgar_fraction, text)
    text = _CHARACTERS.sub(lambda char: _SYMBOLS.get(char.group()) or _GREEK.get(char.group(), ""), text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _brace_arguments(text)
    text = _REPEATING.sub(_repeating, text)
    text = _SPACED_MIXED.sub(lambda m: _mixed(m, f"{m[1]} {m[2]}/{m[3]}"), text)
    text = _MIXED.sub(lambda m: _mixed(m, m.group()), text)
    return _unwrap(" ".join(text.split()))


def _vulgar_fraction(char: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", char.group()).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    value = int(whole + fixed + period) - int((whole + fixed) or "0")
    return rf"\frac{{{value}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _mixed(match: re.Match[str], otherwise: str) -> str:
    whole, numerator, denominator = (int(part) for part in match.groups())
    if numerator >= denominator:
        return otherwise
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


_WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ("{", "}"), ("(", ")")]


def _unwrap(text: str) -> str:
    """Take off what encloses the whole answer and says nothing: math delimiters, emphasis, braces, brackets."""
    text = text.strip()
    partner, separated = _brackets(text)
    start, end = 0, len(text)
    changed = True
    while changed and start < end:
        changed = False
        while start < end and text[start].isspace():
            start += 1
        while start < end and (
            text[end - 1].isspace() or (text[end - 1] in ".,;:" and text[end - 2 : end - 1] != "\\")
        ):
            end -= 1
        for left, right in _WRAPPERS:
            inner = (start + len(left), end - len(right))
            if inner[0] >= inner[1] or not (text.startswith(left, start) and text.startswith(right, inner[1])):
                continue
            if left in "{(" and (partner.get(start) != end - 1 or (left == "(" and start in separated)):
                continue
            if left[0] in "$*`" and left[0] in text[inner[0] : inner[1]].replace(r"\$", ""):
                continue
            start, end = inner
            changed = True
            break
    return text[start:end]


def partners(text: str) -> dict[int, int]:
    """Where each `(`, `[` or `{` closes; half-open intervals let `(` close with `]`. Escaped braces are braces too."""
    return _brackets(text)[0]


def _brackets(text: str) -> tuple[dict[int, int], set[int]]:
    """The partner of each opening bracket, and the opening brackets with a comma or semicolon directly inside."""
    partner: dict[int, int] = {}
    separated: set[int] = set()
    stack: list[int] = []
    for mark in re.finditer(r"\\\\|\\[(\[)\],;]|[()\[\]{},;]", text):
        if mark.group()[0] == "\\":
            continue
        if mark.group() in "([{":
            stack.append(mark.start())
        elif stack and mark.group() in ",;":
            separated.add(stack[-1])
        elif stack:
            partner[stack.pop()] = mark.start()
    return partner, separated


_TAKES_ARGUMENTS = re.compile(r"\\(?:frac|binom|sqrt|overline|bar|dot)(?![A-Za-z])|[\^_]")
_TWO = (r"\frac", r"\binom")


def _brace_arguments(text: str, depth: int = 0) -> str:
    r"""Put braces round every argument: `\frac12` → `\frac{1}{2}`, `x^12` → `x^{12}`, `\sqrt(3)` → `\sqrt{3}`."""
    if depth > MAX_DEPTH:
        raise Undecidable("nested too deeply")
    out, position = [], 0
    while command := _TAKES_ARGUMENTS.search(text, position):
        out.append(text[position : command.start()])
        name, position = command.group(), command.end()
        if name == "^" and (degree := re.compile(r"\s*\\circ(?![A-Za-z])").match(text, position)):
            out.append(r"^\circ")
            position = degree.end()
            continue
        if name == r"\sqrt" and (root := re.compile(r"\s*\[([^\[\]]{1,40})\]").match(text, position)):
            name, position = rf"\sqrt[{root[1].strip()}]", root.end()
        out.append(name)
        for _ in range(2 if name in _TWO else 1):
            argument, position = _argument(text, position, name[:5])
            out.append("{" + _brace_arguments(argument, depth + 1).strip() + "}")
    out.append(text[position:])
    return "".join(out)


def _argument(text: str, position: int, command: str, depth: int = 0) -> tuple[str, int]:
    """The argument of `command` at `position`, without its braces, and where it ends."""
    if depth > MAX_DEPTH:
        raise Undecidable("nested too deeply")
    while position < len(text) and text[position].isspace():
        position += 1
    if position == len(text):
        raise Undecidable("a command without its argument")
    if text[position] in "{(" and (text[position] == "{" or command in {"^", "_", r"\sqrt"}):
        end = partners(text[position:]).get(0)
        if end is None:
            raise Undecidable("braces do not match")
        return text[position + 1 : position + end], position + end + 1
    if command in {"^", "_"} and (number := re.compile(r"[+-]?\d+").match(text, position)):
        return number.group(), number.end()
    if text[position] == "\\":
        inner = re.compile(r"\\(?:[A-Za-z]+|.|$)").match(text, position)
        name, end = (inner.group(), inner.end()) if inner else ("\\", position + 1)
        if name in {*_TWO, r"\sqrt", r"\text"}:
            for _ in range(2 if name in _TWO else 1):
                end = _argument(text, end, name, depth + 1)[1]
        return text[position:end], end
    return text[position], position + 1


def spaceless(text: str) -> str:
    """The key of string equality: spaces go, except where they keep two words or numbers apart."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


# ---------------------------------------------------------------- exact rational value

_RATIONAL_TOKEN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+|\\(?:frac|binom|cdot|div)(?![A-Za-z])|[-+*/^!(){}])")


def rational(text: str) -> Fraction | None:
    """The exact value of canonical text made of numbers and arithmetic alone, else None.

    Raises:
        Undecidable: a number of more than `MAX_BITS` bits would come out, or nesting is too deep.
    """
    tokens, position = [], 0
    text = text.strip()
    while position < len(text):
        token = _RATIONAL_TOKEN.match(text, position)
        if token is None:
            return None
        tokens.append(token[1])
        position = token.end()
    try:
        parser = _Rational(tokens)
        value = parser.sum(0)
    except (_NotRational, ZeroDivisionError, IndexError):
        return None
    return value if parser.position == len(tokens) else None


class _NotRational(Exception):
    pass


class _Rational:
    """Recursive descent over arithmetic. `sum → product → power → atom`; no names, no calls."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.position = 0

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *wanted: str) -> bool:
        if self.peek() in wanted and self.peek():
            self.position += 1
            return True
        return False

    def need(self, token: str) -> None:
        if not self.take(token):
            raise _NotRational

    def sum(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise Undecidable("nested too deeply")
        value = self.signed_product(depth)
        while self.peek() in {"+", "-"}:
            sign = 1 if self.take("+") or not self.take("-") else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def signed_product(self, depth: int) -> Fraction:
        if self.take("-"):
            return -self.product(depth)
        self.take("+")
        return self.product(depth)

    def product(self, depth: int) -> Fraction:
        value = self.power(depth)
        divided = False
        while True:
            if self.take("*", r"\cdot"):
                value = _bounded(value * self.signed_power(depth))
            elif self.take("/", r"\div"):
                value, divided = _bounded(value / self.signed_power(depth)), True
            elif self.peek() in {"(", "{", r"\frac", r"\binom"}:
                if divided:  # 1/2(3): people disagree
                    raise _NotRational
                value = _bounded(value * self.power(depth))
            else:
                return value

    def signed_power(self, depth: int) -> Fraction:
        if self.take("-"):
            return -self.power(depth)
        return self.power(depth)

    def power(self, depth: int) -> Fraction:
        base = self.atom(depth)
        while self.take("!"):
            if base.denominator != 1 or base < 0:
                raise _NotRational
            if base > 1000:
                raise Undecidable("a factorial too large to compute")
            base = _bounded(Fraction(math.factorial(int(base))))
        if not self.take("^"):
            return base
        self.need("{")
        exponent = self.sum(depth + 1)
        self.need("}")
        if self.peek() in {"^", "!"} or exponent.denominator != 1:
            raise _NotRational
        if base in (0, 1, -1):
            return base ** int(exponent % 2 if base == -1 else exponent)
        if abs(exponent) * _bits(base) > MAX_BITS:
            raise Undecidable("a power too large to compute")
        return _bounded(base ** int(exponent))

    def atom(self, depth: int) -> Fraction:
        token = self.tokens[self.position]
        self.position += 1
        if token[0] in "0123456789.":
            return _bounded(Fraction(token))
        if token in {"(", "{"}:
            value = self.sum(depth + 1)
            self.need(")" if token == "(" else "}")
            return value
        if token in {r"\frac", r"\binom"}:
            parts = []
            for _ in range(2):
                self.need("{")
                parts.append(self.sum(depth + 1))
                self.need("}")
            return parts[0] / parts[1] if token == r"\frac" else _binomial(*parts)
        raise _NotRational


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise Undecidable("a number too large to compute")
    return value


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise _NotRational
    if n > 2000:
        raise Undecidable("a binomial too large to compute")
    return _bounded(Fraction(math.comb(int(n), int(k))))
