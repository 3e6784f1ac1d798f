"""Grading from outside: cases by kind, exactness as properties, and what a response may do to the verifier."""

import asyncio
import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fr_lightning.envs.verifier import AnswerPolicy, MathVerifier, Verdict, VerifierError

SHARED_CASES = [json.loads(line) for line in Path(__file__).with_name("math_cases.jsonl").read_text().splitlines()]

# reference ≡ an answer that is the same; reference ≢ one that is not
CASES_BY_KIND = {
    "thousands": r"""
        1234567 ≡ 1,234,567
        1234567 ≡ 1{,}234{,}567
        1234567 ≡ 1\,234\,567
        1234567 ≡ 1 234 567
        1,\!000 ≡ 1000
        2500 ≢ 2,50
        2500 ≢ 2, 500
        12 ≢ 1,2
    """,
    "decimals and powers of ten": r"""
        7 ≡ 7.0
        7 ≡ 7.
        0.5 ≡ .5
        -0.5 ≡ -\frac12
        3\times10^8 ≡ 300000000
        3\times10^8 ≡ 3e8
        3\times 10^8 ≢ 3\cdot10^{7}
        6.02\times10^{23} ≡ 6.02 \cdot 10^{23}
        10^{-30} ≢ 10^{-31}
        0 ≢ 10^{-12}
        1 ≢ 0.9999999999999
        0.3333 ≢ 1/3
        \pi ≢ 3.14159265
        \pi ≢ \frac{22}{7}
        e ≢ 2.718281828
        \frac{1}{3} ≡ 0.\overline{3}
        \frac{1}{3} ≢ 0.333
        \frac{1}{6} ≡ 0.1\overline{6}
    """,
    "fractions": r"""
        \frac{3}{4} ≡ 3/4
        \frac{3}{4} ≡ \frac{6}{8}
        -\frac{3}{4} ≡ \frac{-3}{4}
        -\frac{3}{4} ≡ \frac{3}{-4}
        \frac34 ≡ \tfrac{3}{4}
        \frac34 ≡ ¾
        \frac{7}{3} ≡ 2 1/3
        \frac{7}{3} ≡ 2\frac13
        \frac{2}{3} ≢ 2\frac13
        3\frac{1}{2} ≡ 3.5
        3\frac12 ≢ \frac{31}{2}
        -1\frac12 ≡ -1.5
        -1\frac12 ≢ -0.5
        2 ≡ 3-1
        \frac{7}{2} ≢ 3-1/2
        \frac{1}{0} ≢ \frac{2}{0}
        5 ≢ 1/0
    """,
    "roots": r"""
        \frac{\sqrt{2}}{2} ≡ \frac{1}{\sqrt2}
        \frac{\sqrt{2}}{2} ≢ \frac{1}{2}
        5 ≡ \sqrt{25}
        \sqrt{50} ≡ 5\sqrt 2
        \sqrt{2}+\sqrt{3} ≡ \sqrt{5+2\sqrt6}
        \sqrt{2}+\sqrt{3} ≢ \sqrt{5+2\sqrt{5}}
        \sqrt{2} ≢ \sqrt{2}+10^{-40}
        2\sqrt{3} ≡ 2√3
        2\sqrt{3} ≡ 2*sqrt(3)
        2\sqrt[3]{2} ≡ \sqrt[3]{16}
        3\sqrt{x} ≢ \sqrt[3]{x}
    """,
    "percent": r"""
        50\% ≡ 50
        50\% ≡ 0.5
        50\% ≡ \frac12
        50\% ≡ 50 percent
        50\% ≢ 5\%
        50\% ≢ 0.5\%
        0.5\% ≢ 0.5
        1 ≢ 1\%
        0.25 ≡ 25\%
    """,
    "money": r"""
        \$18 ≡ 18
        18 ≡ \$18
        \$1,250.50 ≡ 1250.50
        \$5 ≢ 5\text{ cents}
        \$20 ≡ 20 dollars
        \$20 ≢ €20
        5 ≢ \$0.05
        \$5000000 ≡ \$5\text{ million}
    """,
    "units": r"""
        12\text{ cm} ≡ 12
        12\text{ cm} ≡ 12\,\mathrm{cm}
        12\text{ cm} ≡ 12 centimeters
        12\text{ cm} ≢ 12\text{ mm}
        12\text{ cm}^2 ≢ 12\text{ cm}^3
        12\text{ cm}^2 ≢ 12\text{ cm}
        12\text{ square inches} ≡ 12\text{ in}^2
        60\text{ mph} ≡ 60\text{ miles per hour}
        60\text{ mph} ≢ 60\text{ km/h}
        5\text{ hours} ≡ 5 hours
        5\text{ hours} ≢ 5 minutes
        100\text{ cm} ≢ 1\text{ m}
        8\text{ apples} ≡ 8
        8 ≡ 8\text{ apples}
        8 ≡ 8 apples
        12 ≢ 12m
        12\text{ m} ≡ 12 m
        2k ≡ 2 k
        12 ≢ 12x
    """,
    "words that change a number": r"""
        5 ≢ 5\text{ million}
        5000000 ≡ 5\text{ million}
        3 ≢ 3\text{ dozen}
        3 ≢ 3\text{ halves}
        3 ≢ 3 thirds
        5 ≢ 5\text{ or so}
        5 ≢ 5\text{ squared}
        5 ≢ \text{not }5
        5 ≢ \not= 5
        5 ≢ 5 or 7
        35 ≢ 5 \quad 7
        57 ≢ 5 \quad 7
        5 ≢ \text{the answer is }5
    """,
    "degrees": r"""
        30 ≡ 30^\circ
        30^\circ ≡ 30
        30^{\circ} ≡ 30 degrees
        30^\circ ≢ 60^\circ
        \sin 30^\circ ≡ \frac12
        \frac{1}{2} ≢ \sin 30
        30^\circ ≢ 30\text{ radians}
    """,
    "words and choices": r"""
        \text{Monday} ≡ Monday
        \text{Monday} ≡ \text{monday.}
        \text{Monday} ≢ Tuesday
        \text{east} ≢ seat
        \text{even} ≢ \text{odd}
        \text{Yes} ≡ yes
        \text{Yes} ≢ No
        B ≡ (B)
        \textbf{(B)} ≡ B
        B ≡ \text{B}
        B ≢ A, B
        \text{(B)} ≢ (D)
    """,
    "ordinals": r"""
        3 ≡ 3^{\text{rd}}
        3 ≡ 3rd
        21 ≡ 21^{st}
    """,
    "times and ratios": r"""
        3:30 ≡ 3:30
        3:30 ≢ 3:03
        3:30\text{ p.m.} ≡ 3:30 PM
        3:30\text{ p.m.} ≢ 3:30\text{ a.m.}
        2:3 ≢ 3:2
    """,
    "intervals and inequalities": r"""
        [0,9) ≢ (0,9)
        (0,9) ≢ [0,9)
        [0,9) ≡ [0, 9)
        (-\infty,2)\cup(5,\infty) ≡ x<2\text{ or }x>5
        (-\infty,2)\cup(5,\infty) ≡ (5,\infty) \cup (-\infty,2)
        (-\infty,2)\cup(5,\infty) ≢ (-\infty,2]\cup(5,\infty)
        2<x\le 5 ≡ (2,5]
        2<x\le 5 ≡ 5\ge x>2
        2<x\le 5 ≢ 2\le x\le 5
        x\ge 2 ≡ [2,\infty)
        x\ge 2 ≢ x>2
        x>2 ≢ y>2
        x>2 ≢ x<2
        (\frac12, 3) ≡ (0.5,3)
        [-\sqrt2,\sqrt2] ≡ -\sqrt{2}\le x\le\sqrt{2}
        (-\infty,\infty) ≡ \mathbb{R}
        \{x \mid x > 2\} ≡ (2,\infty)
    """,
    "tuples": r"""
        (3,1) ≡ (3, 1.0)
        (3,1) ≢ 3,1
        (3,1) ≢ \{3,1\}
        (1,2,3) ≢ (1,2)
        (3,1) ≡ (x,y)=(3,1)
        (1,234) ≡ (1, 234)
        (\frac{1}{2},\sqrt{3}) ≡ (0.5,\sqrt3)
        (1,2,3) ≢ (1,(2,3))
    """,
    "sets and lists": r"""
        \{1,2,3\} ≢ \{1,2\}
        \{1,2\} ≡ \{2,1,1\}
        1,2 ≡ \{2,1\}
        2,5 ≡ 2\text{ and }5
        2,5 ≡ x=2\text{ or }x=5
        2,5 ≢ 2
        2 ≢ 2,5
        5 ≢ 2,5
        1,1,2 ≢ 1,2
        \sqrt2,-\sqrt2 ≡ \pm\sqrt2
        \pm 3 ≡ 3,-3
        \pm3 ≢ -3
        2\pm\sqrt3 ≡ 2+\sqrt3, 2-\sqrt3
        x=\pm2 ≡ \pm 2
        1,000, 2,000 ≡ 2000, 1000
        \emptyset ≡ \varnothing
        1, 3, 6, \ldots ≢ 1, 3, 5, \ldots
    """,
    "matrices": r"""
        \begin{pmatrix}1\\2\end{pmatrix} ≡ \begin{bmatrix}1\\2\end{bmatrix}
        \begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix} ≡ \begin{pmatrix} \frac15 \\ -\frac{18}{5}\end{pmatrix}
        \begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}1&2\end{pmatrix}
        \begin{pmatrix}\frac12&0\\0&1\end{pmatrix} ≡ \begin{pmatrix}0.5&0\\0&1\end{pmatrix}
        \begin{pmatrix}a&b\\c&d\end{pmatrix} ≢ \begin{vmatrix}a&b\\c&d\end{vmatrix}
    """,
    "bases": r"""
        101_2 ≡ 101_{2}
        101_2 ≡ 101
        101_2 ≢ 5
        101_2 ≢ 101_3
        101_2 ≢ 1012
        2A_{16} ≡ 2a_{16}
    """,
    "equations": r"""
        5 ≡ x = 2+3 = 5
        5 ≢ 2x=5
        5 ≢ x=4=5
        5 ≢ 4=5
        42 ≡ 6\times7=42
        \frac13 ≡ x=\frac13\approx 0.333
        x=5 ≡ 5
        x=5 ≢ y=5
        y=2x+1 ≡ 2x+1
        y=2x+1 ≡ y=1+2x
        y=2x+1 ≡ 2x-y+1=0
        y=2x+1 ≢ y=2x-1
        x^2+y^2=4 ≡ 2x^2+2y^2=8
        x^2+y^2=4 ≢ x^2+y^2=5
        x^2+1=0 ≢ x^2+2=0
        x+y>2 ≡ 2x+2y>4
        x+y>2 ≢ -x-y>-2
        0 ≢ 2x+4y-3=0
        x=3,y=4 ≡ y=4, x=3
        x=3,y=4 ≢ x=4,y=3
    """,
    "expressions": r"""
        x^2+2x+1 ≡ (x+1)^2
        x^2+2x+1 ≢ (x-1)^2
        2R+r ≢ 2r+R
        |x| ≢ x
        \sqrt{x^2} ≡ |x|
        x ≢ \sqrt{x^2}
        20 ≢ \max(x,20)
        \sin^2 x+\cos^2 x ≡ 1
        2\sin x\cos x ≡ \sin 2x
        \sin^{-1} x ≢ \frac{1}{\sin x}
        \ln 8 ≡ 3\ln2
        \ln 8 ≢ 3
        \log_2 8 ≡ 3
        n(n+1)/2 ≡ \frac{n^2+n}{2}
        n! ≡ n(n-1)!
        \binom{n}{2} ≡ \frac{n(n-1)}{2}
        x^{10} ≡ x^10
        a^2b ≢ ab^2
        \frac{x}{y} ≡ x/y
        \frac{1}{x} ≡ x^{-1}
        a_{n+1} ≢ a_n+1
        x_{1}+x_2 ≡ x_2+x_1
        f(x)=x^2 ≡ x^2
        f'(x) ≢ f(x)
    """,
    "constants": r"""
        3+4i ≡ 4i+3
        (1+i)^2 ≡ 2i
        3+4i ≢ 3-4i
        e^{i\pi} ≡ -1
        6\pi ≢ 6
        6\pi ≢ 18.85
        \frac{\pi}{4} ≡ π/4
        4\pi ≡ 2\pi\cdot 2
        \tan\frac{\pi}{7} ≡ \frac{\sin\frac{\pi}{7}}{\cos\frac{\pi}{7}}
        2^{10} ≡ 1024
        2^{100} ≢ 2^{101}
        10^{100}\sqrt2 ≢ 10^{100}\sqrt2+1
        10! ≡ 3628800
        \binom{10}{3} ≡ 120
        \infty ≢ -\infty
    """,
    "unicode": r"""
        x^2 ≡ x²
        25 ≡ 5²
        52 ≢ 5²
        x_1 ≢ x₂
        \infty ≡ ∞
        \frac{5}{2} ≡ 2½
        x\ge 2 ≡ x ≥ 2
        12 ≡ １２
    """,
}
CASES = [
    pytest.param(*line.strip().split(f" {mark} "), mark == "≡", id=f"{kind}: {line.strip()}")
    for kind, lines in CASES_BY_KIND.items()
    for line in lines.strip().split("\n")
    for mark in "≡≢"
    if f" {mark} " in line
]

# reference, response, what becomes of it
EXTRACTION = [
    ("10", r"So $\boxed 10$", "correct"),
    ("10", r"Thus $\boxed 10$ is it", "correct"),
    ("10", r"\boxed {10}", "correct"),
    ("10", r"\boxed{\boxed{10}}", "correct"),
    ("3", r"\boxed{\fbox{3}+2}", "wrong"),
    ("10", r"\boxed{10", "no_answer"),
    ("5", r"\boxed{5}. Hmm \boxed{7", "no_answer"),
    ("7", "\\boxed{5 hm\n\nOnce more: \\boxed{7}", "correct"),
    ("5", r"\boxed{ }", "no_answer"),
    ("5", r"The answer is 5. \boxed{\text{}}", "no_answer"),
    ("5", r"It is either $\boxed{5}$ or maybe $\boxed{7}$.", "no_answer"),
    ("7", r"It is either $\boxed{5}$ or maybe $\boxed{7}$.", "no_answer"),
    ("7", r"\boxed{5}. Alternatively, \boxed{7}.", "no_answer"),
    ("7", r"\boxed{5}. \boxed{7}.", "no_answer"),
    ("7", "Options:\n\\boxed{5}\n\\boxed{7}", "no_answer"),
    ("7", r"First we get \boxed{5}. After that step the total is \boxed{7}.", "correct"),
    ("5", r"First we get \boxed{5}. After that step the total is \boxed{7}.", "wrong"),
    ("7", r"\boxed{7} so \boxed{7}", "correct"),
    ("2,5", r"The roots are \boxed{2} and \boxed{5}.", "correct"),
    ("2,6", r"The roots are \boxed{2} and \boxed{5}.", "wrong"),
    ("5", r"<think>\boxed{7}</think> \boxed{5}", "correct"),
    ("7", r"<think>\boxed{7}</think> \boxed{5}", "wrong"),
    ("7", r"<think>\boxed{7}</think> I am not sure.", "no_answer"),
    ("5", r"a template may open the block: \boxed{7}</think> The answer is 5.", "correct"),
    ("5", r"<think>a</think>\boxed{5}<think>wait", "no_answer"),
    ("42", "**Answer:** 42", "correct"),
    ("42", "Final answer: $42$", "correct"),
    ("1042", "... so\n#### 1,042", "correct"),
    ("42", "The answer is:\n\n$$42$$", "correct"),
    ("42", "The answer is not 42.", "wrong"),
    ("42", "The answer is 42 or 43.", "wrong"),
    ("42", "The answer is 41. The answer is 42.", "correct"),
    ("41", "The answer is 41. The answer is 42.", "wrong"),
    ("41", "The answer is 41. " + "But let me think about that again. " * 20, "no_answer"),
    ("3.5", "The answer is 3.5.", "correct"),
    ("5", "The answer is 5 - 2i.", "wrong"),
    (r"\frac12", r"The final answer is $\frac{1}{2}$ because of symmetry.", "correct"),
    ("2,5", "The answer is $x=2$ or $x=5$.", "correct"),
    ("C", "The answer is (C).", "correct"),
    (r"5\text{ m}", "The answer is $5$ cm.", "wrong"),
    ("42", "We computed 42.", "no_answer"),
    ("42", "", "no_answer"),
]

BEYOND_COMPUTING = [
    r"9^{9^{9}}",
    r"2^{2^{2^{2^{2^{2}}}}}",
    r"(10^5)!",
    r"x^{9999999}",
    r"\sqrt{2^{999999}}",
    r"\binom{10^9}{10^8}\sqrt3",
    r"\int_0^1 e^{e^{e^x}} dx",
    r"1+" * 3000 + "1",
    r"\frac{1}{" * 300 + "2" + "}" * 300,
    r"\sqrt{" * 100 + "2" + "}" * 100,
    "9" * 15000,
]


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier() as verifier:
        yield verifier


def boxed(answer: str) -> str:
    return f"Step by step we find that the result is $\\boxed{{{answer}}}$."


def hard(number: int) -> tuple[str, str]:
    """(response, reference) that takes algebra, and the two are equal."""
    return boxed(rf"\frac{{{number}}}{{\sqrt{{{number}}}}}"), rf"\sqrt{{{number}}}"


LONG = boxed(r"\binom{60000}{29999}\sqrt2"), r"\binom{60000}{30000}\sqrt2"  # about a second of algebra
HOPELESS = boxed(r"\binom{10^9}{10^8}\sqrt3"), r"\sqrt{3}"  # takes the algebra system longer than any deadline here


# ---------------------------------------------------------------- what is equal to what


@pytest.mark.parametrize(("gold", "answer", "equal"), CASES)
def test_kinds(verifier, gold, answer, equal):
    verdict = verifier.verify_sync(boxed(answer), gold)
    assert verdict.correct is equal, verdict


@pytest.mark.parametrize(("gold", "response", "status"), EXTRACTION)
def test_which_text_is_the_answer(verifier, gold, response, status):
    assert verifier.verify_sync(response, gold).status == status


def test_shared_cases(verifier):
    right, slowest = 0, 0.0
    for case in SHARED_CASES:
        start = time.perf_counter()
        correct = verifier.verify_sync(case["prediction"], case["gold"]).correct
        slowest = max(slowest, time.perf_counter() - start)
        assert not (correct and not case["expected"]), case["id"]
        right += correct is case["expected"]
    assert len(SHARED_CASES) == 65
    assert right >= 64
    assert slowest < 5.0


def test_a_verdict_says_what_was_answered(verifier):
    assert verifier.verify_sync(r"\boxed{ 3/4 }", r"\frac34") == Verdict("correct", "3/4")
    nothing = verifier.verify_sync("Hm.", "5")
    assert (nothing.status, nothing.answer, nothing.correct) == ("no_answer", None, False)
    assert nothing.reason


@pytest.mark.parametrize("answer", BEYOND_COMPUTING)
def test_what_cannot_be_decided_is_unverifiable_and_soon(verifier, answer):
    start = time.perf_counter()
    verdict = verifier.verify_sync(boxed(answer), r"x+\sqrt{5}")
    assert (verdict.status, bool(verdict.reason)) == ("unverifiable", True)
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize(
    "answer", ["__import__('os').system('true')", "open('/etc/passwd')", "5 if True else 7", "[5][0]"]
)
def test_code_is_no_answer_to_anything(verifier, answer):
    assert not verifier.verify_sync(boxed(answer), "5").correct


# ---------------------------------------------------------------- exactness, as properties


def decimal_places(value: Fraction) -> int | None:
    """Digits after the point of a terminating decimal."""
    return next((places for places in range(40) if (value * 10**places).denominator == 1), None)


@st.composite
def spelled(draw: st.DrawFn, value: Fraction) -> str:
    """A way to write the value."""
    a, b, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    k = draw(st.integers(1, 30))
    ways = [
        rf"{sign}\frac{{{a}}}{{{b}}}",
        rf"\frac{{{sign}{a * k}}}{{{b * k}}}",
        rf"\dfrac{{{a * k}}}{{{sign}{b * k}}}",
        f"{sign}{a}/{b}".replace("-", draw(st.sampled_from(["-", "\u2212"]))),
        rf"{sign}\frac{{{a}}}{{2}} \div \frac{{{b}}}{{2}}",
    ]
    if a > b > 1:
        ways += [rf"{sign}{a // b}\frac{{{a % b}}}{{{b}}}", f"{sign}{a // b} {a % b}/{b}"]
    if b == 1:
        ways += [f"{sign}{a}", f"{sign}{a:,}", f"{sign}{a:,}".replace(",", "{,}"), f"{sign}{a}.00", f"x = {sign}{a}"]
    if (places := decimal_places(value)) is not None:
        digits = str(a * 10**places // b).rjust(places + 1, "0")
        decimal = f"{digits[:-places]}.{digits[-places:]}" if places else digits
        ways += [f"{sign}{decimal}", rf"{sign}{decimal}\times 10^{{0}}", rf"{sign}{digits}\cdot 10^{{-{places}}}"]
    return draw(st.sampled_from(ways))


RATIONALS = st.one_of(
    st.fractions(max_denominator=10**6),
    st.builds(Fraction, st.integers(-(10**12), 10**12), st.sampled_from([1, 2, 4, 5, 10, 1000, 10**9])),
)
PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(data=st.data(), value=RATIONALS)
def test_a_rational_printed_two_ways_is_equal(verifier, data, value):
    gold, answer = data.draw(spelled(value)), data.draw(spelled(value))
    assert verifier.verify_sync(boxed(answer), gold).status == "correct"


@PROPERTY
@given(data=st.data(), value=RATIONALS, other=RATIONALS, digits=st.integers(0, 30))
def test_unequal_rationals_are_not(verifier, data, value, other, digits):
    other = data.draw(
        st.sampled_from([other, -value, value + Fraction(1, 10**digits), 10 * value, 1 / value if value else 1])
    )
    assume(other != value)
    gold, answer = data.draw(spelled(value)), data.draw(spelled(other))
    assert verifier.verify_sync(boxed(answer), gold).status == "wrong"


@settings(PROPERTY, max_examples=40)
@given(st.lists(st.fractions(max_denominator=50), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_order_matters_in_tuples_and_only_there(verifier, values, random):
    shuffled = random.sample(values, len(values))
    first, second = (", ".join(map(str, items)) for items in (values, shuffled))
    assert verifier.verify_sync(boxed(second), first).correct
    assert verifier.verify_sync(boxed(rf"\{{{second}\}}"), rf"\{{{first}\}}").correct
    assert verifier.verify_sync(boxed(f"({second})"), f"({first})").correct == (shuffled == values)


@settings(PROPERTY, max_examples=25)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-9, 9))
def test_factored_and_expanded_polynomials(verifier, a, b, c):
    factored, expanded = f"(x-({a}))(x-({b}))", f"x^2+({-a - b})x+({a * b})"
    assert verifier.verify_sync(boxed(factored), expanded).correct
    assert verifier.verify_sync(boxed(factored), f"{expanded}+({c})x").correct == (c == 0)


FRAGMENTS = [
    *r"\frac { } ( ) [ ] 1 2 x , + - ^ _ \sqrt \boxed{ $ \pm \text{ and = < \le \% ^\circ & \\ \{ \}".split(),
    *r"\begin{pmatrix} \end{pmatrix} ! . | \in cm \ / \overline ² ½ √ \pi \left \right i e \approx \langle '".split(),
    *r"\cup \infty \ldots \binom : ; million <think> </think>".split(),
    *[" ", "\n\n", "answer is "],
]


@settings(PROPERTY, max_examples=150)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_no_text_breaks_it_or_passes_for_an_answer(verifier, text):
    for response in (boxed(text), f"The answer is {text}"):
        assert not verifier.verify_sync(response, r"\frac{987654321}{1234567}").correct
    assert verifier.verify_sync(boxed("5"), text).status in {"correct", "wrong", "unverifiable"}
    assert verifier.check_gold(text) != ""  # a reason says something


# ---------------------------------------------------------------- options and reference answers


@pytest.mark.parametrize(
    ("options", "gold", "response", "default", "otherwise"),
    [
        ({"thinking_must_end": True}, "5", r"\boxed{5}", "correct", "no_answer"),
        ({"think_tags": ("[T]", "[/T]")}, "5", r"[T]\boxed{7}[/T] So, \boxed{5}.", "no_answer", "correct"),
        ({"unboxed": False}, "5", "The answer is 5.", "correct", "no_answer"),
        ({"several_boxes": "last"}, "7", r"\boxed{5} or \boxed{7}", "no_answer", "correct"),
        ({"units": "ignore"}, r"12\text{ cm}", r"\boxed{12\text{ m}}", "wrong", "correct"),
        ({"units": "require"}, r"12\text{ cm}", r"\boxed{12}", "correct", "wrong"),
        ({"percent": "exact"}, r"28\%", r"\boxed{28}", "correct", "wrong"),
        ({"percent": "ignore"}, "28", r"\boxed{28\%}", "wrong", "correct"),
        ({"base": "require"}, "52_8", r"\boxed{52}", "correct", "wrong"),
        ({"list_order": "keep"}, "2, 5", r"\boxed{5, 2}", "correct", "wrong"),
        ({"relative_tolerance": 0.01}, r"\frac13", r"\boxed{0.333}", "wrong", "correct"),
        ({"relative_tolerance": 0.01}, r"\frac13", r"\boxed{0.32}", "wrong", "wrong"),
        ({"max_answer_chars": 5}, "1", r"\boxed{1+1-1+1-1}", "correct", "unverifiable"),
    ],
)
def test_options(verifier, options, gold, response, default, otherwise):
    assert verifier.verify_sync(response, gold).status == default
    with MathVerifier(policy=AnswerPolicy(**options)) as other:
        assert other.verify_sync(response, gold).status == otherwise


def test_options_are_checked():
    with pytest.raises(ValueError, match="units must be one of"):
        AnswerPolicy(units="sometimes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="relative_tolerance"):
        AnswerPolicy(relative_tolerance=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        MathVerifier(workers=0)


@pytest.mark.parametrize(
    "gold", ["5", r"\frac{1}{2}", r"\boxed{7}", r"\text{east}", r"\{1,2\}", "(1,2]", "x>2", "52_8", "x=5", "12:00",
             r"2\sqrt{3}\text{ cm}", "x^2+y^2=1", r"\begin{pmatrix}1\\x\end{pmatrix}", r"\emptyset", r"x=\pm\sqrt{2}"]
)  # fmt: skip
def test_good_reference_answers(verifier, gold):
    assert verifier.check_gold(gold) is None


@pytest.mark.parametrize(
    "gold", ["", "  ", r"\frac{1}{", r"\frac", r"\undefinedmacro{3}{4}", "2^{2^{99}}", "9" * 2000, r"\sum_{k=1}^n k",
             "(1,,2)", "x = ", r"5\text{ if it rains, else }6"]
)  # fmt: skip
def test_bad_reference_answers_are_reported(verifier, gold):
    assert verifier.check_gold(gold)
    assert verifier.verify_sync(boxed("5"), gold).status == "unverifiable"


# ---------------------------------------------------------------- threads, loops, processes


def test_from_eight_threads():
    with MathVerifier(workers=2) as verifier, ThreadPoolExecutor(8) as threads:
        jobs = [hard(number) for number in range(2, 42)]
        verdicts = list(threads.map(lambda job: verifier.verify_sync(*job), jobs))
    assert [verdict.status for verdict in verdicts] == ["correct"] * len(jobs)


def test_from_several_event_loops(verifier):
    async def both(number: int) -> list[bool]:
        jobs = [hard(number), (boxed("5"), "6")]
        return [verdict.correct for verdict in await asyncio.gather(*(verifier.verify(*job) for job in jobs))]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda number: asyncio.run(both(number)), (2, 3, 5))) == [[True, False]] * 3


async def longest_occupation(work) -> float:
    """Processor seconds of the loop's own thread in the longest gap of a heartbeat while `work` is done.

    Not seconds by the clock: other programs of the machine stop the thread too, and no verifier can help that. How
    long the loop really paused is measured by `tests.benchmarks.verifier`.
    """
    working, longest, last = asyncio.ensure_future(work), 0.0, time.thread_time()
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    await working
    return longest


def test_the_event_loop_is_never_occupied():
    async def checks() -> None:
        with MathVerifier(timeout=0.5) as verifier:
            jobs = [HOPELESS, hard(7), ("\\boxed{5} " * 20_000, "5"), ("{" * 200_000, "5")]
            jobs += [(boxed("1/2"), "0.5")] * 300
            verdicts = await asyncio.gather(*(verifier.verify(*job) for job in jobs))
        statuses = [verdict.status for verdict in verdicts]
        assert statuses == ["unverifiable", "correct", "correct", "no_answer"] + ["correct"] * 300

    gc.collect()
    gc.freeze()  # collecting what all the other tests have left behind is not the verifier's work
    try:
        assert min(asyncio.run(longest_occupation(checks())) for _ in range(3)) < 0.05
    finally:
        gc.unfreeze()


def test_cheap_checks_do_not_wait_for_slow_ones():
    async def overtake() -> float:
        with MathVerifier(timeout=4.0) as verifier:
            slow = asyncio.create_task(verifier.verify(*HOPELESS))
            await asyncio.sleep(0.1)
            start = time.perf_counter()
            assert (await verifier.verify(boxed("0.5"), r"\frac12")).correct
            elapsed = time.perf_counter() - start
            assert not slow.done()
        with pytest.raises(VerifierError):
            await slow
        return elapsed

    assert asyncio.run(overtake()) < 1.0


def workers_of(trainer: psutil.Process, verifier: MathVerifier) -> list[psutil.Process]:
    """The workers of a verifier, each before its child if it has one; told from others by their timeout argument."""
    found = []
    for child in trainer.children(recursive=True):
        with suppress(psutil.Error):  # gone meanwhile
            found += [child] if str(verifier.timeout) in child.cmdline() else []
    return found


def wait_for(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("victim", ["worker", "its child", "both"])
def test_a_check_survives_the_killing_of_its_worker(victim):
    with MathVerifier(timeout=20.25) as verifier, ThreadPoolExecutor(1) as threads:
        assert verifier.verify_sync(*hard(2)).correct
        check = threads.submit(verifier.verify_sync, *LONG)
        worker, child = wait_for(lambda: pair if len(pair := workers_of(psutil.Process(), verifier)) == 2 else None)
        for process in {"worker": [worker], "its child": [child], "both": [worker, child]}[victim]:
            process.kill()
        assert check.result().status == "wrong"
        assert verifier.verify_sync(*hard(3)).correct


def test_a_check_that_kills_every_worker_is_unverifiable():
    with MathVerifier(timeout=20.25) as verifier, ThreadPoolExecutor(1) as threads:
        check = threads.submit(verifier.verify_sync, *HOPELESS)
        while not check.done():
            for worker in workers_of(psutil.Process(), verifier)[1:]:
                worker.kill()
            time.sleep(0.01)
        assert (check.result().status, check.result().reason) == ("unverifiable", "every worker given this check died")
        assert verifier.verify_sync(*hard(3)).correct


def test_memory_is_limited():
    with MathVerifier(memory_mb=40) as starved:  # less than the algebra system itself takes
        verdict = starved.verify_sync(*hard(2))
    assert verdict.status == "unverifiable"
    with MathVerifier(memory_mb=400) as fed:
        assert fed.verify_sync(*hard(2)).correct


def test_nothing_is_left_behind():
    me = psutil.Process()

    def live() -> tuple[int, int, int]:
        return len(me.children(recursive=True)), me.num_fds(), threading.active_count()

    gc.collect()
    before = live()
    for _ in range(3):
        with MathVerifier(workers=2, timeout=0.3) as verifier, ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda job: verifier.verify_sync(*job), [HOPELESS, hard(2), hard(3), (boxed("1"), "1")]))
    dropped = MathVerifier()
    assert dropped.verify_sync(*hard(5)).correct
    del dropped
    gc.collect()
    wait_for(lambda: live() <= before, 5.0)


def test_closed_is_closed():
    verifier = MathVerifier()
    verifier.close()
    verifier.close()
    with pytest.raises(VerifierError, match="closed"):
        verifier.verify_sync(boxed("1"), "1")


def test_no_worker_is_an_error_and_no_reward(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with MathVerifier() as verifier, pytest.raises(VerifierError, match="no verifier worker could be started"):
        verifier.verify_sync(*hard(2))


def test_workers_die_with_a_killed_trainer():
    program = textwrap.dedent(
        r"""
        import threading, psutil, time
        from fr_lightning.envs.verifier import MathVerifier
        verifier = MathVerifier(timeout=60.0)
        check = (r"\boxed{\binom{10^9}{10^8}\sqrt3}", r"\sqrt{3}")
        threading.Thread(target=verifier.verify_sync, args=check, daemon=True).start()
        while len(children := psutil.Process().children(recursive=True)) < 2:
            time.sleep(0.01)
        print(*(child.pid for child in children), flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 2
        trainer.kill()
    psutil.wait_procs(workers, timeout=5.0)
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]


def _verify_there(verifier: MathVerifier, results) -> None:
    results.put(verifier.verify_sync(*hard(3)).status)
    verifier.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_other_processes_get_workers_of_their_own(method):
    context = multiprocessing.get_context(method)
    results = context.Queue()
    with MathVerifier() as verifier:
        assert verifier.verify_sync(*hard(2)).correct
        process = context.Process(target=_verify_there, args=(verifier, results))
        process.start()
        assert results.get(timeout=200) == "correct"
        process.join(20)
        assert verifier.verify_sync(*hard(5)).correct  # the child's `close` closed the child's workers only


def test_pickled_verifiers_keep_their_settings():
    policy = AnswerPolicy(units="ignore")
    with pickle.loads(pickle.dumps(MathVerifier(workers=2, timeout=1.5, policy=policy))) as copy:
        assert (copy.workers, copy.timeout, copy.policy) == (2, 1.5, policy)


def test_ctrl_c_is_the_trainers_to_handle(verifier):
    assert verifier.verify_sync(*hard(2)).correct
    assert all(os.getpgid(worker.pid) != os.getpgid(0) for worker in workers_of(psutil.Process(), verifier))
