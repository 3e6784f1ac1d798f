"""A fleet of `vllm serve` processes, on this machine or elsewhere, token ids in and out over HTTP.

Invariants: those of `vllm_replicas`; a server that this module starts ends with this process, however it ends, and one
that it was given the address of is never stopped, only left.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
import torch

from fr_lightning.engines.base import EngineError
from fr_lightning.engines.vllm_replica import Answer, Question, Replica, ReplicaDied, UpdateMode, request_numbers
from fr_lightning.engines.vllm_replicas import ReplicatedEngine

HEALTH_SECONDS = 5.0
HEALTH_FAILURES = 3
CONNECT_SECONDS = 10.0
TERM_SECONDS = 10.0
ATTEMPTS = 3
"""How often a healthy server is asked when the connection breaks, before it counts as dead."""
_LAST_LINES = 20

# What `vllm serve` runs; the command itself asks for the version of a distribution "vllm", which CPU builds are not.
_SERVE = (
    "from fr_lightning.engines.vllm_plugin import die_with_parent; die_with_parent(); "
    "from vllm.entrypoints.launchers.api_server.entry import main; main()"
)


class VLLMServers(ReplicatedEngine):
    """Generates on any number of vLLM servers; a conversation stays on one, for its prefix cache, while that lives.

    A server elsewhere must be started with this package installed beside vLLM, for its weight transfer, as
    `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs --generation-config
    vllm --weight-transfer-config '{"backend": "fr_lightning"}'`, with the `dtype` and `max_context` given here, and
    with `--enable-return-routed-experts` where routing is replayed. Its control routes are open to whoever reaches it:
    keep it on a network of your own.

    Args:
        servers: how many to start on this machine.
        devices: CUDA_VISIBLE_DEVICES of each of them, such as ["0", "1"] or ["0,1", "2,3"]; null: all see the same.
        urls: servers that run already, instead, such as ["http://node1:8000"]; `weights_folder` must be on a disk that
            they share with this machine, unless they run here.
        api_key: what they want to be shown, if anything.
        kwargs: the settings of `ReplicatedEngine`.
    """

    def __init__(
        self,
        servers: int = 2,
        devices: Sequence[str] | None = None,
        urls: Sequence[str] | None = None,
        api_key: str | None = None,
        **kwargs: Any,
    ):
        if servers < 1:
            raise ValueError("servers must be ≥ 1")
        if devices is not None and len(devices) != servers:
            raise ValueError(f"devices names {len(devices)} sets of GPUs for {servers} servers")
        if urls and kwargs.get("sleep_while_learning"):
            raise ValueError("sleep_while_learning is for GPUs shared with the learner, urls are of servers elsewhere")
        self.urls = [url.rstrip("/") for url in urls or ()]
        self.devices = devices
        self.api_key = api_key
        self._servers = servers
        super().__init__(**kwargs)

    @property
    def replicas(self) -> int:
        return len(self.urls) or self._servers

    def _make_replica(self, number: int) -> Replica:
        if self.urls:
            return _Server(self.urls[number], self)
        return _LocalServer(number, self)

    def _check_installation(self) -> None:
        if not self.urls:
            super()._check_installation()


class _Server(Replica):
    """One server, by its address."""

    def __init__(self, url: str, engine: VLLMServers):
        super().__init__(engine.transport, engine.workers)
        self.url = url
        self._engine = engine
        headers = {"Authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
        self._http = aiohttp.ClientSession(
            headers=headers,
            # A connection kept for later may be closed by the server in the moment it is used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            # how long an answer may take is for `watch` to say, by tokens
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
        )
        self._checked = time.monotonic()
        self._failures = 0

    async def start(self) -> None:
        while await self._health() is not None:
            await asyncio.sleep(0.5)
        try:
            await self._post("update_weight_version", {"new_version": "0"})
        except aiohttp.ClientResponseError as error:
            raise EngineError(
                f"{self.url} takes no weights ({error.status}): start it with VLLM_SERVER_DEV_MODE=1 and "
                '--weight-transfer-config \'{"backend": "fr_lightning"}\''
            ) from error

    async def ask(self, question: Question) -> Answer:
        broken = ""
        for _ in range(ATTEMPTS):
            try:
                return await self._ask(question)
            except (aiohttp.ClientError, OSError) as error:
                broken = f"{self.url}: {type(error).__name__}: {error}"
            if (reason := await self._health()) is not None:
                broken = reason
                break
        self.declare_dead(broken)
        raise ReplicaDied(broken)

    async def _ask(self, question: Question) -> Answer:
        answer = Answer([], [])
        body = {
            "request_id": f"{os.getpid()}-{next(request_numbers)}",
            "token_ids": question.token_ids,
            "sampling_params": question.parameters,
            "cache_salt": question.cache_salt,
            "stream": True,
        }
        async with self._http.post(f"{self.url}/inference/v1/generate", json=body) as response:
            if response.status != 200:
                raise EngineError(f"{self.url} answered {response.status}: {(await response.text())[:500]}")
            async for event in _events(response.content):
                self.sign_of_life()
                _add(answer, event)
        return answer

    async def pause(self, mode: UpdateMode) -> None:
        clear = "true" if mode.kv_cache == "recompute" else "false"
        await self._post(f"pause?mode={mode.requests}&clear_cache={clear}")

    async def resume(self) -> None:
        await self._post("resume")

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        await self._post("init_weight_transfer_engine", {"init_info": init_info})

    async def start_transfer(self) -> None:
        await self._post("start_weight_update")

    async def transfer(self, update_info: dict[str, Any]) -> None:
        if (handles := update_info.pop("ipc_handles", None)) is not None:  # as vLLM's own HTTP client sends them
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        await self._post("update_weights", {"update_info": update_info})

    async def finish_transfer(self, version: str) -> None:
        await self._post("finish_weight_update", {"weight_version": version})

    async def discard(self) -> None:
        await self._post("sleep?level=2&mode=wait")

    async def wake(self, part: str) -> None:
        await self._post(f"wake_up?tags={part}")

    async def check(self) -> str | None:
        if time.monotonic() - self._checked < HEALTH_SECONDS:
            return None
        trouble = await self._health()
        self._failures = self._failures + 1 if trouble is not None else 0
        self._checked = time.monotonic()
        return trouble if self._failures >= HEALTH_FAILURES else None

    async def close(self) -> None:
        await super().close()
        await self._http.close()

    async def _health(self) -> str | None:
        """What is wrong; None: nothing."""
        try:
            async with self._http.get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            ) as answer:
                return None if answer.status == 200 else f"{self.url} answered /health with {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return f"{self.url}: {type(error).__name__}: {error}"

    async def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        async with self._http.post(f"{self.url}/{route}", json=body) as answer:
            answer.raise_for_status()


class _LocalServer(_Server):
    """One server that this process starts, and ends."""

    def __init__(self, number: int, engine: VLLMServers):
        super().__init__(f"http://127.0.0.1:{_free_port()}", engine)
        self._number = number
        self._process: subprocess.Popen[str] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)

    async def start(self) -> None:
        on_cpu = not torch.cuda.is_available()
        arguments = self._engine.vllm_arguments(on_cpu=on_cpu)
        arguments |= {"enable_scale_out": True, "host": "127.0.0.1", "port": self.url.rpartition(":")[2]}
        arguments |= {"uvicorn_log_level": "warning", "disable_log_stats": True}
        environment = {
            **os.environ,
            **self._engine.environment(on_cpu=on_cpu),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that take weights
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        if self._engine.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._engine.devices[self._number]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _SERVE, *_flags(arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the trainer, which ends its servers
        )
        threading.Thread(target=self._relay, args=(self._process,), daemon=True).start()
        serving = asyncio.ensure_future(super().start())
        try:
            while not serving.done():
                await asyncio.wait({serving}, timeout=0.5)
                if (reason := self._exited()) is not None:
                    raise EngineError(reason)
            await serving
        finally:
            serving.cancel()

    async def check(self) -> str | None:
        return self._exited() or await super().check()

    async def _health(self) -> str | None:
        return self._exited() or await super()._health()

    async def close(self) -> None:
        await super().close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    def _exited(self) -> str | None:
        if self._process is None or self._process.poll() is None:
            return None
        words = "\n".join(self._last_lines)
        return f"{self.url} ended with exit code {self._process.returncode}" + (
            f"; last words: {words}" if words else ""
        )

    def _relay(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._last_lines.append(line.rstrip())
                sys.stderr.write(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Politely, then with its whole group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(TERM_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _flags(arguments: dict[str, Any]) -> list[str]:
    """vLLM's arguments as its command line spells them."""
    flags: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            flags += [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event; ends at `[DONE]`, and only there.

    Raises:
        aiohttp.ClientPayloadError: the stream broke off.
    """
    pending = b""
    async for piece in content.iter_any():
        *whole, pending = (pending + piece).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    raise aiohttp.ClientPayloadError("the answer broke off")


def _add(answer: Answer, event: dict[str, Any]) -> None:
    """One event of a streamed answer to what came before."""
    if "error" in event:
        raise EngineError(f"vLLM: {event['error']}")
    for choice in event["choices"]:
        answer.token_ids += choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        answer.logprobs += [position["logprob"] for position in content]
        answer.finish_reason = choice["finish_reason"]
        if choice.get("routed_experts") is not None:  # told whole, at the end
            answer.routed_experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        if choice["weight_versions"] is not None:
            answer.spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
