"""Turns an engine that many episodes share into one whose every batch is the same in every run.

Invariant: a round of generation begins only when every episode still playing waits for it, and its requests go to the
engine together, in the order of their numbers. What the engine computes then depends on the episodes alone, never on
how fast an environment or a thread happened to be. This is what makes `sync` mode repeatable bit for bit.
"""

from __future__ import annotations

import asyncio

from fr_lightning.engines.base import Completion, Sampling
from fr_lightning.rollout.runner import Generator


class Lockstep:
    """A gate in front of an engine for a fixed set of episodes, named by their sessions in a fixed order."""

    def __init__(self, engine: Generator, sessions: list[str]):
        self._engine = engine
        self._order = {session: place for place, session in enumerate(sessions)}
        self._playing = set(sessions)
        self._waiting: dict[str, tuple[list[int], Sampling | None, asyncio.Future[asyncio.Future[Completion]]]] = {}

    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion:
        if session is None or session not in self._playing:
            raise ValueError(f"session {session!r} is not one of this round's episodes")
        turn: asyncio.Future[asyncio.Future[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting[session] = (token_ids, sampling, turn)
        self._begin_round_if_all_wait()
        try:
            request = await turn
        finally:
            self._waiting.pop(session, None)
        try:
            return await request
        except asyncio.CancelledError:
            request.cancel()
            raise

    async def forget(self, session: str) -> None:
        """The episode has ended (or failed): the others no longer wait for it."""
        if session in self._playing:
            self._playing.discard(session)
            self._begin_round_if_all_wait()
            await self._engine.forget(session)

    def _begin_round_if_all_wait(self) -> None:
        if not self._playing or self._waiting.keys() != self._playing:
            return
        for session in sorted(self._waiting, key=self._order.__getitem__):
            token_ids, sampling, turn = self._waiting[session]
            request = asyncio.ensure_future(self._engine.generate(token_ids, sampling, session=session))
            turn.set_result(request)
        self._waiting = {}
