"""The process that does algebra for `MathVerifier`: a preloaded parent that forks one child per comparison.

Invariant: whatever an answer makes the algebra system do ends with that child, at the deadline at the latest: its
memory is limited, it cannot write files, and nothing it did is left for the next comparison. This process ends as soon
as the trainer does, its child with it.

Requests and replies are one JSON object a line on standard input and output; `main` is the entry point. Imports nothing
of torch or Lightning, so that it starts in under a second and stays small.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.core.function import AppliedUndef

from fr_lightning.envs.answer_compare import not_algebra, same
from fr_lightning.envs.answer_forms import Items, Relation, Value, read
from fr_lightning.envs.answer_latex import Undecidable
from fr_lightning.envs.answers import AnswerPolicy

Expr = Any
"""A `sympy.Expr`; SymPy's own annotations do not cover what its methods return."""

DIGITS = 50  # compared first
MAX_DIGITS = 1000  # before two expressions that agree are called equal
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])|(?<![\d.])(\d+)\.(?![\d.])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\([^()]*\)|[A-Za-z])\s*\^\\circ(?![A-Za-z])")
_POINTS = (  # rationals of both signs, inside and outside the unit interval
    "29/11 37/101 -53/97 173/10 -59/10 8/101 141/100 -181/100 97/89 61/67 -7/1000 1009/7 -211/3 83/13"
).split()
_FAR_POINTS = "1/1000003 -1/999983 1000003/7 -999983/3 12345678/5 2003/2 -4001/3".split()
_PIECEWISE = (sympy.Max, sympy.Min, sympy.Abs, sympy.floor, sympy.ceiling, sympy.sign, sympy.Mod, sympy.Piecewise)


class MathVerifyAlgebra:
    """`Algebra` by math-verify's parser and SymPy, with an exact re-check of everything called equal."""

    def same_value(self, gold: str, other: str) -> bool:
        try:
            left = parse(gold)
        except Undecidable as error:
            raise Undecidable("the reference answer is not readable as mathematics") from error
        right = parse(other)
        if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
            return equal(left, right)
        if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr):
            return False
        return bool(verify(left, right, timeout_seconds=None, allow_set_relation_comp=True))

    def same_relation(self, gold: Relation, other: Relation) -> bool:
        for side in (gold.lhs, gold.rhs, other.lhs, other.rhs):
            if reason := not_algebra(side):
                raise Undecidable(reason)
        left, right = (_expression(relation.lhs) - _expression(relation.rhs) for relation in (gold, other))
        left, right = _settle(left), _settle(right)
        if not (left.free_symbols and right.free_symbols):
            return False
        ratio = _constant_ratio(left, right)
        if gold.op in {"<", r"\le"}:
            return ratio is not None and bool(ratio > 0)
        if ratio is not None:
            return True
        return gold.op == "=" and _vanishes_on(left, right) and _vanishes_on(right, left)


def parse(text: str) -> Any:
    """The SymPy object of canonical LaTeX, decimals as exact fractions, `i` as the imaginary unit.

    Raises:
        Undecidable: math-verify's parser cannot read it.
    """
    text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _DECIMAL.sub(_exact_decimal, text)
    try:
        parsed = latex2sympy(
            text, is_real=True, convert_degrees=False, normalization_config=None, conversion_config=_CONVERSION
        )
    except Exception as error:  # the parser raises bare Exception
        raise Undecidable("not readable as mathematics") from error
    if isinstance(parsed, sympy.Basic):
        parsed = parsed.subs({symbol: sympy.I for symbol in parsed.free_symbols if str(symbol) == "i"})
    return parsed


def _exact_decimal(match: re.Match[str]) -> str:
    whole, fraction = match[1] if match[2] else match[3], match[2] or ""
    return rf"(\frac{{{int((whole or '') + fraction)}}}{{1{'0' * len(fraction)}}})"


def _expression(text: str) -> Expr:
    parsed = parse(text)
    if not isinstance(parsed, sympy.Expr):
        raise Undecidable("a relation between things that are no numbers")
    return parsed


def _settle(expression: Expr) -> Expr:
    """Evaluated, with every f(x) of an unknown f replaced by a symbol of that name."""
    done = expression.doit()
    unknown = sorted(done.atoms(AppliedUndef), key=str)
    return done.subs({call: sympy.Symbol(f"call {call}", real=True) for call in unknown})


def equal(left: Expr, right: Expr) -> bool:
    """Equality for real values of the symbols, wherever both sides are real; constants exactly or to `MAX_DIGITS`."""
    left, right = _settle(left), _settle(right)
    if any(side.has(sympy.nan, sympy.zoo) for side in (left, right)):
        raise Undecidable("an undefined value")
    if left == right:
        return True
    symbols = _symbols(left, right)
    if not symbols:
        return _equal_constants(left, right)
    is_complex = left.has(sympy.I) or right.has(sympy.I)
    compared = 0
    points = _POINTS + _FAR_POINTS if left.has(*_PIECEWISE) or right.has(*_PIECEWISE) else _POINTS
    for point in _sample(symbols, points):
        values = [side.evalf(DIGITS, subs=point) for side in (left, right)]
        finite = [value.is_finite is not False and not value.has(sympy.nan, sympy.zoo) for value in values]
        real = [ok and (is_complex or value.is_real is True) for ok, value in zip(finite, values, strict=True)]
        if real[0] != real[1]:
            return False
        if not real[0]:
            continue
        if not _close(*values):
            return False
        if not compared and not _equal_constants(left.subs(point), right.subs(point), digits=2 * DIGITS):
            return False
        compared += 1
    if compared < 3:
        raise Undecidable("too few points where both sides are real")
    return True


def _symbols(*sides: Expr) -> list[Any]:
    return sorted(set().union(*(side.free_symbols for side in sides)), key=str)


def _sample(symbols: list[Any], points: Sequence[str] = _POINTS) -> Iterator[dict[Any, Any]]:
    for index in range(len(points)):
        yield {
            symbol: sympy.Rational(points[(index + 5 * place) % len(points)]) + place
            for place, symbol in enumerate(symbols)
        }


def _close(left: Expr, right: Expr) -> bool:
    scale = max(abs(left), abs(right), key=lambda value: sympy.re(value))
    return bool(abs(left - right) <= scale * sympy.Float(10) ** (5 - DIGITS)) or bool(
        scale < sympy.Float(10) ** -DIGITS
    )


def _equal_constants(left: Expr, right: Expr, digits: int = MAX_DIGITS) -> bool:
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    if any(side.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) for side in (left, right)):
        return bool(left == right)
    difference = left - right
    if difference.is_zero:
        return True
    rough = difference.evalf(5, maxn=100)  # precision 1 means: no digit could be established, as for a true zero
    if all(part.is_zero or part._prec == 1 for part in _parts(rough)):
        fine = difference.evalf(5, maxn=digits)
        return all(part.is_zero or part._prec == 1 for part in _parts(fine))
    return False


def _parts(value: Expr) -> list[Any]:
    parts = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        raise Undecidable("no numeric value")
    return [part if part.is_Float else sympy.Float(part, 15) if part else part for part in parts]


def _constant_ratio(left: Expr, right: Expr) -> Expr | None:
    """c with left = c · right for a non-zero constant c, else None."""
    symbols = _symbols(left, right)
    for point in _sample(symbols):
        here = left.subs(point), right.subs(point)
        if all(side.is_finite and side.is_real and side.is_zero is False for side in here):
            ratio = sympy.nsimplify(here[0] / here[1]) if all(side.is_Rational for side in here) else here[0] / here[1]
            return ratio if equal(left, ratio * right) else None
    return None


def _vanishes_on(left: Expr, right: Expr) -> bool:
    """Whether `left` is zero wherever `right` is, by solving `right` for one of its symbols."""
    for symbol in _symbols(right):
        solutions = sympy.solve(right, symbol)
        if solutions:
            return all(equal(left.subs(symbol, solution), sympy.Integer(0)) for solution in solutions)
    raise Undecidable("an equation that cannot be solved")


# ---------------------------------------------------------------- one comparison, in the child


def decide(request: dict[str, Any]) -> dict[str, Any]:
    """`{"gold", "other", "policy"}` → `{"same": bool}` or `{"undecidable": reason}`.

    Without `other` the answer is whether `gold` can be read.
    """
    policy = AnswerPolicy(**{**request["policy"], "think_tags": tuple(request["policy"]["think_tags"])})
    algebra = MathVerifyAlgebra()
    try:
        gold = read(request["gold"], policy.max_answer_chars)
        if request.get("other") is None:
            _check_readable(gold)
            return {"same": True}
        return {"same": same(gold, read(request["other"], policy.max_answer_chars), policy, algebra)}
    except Undecidable as error:
        return {"undecidable": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"undecidable": f"out of {'memory' if isinstance(error, MemoryError) else 'stack'}"}
    except Exception as error:  # SymPy raises anything on odd input
        return {"undecidable": f"{type(error).__name__} in the algebra system"}


def _check_readable(form: Any) -> None:
    if isinstance(form, Value):
        if form.base is None and r"\emptyset" not in form.body and ":" not in form.body:
            if reason := not_algebra(form.body):
                raise Undecidable(reason)
            parse(form.body)
    elif isinstance(form, Relation):
        _expression(form.lhs)
        _expression(form.rhs)
    elif isinstance(form, Items):
        for item in form.items:
            _check_readable(item)
    elif hasattr(form, "interval"):
        _check_readable(form.interval)
    elif hasattr(form, "values"):
        for value in form.values:
            _check_readable(value)


# ---------------------------------------------------------------- the parent of the children


def main(timeout: float, memory_mb: int) -> None:
    """Serve requests from standard input until it closes or the trainer is gone."""
    trainer = os.getppid()
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing printed by a library reaches the trainer as a reply
    warm_up = _warm_up()
    warming = next(warm_up)
    replies.write(b'{"ready": true}\n')
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], 0.0 if warming else 1.0)
        if os.getppid() != trainer:  # a forked sibling may still hold our input open
            return
        if not readable:
            warming = next(warm_up, False)
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            replies.write(json.dumps(_in_child(json.loads(line), timeout, memory_mb, trainer)).encode() + b"\n")


_WARM_UP = r"""
\frac{\sqrt{3}}{3} ; \frac{1}{\sqrt{3}}
2x+4y=3 ; y=\frac{3}{4}-\frac{x}{2}
x^{2}-5x+(6) ; (x-2)(x-(3))
\frac{9a+11}{20b^{2}} ; \frac{11+9a}{20b\cdot b}
-\frac{1}{2}+2\sqrt{3}i ; 2i\sqrt{3}-0.5
\sin 2x+\cos^{2}(x) ; 2\sin x\cos x+\cos(x)\cos x
\tan\frac{\pi}{7} ; \frac{\sin\frac{\pi}{7}}{\cos\frac{\pi}{7}}
\ln(8x)+\log_{2}y ; \ln 8x+\frac{\ln y}{\ln 2}
n!+\binom{n}{2} ; n(n-1)!+\frac{n(n-1)}{2}
|x|-\lfloor y\rfloor ; \sqrt{x^{2}}-\lfloor{y}\rfloor
e^{-2\pi r}(a_{1}+b) ; (b+a_{1})/e^{2\pi r}
2\alpha+3f(x)-\sqrt[3]{16} ; 3f(x)+2\alpha-2\sqrt[3]{2}
4\pi ; 2\pi\cdot 2
\sqrt{2} ; 1.41421
2^{n+1}-x/y ; 2\cdot 2^{n}-\frac{x}{y}
"""


def _warm_up() -> Iterator[bool]:
    """Compare one pair of each common kind, a pair whenever there is nothing else to do; True while there are more.

    The parser learns its grammar as it goes, and children inherit that: a tenth of the time for their first parse.
    """
    for pair in _WARM_UP.strip().split("\n"):
        gold, other = pair.split(" ; ")
        decide({"gold": gold, "other": other, "policy": vars(AnswerPolicy())})
        yield True
    gc.collect()
    gc.freeze()  # children share these pages instead of copying them


def _in_child(request: dict[str, Any], timeout: float, memory_mb: int, trainer: int) -> dict[str, Any]:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _confine(timeout, memory_mb)
            os.write(send, json.dumps(decide(request)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(send)
    try:
        reply = _await_reply(receive, time.monotonic() + timeout, trainer)
    finally:
        os.close(receive)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return reply


def _await_reply(receive: int, deadline: float, trainer: int) -> dict[str, Any]:
    reply = b""
    while (left := deadline - time.monotonic()) > 0:
        readable, _, _ = select.select([receive, 0], [], [], min(left, 1.0))
        if 0 in readable or os.getppid() != trainer:  # requests come one at a time: this is the trainer closing
            return {"undecidable": "closed"}
        if receive in readable:
            chunk = os.read(receive, 1 << 16)
            if not chunk:
                return json.loads(reply) if reply else {"died": True}
            reply += chunk
    return {"undecidable": "time limit"}


def _confine(timeout: float, memory_mb: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    seconds = int(timeout) + 2
    limits = [
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ]
    for name, limit in limits:
        with suppress(ValueError, OSError):  # some systems refuse RLIMIT_AS
            resource.setrlimit(name, (limit, limit))
