"""One episode, from prompt to trajectory, and every way it can fail."""

import asyncio
import time

import pytest
from scripted_engine import ScriptedEngine

from fr_lightning.engines.base import Completion, EngineError, PromptTooLong, Sampling
from fr_lightning.envs.arithmetic import CalculatorEnv
from fr_lightning.envs.base import TextEnv
from fr_lightning.rollout.runner import EpisodeFailed, EpisodeLimits, Runner, derived_seed
from fr_lightning.trajectory import Task

TASK = Task(id="train/1", seed=11, group=5)


class Counting(TextEnv):
    """Says 1, 2, 3, …; every step pays 0.5; ends after `steps`."""

    def __init__(self, steps=3):
        self.steps, self.done = steps, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.done = 0
        return "0", {}

    def step(self, action):
        self.done += 1
        info = {"tool_calls": 1, "success": False, "metrics": {"steps": self.done}}
        return str(self.done), 0.5, self.done == self.steps, False, info


def play(runner, env, task=TASK):
    return asyncio.run(runner.play(task, env, rollout_id="r", seed=1))


def test_several_turns_with_rewards_tools_and_metrics(chat):
    engine = ScriptedEngine(chat, lambda prompt: "ok")
    trajectory = play(Runner(engine, chat), Counting())
    assert trajectory.reward == 1.5
    assert not trajectory.success
    assert (trajectory.terminated, trajectory.truncated) == (True, False)
    assert len(trajectory.turns) == 3
    assert trajectory.tool_calls == 3
    assert trajectory.metrics == {"steps": 3.0}
    assert (trajectory.task_id, trajectory.group, trajectory.rollout_id) == ("train/1", 5, "r")
    ids = trajectory.token_ids.tolist()
    for turn, prompt in zip(trajectory.turns, engine.prompts, strict=True):
        assert ids[: turn.start] == prompt  # what was trained on is what was prompted with
        assert trajectory.policy_mask[turn.start : turn.stop].all()
    assert trajectory.policy_mask.sum() == sum(turn.stop - turn.start for turn in trajectory.turns)
    assert engine.forgotten == ["r"]


def test_the_tool_is_really_called(chat):
    env = CalculatorEnv()

    def expert(prompt):
        return env.expert_action()

    trajectory = play(Runner(ScriptedEngine(chat, expert), chat), env)
    assert trajectory.success
    assert trajectory.tool_calls == 1
    assert f"<tool_response>\n{env.answer}\n" in chat.tokenizer.decode(trajectory.token_ids)


def test_turns_have_seeds_of_their_own_and_stop_ids(chat):
    engine = ScriptedEngine(chat, lambda prompt: "ok")
    play(Runner(engine, chat, Sampling(temperature=0.7, stop=("</a>",))), Counting())
    assert [s.seed for s in engine.samplings] == [derived_seed(1, turn) for turn in range(3)]
    for sampling in engine.samplings:
        assert (sampling.stop_token_ids, sampling.stop, sampling.temperature) == (chat.stop_token_ids, ("</a>",), 0.7)


def test_max_turns_truncates(chat):
    trajectory = play(Runner(ScriptedEngine(chat, lambda p: "ok"), chat, limits=EpisodeLimits(max_turns=2)), Counting())
    assert (len(trajectory.turns), trajectory.truncated, trajectory.terminated) == (2, True, False)
    assert trajectory.policy_mask[-1]  # nothing is appended after the last turn


def test_token_budgets_truncate(chat):
    runner = Runner(ScriptedEngine(chat, lambda p: "x" * 50), chat, limits=EpisodeLimits(max_tokens=30))
    trajectory = play(runner, Counting())
    assert trajectory.num_policy_tokens == 30
    assert trajectory.turns[-1].finish_reason == "length"
    assert trajectory.truncated

    room = len(chat.opening([{"role": "user", "content": "0"}], None))
    runner = Runner(ScriptedEngine(chat, lambda p: "x" * 50), chat, limits=EpisodeLimits(max_context=room + 7))
    trajectory = play(runner, Counting())
    assert len(trajectory) == room + 7
    assert trajectory.truncated


def test_the_context_never_ends_inside_an_observation_with_nothing_trained(chat):
    class Talkative(Counting):
        def step(self, action):
            return "y" * 500, 0.0, False, False, {}

    room = len(chat.opening([{"role": "user", "content": "0"}], None))
    runner = Runner(ScriptedEngine(chat, lambda p: "ok"), chat, limits=EpisodeLimits(max_context=room + 50))
    trajectory = play(runner, Talkative())
    assert trajectory.truncated
    assert len(trajectory.turns) == 1


class Forgetful(Counting):
    system_prompt = "count"
    fresh_context = True


def test_a_fresh_context_is_prompted_with_one_observation_only(chat):
    engine = ScriptedEngine(chat, lambda prompt: "ok")
    trajectory = play(Runner(engine, chat), Forgetful())
    system = {"role": "system", "content": "count"}
    assert engine.prompts == [chat.opening([system, {"role": "user", "content": said}], None) for said in "012"]
    starts = (*trajectory.contexts, len(trajectory))
    for turn, prompt, start, stop in zip(trajectory.turns, engine.prompts, starts, starts[1:], strict=False):
        assert trajectory.token_ids[start : turn.start].tolist() == prompt
        assert turn.stop == stop
    assert engine.forgotten == ["r"] * 3  # each context is a session of its own
    assert trajectory.num_policy_tokens == 3 * (trajectory.turns[0].stop - trajectory.turns[0].start)


def test_each_context_may_fill_the_limit(chat):
    one = play(Runner(ScriptedEngine(chat, lambda prompt: "ok"), chat), Forgetful(steps=1))
    limits = EpisodeLimits(max_context=len(one))
    whole = play(Runner(ScriptedEngine(chat, lambda prompt: "ok"), chat, limits=limits), Forgetful(steps=4))
    assert (len(whole), len(whole.contexts), whole.truncated) == (4 * len(one), 4, False)

    class Growing(Forgetful):
        def step(self, action):
            said, reward, terminated, truncated, info = super().step(action)
            return said * 100, reward, terminated, truncated, info

    cut = play(Runner(ScriptedEngine(chat, lambda prompt: "ok"), chat, limits=limits), Growing())
    assert (len(cut), cut.contexts, cut.truncated) == (len(one), (0,), True)


class Broken(Counting):
    def __init__(self, at, how):
        super().__init__()
        self.at, self.how = at, how

    def reset(self, *, seed=None, options=None):
        return self.how() if self.at == "reset" else super().reset(seed=seed, options=options)

    def step(self, action):
        return self.how() if self.at == "step" else super().step(action)


def raising():
    raise FileNotFoundError("game.json")


@pytest.mark.parametrize(
    ("at", "how", "kind", "message"),
    [
        ("reset", raising, "env_error", "env.reset: FileNotFoundError: game.json"),
        ("reset", lambda: "text alone", "env_error", "must return"),
        ("reset", lambda: (b"bytes", {}), "env_error", "must be a str"),
        ("step", raising, "env_error", "env.step"),
        ("step", lambda: ("x", 1.0, True), "env_error", "must return"),
        ("step", lambda: ("x", float("nan"), True, False, {}), "env_error", "not finite"),
        ("step", lambda: ("x", 10**400, True, False, {}), "env_error", "no number"),
        ("step", lambda: ("x", None, True, False, {}), "env_error", "no number"),
        ("step", lambda: (7, 0.0, False, False, {}), "env_error", "must be a str"),
        ("step", lambda: ("x", 0.0, True, False, {"metrics": {"a": "b"}}), "env_error", "must hold numbers"),
        ("step", lambda: time.sleep(5), "timeout", "1 s"),
        ("reset", lambda: time.sleep(5), "timeout", "1 s"),
    ],
)
def test_an_environments_faults_are_failures_not_rewards(chat, at, how, kind, message):
    runner = Runner(ScriptedEngine(chat, lambda p: "ok"), chat, limits=EpisodeLimits(env_timeout=1.0))
    with pytest.raises(EpisodeFailed, match=message) as failure:
        play(runner, Broken(at, how))
    assert failure.value.kind == kind
    assert failure.value.retry


class FaultyEngine(ScriptedEngine):
    def __init__(self, chat, how):
        super().__init__(chat, lambda p: "ok")
        self.how = how

    async def generate(self, token_ids, sampling=None, *, session=None):
        return await self.how()


def engine_raises(error):
    async def generate():
        raise error

    return generate


async def hangs():
    await asyncio.sleep(60)


async def without_logprobs():
    return Completion([5, 6], [], [0, 0], "stop")


@pytest.mark.parametrize(
    ("how", "kind", "retry"),
    [
        (engine_raises(EngineError("died")), "engine_error", True),
        (engine_raises(PromptTooLong("4096")), "prompt_too_long", False),
        (hangs, "timeout", True),
        (without_logprobs, "engine_error", True),
    ],
)
def test_an_engines_faults_are_failures_not_rewards(chat, how, kind, retry):
    engine = FaultyEngine(chat, how)
    with pytest.raises(EpisodeFailed) as failure:
        play(Runner(engine, chat, limits=EpisodeLimits(generate_timeout=0.2)), Counting())
    assert (failure.value.kind, failure.value.retry) == (kind, retry)
    assert engine.forgotten == ["r"]


def test_a_first_prompt_beyond_the_context_names_the_setting(chat):
    runner = Runner(ScriptedEngine(chat, lambda p: "ok"), chat, limits=EpisodeLimits(max_context=4))
    with pytest.raises(EpisodeFailed, match=r"data\.limits\.max_context") as failure:
        play(runner, Counting())
    assert not failure.value.retry


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert derived_seed(1, "a") == derived_seed(1, "a")
    assert len({derived_seed(*parts) for parts in ((1, "a"), (1, "b"), (2, "a"), ("1", "a"), (1,))}) == 5
    assert 0 <= derived_seed("x") < 2**63


@pytest.mark.parametrize("settings", [{"max_turns": 0}, {"max_context": 0}, {"env_timeout": 0}])
def test_bad_limits_are_refused(settings):
    with pytest.raises(ValueError):
        EpisodeLimits(**settings)
