"""ALFWorld games for any number of episodes at once, on a fixed number of worker processes.

Invariant: a game in play is a value, the game and the commands that changed it. Workers only keep it warm. When one is
killed, hangs, is recycled or has let go of a game, the next call plays the commands again on another and checks that
the game says what it said before; so no answer is lost, doubled or made up. What cannot be repeated so raises
`EngineFailed`: the episode is then the trainer's to retry, and never a reward of zero.

The number of processes follows the cores, not the episodes. All environments of this process with the same settings
share them (`shared`); they start with the first game and end with the last environment.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fr_lightning.envs.alfworld_engine import GameError
from fr_lightning.envs.worker_process import WorkerDied, WorkerHung, WorkerProcess

__all__ = ["EngineFailed", "GameError", "Session", "WorkerSettings", "Workers", "shared"]

ATTEMPTS = 3
"""Workers that may die over one call; a game that kills more than that has the engine fail."""


class EngineFailed(RuntimeError):
    """The engine failed, not the game and not the policy. Never a reward."""


@dataclass(frozen=True)
class WorkerSettings:
    """How many processes play, and within which limits.

    Attributes:
        processes: how many; None: one per core this process may use.
        timeout: seconds one call may take in a worker before that is killed (waiting for a free one not counted).
        recycle_after: games started in a worker before it is replaced, so that what the engine leaks stays bounded.
        live_games: most games a worker keeps at a time, the others are played again when needed; None: its choice.
        speedups: leave out the engine's repeated work (see `alfworld_speedups`).
        cache: folder for translated problems; None: none are kept.
    """

    processes: int | None = None
    timeout: float = 60.0
    recycle_after: int = 2000
    live_games: int | None = None
    speedups: bool = True
    cache: str | None = None

    def __post_init__(self) -> None:
        counts = [count for count in (self.processes, self.recycle_after, self.live_games) if count is not None]
        if min(counts) < 1 or not self.timeout > 0:
            raise ValueError(f"processes, timeout, recycle_after and live_games must be positive, got {self}")

    @property
    def count(self) -> int:
        return self.processes or (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )


@dataclass(frozen=True)
class State:
    """What the engine says after a command: its text, the commands it admits now, and whether the game is won."""

    observation: str
    commands: tuple[str, ...]
    won: bool


@dataclass(eq=False)
class _Slot:
    """The place of one process. Whoever holds `lock` talks to it, and replaces it when it has ended."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    process: WorkerProcess | None = None
    started: int = 0
    sessions: int = 0
    closed: deque[str] = field(default_factory=deque)


class Workers:
    """The processes. Safe from any thread; every call blocks its own thread only."""

    def __init__(self, settings: WorkerSettings = WorkerSettings()):
        self.settings = settings
        self.replayed = 0
        """Games that had to be played again on another process, or the same one."""
        self._slots = [_Slot() for _ in range(settings.count)]
        self._keys = itertools.count()
        self._choosing = threading.Lock()
        self._scratch = tempfile.TemporaryDirectory(prefix="fr-lightning-alfworld-")
        self._ended = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self._slots, self._ended, self._scratch, os.getpid())

    def session(self, name: str, game: Mapping[str, Any]) -> Session:
        """A game to play, on the process that has the fewest. `name` is for messages; the engine loads `game`."""
        with self._choosing:
            slot = min(self._slots, key=lambda slot: slot.sessions)
            slot.sessions += 1
            return Session(self, slot, f"{next(self._keys)}", name, game)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [slot.process.pid for slot in self._slots if slot.process is not None and slot.process.usable]

    def close(self) -> None:
        """End the processes. Calls in flight raise `EngineFailed`; closing twice is harmless."""
        self._finalizer()

    def ask(self, slot: _Slot, request: dict[str, Any]) -> dict[str, Any]:
        """The reply of a slot's process.

        Raises:
            WorkerDied: it ended, or was killed for not answering. The next call starts another.
            EngineFailed: there is none to be had.
        """
        with slot.lock:
            process = self._process(slot, request["do"] == "open")
            closed = []
            with suppress(IndexError):
                while True:
                    closed.append(slot.closed.popleft())
            try:
                return process.ask({**request, "closed": closed}, self.settings.timeout)
            except WorkerDied:
                process.release()
                slot.process = None
                raise

    def _process(self, slot: _Slot, opens: bool) -> WorkerProcess:
        if slot.process is not None and opens and slot.started >= self.settings.recycle_after:
            slot.process.end()
            slot.process.release()
            slot.process = None
        if slot.process is None:
            settings = self.settings
            arguments = [
                "on" if settings.speedups else "",
                settings.cache or "",
                str(settings.live_games or ""),
            ]
            self._check_open()
            scratch = Path(self._scratch.name) / str(self._slots.index(slot))
            environment = {
                "ALFWORLD_DATA": "/",  # alfworld makes the folder of this name when it is imported
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",  # the same order of sets in every worker
                "TMPDIR": str(scratch),
            }
            shutil.rmtree(scratch, ignore_errors=True)  # what one that was killed has left
            try:
                scratch.mkdir()
                slot.process = WorkerProcess("alfworld_worker", arguments, environment)
            except (WorkerDied, OSError) as error:
                raise EngineFailed(f"the ALFWorld engine did not start: {error}") from error
            slot.started = 0
            if self._ended.is_set():  # closed while it started
                slot.process.end()
        slot.started += opens
        return slot.process

    def _check_open(self) -> None:
        if self._ended.is_set():
            raise EngineFailed("the ALFWorld workers are closed")


class Session:
    """One game in play, by one thread at a time."""

    def __init__(self, workers: Workers, slot: _Slot, key: str, name: str, game: Mapping[str, Any]):
        self._workers = workers
        self._slot = slot
        self._key = key
        self._name = name
        self._game = dict(game)
        self._commands: list[str] = []
        self._state: State | None = None
        self._closed = False
        self.walkthrough: list[str] | None = None
        """The way to win that came with the game, if one did."""

    def start(self) -> State:
        """The game's first words.

        Raises:
            GameError: it is no game the engine can play.
            EngineFailed: the engine could not answer.
        """
        self._commands, self._state = [], None
        return _state(self._survive(self._open))

    def step(self, command: str) -> State:
        """Give a command; one that the game does not admit changes nothing, as its answer says.

        Raises:
            EngineFailed: the engine could not answer, or a replayed game differs.
        """
        before = self._state
        assert before is not None, "start the game first"
        state = _state(self._survive(lambda: self._ask_live({"do": "step", "command": command})))
        if command in before.commands:
            self._commands.append(command)
        self._state = state
        return state

    def plan(self) -> list[str] | None:
        """The planner's commands from here to the goal, or None if there is no way. Slow: up to `timeout`."""
        assert self._state is not None, "start the game first"
        return self._survive(lambda: self._ask_live({"do": "plan"}))["plan"]

    def close(self) -> None:
        """Give its place back. Harmless twice, and without it the worker lets go of the game in time."""
        if not self._closed:
            self._closed = True
            with self._workers._choosing:
                self._slot.sessions -= 1
            self._slot.closed.append(self._key)

    def _open(self, then: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start the game, or play it again to where it was, and at once what comes `then`, whose reply it returns."""
        reply = self._ask({"do": "open", "game": self._game, "commands": self._commands, "then": then})
        self.walkthrough = reply["walkthrough"]
        state = _state(reply)
        if self._state is None:
            self._state = state
        elif (state.commands, state.won) != (self._state.commands, self._state.won):
            raise EngineFailed(f"game {self._name}: played again, it differs after {len(self._commands)} commands")
        else:
            self._workers.replayed += 1
        return reply if then is None else self._checked(reply["then"])

    def _ask_live(self, request: dict[str, Any]) -> dict[str, Any]:
        reply = self._ask(request)
        return self._open(request) if "gone" in reply else reply

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._checked(self._workers.ask(self._slot, {**request, "key": self._key}))

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "game_error" in reply:
            raise GameError(f"game {self._name}: {reply['game_error']}")
        if "engine_error" in reply:
            raise EngineFailed(f"game {self._name}: {reply['engine_error']}")
        return reply

    def _survive(self, call: Callable[[], Any]) -> Any:
        """The call's result, on another process if one dies under it. One that hangs is not tried again here."""
        for left in reversed(range(ATTEMPTS)):
            try:
                return call()
            except WorkerDied as error:
                self._workers._check_open()
                if not left or isinstance(error, WorkerHung):
                    raise EngineFailed(f"game {self._name}: {error}") from error
        raise AssertionError


def _state(reply: dict[str, Any]) -> State:
    return State(reply["observation"], tuple(reply["commands"]), reply["won"])


def _end(slots: list[_Slot], ended: threading.Event, scratch: tempfile.TemporaryDirectory[str], owner: int) -> None:
    ended.set()
    if os.getpid() != owner:  # a fork has none of its own
        return
    for slot in slots:
        process = slot.process
        if process is not None:
            process.end()
    scratch.cleanup()


_leases: dict[tuple[int, WorkerSettings], tuple[Workers, int]] = {}
_leasing = threading.Lock()


def shared(settings: WorkerSettings) -> tuple[Workers, Callable[[], None]]:
    """The workers of these settings in this process, and the function that gives them back (harmless twice).

    They end when everybody has given them back.
    """
    key = (os.getpid(), settings)
    with _leasing:
        workers, holders = _leases.get(key) or (Workers(settings), 0)
        _leases[key] = workers, holders + 1
    return workers, _once(lambda: _give_back(key))


def _give_back(key: tuple[int, WorkerSettings]) -> None:
    with _leasing:
        workers, holders = _leases[key]
        if holders > 1:
            _leases[key] = workers, holders - 1
            return
        del _leases[key]
    workers.close()


def _once(function: Callable[[], None]) -> Callable[[], None]:
    pending: Iterator[Callable[[], None]] = iter([function])
    return lambda: next(pending, lambda: None)()
