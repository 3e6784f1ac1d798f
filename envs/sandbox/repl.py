"""Inside the sandbox: runs the model's cells one after another, as a notebook would.

Invariant: names live from cell to cell; the value of a last expression is shown; a traceback holds the model's own
frames and no others. The end of a cell is a message on the control socket, sent once by the process that received
the cell, whatever the code did to its streams or however often it forked.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import os
import resource
import socket
import sys
import traceback
import types
from typing import NoReturn, TextIO

MAX_MESSAGE_BYTES = (128 << 10) + 64
"""Longest message on the control socket: a cell's number, a line end and its source."""
REPORT_BYTES = 64 << 20
"""Address space kept back from the code, so that a MemoryError can be reported."""
MAX_FRAMES = 100
MAX_TRACEBACK_LINES = 40


class Repl:
    def __init__(self, control: socket.socket):
        self.control = control
        self.process = os.getpid()
        self.getpid = os.getpid  # the code may replace what it likes in `os`
        self.message = bytearray(MAX_MESSAGE_BYTES)  # made now: the code may leave no memory
        self.stdout: TextIO | None = None
        self.stderr: TextIO | None = None
        self.module = types.ModuleType("__main__")
        self.limit = resource.getrlimit(resource.RLIMIT_AS)
        sys.modules["__main__"] = self.module  # pickle, dataclasses and multiprocessing look names up here
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        self.reset_streams()

    def reset_streams(self) -> None:
        """Undo what a cell did to the streams: a forgotten redirection must not swallow the next cell's output."""
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            stream: TextIO | None = getattr(self, name)
            if stream is None or stream.closed:
                raw = open(descriptor, "wb", buffering=1 << 16, closefd=False)  # noqa: SIM115
                stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
                setattr(self, name, stream)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    def serve(self) -> NoReturn:
        while True:
            size = self.control.recv_into(self.message)
            if not size:
                os._exit(0)
            number, _, source = bytes(self.message[:size]).partition(b"\n")
            status = self.run(source.decode("utf-8", "replace"), f"<cell {int(number)}>")
            if self.getpid() != self.process:  # a fork that ran on to the end of the cell
                os._exit(status == b"error")
            self.control.send(number + b" " + status)

    def run(self, source: str, name: str) -> bytes:
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        status = b"ok"
        try:
            self.execute(source, name)
        except BaseException as error:
            status = self.explain(error)
        try:
            self.reset_streams()
        except BaseException:  # an interrupt, no memory left, no descriptors left: the reply still goes out
            status = b"error"
        return status

    def execute(self, source: str, name: str) -> None:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec", dont_inherit=True), self.module.__dict__)
        if last is not None:  # "single" hands the value to sys.displayhook
            exec(compile(ast.Interactive([last]), name, "single", dont_inherit=True), self.module.__dict__)

    def explain(self, error: BaseException) -> bytes:
        """Write the traceback, with the memory kept back for it; returns the cell's status."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (self.limit[1], self.limit[1]))
        try:
            if isinstance(error, SystemExit):
                if not error.code:
                    return b"ok"
                text = f"SystemExit: {error.code}\n"
            else:
                keep_own_frames(error)
                lines = "".join(traceback.format_exception(error)).splitlines(keepends=True)
                if len(lines) > MAX_TRACEBACK_LINES:
                    half = MAX_TRACEBACK_LINES // 2
                    lines[half:-half] = ["  ...\n"]
                text = "".join(lines)
            self.report(text)
        except BaseException:  # the exception's own methods are the model's code too
            self.report(f"{type(error).__name__}\n")
        finally:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_AS, self.limit)
        return b"error"

    def report(self, text: str) -> None:
        with contextlib.suppress(BaseException):
            self.reset_streams()
            sys.stderr.write(text)
            sys.stderr.flush()


def keep_own_frames(error: BaseException) -> None:
    """Cut from an exception, and from those behind it, every frame that is not a cell's."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        entries: list[types.TracebackType] = []
        entry = current.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code.co_filename.startswith("<cell "):
                entries.append(entry)
            entry = entry.tb_next
        kept: types.TracebackType | None = None
        for entry in reversed(entries[-MAX_FRAMES:]):
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        BaseException.with_traceback(current, kept)
        pending += (current.__cause__, current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
