"""Generated problems: the answers against running each problem's program, and against sympy by another way."""

import contextlib
import io
import re

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from fr_lightning.envs.math_generator import DIFFICULTIES, KINDS, make_problem
from fr_lightning.envs.verifier import MathVerifier


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier() as verifier:
        yield verifier


def printed(program: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(program, {})
    return output.getvalue().strip()


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_prints_the_answer(kind, difficulty, verifier):
    for seed in range(15):
        problem = make_problem(kind, difficulty, seed)
        verdict = verifier.verify_sync(
            f"\\boxed{{{sympy.latex(sympy.sympify(printed(problem.program)))}}}", problem.answer
        )
        assert verdict.correct, problem


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_functions_of_the_seed_and_differ(kind):
    for difficulty in DIFFICULTIES:
        problems = [make_problem(kind, difficulty, seed) for seed in range(60)]
        assert problems == [make_problem(kind, difficulty, seed) for seed in range(60)]
        assert len({problem.question for problem in problems}) > 30


@given(st.integers(0, 10**9), st.sampled_from(list(DIFFICULTIES)))
def test_arithmetic_is_what_sympy_makes_of_the_question(seed, difficulty):
    problem = make_problem("arithmetic", difficulty, seed)
    assert sympy.sympify(re.findall(r"Compute (.*)\.", problem.question)[0]) == int(problem.answer)


@given(st.integers(0, 10**9), st.sampled_from([1, 2, 3]))
def test_the_root_of_a_linear_equation_solves_it(seed, difficulty):
    problem = make_problem("linear", difficulty, seed)
    left, right = re.search(r": \$(.*) = (.*)\$", problem.question).groups()
    x = sympy.Symbol("x")
    answer = sympy.sympify(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"(\1)/(\2)", problem.answer))
    sides = [sympy.sympify(re.sub(r"(\d)x", r"\1*x", side)) for side in (left, right)]
    assert sides[0].subs(x, answer) == sides[1].subs(x, answer)


@pytest.mark.parametrize(("kind", "difficulty"), [("algebra", 1), ("linear", 0), ("linear", 6)])
def test_unknown_kinds_and_difficulties_are_refused_with_those_there_are(kind, difficulty):
    with pytest.raises(ValueError, match="arithmetic, fractions, linear, modular, counting, geometry"):
        make_problem(kind, difficulty, 0)
