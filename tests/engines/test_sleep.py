"""Engine and learner take turns on one GPU: what a replica is asked, and when.

vLLM has no sleep mode on a CPU, so a replica that writes down what it is asked stands in for one; `tests/test_fit.py`
has the trainer's side.
"""

import asyncio

import pytest
from conformance import make, make_model, needs_vllm

from fr_lightning.engines.base import EngineError, Sampling
from fr_lightning.engines.server import VLLMServers
from fr_lightning.engines.vllm_replica import Answer, Replica
from fr_lightning.engines.vllm_replicas import ReplicatedEngine


class Diary(Replica):
    """Answers at once, under the version loaded last."""

    def __init__(self, pages: list[str]):
        super().__init__("file", 1)
        self.pages = pages
        self.version = "0"
        self.refuses_sleep = False

    async def start(self):
        self.pages.append("start")

    async def ask(self, question):
        self.pages.append("ask")
        return Answer([7], [-0.5], [(self.version, 0, 1)], "length")

    async def pause(self, mode):
        self.pages.append("pause")

    async def resume(self):
        self.pages.append("resume")

    async def init_transfer(self, init_info): ...

    async def start_transfer(self):
        self.pages.append("start transfer")

    async def transfer(self, update_info): ...

    async def finish_transfer(self, version):
        self.version = version
        self.pages.append(f"finish transfer {version}")

    async def discard(self):
        self.pages.append("discard")
        if self.refuses_sleep:
            raise RuntimeError("out of memory")

    async def wake(self, part):
        self.pages.append(f"wake {part}")

    async def check(self):
        return None


class DiaryEngine(ReplicatedEngine):
    def __init__(self, **settings):
        super().__init__(model="embedded", dtype="float32", **settings)
        self.diaries: list[Diary] = []

    def _check_installation(self):
        return

    def _make_replica(self, number):
        self.diaries.append(Diary([]))
        return self.diaries[-1]


def loaded(version: int) -> list[str]:
    return ["start transfer", f"finish transfer {version}"]


def awake(version: int) -> list[str]:
    return ["pause", *loaded(version), "resume"]


def woken(version: int) -> list[str]:
    return ["wake weights", *loaded(version), "wake kv_cache"]


def test_weights_wake_before_they_are_published_and_the_room_for_keys_and_values_after():
    async def play():
        engine = DiaryEngine(sleep_while_learning=True)
        await engine.start()
        await engine.sleep()  # before anything was published: there would be nothing to wake up with
        (diary,) = engine.diaries
        for version in (1, 2, 3):
            await engine.update_weights(make_model().named_parameters(), version)
            completion = await engine.generate([1], Sampling(max_tokens=1))
            assert completion.policy_versions == [version]
            await engine.sleep()
        assert engine.pause_seconds > 0
        await engine.close()
        return diary.pages

    turns = [["ask", "discard", *woken(version)] for version in (2, 3)]
    assert asyncio.run(play()) == ["start", *awake(1), *turns[0], *turns[1], "ask", "discard"]


def test_who_is_asked_while_asleep_wakes_up_once_with_the_weights_published_last():
    async def play():
        engine = DiaryEngine(sleep_while_learning=True)
        await engine.start()
        (diary,) = engine.diaries
        await engine.update_weights(make_model().named_parameters(), 4)
        await engine.sleep()
        completions = await asyncio.gather(*(engine.generate([1], Sampling(max_tokens=1)) for _ in range(3)))
        assert [completion.policy_versions for completion in completions] == [[4]] * 3
        await engine.close()
        return diary.pages

    assert asyncio.run(play()) == ["start", *awake(4), "discard", *woken(4), "ask", "ask", "ask"]


def test_one_that_cannot_sleep_is_replaced_with_the_published_weights():
    async def play():
        engine = DiaryEngine(sleep_while_learning=True)
        await engine.start()
        await engine.update_weights(make_model().named_parameters(), 4)
        engine.diaries[0].refuses_sleep = True
        await engine.sleep()
        completion = await engine.generate([1], Sampling(max_tokens=1))
        await engine.close()
        return completion, engine.diaries

    completion, (first, second) = asyncio.run(play())
    assert "out of memory" in first.dead.result()
    assert completion.policy_versions == [4]
    assert second.pages == ["start", *awake(4), "ask"]


def test_without_the_setting_nobody_sleeps():
    async def play():
        engine = DiaryEngine()
        await engine.start()
        await engine.update_weights(make_model().named_parameters(), 1)
        await engine.sleep()
        await engine.close()
        return engine.diaries[0].pages

    assert asyncio.run(play()) == ["start", *awake(1)]


def test_where_it_cannot_be_the_setting_is_named():
    engine = DiaryEngine(sleep_while_learning=True)
    with pytest.raises(ValueError, match="sleep_while_learning needs a GPU"):
        engine.vllm_arguments(on_cpu=True)
    assert engine.vllm_arguments(on_cpu=False)["enable_sleep_mode"]
    assert "enable_sleep_mode" not in DiaryEngine().vllm_arguments(on_cpu=False)
    with pytest.raises(ValueError, match="sleep_while_learning"):
        VLLMServers(urls=["http://127.0.0.1:1"], sleep_while_learning=True)


@needs_vllm
def test_vllm_on_a_cpu_does_not_start_with_it():
    with pytest.raises(EngineError, match="sleep_while_learning needs a GPU"):
        asyncio.run(make("vllm", sleep_while_learning=True).start())
