"""Arithmetic: exact grading, problems held out, and a calculator that executes nothing but arithmetic."""

import json

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs.arithmetic import (
    ArithmeticEnv,
    CalculatorEnv,
    calculate,
    evaluate,
    is_held_out,
    last_integer,
    whole_integer,
)


@pytest.mark.parametrize("name", ["fr_lightning/Arithmetic-v0", "fr_lightning/Calculator-v0"])
def test_passes_gymnasiums_checker(name):
    check_env(gymnasium.make(name).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("make", [ArithmeticEnv, CalculatorEnv])
def test_problems_are_functions_of_the_seed(make):
    env, other = make(), make()
    texts = [env.reset(seed=seed)[0] for seed in range(30)]
    assert texts == [other.reset(seed=seed)[0] for seed in range(30)]
    assert len(set(texts)) > 20


@pytest.mark.parametrize("make", [ArithmeticEnv, CalculatorEnv])
def test_no_training_problem_is_held_out_and_every_validation_problem_is(make):
    env = make()
    for split, held_out in (("train", False), ("validation", True)):
        for seed in range(200):
            env.reset(seed=seed, options={"split": split})
            assert is_held_out(env.problem) == held_out


@given(st.integers(-999, 999), st.sampled_from("+-*"), st.integers(-999, 999))
def test_values_are_pythons(a, operation, b):
    assert evaluate(f"{a} {operation} {b}") == eval(f"{a} {operation} {b}")


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "2 ** 99", "1 / 2", "1 // 2", "x + 1", "(lambda: 1)()", "[1][0]", "1.5 + 1",
        "True + 1", "'a' * 3", "", "1 +", "~1", "+1 if 1 else 2", "1" * 201, "(" * 150 + "1" + ")" * 49, "1_0 and 2",
    ],
)  # fmt: skip
def test_nothing_else_is_evaluated(expression):
    with pytest.raises(ValueError):
        evaluate(expression)


def test_three_terms_bind_as_usual():
    assert evaluate("2 + 3 * 4") == 14
    env = ArithmeticEnv(terms=3, operations="+*")
    assert len(env.reset(seed=0)[0].split()) == 2 + 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7), ("-7", -7), ("it is 1,234.", 1234), ("5 - 3 = 2", 2), ("12-5", 5), ("2+-3", -3), ("3.5", None),
        ("4.0", 4), ("x12", None), ("12, no 13", 13), ("", None), ("none", None), ("9" * 50, None), ("1,2345", 2345),
        ("(-8)", -8), ("= 10\n", 10), ("٣", 3),
    ],
)  # fmt: skip
def test_the_last_number_is_the_answer(text, value):
    assert last_integer(text) == value


@pytest.mark.parametrize(("text", "value"), [(" 12\n", 12), ("-3", -3), ("12.", None), ("= 12", None), ("", None)])
def test_the_whole_reply_is_the_answer(text, value):
    assert whole_integer(text) == value


def test_right_and_wrong():
    env = ArithmeticEnv()
    env.reset(seed=3)
    assert env.step(str(env.answer)) == ("", 1.0, True, False, {"success": True})
    assert env.step(str(env.answer + 1)) == ("", 0.0, True, False, {"success": False})
    strict = ArithmeticEnv(answer="whole")
    strict.reset(seed=3)
    assert strict.step(f"It is {strict.answer}")[1] == 0.0


def call(expression, name="calculator"):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


def test_a_call_is_answered_and_then_the_answer_is_graded():
    env = CalculatorEnv()
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(call("12 * 12"))
    assert (observation, reward, terminated, truncated) == ("144", 0.0, False, False)
    assert info == {"success": False, "tool_calls": 1, "role": "tool"}
    assert env.step(f"The answer is {env.answer}")[1] == 1.0


@pytest.mark.parametrize(
    "action",
    [
        "<tool_call>not json</tool_call>", "<tool_call>", "<tool_call>[]</tool_call>", "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": [1]}}</tool_call>', call("1", name="python"),
        call("import os"),
    ],
)  # fmt: skip
def test_a_malformed_call_gets_a_message_and_counts(action):
    env = CalculatorEnv()
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(action)
    assert observation.startswith("Error: ")
    assert (reward, terminated, info["tool_calls"]) == (0.0, False, 1)


def test_calls_are_limited():
    env = CalculatorEnv(max_calls=2)
    env.reset(seed=0)
    assert not env.step(call("1"))[2]
    assert not env.step(call("1"))[2]
    assert env.step(call("1"))[1:3] == (0.0, True)
    env.reset(seed=1)
    assert not env.step(call("1"))[2]


def test_the_expert_solves_everything_and_the_unskilled_little():
    for skill, low, high in ((1.0, 1.0, 1.0), (0.0, 0.0, 0.2)):
        solved = 0.0
        for seed in range(100):
            env = CalculatorEnv()
            env.reset(seed=seed)
            terminated = False
            while not terminated:
                _, reward, terminated, _, _ = env.step(env.expert_action(skill))
                solved += reward
        assert low <= solved / 100 <= high


def test_calculate_says_what_was_wrong():
    assert "only calculator" in calculate('{"name": "bash", "arguments": {}}')


@pytest.mark.parametrize(
    "settings", [{"digits": 0}, {"terms": 1}, {"operations": ""}, {"operations": "/"}, {"instruction": "What?"}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError):
        ArithmeticEnv(**settings)
