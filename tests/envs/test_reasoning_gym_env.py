"""reasoning-gym's own tasks, through the real package."""

import gymnasium
import pytest

pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning`")
from gymnasium.utils.env_checker import check_env

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs.base import NotReady
from fr_lightning.envs.reasoning_gym_env import ReasoningGymEnv


def test_passes_gymnasiums_checker():
    check_env(gymnasium.make("fr_lightning/ReasoningGym-v0").unwrapped, skip_render_check=True)


def test_the_tasks_own_scorer_grades_the_tagged_answer():
    env = ReasoningGymEnv("chain_sum", {"min_terms": 2, "max_terms": 2}, size=50)
    question, _ = env.reset(seed=1)
    assert env._entry["answer"] not in question.split()
    assert env.step(f"It is 1... no: <answer>{env._entry['answer']}</answer>")[1:3] == (1.0, True)
    env.reset(seed=1)
    _, reward, _, _, info = env.step("<answer>-1000000</answer>")
    assert (reward, info["success"]) == (0.0, False)


@pytest.mark.parametrize("said", ["no tags", "<answer>1</answer>"])
def test_a_consolation_prize_is_not_success(said):
    for partial_credit in (False, True):
        env = ReasoningGymEnv("countdown", size=20, partial_credit=partial_credit)
        env.reset(seed=0)
        _, reward, _, _, info = env.step(said)
        assert info["success"] is False
        assert reward == (info["metrics"]["score"] if partial_credit else 0.0)
        assert reward < 0.5


def test_held_out_questions_are_in_no_training_row():
    env = ReasoningGymEnv("chain_sum", size=300)
    train, validation = env.tasks("train"), env.tasks("validation")
    assert not {row["index"] for row in train} & {row["index"] for row in validation}
    assert len(validation) > 10
    assert {row["set"] for row in train} == {"chain_sum"}
    assert env.reset(options={"task": validation[0]})[1]["id"] == validation[0]["id"]


@pytest.mark.parametrize(
    ("task", "options"), [("no_such_task", {}), ("chain_sum", {"min_terms": -1}), ("chain_sum", {"a": 1})]
)
def test_unknown_tasks_and_options_are_refused_by_name(task, options):
    with pytest.raises(NotReady, match=task):
        ReasoningGymEnv(task, options).prepare()
