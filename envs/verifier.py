"""Grading mathematical answers: what a response answers, and whether that is the reference answer.

Invariant: a response counts as correct only if equality was shown. No text of a model is evaluated in this process:
strings, words and rational numbers are compared here; algebra runs in worker processes that are killed at the
deadline, and no call blocks an event loop. A worker that dies is replaced and the check repeated; a verifier that
cannot work at all raises `VerifierError` instead of scoring zero.

Where graders disagree, `AnswerPolicy` has an option. The default is the strict choice, unless the lenient one cannot
make a wrong answer right.

| choice | option | default | otherwise |
| --- | --- | --- | --- |
| thinking | `think_tags` | text up to the last closing tag is not read; unclosed: no answer | other tags |
| | `thinking_must_end` | `False`: a missing tag means no thinking | `True`: it means no answer |
| boxes | `several_boxes` | `"hedge"`: the last box; different boxes in the closing | `"last"`: always |
| | | statement are no answer, unless the reference lists as many | the last box |
| | – | if the last box is empty or never closed: no answer | |
| no box | `unboxed` | `True`: a closing "the answer is", "Answer:", "####" is read | `False`: no answer |
| units | `units` | `"agree"`: 12 cm is 12, but neither 12 m nor 0.12 m | `"require"`, `"ignore"` |
| percent | `percent` | `"sign_optional"`: 28 % is 0.28; where the reference is | `"exact"`: 28 % is 0.28 |
| | | in per cent, 28 as well | only; `"ignore"`: or 28 |
| base | `base` | `"optional"`: 52_8 may be written 52; never 528 or 42 | `"require"`: 52_8 only |
| decimals | `relative_tolerance` | 0: 0.333 is not 1/3, 3.0 is 3 | for rational numbers |
| order | `list_order` | `"ignore"`: sets and bare lists in any order | `"keep"`: sets only |
| brackets | – | (1,2), [1,2] and {1,2} differ; {1,2} is the list 1, 2 | |
| domain | – | variables are real; equal means equal, and real, at the same places | |
| names | – | case counts in variables, not in words; x = 5 is 5, not y = 5 | |
| length | `max_answer_chars` | 1000; a longer answer is unverifiable | |
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fr_lightning.envs.answer_compare import same
from fr_lightning.envs.answer_forms import Items, Relation, Value, read
from fr_lightning.envs.answer_latex import Undecidable, canonical, rational, spaceless
from fr_lightning.envs.answers import AnswerPolicy, extract
from fr_lightning.envs.base import NotReady

__all__ = ["AnswerPolicy", "MathVerifier", "Verdict", "VerifierError"]

Status = Literal["correct", "wrong", "no_answer", "unverifiable"]

START_SECONDS = 60.0
REPLY_SLACK_SECONDS = 2.0
ATTEMPTS = 3
"""A check is repeated when its worker was killed; a check that kills every worker it gets is unverifiable."""


class VerifierError(NotReady):
    """The verifier, not the response, failed. Never a reward."""

    failure_kind = "verifier_unverifiable"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        status: `wrong` was shown to differ or is no mathematics; `no_answer` commits to nothing; `unverifiable` could
            not be decided within the limits, because of the response or of the reference answer (see `reason`).
        answer: the text extracted from the response, or None.
        reason: why there is no answer, or why it could not be decided.
    """

    status: Status
    answer: str | None = None
    reason: str = ""

    @property
    def correct(self) -> bool:
        return self.status == "correct"


class MathVerifier:
    """Checks responses against reference answers, from any thread and any event loop.

    Args:
        workers: processes for algebra, started when first needed; also the checks that can be in algebra at a time.
        timeout: seconds one comparison may take in a worker before it is killed, not counting the wait for a worker.
        memory_mb: address space of one comparison.
        policy: the choices of the table above.

    Raises:
        ValueError: an argument that is not positive.
    """

    def __init__(
        self, *, workers: int = 1, timeout: float = 3.0, memory_mb: int = 1024, policy: AnswerPolicy | None = None
    ):
        if workers < 1 or not timeout > 0 or memory_mb < 1:
            raise ValueError(f"workers, timeout and memory_mb must be positive, got {workers}, {timeout}, {memory_mb}")
        self.workers = workers
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.policy = policy or AnswerPolicy()
        self._lock = threading.Lock()
        self._processes: _Processes | None = None
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.workers, self.timeout, self.memory_mb, self.policy)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def verify(self, response: str, answer: str) -> Verdict:
        """Check a response against the reference answer without blocking the event loop.

        Raises:
            VerifierError: the verifier is closed, or no worker can be started.
        """
        processes = self._running()
        loop = asyncio.get_running_loop()
        verdict = await loop.run_in_executor(processes.reading, self._without_algebra, response, answer)
        if isinstance(verdict, Verdict):
            return verdict
        return await loop.run_in_executor(processes.waiting, self._with_algebra, processes, answer, verdict)

    def verify_sync(self, response: str, answer: str) -> Verdict:
        """`verify` for callers without an event loop."""
        processes = self._running()
        verdict = self._without_algebra(response, answer)
        if isinstance(verdict, Verdict):
            return verdict
        return processes.waiting.submit(self._with_algebra, processes, answer, verdict).result()

    def check_gold(self, answer: str) -> str | None:
        """None if responses can be checked against this reference answer, else the reason why not: a data error."""
        try:
            gold = self._gold(answer)
            form = read(gold, self.policy.max_answer_chars)
            if isinstance(form, Value) and rational(form.body) is not None:  # most are, and need no process
                return None
        except Undecidable as error:
            return str(error)
        processes = self._running()
        reply = processes.waiting.submit(processes.ask, {"gold": gold, "policy": asdict(self.policy)}).result()
        return reply.get("undecidable")

    def close(self) -> None:
        """End the workers. Checks in flight end with `VerifierError`; more than one call is harmless."""
        with self._lock:
            self._closed = True
            processes, self._processes = self._processes, None
        if processes is not None and processes.owner == os.getpid():
            processes.close()

    def _running(self) -> _Processes:
        with self._lock:
            if self._closed:
                raise VerifierError("the verifier is closed")
            if self._processes is None or self._processes.owner != os.getpid():  # a fork inherits no threads
                self._processes = _Processes(self.workers, self.timeout, self.memory_mb)
            return self._processes

    def _gold(self, answer: str) -> str:
        boxed = extract(answer, AnswerPolicy(unboxed=False)).answer
        gold = (boxed or answer).strip()
        if not gold:
            raise Undecidable("empty")
        return gold

    def _without_algebra(self, response: str, answer: str) -> Verdict | str:
        """The verdict, or the extracted answer if it takes algebra."""
        found = extract(response, self.policy)
        other = found.answer
        limit = self.policy.max_answer_chars
        try:
            gold = self._gold(answer)
            if found.listed:
                reference = read(gold, limit)
                if isinstance(reference, Items) and len(reference.items) == len(found.listed):
                    other = ", ".join(found.listed)
            if other is None:
                return Verdict("no_answer", None, found.reason)
            if spaceless(canonical(gold, limit)) == spaceless(canonical(other, limit)):
                return Verdict("correct", other)
            equal = same(read(gold, limit), read(other, limit), self.policy, _NoAlgebra())
            return Verdict("correct" if equal else "wrong", other)
        except _NeedsAlgebra:
            return other or ""
        except Undecidable as error:
            return (
                Verdict("no_answer", None, found.reason)
                if other is None
                else Verdict("unverifiable", other, str(error))
            )

    def _with_algebra(self, processes: _Processes, answer: str, other: str) -> Verdict:
        reply = processes.ask({"gold": self._gold(answer), "other": other, "policy": asdict(self.policy)})
        if "undecidable" in reply:
            return Verdict("unverifiable", other, reply["undecidable"])
        return Verdict("correct" if reply["same"] else "wrong", other)


def _rebuild(workers: int, timeout: float, memory_mb: int, policy: AnswerPolicy) -> MathVerifier:
    return MathVerifier(workers=workers, timeout=timeout, memory_mb=memory_mb, policy=policy)


class _NeedsAlgebra(Exception):
    pass


class _NoAlgebra:
    """The `Algebra` of the trainer's process: none."""

    def same_value(self, gold: str, other: str) -> bool:
        raise _NeedsAlgebra

    def same_relation(self, gold: Relation, other: Relation) -> bool:
        raise _NeedsAlgebra


class _Processes:
    """The worker processes of one verifier in one process, and the threads that wait for them."""

    def __init__(self, workers: int, timeout: float, memory_mb: int):
        self.owner = os.getpid()
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="verifier-read")
        self.waiting = ThreadPoolExecutor(workers, thread_name_prefix="verifier-wait")
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.closed = threading.Event()
        self.idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):  # one place per thread of `waiting`, so that taking one never blocks
            self.idle.put(None)
        self.alive: set[_Worker] = set()
        self._finalizer = weakref.finalize(self, _end_all, self.alive, self.closed, self.owner)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply of a worker, from a fresh one if it dies. Blocks; called in the threads of `waiting` only."""
        worker = self.idle.get()
        try:
            for _ in range(ATTEMPTS):
                if self.closed.is_set():
                    raise VerifierError("the verifier was closed")
                if worker is None or not worker.usable:
                    worker = self._start()
                reply = worker.ask(request, self.timeout)
                if not worker.usable:
                    self.alive.discard(worker)
                if reply is not None and not reply.get("died"):
                    return reply
            if self.closed.is_set():
                raise VerifierError("the verifier was closed")
            return {"undecidable": "every worker given this check died"}
        finally:
            self.idle.put(worker)

    def _start(self) -> _Worker:
        code = None
        for _ in range(ATTEMPTS):
            worker = _Worker(self.timeout, self.memory_mb)
            self.alive.add(worker)
            if self.closed.is_set():  # after `close` looked for workers to end
                worker.end()
            if worker.ready():
                return worker
            self.alive.discard(worker)
            code = worker.process.returncode
            if self.closed.is_set():
                raise VerifierError("the verifier was closed")
        raise VerifierError(
            f"no verifier worker could be started (exit code {code}, -9: not ready within "
            f"{START_SECONDS:.0f} s); does `{sys.executable} -c 'import math_verify'` work?"
        )

    def close(self) -> None:
        self._finalizer()
        self.reading.shutdown(wait=False)
        self.waiting.shutdown(wait=True)  # its checks have lost their workers, so they end now
        while not self.idle.empty():
            if (worker := self.idle.get()) is not None:
                worker.release()


def _end_all(alive: set[_Worker], closed: threading.Event, owner: int) -> None:
    closed.set()
    if os.getpid() == owner:
        for worker in list(alive):
            worker.end()


_BOOTSTRAP = """
import sys, types
for name, folder in (("fr_lightning", None), ("fr_lightning.envs", sys.argv[1])):  # not the packages' own imports
    module = types.ModuleType(name)
    module.__path__ = [folder] if folder else []
    sys.modules[name] = module
from fr_lightning.envs.verifier_worker import main
main(float(sys.argv[2]), int(sys.argv[3]))
"""
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV", "LANG", "SYSTEMROOT")


class _Worker:
    """One worker process, asked one thing at a time."""

    def __init__(self, timeout: float, memory_mb: int):
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        arguments = [str(Path(__file__).resolve().parent), str(timeout), str(memory_mb)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,  # Ctrl-C is the trainer's to handle
        )
        self.usable = True
        self._ending = threading.Lock()
        self._unread = b""

    def ready(self) -> bool:
        """Wait until the worker has loaded; False, and ended, if it does not."""
        if self._read_line(START_SECONDS) is not None:
            return True
        with suppress(subprocess.TimeoutExpired):  # let its own exit code stand, if it has one
            self.process.wait(0.2)
        self.end()
        self.release()
        return False

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """The reply, or None if the process died or hangs; it is then ended and `usable` is False."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self._read_line(timeout + REPLY_SLACK_SECONDS)
        except OSError:  # a broken pipe: it was killed
            line = None
        if line is None or not self.usable:
            self.end()
            self.release()
            return None
        return json.loads(line)

    def _read_line(self, seconds: float) -> bytes | None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return None
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill the process and reap it. Any thread may; the pipes are left to the thread that may be reading them."""
        self.usable = False
        with self._ending:
            self.process.kill()
            self.process.wait()

    def release(self) -> None:
        """Close the pipes of an ended process."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unsent bytes of a dead process
                    pipe.close()
