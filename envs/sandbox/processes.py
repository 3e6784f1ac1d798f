"""The trainer's ends of the sandbox's processes: the zygote, and the interpreter of one session.

Invariant: how a session ended is told by the zygote, which the model's code cannot reach, and by what the trainer did
itself; never by the session. So code can break its own session only, and cannot make that look like a failure of the
sandbox. All methods run on one event loop, none of them blocks it, and whatever is waited for has a deadline.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fr_lightning.envs.sandbox import isolation, seccomp
from fr_lightning.envs.sandbox.isolation import Isolation, SandboxUnavailable
from fr_lightning.envs.sandbox.output import Output

Status = Literal["ok", "error", "timeout", "flood", "died", "unavailable"]

START_SECONDS = 60.0
CLOSE_SECONDS = 5.0
GRACE_SECONDS = 0.25
"""Between the deadline's interrupt, which shows the model where its code was, and the kill."""
CHANNEL_SECONDS = 0.5
"""From a session's closing its control socket, which is what its death looks like first, to the kill."""
FLOOD_BYTES = 8 << 20
PIPE_BYTES = 1 << 20
"""The most a pipe can hold."""
MAX_CODE_BYTES = 128 << 10


@dataclass(frozen=True)
class Limits:
    """Of one session: memory of all its processes and files in bytes, and how many processes and threads."""

    memory: int
    disk: int
    processes: int


class Channel:
    """The trainer's end of a socket whose messages, with the descriptors that came along, go to `receive`.

    `receive(b"", [])` is the end of the channel, said once.
    """

    def __init__(self, receive: Callable[[bytes, list[int]], None]):
        self.loop = asyncio.get_running_loop()
        self.socket, self.far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.receive = receive
        self.trusted = True
        """Descriptors are taken from the sandbox's own code only."""
        self.loop.add_reader(self.socket, self._read)

    def _read(self) -> None:
        descriptors: list[int] = []
        try:
            if self.trusted:
                message, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 1)
            else:
                message = self.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.loop.remove_reader(self.socket)
        self.receive(message, descriptors)

    def close(self) -> None:
        self.loop.remove_reader(self.socket)
        self.socket.close()
        self.far_end.close()


class Zygote:
    """Starts a zygote and forks interpreters from it; `alive` from the start to its end, whatever ends it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.alive = False
        self.process: subprocess.Popen[bytes] | None = None
        self.first_message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.channel = Channel(self._receive)
        self.interpreters: set[Interpreter] = set()
        self.by_number: dict[int, Interpreter] = {}
        self.early_exits: dict[int, int] = {}  # told before the session had told its number

    async def start(self, level: Isolation, preload: Sequence[str]) -> None:
        """Raises `SandboxUnavailable`, which says what to do about it."""
        try:
            program = b"" if level == "unsafe_none" else seccomp.compile_filter()
        except OSError as error:
            raise SandboxUnavailable(
                f"the Python sandbox needs libseccomp (package `libseccomp2` or `libseccomp`): {error}"
            ) from error
        settings = {
            "namespaces": level != "unsafe_none",
            "preload": list(preload),
            "interpreter_in_tmp": isolation.interpreter_in_tmp(),
            "filter": base64.b64encode(program).decode(),
            **vars(self.limits),
        }
        self.channel.socket.send(json.dumps(settings).encode())
        trainer = os.pidfd_open(os.getpid())
        try:
            descriptors = (self.channel.far_end.fileno(), trainer)
            line, environment = isolation.command(level, *descriptors)
            self.process = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,  # a Ctrl-C is the trainer's to handle
            )
        except OSError as error:
            raise SandboxUnavailable(f"the Python sandbox did not start: {error}") from error
        finally:
            os.close(trainer)
            self.channel.far_end.close()
        await asyncio.wait([self.first_message], timeout=START_SECONDS)
        said = self.first_message.result() if self.first_message.done() else b"no answer in time"
        if said != b"ready":
            self.process.kill()
            _, complaint = await asyncio.to_thread(self.process.communicate)
            raise SandboxUnavailable(isolation.explain_failure(f"{complaint.decode(errors='replace')} {said.decode()}"))
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _receive(self, message: bytes, _: list[int]) -> None:
        if not self.first_message.done():
            self.alive = message == b"ready"
            self.first_message.set_result(message)
            return
        match message.split():
            case [b"exit", number, code]:
                interpreter = self.by_number.pop(int(number), None)
                if interpreter is None:
                    self.early_exits[int(number)] = int(code)
                else:
                    interpreter.has_ended(int(code))
            case [b"memory", number]:
                if int(number) in self.by_number:
                    self.by_number[int(number)].kill("memory")
            case _:
                self.alive = False
                for interpreter in tuple(self.interpreters):
                    interpreter.has_ended(None)

    async def fork(self) -> Interpreter:
        """A new interpreter, on its way: wait for its `started`.

        Raises:
            OSError: this process is out of descriptors, or the zygote has just ended.
        """
        interpreter = Interpreter(self)
        deadline = time.monotonic() + START_SECONDS
        try:
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            interpreter.output = reading
            try:
                os.set_blocking(writing, True)
                while True:
                    try:
                        socket.send_fds(
                            self.channel.socket, [b"spawn"], [interpreter.channel.far_end.fileno(), writing]
                        )
                        break
                    except OSError as error:  # more sessions asked for at once than the socket holds
                        busy = error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS)
                        if not busy or time.monotonic() > deadline:
                            raise
                    await asyncio.sleep(0.005)
            finally:
                os.close(writing)
        except BaseException:
            interpreter.release()
            raise
        interpreter.channel.far_end.close()
        return interpreter

    async def close(self) -> None:
        """Ends it and everything in it."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.channel.socket.send(b"stop")
            try:
                await asyncio.to_thread(self.process.wait, CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)
        self.alive = False
        self.channel.close()
        for interpreter in tuple(self.interpreters):
            interpreter.has_ended(None)
            interpreter.release()


class Interpreter:
    """One session's processes. Life: `started`, any number of `execute`, `close`."""

    def __init__(self, zygote: Zygote):
        self.loop = asyncio.get_running_loop()
        self.zygote = zygote
        self.channel = Channel(self._receive)
        self.output = -1
        self.handle = -1  # pidfd of its init
        self.number = -1
        self.namespaces: dict[str, int] = {}
        self.cells = 0
        self.cell_output: Output | None = None
        self.killed_for = ""
        self.ready = False
        self.started: asyncio.Future[str] = self.loop.create_future()
        """Why it could not start; empty when it did."""
        self.ended: asyncio.Future[int | None] = self.loop.create_future()
        """Exit code, negative for a signal, of its init; None: the zygote ended first."""
        self.reply: asyncio.Future[bytes] | None = None
        zygote.interpreters.add(self)

    # -- what arrives ----------------------------------------------------------------------------------------------

    def _receive(self, message: bytes, descriptors: list[int]) -> None:
        if not message:
            if not self.started.done():
                self.started.set_result("its processes ended while it started")
            self.loop.call_later(CHANNEL_SECONDS, self.kill, "channel")
        elif not self.started.done():
            self._starting(message, descriptors)
        elif self.reply is not None and not self.reply.done():
            self.reply.set_result(message)
        else:
            self.kill("channel")

    def _starting(self, message: bytes, descriptors: list[int]) -> None:
        """Two messages, in any order: "init" with its number and pidfd, and "ready"; or "failed"."""
        kind, _, rest = message.partition(b" ")
        if kind == b"failed":
            self.started.set_result(rest.decode(errors="replace"))
        elif kind == b"init":
            number, _, namespaces = rest.partition(b" ")
            (self.handle,), self.number, self.namespaces = descriptors, int(number), json.loads(namespaces)
            self.zygote.by_number[self.number] = self
        self.ready |= kind == b"ready"
        if self.ready and self.number >= 0:
            self.channel.trusted = False
            self.started.set_result("")
        if self.number in self.zygote.early_exits:
            self.has_ended(self.zygote.early_exits.pop(self.number))

    def has_ended(self, code: int | None) -> None:
        self.zygote.by_number.pop(self.number, None)
        if not self.ended.done():
            self.ended.set_result(code)
        if not self.started.done():
            self.started.set_result("its processes ended while it started")
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(b"")

    def _read_output(self) -> None:
        assert self.cell_output is not None
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.loop.remove_reader(self.output)
        self.cell_output.feed(data)
        if self.cell_output.bytes > FLOOD_BYTES:
            self.kill("flood")

    # -- what is done ----------------------------------------------------------------------------------------------

    async def execute(self, code: bytes, timeout: float, output: Output) -> tuple[Status, str]:
        """Run one cell; returns its status and, where the interpreter is lost, why (words for the model).

        `code` is at most `MAX_CODE_BYTES` long. What the code and the processes it left behind print goes to `output`.
        """
        self.cells += 1
        self.cell_output = output
        self.reply = self.loop.create_future()
        self.loop.add_reader(self.output, self._read_output)
        finished = False
        try:
            with contextlib.suppress(OSError):  # its end, which is reported below
                self.channel.socket.send(b"%d\n%s" % (self.cells, code))
            if self.ended.done():
                self.has_ended(self.ended.result())
            await asyncio.wait([self.reply], timeout=timeout)
            if not self.reply.done():
                self.signal(signal.SIGINT)
                await asyncio.wait([self.reply], timeout=GRACE_SECONDS)
                self.kill("timeout")
            verdict = await self._verdict(self.reply.result() if self.reply.done() else b"")
            finished = True
            return verdict
        finally:
            if not finished:
                self.kill("cancelled")
            self.reply = None
            if self.output >= 0:  # the sandbox may have been closed meanwhile
                self.loop.remove_reader(self.output)
                self._drain()

    async def _verdict(self, reply: bytes) -> tuple[Status, str]:
        if not self.killed_for:
            if reply == b"%d ok" % self.cells:
                return "ok", ""
            if reply == b"%d error" % self.cells:
                return "error", ""
            if reply:
                self.kill("channel")
        await asyncio.wait([self.ended], timeout=CLOSE_SECONDS)
        code = self.ended.result() if self.ended.done() else None
        match self.killed_for:
            case "timeout":
                return "timeout", ""
            case "flood":
                return "flood", ""
            case "memory":
                megabytes = self.zygote.limits.memory >> 20
                return "died", f"its processes together used more than {megabytes} MiB of memory"
        if code is None:
            return "unavailable", "the sandbox ended"
        if self.killed_for == "channel":
            return "died", "the interpreter gave up its connection to the tool"
        if code < 0:  # the code cannot reach its init
            return "unavailable", f"the session was killed from outside ({signal_name(-code)})"
        if code > 128:
            return "died", f"the interpreter was killed by {signal_name(code - 128)}"
        return "died", f"the interpreter exited with code {code}"

    def _drain(self) -> None:
        """What was written before the reply was sent is in the pipe still."""
        assert self.cell_output is not None
        for _ in range(PIPE_BYTES >> 16):
            try:
                data = os.read(self.output, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self.cell_output.feed(data)
        self.cell_output.feed(b"", final=True)

    def signal(self, number: signal.Signals) -> None:
        if self.handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)

    def kill(self, reason: str) -> None:
        """Kill all of its processes, unless they have ended; the first reason given is the one that counts."""
        if not self.ended.done():
            self.killed_for = self.killed_for or reason
            self.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Returns when none of its processes is left."""
        try:
            await asyncio.wait([self.started], timeout=START_SECONDS)
            self.kill("close")
            if self.handle >= 0 and self.zygote.alive:
                await asyncio.wait([self.ended], timeout=CLOSE_SECONDS)
        finally:
            self.release()

    def release(self) -> None:
        """Give its descriptors back; an interpreter that lives still ends at the end of its control socket."""
        self.kill("close")
        self.zygote.interpreters.discard(self)
        self.channel.close()
        if self.output >= 0:
            self.loop.remove_reader(self.output)
        for descriptor in (self.output, self.handle):
            if descriptor >= 0:
                os.close(descriptor)
        self.output = self.handle = -1


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
