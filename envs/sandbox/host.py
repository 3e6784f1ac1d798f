"""`PythonSandbox`: Python tools for many episodes at once, each in an interpreter that only its own episode can touch.

Invariants: code changes nothing but its own session, and costs no more than its quotas; a call returns within its
deadline and a grace of a second, whatever the code does; the sandbox's own failures are `unavailable`, and nothing the
code can do is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, get_args

from fr_lightning.envs.sandbox import isolation as levels
from fr_lightning.envs.sandbox.isolation import Isolation, SandboxUnavailable
from fr_lightning.envs.sandbox.output import Output
from fr_lightning.envs.sandbox.processes import (
    FLOOD_BYTES,
    MAX_CODE_BYTES,
    START_SECONDS,
    Interpreter,
    Limits,
    Status,
    Zygote,
)

log = logging.getLogger(__name__)

LOST = "The interpreter was restarted: all variables, imports and files are lost."


@dataclass(frozen=True)
class ToolResult:
    """What one call gave.

    Attributes:
        output: what the model sees: all that was printed, the value of a last expression, the traceback, and in
            square brackets what happened to the interpreter; "(no output)" rather than nothing.
        status: `ok`; `error`: an exception; `timeout`, `flood` (too much output), `died` (crashed, exited or over its
            memory): the interpreter was restarted; `unavailable`: the sandbox failed, not the code.
        truncated: the middle of the output was left out.
        seconds: wall time of the call.
    """

    output: str
    status: Status
    truncated: bool
    seconds: float


class PythonSandbox:
    """Runs the model's Python. One per process and event loop, for any number of concurrent sessions.

        async with PythonSandbox() as sandbox:
            session = await sandbox.session()
            result = await session.run("2 + 2")  # result.output == "4\\n"

    Args:
        isolation: `auto` and `namespaces` refuse to start below namespaces; `unsafe_none` runs the code as a plain
            process of this user, for machines that forbid namespaces.
        preload: modules imported once, before the sessions are forked.
        timeout: seconds a call may take, unless it says otherwise.
        memory_mb: MiB that all processes of a session may take together, beyond the warm interpreter's own.
        output_chars: longest `ToolResult.output`.
        disk_mb: MiB of files, in /tmp and /dev/shm together; they live in memory.
        processes: processes and threads of a session beside the interpreter.

    Entering raises `SandboxUnavailable`, which says what to install or to allow.
    """

    def __init__(
        self,
        *,
        isolation: Isolation = "auto",
        preload: Sequence[str] = ("numpy", "sympy"),
        timeout: float = 5.0,
        memory_mb: int = 1024,
        output_chars: int = 8192,
        disk_mb: int = 64,
        processes: int = 32,
    ):
        if isolation not in get_args(Isolation):
            raise ValueError(f"isolation must be one of {get_args(Isolation)}, got {isolation!r}")
        if not timeout > 0 or memory_mb < 1 or disk_mb < 1 or processes < 0:
            raise ValueError("timeout, memory_mb and disk_mb must be positive and processes not negative")
        if output_chars < 256:
            raise ValueError(f"output_chars must be at least 256, got {output_chars}")
        self.isolation_in_force: str = "none: not started"
        self.timeout = timeout
        self.output_chars = output_chars
        self._level: Isolation = "namespaces" if isolation == "auto" else isolation
        self._preload = tuple(preload)
        self._limits = Limits(memory_mb << 20, disk_mb << 20, processes)
        self._zygote: Zygote | None = None
        self._sessions: set[SandboxSession] = set()
        self._starting = asyncio.Lock()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        try:
            await self._probe()
        except BaseException:
            await self.close()
            raise
        self.isolation_in_force = self._level
        log.log(
            logging.WARNING if self._level == "unsafe_none" else logging.INFO,
            levels.describe(self._level, self._preload),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every session and every process. Safe to call twice."""
        self._open = False
        self._sessions.clear()
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await zygote.close()

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("the sandbox is closed: use it inside `async with PythonSandbox() as sandbox`")

    async def session(self) -> SandboxSession:
        """A new session. Its interpreter starts while the caller goes on; a failure shows as `unavailable` in `run`."""
        session = SandboxSession(self)
        self._sessions.add(session)
        await session._prepare()
        return session

    async def _probe(self) -> None:
        """Start, and believe in the isolation only when a session has shown it."""
        interpreter = await self._fork()
        await asyncio.wait([interpreter.started], timeout=START_SECONDS)
        reason = interpreter.started.result() if interpreter.started.done() else "a session did not start in time"
        if reason:
            raise SandboxUnavailable(levels.explain_failure(reason))
        if self._level != "unsafe_none":
            output = Output(4096)
            await interpreter.execute(levels.PROBE.encode(), START_SECONDS, output)
            shared, found = levels.shared_namespaces(interpreter.namespaces), output.text()[0].strip()
            if shared or found != "holds":
                raise SandboxUnavailable(
                    f"the Python sandbox started, but its isolation does not hold. A session shares these namespaces "
                    f"with the trainer: {', '.join(shared) or 'none'}; and says of what it should lack or have: {found}"
                )
        await interpreter.close()

    async def _fork(self) -> Interpreter:
        """A new interpreter of a zygote that is alive: a dead one is replaced, and the sessions it held are lost."""
        async with self._starting:
            if self._zygote is None or not self._zygote.alive:
                if self._zygote is not None:
                    log.warning("the python sandbox ended; starting another")
                    await self._zygote.close()
                self._zygote = Zygote(self._limits)
                await self._zygote.start(self._level, self._preload)
            zygote = self._zygote
        return await zygote.fork()


class SandboxSession:
    """One episode's interpreter: names, imports and files live from call to call. Calls run one at a time."""

    def __init__(self, sandbox: PythonSandbox):
        self._sandbox = sandbox
        self._interpreter: Interpreter | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, code: str, timeout: float | None = None) -> ToolResult:
        """Run a cell; never raises for what the code or the sandbox does.

        Args:
            code: Python source, at most 128 KiB.
            timeout: seconds, the sandbox's own by default. Cancelling the call kills the interpreter.

        Raises:
            RuntimeError: the session or the sandbox is closed.
        """
        timeout = self._sandbox.timeout if timeout is None else timeout
        async with self._turn:
            start = time.monotonic()
            source = code.encode("utf-8", "replace")
            output = Output(self._sandbox.output_chars)
            if len(source) > MAX_CODE_BYTES:
                status, note = "error", f"[the code is too long: {len(source)} bytes; at most {MAX_CODE_BYTES}]"
            else:
                status, note = await self._execute(source, timeout, output)
            if not note and output.characters == 0:
                note = "(no output)"
            text, truncated = output.text(note)
            return ToolResult(text, status, truncated, time.monotonic() - start)

    async def close(self) -> None:
        """Returns when none of the session's processes is left. Safe to call twice."""
        self._closed = True
        self._sandbox._sessions.discard(self)
        await self._discard()

    async def _prepare(self) -> str:
        """Have an interpreter; returns why there is none."""
        self._sandbox._check_open()
        if self._closed:
            raise RuntimeError("the session is closed")
        if self._interpreter is None:
            try:
                self._interpreter = await self._sandbox._fork()
            except (OSError, SandboxUnavailable) as error:
                return str(error)
        return ""

    async def _execute(self, source: bytes, timeout: float, output: Output) -> tuple[Status, str]:
        reason = await self._prepare()
        if self._interpreter is not None:
            started = self._interpreter.started
            await asyncio.wait([started], timeout=START_SECONDS)
            reason = started.result() if started.done() else "it did not start in time"
        if self._interpreter is None or reason:
            await self._discard()
            log.warning("python sandbox unavailable: %s", reason)
            return "unavailable", f"[the Python tool is unavailable: {reason}]"
        try:
            status, reason = await self._interpreter.execute(source, timeout, output)
        except BaseException:
            await self._discard()
            raise
        match status:
            case "ok" | "error":
                return status, ""
            case "timeout":
                note = f"[stopped: the time limit of {timeout:g} s was reached. {LOST}]"
            case "flood":
                note = f"[stopped: more than {FLOOD_BYTES >> 20} MiB of output. {LOST}]"
            case "died":
                note = f"[{reason}. {LOST}]"
            case "unavailable":
                log.warning("python sandbox unavailable: %s", reason)
                note = f"[the Python tool is unavailable: {reason}. {LOST}]"
        await self._discard()
        return status, note

    async def _discard(self) -> None:
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            await interpreter.close()
