"""Mathematical problems made from a seed: six kinds, five grades of difficulty, exact answers.

Invariant: a problem is a function of its kind, its difficulty and the seed; its answer is computed here with integers
and fractions, never by a floating-point number. `program` is Python that prints the answer, as an agent with a Python
tool would write it; it is what a demonstrator shows, not where the answer comes from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

DIFFICULTIES = range(1, 6)


@dataclass(frozen=True)
class Problem:
    """A question, its exact answer (LaTeX where it is not an integer) and a program that prints an equal value."""

    kind: str
    difficulty: int
    question: str
    answer: str
    program: str


def make_problem(kind: str, difficulty: int, seed: int) -> Problem:
    """One problem.

    Raises:
        ValueError: no such kind or difficulty.
    """
    if kind not in KINDS or difficulty not in DIFFICULTIES:
        raise ValueError(
            f"generated problems have kinds {', '.join(KINDS)} and difficulties 1 to 5; got {kind!r} of {difficulty}"
        )
    question, answer, program = KINDS[kind](random.Random(f"{kind}/{difficulty}/{seed}"), difficulty)
    return Problem(kind, difficulty, question, latex(answer) if isinstance(answer, Fraction) else str(answer), program)


def latex(value: Fraction) -> str:
    """`3`, `-\\frac{1}{2}`."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


MULTIPLICATION = {"*": "\\cdot", "/": "\\div"}

Drawn = tuple[str, int | Fraction | str, str]
"""Question, answer, program."""


def _arithmetic(rng: random.Random, difficulty: int) -> Drawn:
    """Sums, differences and products of ever more and longer integers, with brackets from grade 3 on."""
    longest = (10, 100, 100, 1000, 1000)[difficulty - 1]
    value = rng.randrange(1, longest)
    text, binds = str(value), True
    for _ in range((1, 1, 2, 2, 3)[difficulty - 1]):
        sign, other = rng.choice("+-*"), rng.randrange(1, longest)
        if sign == "*":
            text = f"{text} * {other}" if binds else f"({text}) * {other}"
            value, binds = value * other, True
        else:
            text, value, binds = f"{text} {sign} {other}", value + other if sign == "+" else value - other, False
    return f"Compute {text}.", value, f"print({text})"


def _fractions(rng: random.Random, difficulty: int) -> Drawn:
    """Sums, differences, products and quotients of fractions."""
    largest = 4 + 4 * difficulty
    value = Fraction(rng.randrange(1, largest), rng.randrange(2, largest))
    shown, program = latex(value), _python(value)
    for _ in range(1 if difficulty < 3 else 2):
        other = Fraction(rng.randrange(1, largest), rng.randrange(2, largest))
        sign = rng.choice("+-" if difficulty == 1 else "+-*/")
        if sign in "*/":
            shown = rf"\left({shown}\right) {MULTIPLICATION[sign]} {latex(other)}"
            value = value * other if sign == "*" else value / other
        else:
            shown = f"{shown} {sign} {latex(other)}"
            value = value + other if sign == "+" else value - other
        program = f"({program}) {sign} {_python(other)}"
    question = f"Compute ${shown}$. Give the answer as an integer or a fraction in lowest terms."
    return question, value, f"from fractions import Fraction as F\nprint({program})"


def _linear(rng: random.Random, difficulty: int) -> Drawn:
    """Linear equations, and from grade 4 on pairs of them."""
    size = 3 + 4 * difficulty
    if difficulty >= 4:
        while True:
            a, b, c, d = (rng.choice([n for n in range(-size, size + 1) if n]) for _ in range(4))
            if a * d != b * c:
                break
        x, y = rng.randint(-size, size), rng.randint(-size, size)
        e, f = a * x + b * y, c * x + d * y
        question = f"If ${_terms(a, 'x', b, 'y')} = {e}$ and ${_terms(c, 'x', d, 'y')} = {f}$, what is $x + y$?"
        solving = f"solve([{a}*x + {b}*y - ({e}), {c}*x + {d}*y - ({f})], [x, y])"
        program = f"from sympy import symbols, solve\nx, y = symbols('x y')\ns = {solving}\nprint(s[x] + s[y])"
        return question, x + y, program
    a = rng.randrange(2, size)
    c = 0 if difficulty == 1 else rng.choice([n for n in range(1, size) if n != a])
    b, d = rng.randint(-size, size) or 1, rng.randint(-size, size)
    if difficulty < 3:
        x = Fraction(rng.randint(-size, size))
        d = (a - c) * int(x) + b
    else:
        x = Fraction(d - b, a - c)
    right = f"{c}x {'-' if d < 0 else '+'} {abs(d)}" if c else str(d)
    question = f"Solve for $x$: ${a}x {'-' if b < 0 else '+'} {abs(b)} = {right}$."
    return question, x, f"from fractions import Fraction as F\nprint(F({d} - ({b}), {a} - {c}))"


def _modular(rng: random.Random, difficulty: int) -> Drawn:
    """Remainders of sums, products and powers."""
    modulus = rng.randrange(3, (10, 20, 50, 100, 1000)[difficulty - 1])
    a, b = (rng.randrange(2, (20, 50, 100, 1000, 10_000)[difficulty - 1]) for _ in range(2))
    if difficulty <= 2:
        sign = rng.choice("+*")
        value = (a + b if sign == "+" else a * b) % modulus
        return (
            f"What is the remainder when {a} {sign} {b} is divided by {modulus}?",
            value,
            f"print(({a} {sign} {b}) % {modulus})",
        )
    question = f"What is the remainder when ${a}^{{{b}}}$ is divided by {modulus}?"
    return question, pow(a, b, modulus), f"print(pow({a}, {b}, {modulus}))"


def _counting(rng: random.Random, difficulty: int) -> Drawn:
    """Multiples in a range, choices, arrangements of letters, and lattice paths."""
    which = rng.choice(("multiples", "choices", "letters", "paths")[: 2 + (difficulty > 1) + (difficulty > 2)])
    if which == "multiples":
        top = rng.randrange(10, 40 * 4**difficulty)
        a, b = rng.sample(range(2, 6 + 2 * difficulty), 2)
        value = top // a + top // b - top // math.lcm(a, b)
        question = f"How many integers from 1 to {top} are divisible by {a} or by {b}?"
        return question, value, f"print(sum(n % {a} == 0 or n % {b} == 0 for n in range(1, {top} + 1)))"
    if which == "choices":
        n = rng.randrange(4, 6 + 3 * difficulty)
        k = rng.randrange(2, n - 1)
        question = f"In how many ways can {k} people be chosen out of {n}?"
        return question, math.comb(n, k), f"import math\nprint(math.comb({n}, {k}))"
    if which == "letters":
        letters = [letter for letter in rng.sample("ABCDEFGH", 2 + difficulty // 2) for _ in range(rng.randint(1, 3))]
        rng.shuffle(letters)
        word = "".join(letters)
        counts = [word.count(letter) for letter in sorted(set(word))]
        value = math.factorial(len(word)) // math.prod(map(math.factorial, counts))
        program = (
            f"import math\nw = '{word}'\n"
            "print(math.factorial(len(w)) // math.prod(math.factorial(w.count(c)) for c in set(w)))"
        )
        return f"How many different strings can be made by rearranging the letters of {word}?", value, program
    x, y = (rng.randrange(2, 3 + 2 * difficulty) for _ in range(2))
    question = f"How many shortest paths along grid lines lead from $(0, 0)$ to $({x}, {y})$?"
    return question, math.comb(x + y, x), f"import math\nprint(math.comb({x} + {y}, {x}))"


def _geometry(rng: random.Random, difficulty: int) -> Drawn:
    """Rectangles, circles, triangles by their corners, distances as radicals."""
    size = 5 * difficulty
    which = rng.choice(("rectangle", "circle", "triangle", "distance")[: 1 + min(difficulty, 3)])
    if which == "rectangle":
        a, b = rng.randrange(2, 4 * size), rng.randrange(2, 4 * size)
        if rng.random() < 0.5:
            return (
                f"What is the perimeter of a rectangle with sides {a} and {b}?",
                2 * (a + b),
                f"print(2 * ({a} + {b}))",
            )
        return f"What is the area of a rectangle with sides {a} and {b}?", a * b, f"print({a} * {b})"
    if which == "circle":
        radius = Fraction(rng.randrange(2, 4 * size), 1 if difficulty < 4 else 2)
        area = radius**2
        shown = (
            f"{latex(area)}\\pi" if area.denominator == 1 else f"\\frac{{{area.numerator}\\pi}}{{{area.denominator}}}"
        )
        question = (
            f"What is the exact area of a circle of radius ${latex(radius)}$? Give the answer in terms of $\\pi$."
        )
        return (
            question,
            shown,
            f"from sympy import Rational, pi\nprint(pi * Rational({radius.numerator}, {radius.denominator})**2)",
        )
    if which == "triangle":
        while True:
            (a, b), (c, d), (e, f) = ((rng.randint(-size, size), rng.randint(-size, size)) for _ in range(3))
            doubled = abs((c - a) * (f - b) - (e - a) * (d - b))
            if doubled:
                break
        question = f"What is the area of the triangle with corners $({a}, {b})$, $({c}, {d})$ and $({e}, {f})$?"
        program = (
            "from fractions import Fraction as F\n"
            f"print(F(abs(({c} - {_b(a)}) * ({f} - {_b(b)}) - ({e} - {_b(a)}) * ({d} - {_b(b)})), 2))"
        )
        return question, Fraction(doubled, 2), program
    a, b, c, d = (rng.randint(-size, size) for _ in range(4))
    square = (c - a) ** 2 + (d - b) ** 2
    question = f"What is the exact distance between the points $({a}, {b})$ and $({c}, {d})$?"
    return question, _root(square), f"from sympy import sqrt\nprint(sqrt({square}))"


def _root(square: int) -> str:
    """√n with the largest square taken out: `5`, `3\\sqrt{2}`."""
    outside = max(n for n in range(1, math.isqrt(square) + 1) if square % n**2 == 0) if square else 0
    inside = square // outside**2 if outside else 1
    return str(outside) if inside == 1 else f"{'' if outside == 1 else outside}\\sqrt{{{inside}}}"


def _terms(a: int, x: str, b: int, y: str) -> str:
    def times(n: int, name: str) -> str:
        return name if n == 1 else f"{n}{name}"

    return f"{'-' + x if a == -1 else times(a, x)} {'-' if b < 0 else '+'} {times(abs(b), y)}"


def _python(value: Fraction) -> str:
    return f"F({value.numerator}, {value.denominator})"


def _b(number: int) -> str:
    return f"({number})" if number < 0 else str(number)


KINDS: dict[str, Callable[[random.Random, int], Drawn]] = {
    "arithmetic": _arithmetic,
    "fractions": _fractions,
    "linear": _linear,
    "modular": _modular,
    "counting": _counting,
    "geometry": _geometry,
}
