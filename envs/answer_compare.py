"""When two answers are the same.

Invariant: only if it was shown. Lists, sets, intervals, tuples and matrices are taken apart and compared item by item,
numbers exactly; only what is left, one expression against another, is asked of an `Algebra`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from fr_lightning.envs.answer_forms import VARIABLE, Assigned, Form, Items, Range, Relation, Value, Words
from fr_lightning.envs.answer_latex import Undecidable, rational, spaceless
from fr_lightning.envs.answers import AnswerPolicy


class Algebra(Protocol):
    """Decides what needs a computer algebra system. Both may raise `Undecidable`."""

    def same_value(self, gold: str, other: str) -> bool: ...

    def same_relation(self, gold: Relation, other: Relation) -> bool: ...


def same(gold: Form, other: Form, policy: AnswerPolicy, algebra: Algebra) -> bool:
    """Whether `other` says what `gold` says.

    Raises:
        Undecidable: a comparison the limits or the algebra system do not reach.
    """

    def again(left: Form, right: Form) -> bool:
        return same(left, right, policy, algebra)

    gold_equation, other_equation = _equation(gold), _equation(other)
    if isinstance(gold, Assigned) and isinstance(other, Assigned):
        variables = VARIABLE.fullmatch(gold.name) and VARIABLE.fullmatch(other.name)
        if variables and gold.name != other.name:
            return bool(gold_equation and other_equation and algebra.same_relation(gold_equation, other_equation))
        return all(again(gold.values[-1], value) for value in other.values)
    if isinstance(gold, Relation) or isinstance(other, Relation):
        if gold_equation is None or other_equation is None or gold_equation.op != other_equation.op:
            return False
        if all(spaceless(a) == spaceless(b) for a, b in _sides(gold_equation, other_equation)):
            return True
        return algebra.same_relation(gold_equation, other_equation)
    if isinstance(other, Assigned):
        return all(again(gold, value) for value in other.values)
    if isinstance(gold, Assigned):
        return again(gold.values[-1], other)
    if isinstance(gold, Range) and isinstance(other, Range):
        return gold.variable == other.variable and again(gold.interval, other.interval)
    if isinstance(gold, Range) or isinstance(other, Range):
        return again(*(form.interval if isinstance(form, Range) else form for form in (gold, other)))
    if isinstance(gold, Items) or isinstance(other, Items):
        return _same_items(gold, other, policy, again)
    if isinstance(gold, Words) or isinstance(other, Words):
        return _same_words(gold, other)
    return _same_value(gold, other, policy, algebra)


def _equation(form: Form) -> Relation | None:
    if isinstance(form, Relation):
        return form
    if isinstance(form, Assigned) and form.name and isinstance(form.values[-1], Value):
        return Relation("=", form.name, form.values[-1].body)
    return None


def _sides(gold: Relation, other: Relation) -> list[tuple[str, str]]:
    return [(gold.lhs, other.lhs), (gold.rhs, other.rhs)]


def _same_items(gold: Form, other: Form, policy: AnswerPolicy, again: Callable[[Form, Form], bool]) -> bool:
    collections = {"list", "set"}
    left, right = (
        form if isinstance(form, Items) else Items("set", (form,)) if isinstance(form, Value) else None
        for form in (gold, other)
    )
    if left is None or right is None or (left.kind != right.kind and not {left.kind, right.kind} <= collections):
        return False
    if left.kind not in {*collections, "union"} or (
        policy.list_order == "keep" and "set" not in {left.kind, right.kind}
    ):
        return len(left.items) == len(right.items) and all(map(again, left.items, right.items))
    if "set" in {left.kind, right.kind}:  # {1, 1, 2} is {1, 2}
        return all(any(again(a, b) for b in right.items) for a in left.items) and all(
            any(again(a, b) for a in left.items) for b in right.items
        )
    if len(left.items) != len(right.items):
        return False
    unmatched = list(right.items)
    for item in left.items:
        partner = next((index for index, candidate in enumerate(unmatched) if again(item, candidate)), None)
        if partner is None:
            return False
        del unmatched[partner]
    return True


def _same_words(gold: Form, other: Form) -> bool:
    if isinstance(gold, Words) and isinstance(other, Words):
        return _fold(gold.text) == _fold(other.text)
    words, value = (gold, other) if isinstance(gold, Words) else (other, gold)
    return isinstance(words, Words) and isinstance(value, Value) and value.unit is None and value.body == words.text


def _fold(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().casefold()


def _same_value(gold: Value, other: Value, policy: AnswerPolicy, algebra: Algebra) -> bool:
    if gold.product and other.unit is None and re.search("[A-Za-z]", other.body):
        gold = Value(gold.product)
    elif other.product and gold.unit is None and re.search("[A-Za-z]", gold.body):
        other = Value(other.product)
    if policy.units != "ignore" and gold.unit != other.unit:
        missing = gold.unit is None or other.unit is None
        if not missing or (policy.units == "require" and gold.unit is not None):
            return False
    if gold.base or other.base:
        dropped = other.base is None and policy.base == "optional"
        return (gold.base == other.base or dropped) and gold.body == other.body.lower()
    if spaceless(gold.body) == spaceless(other.body) and gold.percent == other.percent:
        return True
    ours, theirs = rational(gold.body), rational(other.body)
    sign_dropped = gold.percent and not other.percent and policy.percent == "sign_optional"
    if ours is not None and theirs is not None:
        bare = ours, theirs
        ours, theirs = ours / (100 if gold.percent else 1), theirs / (100 if other.percent else 1)
        if abs(ours - theirs) <= policy.relative_tolerance * abs(ours):
            return True
        if sign_dropped and abs(theirs) < 1:  # 0.5 beside 0.5 % is read as a fraction
            return False
        return (sign_dropped or policy.percent == "ignore") and bare[0] == bare[1]
    for value, exact in ((gold, ours), (other, theirs)):
        if exact is None:
            if ":" in value.body:  # clock times and ratios are equal as written or not at all
                return False
            if reason := not_algebra(value.body):
                if value is other and reason in {"words inside mathematics", "numbers side by side"}:
                    return False
                raise Undecidable(reason)
    bodies = [rf"\frac{{{v.body}}}{{100}}" if v.percent else v.body for v in (gold, other)]
    if algebra.same_value(bodies[0], bodies[1]):
        return True
    ignore_sign = sign_dropped or (policy.percent == "ignore" and gold.percent != other.percent)
    return ignore_sign and algebra.same_value(gold.body, other.body)


_BEYOND = [
    (re.compile(r"\\(?:sum|prod|i*int|oint|lim)(?![A-Za-z])"), "a sum, product, integral or limit"),
    (re.compile(r"\\ldots|'|\\prime"), "dots or primes"),
    (re.compile(r"\d{200,}"), "a number too large to compute"),
    (re.compile(r"\d{4,}\s*[)}]*\s*!|!\s*[)}]*\s*!"), "a factorial too large to compute"),
    (re.compile(r"\^\s*\{?\s*[-+]?\d{6,}"), "a power too large to compute"),
    (re.compile(r"\d\s*[)}]*\s*\^\{[^{}]*\^\{[^{}]*\^"), "a tower of powers"),
    (re.compile(r"\d\s*[)}]*\s*\^\{\(*\d+\)*\^\{\(*\d"), "a tower of powers"),
    (re.compile(r"\d\s+\.?\d|\\\\"), "numbers side by side"),
    (re.compile(r"\\text|(?<![A-Za-z\\])[A-Za-z]{5,}(?![A-Za-z])|[^\x00-\x7f]|[\"#&@?$]"), "words inside mathematics"),
]


def not_algebra(body: str) -> str | None:
    """Why an expression is not handed to the algebra system, or None."""
    if len(body) > 600:
        return "too long"
    depth = deepest = 0
    for mark in re.findall(r"[({\[\]})]", body):
        depth += 1 if mark in "({[" else -1
        deepest = max(deepest, depth)
    if deepest > 30:
        return "nested too deeply"
    commands_off = re.sub(r"\\(?!text|sum|prod|i*int|oint|lim|ldots|prime)[A-Za-z]+", "~", body)
    return next((reason for pattern, reason in _BEYOND if pattern.search(commands_off)), None)
