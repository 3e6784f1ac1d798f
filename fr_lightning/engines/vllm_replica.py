"""One running vLLM: what it can be asked, when it counts as dead, how new weights get into it.

Invariants: a replica is used until `dead` is set, with the reason, and never after; weights that were half loaded are
never sampled from; an answer that lacks what the contract promises is an error, not a completion.

How a replica is started and spoken to is its own business (`vllm.py`: in this process; `server.py`: over HTTP).
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from fr_lightning.engines.base import Completion, EngineError, Sampling
from fr_lightning.engines.publications import Publication

if TYPE_CHECKING:
    from fr_lightning.engines.vllm_gpu_transfer import GPUSender

T = TypeVar("T")

OnUpdate = Literal["keep", "abort", "wait"]
KVCacheOnUpdate = Literal["recompute", "keep"]
Transport = Literal["file", "nccl", "ipc"]

WATCH_SECONDS = 0.25
STREAM_INTERVAL = 16
"""Tokens between two signs of life of a request: each costs this process time, none would hide a hung engine."""

NONE = -9999.0
"""What a vLLM server writes for a log-probability that is not a finite number."""


class ReplicaDied(RuntimeError):
    """The replica is gone, and what it was asked may be asked of another."""


@dataclass(frozen=True)
class UpdateMode:
    """How a running vLLM takes new weights."""

    requests: OnUpdate
    kv_cache: KVCacheOnUpdate


class Replica(abc.ABC):
    """One running vLLM. Made in the event loop; used until `dead` is set, with the reason, and then closed.

    Args:
        transport: how publications reach its workers.
        workers: how many there are.
    """

    def __init__(self, transport: Transport, workers: int) -> None:
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._transport: Transport = transport
        self._workers = workers
        self._sender: GPUSender | None = None
        self.in_flight = 0
        self.asleep = False
        self._updating = False
        self._heard = time.monotonic()

    @abc.abstractmethod
    async def start(self) -> None:
        """Return when requests are taken."""

    @abc.abstractmethod
    async def ask(self, question: Question) -> Answer:
        """Generate. Cancelling the call aborts the request.

        Raises:
            ReplicaDied: as it says.
            EngineError: this request failed; others may not.
        """

    @abc.abstractmethod
    async def pause(self, mode: UpdateMode) -> None: ...

    @abc.abstractmethod
    async def resume(self) -> None: ...

    # vLLM's weight transfer, in the order in which it wants to be called between a pause and the end of it.

    @abc.abstractmethod
    async def init_transfer(self, init_info: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    async def start_transfer(self) -> None: ...

    @abc.abstractmethod
    async def transfer(self, update_info: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    async def finish_transfer(self, version: str) -> None: ...

    # vLLM's sleep mode. A part is "weights" or "kv_cache"; with the last of them, requests are taken again.

    @abc.abstractmethod
    async def discard(self) -> None:
        """Let requests in flight end; then give up weights, keys and values, and take no requests."""

    @abc.abstractmethod
    async def wake(self, part: str) -> None:
        """Have memory for a part again, with nothing in it."""

    @abc.abstractmethod
    async def check(self) -> str | None:
        """Why the replica cannot be used any more; None: nothing is known against it."""

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.to_thread(self._sender.close)

    def declare_dead(self, reason: str) -> None:
        if not self.dead.done():
            self.dead.set_result(reason)

    def sign_of_life(self) -> None:
        self._heard = time.monotonic()

    async def or_death(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of the call; `ReplicaDied` as soon as the replica is declared dead."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task, self.dead}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ReplicaDied(self.dead.result())
            return task.result()
        finally:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody waits for it
            task.cancel()

    async def generate(self, question: Question) -> Answer:
        if not self.in_flight:
            self.sign_of_life()
        self.in_flight += 1
        try:
            return await self.or_death(self.ask(question))
        finally:
            self.in_flight -= 1

    async def update(self, publication: Publication, mode: UpdateMode) -> float:
        """Load a publication between two steps of the model, or wake up with it.

        Returns:
            for how many seconds generation stood still.
        """
        self._updating = True
        self.sign_of_life()
        try:
            began = time.perf_counter()
            await self.or_death(self.wake("weights") if self.asleep else self.pause(mode))
            if mode.requests == "wait" and not self.asleep:
                began = time.perf_counter()  # until here what was in flight went on
            self.sign_of_life()
            await self.or_death(self._load(publication))
            self.sign_of_life()
            # Only now: while weights are handed over, the memory of keys and values is still the learner's.
            await self.or_death(self.wake("kv_cache") if self.asleep else self.resume())
            self.asleep = False
            return time.perf_counter() - began
        except BaseException as error:
            # Weights may be half loaded, be it because the update was cancelled: nothing may be sampled from them.
            self.declare_dead(f"an update of its weights failed: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
            raise ReplicaDied(str(error)) from error
        finally:
            self._updating = False

    async def sleep(self) -> None:
        """Free the memory of weights, keys and values until the next `update`, which brings the weights back."""
        try:
            await self.or_death(self.discard())
            self.asleep = True
        except BaseException as error:
            self.declare_dead(f"it did not go to sleep: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise

    async def _load(self, publication: Publication) -> None:
        if self._transport == "file":
            await self.start_transfer()
            await self.transfer({"path": publication.path})
            await self.finish_transfer(str(publication.version))
            return
        if self._sender is None:
            from fr_lightning.engines.vllm_gpu_transfer import GPUSender

            self._sender = GPUSender(self._transport, self, asyncio.get_running_loop(), self._workers)
        await asyncio.to_thread(self._sender.send, publication)

    async def watch(self, stall_timeout: float) -> str:
        """Wait for the end; returns its reason."""
        while not self.dead.done():
            await asyncio.wait({self.dead}, timeout=WATCH_SECONDS)
            if (reason := await self.check()) is not None:
                self.declare_dead(reason)
            elif (self.in_flight or self._updating) and time.monotonic() - self._heard > stall_timeout:
                self.declare_dead(f"no sign of life for {stall_timeout:g} s")
        return self.dead.result()


@dataclass(frozen=True)
class Question:
    """One request: a prompt, the fields of vLLM's `SamplingParams`, and which conversation's next turn it is.

    Only requests of one `cache_salt` share keys and values.
    """

    token_ids: list[int]
    parameters: dict[str, Any]
    session: str | None = None
    cache_salt: str | None = None


@dataclass
class Answer:
    """What came of one request, as it comes: token ids, log-probabilities, version spans, why it ended, and the routed
    experts as vLLM has them: [R, L, k] unsigned, for prompt and sampled tokens together without the last, from
    `routed_experts_prompt_start` on; layers without experts are 0.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: Sequence[tuple[str, int, int]] | None = None  # version, first token, one past the last
    finish_reason: str | None = None
    routed_experts: np.ndarray | None = None

    def completion(self, routed_prompt: int | None = None) -> Completion:
        """The engine contract's form.

        Args:
            routed_prompt: tokens at the end of the prompt whose routed experts were asked for; None: none were.

        Raises:
            EngineError: something the contract promises is missing.
        """
        count = len(self.token_ids)
        if self.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a request by {self.finish_reason!r}")
        if len(self.logprobs) != count or not all(math.isfinite(value) and value > NONE for value in self.logprobs):
            raise EngineError("vLLM returned a token without a finite log-probability")
        versions: list[int] = []
        for version, start, stop in self.spans or ():
            versions += [int(version)] * (stop - start)
        if len(versions) != count:
            raise EngineError(f"vLLM told the weight version of {len(versions)} of {count} tokens")
        routes = None if routed_prompt is None else self._routes(routed_prompt + count - 1)
        # Rounding may put the log of a probability of one above zero.
        logprobs = [min(value, 0.0) for value in self.logprobs]
        return Completion(self.token_ids, logprobs, versions, self.finish_reason, routes)

    def _routes(self, expected: int) -> np.ndarray:
        if self.routed_experts is None:
            raise EngineError("vLLM told no routed experts: start it with --enable-return-routed-experts")
        if len(self.routed_experts) != expected:
            raise EngineError(f"vLLM told the routed experts of {len(self.routed_experts)} of {expected} tokens")
        return self.routed_experts.astype(np.int16)


def request_parameters(sampling: Sampling, room: int) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`. `room`: tokens the context still holds.

    Only what was asked for ends a turn (`ignore_eos`). Text is made (`detokenize`) only to find stop strings in it;
    `include_stop_str_in_output` keeps the token that completes one.
    """
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(sampling.stop),
        "stream_interval": STREAM_INTERVAL,
    }


request_numbers = itertools.count()
"""Numbers that tell this process's requests apart."""
