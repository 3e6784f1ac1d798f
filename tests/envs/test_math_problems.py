"""Problems with one answer: what is asked, what is graded, and what is never a reward."""

import json

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs.base import NotReady
from fr_lightning.envs.math_data import ProblemMix, ProblemSet, ProblemSetError
from fr_lightning.envs.math_problems import AGAIN, PROMPTS, MathEnv
from fr_lightning.envs.verifier import VerifierError

ROW = {"id": "set/1", "set": "set", "question": "What is \\frac{1}{4} + {1}?", "answer": "\\frac{5}{4}"}


def played(env, *answers, row=ROW):
    env.reset(seed=0, options={"task": row})
    return [env.step(answer) for answer in answers]


def test_passes_gymnasiums_checker():
    check_env(gymnasium.make("fr_lightning/Math-v0").unwrapped, skip_render_check=True)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("So \\boxed{1.25}", "correct"),
        ("\\boxed{5/4}", "correct"),
        ("\\boxed{4/5}", "wrong"),
        ("no idea", "no_answer"),
        ("\\boxed{9^{9^{9^9}}}", "unverifiable"),
    ],
)
def test_the_verdict_is_the_reward(answer, status):
    ((observation, reward, terminated, truncated, info),) = played(MathEnv(), answer)
    assert (reward, info["success"]) == (float(status == "correct"), status == "correct")
    assert info["verdict"] == status
    assert info["metrics"] == {
        "no_answer": float(status == "no_answer"),
        "unverifiable": float(status == "unverifiable"),
    }
    assert (observation, terminated, truncated) == ("", True, False)


def test_wrong_answers_are_asked_again_as_often_as_allowed():
    env = MathEnv(attempts=3)
    steps = played(env, "\\boxed{1}", "\\boxed{2}", "\\boxed{5/4}")
    assert [(step[0], step[1], step[2]) for step in steps] == [
        (AGAIN, 0.0, False),
        (AGAIN, 0.0, False),
        ("", 1.0, True),
    ]
    steps = played(env, "\\boxed{1}", "\\boxed{2}", "\\boxed{3}")
    assert [(step[1], step[2]) for step in steps] == [(0.0, False), (0.0, False), (0.0, True)]


@pytest.mark.parametrize("prompt", [*PROMPTS, "Q: {question} A:"])
def test_the_question_is_asked_as_it_is_in_every_template(prompt):
    env = MathEnv(prompt=prompt)
    asked, info = env.reset(seed=0, options={"task": ROW})
    assert ROW["question"] in asked
    assert info["id"] == "set/1"
    assert ("boxed" in asked + (env.system_prompt or "")) == (prompt in ("chat", "qwen", "r1"))


def test_rows_come_from_the_sets_named_and_bad_references_stop_the_run(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(30)))
    env = MathEnv(ProblemMix((ProblemSet(str(path)),)))
    assert {row["set"] for row in env.tasks("train")} == {"own"}
    assert len(env.tasks("train")) + len(env.tasks("validation")) == 30
    question, info = env.reset(seed=3)
    assert question.startswith(info["id"].removeprefix("own/"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "a", "answer": "\\\\frac{1}{"}\n')
    with pytest.raises(ProblemSetError, match=r"bad\.jsonl, line 1: the answer .* cannot be graded"):
        MathEnv(ProblemMix((ProblemSet(str(bad)),))).tasks("train")


def test_a_verifier_that_fails_raises_and_gives_no_reward(monkeypatch):
    env = MathEnv(verifier_timeout=2.5)
    env.reset(seed=0, options={"task": ROW})

    def broken(*args):
        raise VerifierError("no worker can be started")

    monkeypatch.setattr(env._verifier, "verify_sync", broken)
    with pytest.raises(VerifierError):
        env.step("\\boxed{5/4}")


def test_the_expert_is_right_and_the_unskilled_mostly_wrong():
    env = MathEnv()
    rewards = {1.0: 0.0, 0.0: 0.0}
    for seed in range(30):
        for skill in rewards:
            env.reset(seed=seed)
            rewards[skill] += env.step(env.expert_action(skill))[1]
    assert rewards[1.0] == 30
    assert rewards[0.0] < 10


def test_without_the_extra_the_start_names_it(monkeypatch):
    monkeypatch.setattr("fr_lightning.envs.math_problems.find_spec", lambda name: None)
    with pytest.raises(NotReady, match=r"fr-lightning\[math\]"):
        MathEnv().prepare()


def test_what_the_run_records_names_the_verifier():
    assert MathEnv().prepare()["verifier"].startswith("math-verify 0.9")


@pytest.mark.parametrize(
    ("settings", "complaint"), [({"attempts": 0}, "attempts"), ({"prompt": "fancy"}, "prompt must")]
)
def test_wrong_settings_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        MathEnv(**settings)
