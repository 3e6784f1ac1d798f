"""ALFWorld as an environment: what the policy sees, how its replies are read, and what counts as success."""

import os
import re
import signal

import gymnasium
import pytest
from alfworld_games import needs_engine
from gymnasium.utils.env_checker import check_env

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs import alfworld_env
from fr_lightning.envs.alfworld_data import TASK_TYPES, GameDataError
from fr_lightning.envs.alfworld_env import ALFWorldEnv
from fr_lightning.envs.alfworld_workers import WorkerSettings
from fr_lightning.envs.base import NotReady

pytestmark = needs_engine
ONE = WorkerSettings(processes=1)


@pytest.fixture
def make():
    made = []

    def make(**settings):
        made.append(ALFWorldEnv(data="embedded", workers=ONE, **settings))
        return made[-1]

    holder = ALFWorldEnv(data="embedded", workers=ONE)  # keeps the worker from one test's environment to the next
    yield make
    for env in [*made, holder]:
        env.close()


def play(env, skill=1.0, **reset):
    observation, info = env.reset(**reset)
    steps = []
    ended = False
    while not ended:
        action = env.expert_action(skill)
        observation, reward, won, cut, info = env.step(action)
        steps.append((action, observation, reward, won, cut))
        ended = won or cut
    return steps, info


def test_passes_gymnasiums_checker():
    env = gymnasium.make("fr_lightning/ALFWorld-v0", data="embedded", workers=ONE).unwrapped
    check_env(env, skip_render_check=True)
    env.close()


def test_the_first_observation_tells_the_room_the_task_and_what_can_be_done(make):
    env = make()
    task = env.tasks("validation")[0]
    observation, info = env.reset(seed=0, options={"task": task, "split": "validation"})
    text, listed = observation.split("\n\nAdmissible commands: ")
    assert text.startswith("You are in the middle of a room.")
    assert "\n\nYour task is to: " in text
    commands = listed.split(" | ")
    assert {"look", "inventory"} < set(commands)
    assert "help" not in commands
    assert any(command.startswith("go to ") for command in commands)
    assert info["game"] == task["id"]
    assert info["game"].startswith(f"{task['set']}/")
    assert info["task_type"] in TASK_TYPES
    assert (info["won"], info["success"], info["steps"], info["invalid_actions"]) == (False, False, 0, 0)
    assert "(place)" in env.system_prompt
    bare = make(list_commands=False, system_prompt="")
    assert bare.reset(seed=0, options={"task": task})[0] == text
    assert bare.system_prompt is None


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_expert_wins_and_winning_is_the_reward(make, task_type):
    env = make(task_types=[task_type])
    steps, info = play(env, seed=1)
    assert [reward for _, _, reward, _, _ in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert [won for *_, won, _ in steps] == [False] * (len(steps) - 1) + [True]
    assert info["success"]
    assert info["won"]
    assert info["metrics"] == {
        "steps": float(len(steps)),
        "invalid_actions": 0.0,
        "success/train": 1.0,
        f"success/train/{task_type}": 1.0,
    }


def test_the_expert_goes_through_the_room_in_order_and_takes_what_it_sees(make):
    env = make(list_commands=False)
    for seed in range(12):
        steps, info = play(env, seed=seed)
        assert info["invalid_actions"] == 0
        room, task = env.reset(seed=seed)[0].split("Your task is to: ")
        searched = [command.removeprefix("go to ") for command, *_ in steps if command.startswith("go to ")]
        takes = [place for place, (command, *_) in enumerate(steps) if command.startswith("take ")]
        first = sum(command.startswith("go to ") for command, *_ in steps[: takes[0]])
        described = re.findall(r"an? (\w+ \d+)", room)
        assert searched[:first] == described[:first]
        taken = {steps[place][0].split()[1] for place in takes}
        assert len(taken) == 1
        (kind,) = taken
        assert f" {kind} " in f" {task.rstrip('.')} ".replace(",", "")
        # nothing of the kind was in sight before the first was taken
        assert not any(f" {kind} " in observation for _, observation, *_ in steps[: takes[0] - 1])


def test_an_expert_that_strays_takes_longer_and_mostly_still_arrives(make):
    env = make(list_commands=False)
    played = {skill: [play(env, skill, seed=seed) for seed in range(12)] for skill in (1.0, 0.6)}
    lengths = {skill: sum(len(steps) for steps, _ in episodes) for skill, episodes in played.items()}
    assert lengths[0.6] > 1.25 * lengths[1.0]
    assert sum(info["won"] for _, info in played[0.6]) >= 10


@pytest.mark.parametrize("history", [0, 2])
def test_a_windowed_history_tells_the_first_observation_and_the_last_steps(make, history):
    whole, windowed = make(list_commands=False), make(list_commands=False, history=history)
    assert (whole.fresh_context, windowed.fresh_context) == (False, True)
    first = whole.reset(seed=4)[0]
    assert windowed.reset(seed=4)[0] == first
    told = []
    for command in ("look", "inventory", "dance", "look"):
        told.append(f"> {command}\n{whole.step(command)[0]}")
        assert windowed.step(command)[0] == "\n\n".join([first, *told[-(history + 1) :]])


def test_the_seed_decides_the_game(make):
    env, other = make(), make()
    first = [env.reset(seed=seed)[1]["game"] for seed in range(20)]
    assert first == [other.reset(seed=seed)[1]["game"] for seed in range(20)]
    assert len(set(first)) > 12
    assert all(game.startswith("train/") for game in first)
    assert env.reset(seed=0, options={"split": "validation"})[1]["game"].startswith("valid_")


def test_invalid_commands_are_answered_by_the_game_and_counted(make):
    env = make(list_commands=False, invalid_penalty=0.1, step_penalty=0.01)
    env.reset(seed=0)
    observation, reward, won, cut, info = env.step("fly to the moon")
    assert (observation, won, cut) == ("Nothing happens.", False, False)
    assert reward == pytest.approx(-0.11)
    assert (info["steps"], info["invalid_actions"]) == (1, 1)
    _, reward, _, _, info = env.step("  Look\n")
    assert reward == pytest.approx(-0.01)
    assert (info["steps"], info["invalid_actions"]) == (2, 1)


def test_a_step_limit_is_no_success(make):
    env = make(max_steps=3)
    env.reset(seed=0)
    ends = [env.step("look")[2:] for _ in range(3)]
    assert [(won, cut) for won, cut, _ in ends] == [(False, False), (False, False), (False, True)]
    assert ends[-1][2]["success"] is False


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("<think>Let me see.</think><action>go to desk 1</action>", "go to desk 1"),
        ("<think>\nI\n</think>\n\n<action> Go to desk 1 </action>\n", "go to desk 1"),
        ("Let me see.</think><action>look</action>", "look"),  # some templates open the thought themselves
        ("<action>look</action>", ""),
        ("look", ""),
        ("<think>I</think>look", ""),
        ("<think>I</think><action>look</action><action>inventory</action>", ""),
        ("<think>I</think><action>look</action> and then", ""),
        ("<think>I<action>look</action>", ""),
        ("<think>I <think>again</think><action>look</action>", ""),
        ("", ""),
    ],
)
def test_thoughtful_replies_have_one_form(make, reply, command):
    assert make(action_format="think")._command(reply) == command


def test_the_thoughtful_expert_wins_too(make):
    assert play(make(action_format="think"), seed=2)[1]["won"]


def test_validation_mixes_both_splits_and_all_types(make):
    env = make()
    rows = env.tasks("validation")
    assert len(rows) == len({row["id"] for row in rows}) >= 120
    first = [row["id"].split("/")[:2] for row in rows[:40]]
    assert {split for split, _ in first} == {"valid_seen", "valid_unseen"}
    assert {task_type for _, task_type in first} == set(TASK_TYPES)
    only = make(evaluation_splits=["valid_unseen"]).tasks("validation")
    assert {row["id"].split("/")[0] for row in only} == {"valid_unseen"}
    assert all(row["id"].startswith("train/") for row in env.tasks("train"))


def test_a_killed_worker_costs_neither_the_episode_nor_its_reward(make):
    env = make()
    env.reset(seed=3)
    env.step(env.expert_action())
    (pid,) = env._workers.pids
    os.kill(pid, signal.SIGKILL)
    won = cut = False
    reward = 0.0
    while not (won or cut):
        _, reward, won, cut, _ = env.step(env.expert_action())
    assert (won, reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps ≥ 1"),
        ({"invalid_penalty": -1.0}, "penalties ≥ 0"),
        ({"action_format": "json"}, "plain or think"),
        ({"history": -1}, "history is null or a number"),
        ({"data": "/nowhere/at/all"}, "no such folder"),
        ({"sizes": ["huge"]}, "there are easy, medium, hard"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises((ValueError, NotReady), match=message):
        ALFWorldEnv(**{"data": "embedded", **settings})


def test_missing_data_is_an_error_of_its_own():
    assert issubclass(GameDataError, NotReady)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotReady, match=r"pip install 'fr-lightning\[alfworld\]'"):
        ALFWorldEnv()


def test_an_unchecked_textworld_is_played_as_it_comes_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(alfworld_env.alfworld_speedups, "CHECKED", {"textworld": "0.0"})
    alfworld_env._warn_once.cache_clear()
    env = ALFWorldEnv(data="embedded", workers=ONE)
    assert not env._workers.settings.speedups
    assert "without its speed-ups" in caplog.text
    assert "textworld 1." in caplog.text
    assert play(env, seed=0)[1]["won"]
    env.close()
