"""A child process that answers one line of JSON with another, for machinery that may hang, leak or crash.

Invariant: every wait has a deadline, and a child that misses it or breaks the protocol is killed and reaped before the
caller hears of it; a `WorkerProcess` is usable or ended, never in between. Children are started afresh (not forked, so
that they inherit no threads and no locks), import nothing of torch, and end when this process does.

In the child, `serve` is the other end: it keeps what libraries print out of the replies, and leaves with its parent.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
CHUNK = 1 << 16
ORPHAN_CHECK_SECONDS = 1.0

_BOOTSTRAP = """
import importlib, sys, types
for name, folder in (("fr_lightning", None), ("fr_lightning.envs", sys.argv[1])):  # not the packages' own imports
    module = types.ModuleType(name)
    module.__path__ = [folder] if folder else []
    sys.modules[name] = module
importlib.import_module("fr_lightning.envs." + sys.argv[2]).main(*sys.argv[3:])
"""
_KEPT_ENVIRONMENT = (
    "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "SYSTEMROOT", "TMPDIR", "HOME",
)  # fmt: skip


class WorkerDied(RuntimeError):
    """The process ended before it answered."""


class WorkerHung(WorkerDied):
    """The process did not answer by the deadline and was killed."""


class WorkerProcess:
    """One child, asked one thing at a time (the caller sees to that).

    Args:
        module: of `fr_lightning.envs`; its `main(*arguments)` calls `serve`.
        arguments: strings for `main`.
        environment: variables to set beside the few that are passed on.

    Raises:
        WorkerDied: it did not come up; the message ends with the last line it wrote.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None):
        kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, str(Path(__file__).resolve().parent), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**kept, **(environment or {})},
            cwd="/",
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        self.usable = True
        self._ending = threading.Lock()
        self._unread = b""
        try:
            self._await("did not start", START_SECONDS)
        except WorkerDied:
            self.release()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The reply to a request.

        Raises:
            WorkerHung: there was none within `timeout` seconds.
            WorkerDied: the process ended.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # a broken or closed pipe: it is dead
            self._give_up("died")
        return self._await("did not answer", timeout)

    def _await(self, failure: str, seconds: float) -> dict[str, Any]:
        try:
            line = self._read_line(seconds)
        except TimeoutError:
            self._give_up(f"{failure} within {seconds:g} s", WorkerHung)
        except (OSError, ValueError):
            line = b""
        if not line or not self.usable:
            self._give_up("died")
        return json.loads(line)

    def _read_line(self, seconds: float) -> bytes:
        """The next line; empty at the end of the pipe."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise TimeoutError
            chunk = os.read(descriptor, CHUNK)
            if not chunk:
                return b""
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _give_up(self, what: str, error: type[WorkerDied] = WorkerDied) -> Any:
        with suppress(subprocess.TimeoutExpired):  # let its own exit code stand, if it has one
            self._process.wait(0.2)
        code = self._process.returncode
        self.end()
        last = self._last_words()
        raise error(f"worker process {what}" + (f" (exit code {code})" if code is not None else "") + last)

    def _last_words(self) -> str:
        with suppress(OSError, ValueError):
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, self._errors.tell() - 4096))
            lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            return f": {lines[-1].strip()}" if lines else ""
        return ""

    def end(self) -> None:
        """Kill and reap it. Any thread may; one that waits for a reply gets `WorkerDied`."""
        self.usable = False
        with self._ending:
            self._process.kill()
            self._process.wait()

    def release(self) -> None:
        """Close the pipes of an ended process (by the one thread that reads them)."""
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(OSError):  # unsent bytes of a dead process
                    pipe.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """In the child: say that it is ready, then answer requests until the parent closes the pipe or is gone."""
    parent = os.getppid()
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing printed by a library reaches the parent as a reply
    replies.write(b'{"ready": true}\n')
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], ORPHAN_CHECK_SECONDS)
        if os.getppid() != parent:  # some other process may still hold our input open
            return
        if not readable:
            continue
        chunk = os.read(0, CHUNK)
        if not chunk:
            return
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            with suppress(BrokenPipeError):  # the end of the input follows
                replies.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
