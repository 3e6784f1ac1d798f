"""A round begins when every episode still playing waits, and in their order."""

import asyncio

import pytest

from fr_lightning.engines.base import Completion, EngineError
from fr_lightning.rollout.lockstep import Lockstep


class Recording:
    def __init__(self):
        self.rounds: list[list[str]] = []
        self._tick: list[str] = []

    async def generate(self, token_ids, sampling=None, *, session=None):
        self._tick.append(session)
        if len(self._tick) == 1:
            asyncio.get_running_loop().call_soon(self._end_of_tick)
        await asyncio.sleep(0.01)
        if session == "broken":
            raise EngineError("broken")
        return Completion([1], [0.0], [0], "stop")

    def _end_of_tick(self):
        self.rounds.append(self._tick)
        self._tick = []

    async def forget(self, session):
        return


async def episode(gate, name, turns, naps):
    for nap in naps[:turns]:
        await asyncio.sleep(nap)
        await gate.generate([1], session=name)
    await gate.forget(name)


def test_rounds_are_whole_and_ordered_whatever_the_naps():
    async def play():
        engine = Recording()
        gate = Lockstep(engine, ["a", "b", "c"])
        await asyncio.gather(
            episode(gate, "c", 3, [0.0, 0.03, 0.0]),
            episode(gate, "a", 1, [0.05]),
            episode(gate, "b", 2, [0.02, 0.0]),
        )
        return engine.rounds

    assert asyncio.run(play()) == [["a", "b", "c"], ["b", "c"], ["c"]]


def test_a_failure_reaches_its_own_episode_and_no_other():
    async def play():
        gate = Lockstep(Recording(), ["broken", "whole"])
        return await asyncio.gather(
            gate.generate([1], session="broken"), gate.generate([1], session="whole"), return_exceptions=True
        )

    broken, whole = asyncio.run(play())
    assert isinstance(broken, EngineError)
    assert isinstance(whole, Completion)


def test_strangers_are_refused():
    async def play():
        await Lockstep(Recording(), ["a"]).generate([1], session="b")

    with pytest.raises(ValueError, match="'b'"):
        asyncio.run(play())
