"""Generation on this machine without a server: one model in a process of its own, so that it overlaps with learning.

Invariants: a request that was accepted ends in a completion or an `EngineError`, also when the process dies or hangs
(it is replaced, with the last published weights, and the requests start again); an update is seen by the process only
when the whole of it was found good; nothing outlives this process, however it ends.

The process runs a batching loop of our own (`embedded_worker`) rather than transformers' continuous batching, which
decoded fewer tokens a second than `generate` does, measured on a CPU with equal lengths. It also has one seed for all
requests together, and no place between two steps to change the weights and stamp each token with their version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fr_lightning.engines.base import Completion, Engine, EngineError, Sampling, check_limits, checked_prompt
from fr_lightning.engines.embedded_worker import ModelFacts, Request, WorkerSettings
from fr_lightning.engines.shared_weights import SharedWeights

_log = logging.getLogger(__name__)

_WORKER = "from fr_lightning.engines.embedded_worker import main; main()"
_LAST_LINES = 20


class EmbeddedEngine(Engine):
    """Generates on the CPU or one GPU, in one child process, many conversations at a time.

    Args:
        model: folder, hub name, .gguf file or "embedded" (see `fr_lightning.models`); None: given to `start`.
        dtype: of weights and keys/values: "float32", "bfloat16", or "auto": bfloat16 where the device has units for
            it. Updates are converted to it.
        device: "cpu", "cuda", "cuda:1", … or "auto": the first GPU if there is one.
        max_context: most tokens of one conversation, prompt and completion together (a model made for less keeps its
            own limit). Memory for keys and values grows with the longest conversation seen, up to this.
        max_sequences: most conversations decoded together, and most whose keys and values are held; more wait.
        threads: CPU threads of the child process.
        kv_cache_on_update: what a weight update does to conversations in flight. "recompute" runs their tokens through
            the new weights, so that each later token is drawn as if the conversation had been under them all along.
            "keep" goes on from the old keys and values, at no cost: a token's log-probability is still that of the
            distribution it was drawn from, but no single set of weights gives it.
        max_restarts: how often in all the child may die or hang and be replaced before calls raise.
        stall_timeout: seconds without a sign of life, while there is work, after which the child counts as hung.
        start_timeout: seconds the child may take to load the model.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        dtype: Literal["float32", "bfloat16", "auto"] = "float32",
        device: str = "cpu",
        max_context: int = 2048,
        max_sequences: int = 64,
        threads: int = 1,
        kv_cache_on_update: Literal["recompute", "keep"] = "recompute",
        max_restarts: int = 3,
        stall_timeout: float = 120.0,
        start_timeout: float = 300.0,
    ):
        if dtype not in ("float32", "bfloat16", "auto"):
            raise ValueError(f"dtype must be float32, bfloat16 or auto, got {dtype!r}")
        check_limits(
            kv_cache_on_update=kv_cache_on_update,
            max_context=max_context,
            max_sequences=max_sequences,
            threads=threads,
            max_restarts=max_restarts,
            stall_timeout=stall_timeout,
            start_timeout=start_timeout,
        )
        self.model = model
        self.dtype = dtype
        self.max_context = max_context
        self.max_restarts = max_restarts
        self.stall_timeout = stall_timeout
        self.start_timeout = start_timeout
        self._settings = WorkerSettings(
            model="",
            dtype=dtype,
            device=device,
            max_context=max_context,
            max_sequences=max_sequences,
            threads=threads,
            keep_kv_on_update=kv_cache_on_update == "keep",
            buffers=(),
        )
        self._child: _Child | None = None
        self._facts: ModelFacts | None = None
        self._ready = asyncio.Event()
        self._failure: str | None = "the engine is not started"
        self._restarts = 0
        self._ids = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._outbox: list[tuple[Any, ...]] = []
        self._updating = asyncio.Lock()
        self._update: asyncio.Future[None] | None = None  # of the last update, done when it is in force
        self._buffers: tuple[SharedWeights, ...] = ()

    async def start(self, model: str | None = None) -> None:
        if self._child is not None:
            raise EngineError("the engine is already started")
        name = model or self.model
        if name is None:
            raise ValueError("the engine was given no model")
        from fr_lightning.models import resolve_model

        folder = await asyncio.to_thread(resolve_model, name)
        self._loop = asyncio.get_running_loop()
        self._buffers = (SharedWeights(), SharedWeights())
        descriptors = tuple(buffer.fd for buffer in self._buffers)
        self._settings = replace(
            self._settings,
            model=folder,
            buffers=descriptors,
            published=None,
            version=0,
            record_routes=self.record_routes,
        )
        self.version = self._restarts = 0
        self._failure, self._update = None, None
        self._ready, self._updating = asyncio.Event(), asyncio.Lock()
        self._launch()
        try:
            await self._ready.wait()
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._failure is not None:
            failure = self._failure
            await self.close()
            raise EngineError(failure)

    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion:
        facts = self._alive()
        tokens = checked_prompt(token_ids, vocab_size=facts.vocab_size, max_context=facts.max_context)
        sampling = sampling or Sampling()
        seed = random.SystemRandom().getrandbits(63) if sampling.seed is None else sampling.seed
        request = Request(next(self._ids), tokens, sampling, seed, session)
        pending = self._pending[request.id] = _Pending(request, self._loop.create_future())
        self._send("add", request)
        try:
            return await pending.future
        finally:
            if self._pending.pop(request.id, None) is not None:
                self._send("abort", request.id)

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        async with self._updating:
            facts = self._alive()
            if version < self._settings.version:
                raise ValueError(f"the engine holds version {self._settings.version}: {version} would be a step back")
            # Two buffers in turn: the one in force stays whole for a child that restarts in the meantime.
            previous = self._settings.published
            target = 1 if previous == 0 else 0
            for _ in self._buffers[target].fill(facts.layout, named_tensors):
                await asyncio.sleep(0)
            self._alive()
            self._settings = replace(self._settings, published=target, version=version)
            self._update = self._loop.create_future()
            began = time.perf_counter()
            self._send("update", target, version)
            await self._update
            self.pause_seconds = time.perf_counter() - began
            if previous is not None:
                self._buffers[previous].empty()

    async def forget(self, session: str) -> None:
        if self._failure is None:
            self._send("forget", session)

    async def close(self) -> None:
        self._fail("the engine was closed")
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.stop)
        for buffer in self._buffers:
            buffer.close()
        self._buffers = ()

    def _alive(self) -> ModelFacts:
        if self._failure is not None or self._facts is None:
            raise EngineError(self._failure or "the engine is still starting")
        return self._facts

    def _launch(self) -> None:
        self._child = _Child(
            self._settings,
            self._loop,
            on_events=self._on_events,
            on_death=self._on_death,
            busy=lambda: bool(self._pending) or not (self._update is None or self._update.done()),
            start_timeout=self.start_timeout,
            stall_timeout=self.stall_timeout,
        )

    def _send(self, *command: Any) -> None:
        # All commands of one tick of the event loop travel as one message: what the child does with requests that
        # arrive together then cannot depend on when it looks.
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        # A child that is still loading is told everything that is pending when it is ready.
        if commands and self._ready.is_set() and self._child is not None:
            self._child.send(commands)

    def _on_events(self, child: _Child, events: list[tuple[Any, ...]]) -> None:
        if child is not self._child:
            return
        for kind, *values in events:
            if kind == "ended":
                request_id, result = values
                pending = self._pending.pop(request_id, None)
                if pending is not None and not pending.future.done():
                    if isinstance(result, Completion):
                        pending.future.set_result(result)
                    else:
                        pending.future.set_exception(EngineError(result))
            elif kind == "updated":
                self._updated(*values)
            elif kind == "ready":
                self._facts, version = values
                self._on_ready(child, version)
            elif kind == "refused":
                child.last_words = values[0]

    def _on_ready(self, child: _Child, version: int) -> None:
        assert self._facts is not None
        self.max_context = self._facts.max_context
        self._outbox.clear()
        commands: list[tuple[Any, ...]] = []
        if child.settings == self._settings:
            self._updated(version)
        else:  # published while the child was loading
            commands.append(("update", self._settings.published, self._settings.version))
        commands.extend(("add", pending.request) for pending in self._pending.values())
        self._ready.set()
        child.send(commands)

    def _updated(self, version: int) -> None:
        self.version = version
        if self._update is not None and not self._update.done():
            self._update.set_result(None)

    def _on_death(self, child: _Child, reason: str) -> None:
        if child is not self._child or self._failure is not None:
            return
        self._ready.clear()
        if self._facts is None:
            self._fail(reason)
        elif self._restarts >= self.max_restarts:
            self._fail(f"the engine was replaced {self._restarts} times and failed again: {reason}")
        else:
            self._restarts += 1
            _log.warning("restart %d of %d of the engine: %s", self._restarts, self.max_restarts, reason)
            self._launch()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        waiting: list[asyncio.Future[Any]] = [pending.future for pending in self._pending.values()]
        if self._update is not None:
            waiting.append(self._update)
        for future in waiting:
            if not future.done():
                future.set_exception(EngineError(reason))
        self._pending.clear()
        self._outbox.clear()
        self._facts = None
        self._ready.set()


@dataclass(frozen=True)
class _Pending:
    request: Request
    future: asyncio.Future[Completion]


class _Child:
    """One worker process, the thread that listens to it, and the one that passes its output on.

    `on_events(child, events)` and `on_death(child, reason)` are called in the event loop; `busy()` anywhere. Being
    outside the loop, the listener notices a hung child also while the loop is blocked.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        loop: asyncio.AbstractEventLoop,
        *,
        on_events: Callable[[_Child, list[tuple[Any, ...]]], None],
        on_death: Callable[[_Child, str], None],
        busy: Callable[[], bool],
        start_timeout: float,
        stall_timeout: float,
    ):
        self.settings = settings
        self.last_words = ""
        self._loop = loop
        self._on_events, self._on_death, self._busy = on_events, on_death, busy
        self._start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        parent_end, child_end = socket.socketpair()
        with child_end:
            # Not multiprocessing: its spawn would run the caller's main module again in the child.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, str(child_end.fileno())],
                pass_fds=(child_end.fileno(), *settings.buffers),
                env=_environment(settings.threads),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        self._connection = Connection(parent_end.detach())
        self.send(settings)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._relay, self._listen)]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it died: `on_death` follows
            self._connection.send(message)

    def stop(self) -> None:
        self._process.kill()
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _listen(self) -> None:
        limit, heard, hung = self._start_timeout, time.monotonic(), ""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self._connection.poll(min(0.2, limit / 4)):
                    events = self._connection.recv()
                    heard, limit = time.monotonic(), self._stall_timeout
                    self._call(self._on_events, events)
                elif limit == self._stall_timeout and not self._busy():
                    heard = time.monotonic()
                elif time.monotonic() - heard > limit:
                    hung = f"no sign of life for {limit:g} s, "
                    self._process.kill()
        code = self._process.wait()
        self._threads[0].join()
        words = self.last_words or "\n".join(self._last_lines)
        self._call(self._on_death, f"{hung}exit code {code}" + (f"; last words: {words}" if words else ""))

    def _relay(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_lines.append(line.rstrip())
                sys.stderr.write(line)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, self, *arguments)


def _environment(threads: int) -> dict[str, str]:
    """The child's environment. What concerns OpenMP must be there before torch is loaded: idle threads that spin would
    take the learner's cores. And it must be this very package that the child imports: another copy of it may lie in the
    folder where the run was started."""
    ours = str(Path(__file__).parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([ours, *(path or os.getcwd() for path in sys.path)]),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",  # the model is a folder here by now
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
