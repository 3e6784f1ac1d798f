"""The agent with the Python tool, in the real sandbox."""

import json
import subprocess
import sys
import threading
import time

import gymnasium
import psutil
import pytest
from gymnasium.utils.env_checker import check_env

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs.python_tool import LAST_CALL, PythonToolEnv
from fr_lightning.envs.sandbox import SandboxUnavailable
from fr_lightning.envs.sandbox.shared import SandboxSettings, shared_sandbox

ROW = {"id": "set/1", "set": "set", "question": "What is 6 * 7?", "answer": "42"}


def call(code):
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


@pytest.fixture
def env():
    env = PythonToolEnv(max_calls=3)
    env.reset(seed=0, options={"task": ROW})
    yield env
    env.close()


def test_passes_gymnasiums_checker():
    check_env(gymnasium.make("fr_lightning/PythonTool-v0").unwrapped, skip_render_check=True)


def test_a_call_is_answered_and_the_final_answer_graded(env):
    observation, reward, terminated, truncated, info = env.step("I compute.\n" + call("x = 6 * 7\nprint(x)"))
    assert (observation, reward, terminated, truncated) == ("42", 0.0, False, False)
    assert (info["role"], info["tool_calls"], info["success"]) == ("tool", 1, False)
    observation, *_ = env.step(call("x + 1"))  # names live on
    assert observation == "43"
    _, reward, terminated, _, info = env.step("It is \\boxed{42}.")
    assert (reward, terminated, info["success"], info["tool_calls"], info["answer"]) == (1.0, True, True, 0, "42")
    assert info["metrics"]["tool_errors"] == 0.0
    assert info["metrics"]["tool_seconds"] > 0.0


def test_a_box_beside_a_call_is_not_the_final_answer(env):
    _, reward, terminated, _, info = env.step("\\boxed{42}" + call("1"))
    assert (reward, terminated, info["success"]) == (0.0, False, False)


def test_several_calls_in_a_turn_run_in_order(env):
    observation, *_, info = env.step(call("a = 1") + call("print(a + 1)"))
    assert observation == "[1] (no output)\n[2] 2"
    assert info["tool_calls"] == 2


def test_errors_of_the_code_and_of_the_call_are_counted_and_told(env):
    observation, *_, info = env.step(call("1 / 0") + "<tool_call>{oops}</tool_call>")
    assert "ZeroDivisionError" in observation
    assert "not valid JSON" in observation
    assert info["metrics"]["tool_errors"] == 2.0


def test_the_last_call_is_announced_and_a_further_one_ends_the_episode(env):
    env.step(call("1"))
    env.step(call("2"))
    observation, _, terminated, *_ = env.step(call("3"))
    assert (observation, terminated) == (f"3\n{LAST_CALL}", False)
    _, reward, terminated, truncated, info = env.step(call("4"))
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


def test_every_episode_has_an_interpreter_of_its_own(env):
    env.step(call("secret = 1"))
    env.reset(seed=0, options={"task": ROW})
    assert "NameError" in env.step(call("secret"))[0]


@pytest.mark.parametrize(
    ("tool_format", "action", "shown"),
    [
        ("markdown", "```python\nprint(6 * 7)\n```", "```output\n42\n```"),
        ("tags", "<python>print(6 * 7)</python>", "<output>\n42\n</output>"),
    ],
)
def test_other_formats(tool_format, action, shown):
    env = PythonToolEnv(tool_format=tool_format, prompt="qwen")
    env.reset(seed=0, options={"task": ROW})
    observation, *_, info = env.step(action)
    assert (observation, info["role"], env.tools) == (shown, "user", None)
    assert "boxed" in (env.system_prompt or "")
    assert "Python" in (env.system_prompt or "")
    assert env.step("\\boxed{42}")[1] == 1.0


@pytest.mark.parametrize("tool_format", ["hermes", "markdown", "tags"])
def test_the_expert_solves_generated_problems_by_calling_the_tool(tool_format):
    env = PythonToolEnv(tool_format=tool_format)
    for seed in range(12):
        env.reset(seed=seed)
        *_, info = env.step(env.expert_action())
        assert info["tool_calls"] == 1
        observation, reward, terminated, *_ = env.step(env.expert_action())
        assert (reward, terminated) == (1.0, True), (env._row, observation)


def test_a_sandbox_that_fails_raises_and_gives_no_reward(env, monkeypatch):
    env.step(call("1"))

    async def broken(*args):
        raise OSError("no more processes")

    session = env._session
    monkeypatch.setattr(session._sandbox, "_fork", broken)
    session._interpreter = None
    with pytest.raises(SandboxUnavailable, match="no more processes"):
        env.step(call("1"))


def test_the_run_records_the_isolation_in_force(env):
    assert env.prepare()["sandbox_isolation"] == "namespaces"


def test_without_bubblewrap_the_start_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    env = PythonToolEnv(sandbox=SandboxSettings(timeout=4.5))
    with pytest.raises(SandboxUnavailable, match="bubblewrap"):
        env.prepare()


def test_sandboxes_are_shared_by_settings():
    assert shared_sandbox(SandboxSettings()) is shared_sandbox(SandboxSettings())
    assert shared_sandbox(SandboxSettings()) is not shared_sandbox(SandboxSettings(timeout=1.0))


def test_episodes_in_many_threads_share_one_warm_interpreter():
    seen, threads = [], []

    def episode(number):
        env = PythonToolEnv()
        env.reset(seed=number, options={"task": ROW})
        seen.append(env.step(call(f"print({number} * 2)"))[0] == str(number * 2))
        env.close()

    for number in range(16):
        threads.append(threading.Thread(target=episode, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 16


@pytest.mark.parametrize("ending", ["", "import os; os.kill(os.getpid(), 9)"])
def test_nothing_is_left_when_the_process_ends(ending):
    program = (
        "from fr_lightning.envs.python_tool import PythonToolEnv\n"
        "from fr_lightning.envs.sandbox.shared import SandboxSettings\n"
        "env = PythonToolEnv(sandbox=SandboxSettings(preload=()))\n"
        f"env.reset(seed=0, options={{'task': {ROW!r}}})\n"
        f"print(env.step({call('import os; print(7)')!r})[0], flush=True)\n"
        "import psutil; print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program + ending], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-9 if ending else 0, "")
    printed, children = done.stdout.splitlines()
    assert printed == "7"
    assert children
    deadline = time.monotonic() + 10.0
    while any(psutil.pid_exists(int(pid)) for pid in children.split()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(int(pid)) for pid in children.split())
