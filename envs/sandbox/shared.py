"""One warm `PythonSandbox` per process and settings, for environments in any thread and on any event loop.

Invariant: the sandbox lives on a thread of its own for as long as the process does, so that no episode's end, and no
event loop's, takes the warm interpreter away from the others. It ends with the process, whatever ends that: the sandbox
watches its trainer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from fr_lightning.envs.sandbox.host import PythonSandbox, SandboxSession, ToolResult
from fr_lightning.envs.sandbox.isolation import Isolation

T = TypeVar("T")


@dataclass(frozen=True)
class SandboxSettings:
    """What `PythonSandbox` takes; see there."""

    isolation: Isolation = "auto"
    preload: tuple[str, ...] = ("numpy", "sympy")
    timeout: float = 5.0
    memory_mb: int = 1024
    output_chars: int = 8192
    disk_mb: int = 64
    processes: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "preload", tuple(self.preload))  # YAML gives lists


class SharedSandbox:
    """Sessions of this process's sandbox with these settings. Get it from `shared_sandbox`."""

    def __init__(self, settings: SandboxSettings):
        self._settings = settings
        self._starting = threading.Lock()
        self._sandbox: PythonSandbox | None = None

    @property
    def isolation_in_force(self) -> str:
        return self._sandbox.isolation_in_force if self._sandbox is not None else "none: not started"

    def start(self) -> None:
        """Warm the interpreter up; nothing more if it is warm.

        Raises:
            SandboxUnavailable: says what to install or to allow.
        """
        with self._starting:
            if self._sandbox is None:
                sandbox = PythonSandbox(**vars(self._settings))
                self._submit(sandbox.__aenter__()).result()
                self._sandbox = sandbox

    def session(self) -> Future[SandboxSession]:
        """A new session, in the sandbox that is started if need be."""
        self.start()
        assert self._sandbox is not None
        return self._submit(self._sandbox.session())

    def run(self, session: SandboxSession, code: str) -> Future[ToolResult]:
        return self._submit(session.run(code))

    def end(self, session: SandboxSession) -> Future[None]:
        return self._submit(session.close())

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="python sandbox", daemon=True).start()
        return loop


def shared_sandbox(settings: SandboxSettings) -> SharedSandbox:
    """This process's sandbox with these settings; a forked process has its own, as threads are not forked."""
    return _of_process(os.getpid(), settings)


@lru_cache(maxsize=8)
def _of_process(pid: int, settings: SandboxSettings) -> SharedSandbox:
    return SharedSandbox(settings)
