"""One or many running vLLMs behind the `Engine` contract: who is asked, what if one dies, how all are updated.

Invariants: a request that was accepted ends in a completion or an `EngineError`; a replica's death costs its requests a
second try and nothing else; a replica serves only after it was given the latest publication, so that no token is ever
drawn under older weights than its version says. One replica by itself is `vllm_replica.py`.

Routed experts (`record_routes`) are vLLM's `enable_return_routed_experts`. Its "model runner V2", which they come with,
needs Triton: what is here is written against the code of vLLM 0.32 and answers of its form, and is unproven on a GPU.
A session's later turns ask only for what was not told (`routed_experts_prompt_start`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from fr_lightning.engines.base import Completion, Engine, EngineError, Sampling, check_limits, checked_prompt
from fr_lightning.engines.publications import Publications, layout_of
from fr_lightning.engines.vllm_plugin import BACKEND, PARENT
from fr_lightning.engines.vllm_replica import (
    KVCacheOnUpdate,
    OnUpdate,
    Question,
    Replica,
    ReplicaDied,
    Transport,
    UpdateMode,
    request_parameters,
)

if TYPE_CHECKING:
    pass

T = TypeVar("T")
_log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]


def require_vllm() -> None:
    """Say what is missing before anything is started.

    Raises:
        ImportError: vLLM is not installed, or does not see this package's plugin.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "this engine needs vLLM: pip install 'fr-lightning[vllm]' (on a machine without a GPU: make setup-vllm)"
        )
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name=BACKEND):
        raise ImportError(
            "fr-lightning is installed without its vLLM plugin (an older version's metadata?): install it again"
        )


class ReplicatedEngine(Engine):
    """The engine contract over replicas. Subclasses say how many there are and how each is made.

    Args:
        model: folder, hub name, .gguf file or "embedded" (see `fr_lightning.models`); None: given to `start`.
        dtype: of weights and activations. Updates are converted to it.
        max_context: most tokens of one conversation, prompt and completion together (a model made for less keeps its
            own limit).
        max_sequences: most conversations decoded together by one replica; more wait.
        kv_cache_gib: memory for keys and values of one replica; null: vLLM's own choice on a GPU, 1 on a CPU.
        threads: CPU threads of one replica, where there is no GPU.
        on_update: what a weight update does to requests in flight. `keep`: they stop between two tokens and go on under
            the new weights. `abort`: they start again from their prompt; each turn is of one version, and its tokens so
            far are lost. `wait`: they end first, under the old weights, and new ones wait: the longest is waited for.
        kv_cache_on_update: `recompute` runs the tokens of what goes on, and of conversations kept for their next turn,
            through the new weights; each later token is then drawn as if the conversation had been under them all
            along. `keep` lets a conversation go on from its old keys and values at no cost: a log-probability is still
            that of the distribution that was sampled, but no single set of weights gives it.
        transport: how published weights reach vLLM. `file`: its workers read the file they lie in. `nccl`: they are
            broadcast, also to machines that share no disk. `ipc`: through the memory of a GPU that both sides use.
            The last two need GPUs, and have not been tried on any.
        weights_folder: a folder for that file, which every replica must see under this path; null: shared memory,
            which replicas on this machine see.
        sleep_while_learning: after each batch vLLM gives its GPU memory to the learner, and takes it back as the next
            weights arrive: weights first, then room for keys and values. For a GPU that both use in turns, which
            `data.mode: sync` makes them do. vLLM takes its memory when it starts: `gpu_memory_utilization` in
            `engine_args` must leave the learner enough to load the model. Has not been tried on any GPU.
        max_restarts: how often in all a replica may die and be replaced.
        stall_timeout: seconds without any token, while there is work, after which a replica counts as dead.
        start_timeout: seconds a replica may take to load the model.
        engine_args: further arguments of vLLM's own, by the names of its `EngineArgs`, such as
            {tensor_parallel_size: 2, gpu_memory_utilization: 0.5}. They win over the ones above.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        dtype: Dtype = "bfloat16",
        max_context: int = 2048,
        max_sequences: int = 64,
        kv_cache_gib: float | None = None,
        threads: int = 1,
        on_update: OnUpdate = "keep",
        kv_cache_on_update: KVCacheOnUpdate = "recompute",
        transport: Transport = "file",
        weights_folder: str | None = None,
        sleep_while_learning: bool = False,
        max_restarts: int = 3,
        stall_timeout: float = 120.0,
        start_timeout: float = 600.0,
        engine_args: dict[str, Any] | None = None,
    ):
        if on_update not in ("keep", "abort", "wait"):
            raise ValueError(f"on_update must be keep, abort or wait, got {on_update!r}")
        if transport not in ("file", "nccl", "ipc"):
            raise ValueError(f"transport must be file, nccl or ipc, got {transport!r}")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
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
        self.max_sequences = max_sequences
        self.sleep_while_learning = sleep_while_learning
        self.threads = threads
        self.transport: Transport = transport
        self._kv_cache_gib = kv_cache_gib
        self._mode = UpdateMode(on_update, kv_cache_on_update)
        self._weights_folder = Path(weights_folder) if weights_folder is not None else None
        self._engine_args = dict(engine_args or {})
        self._folder = ""
        self._vocab_size = 0
        self._failure: str | None = "the engine is not started"
        self._publications: Publications | None = None
        self._supervisors: list[asyncio.Task[None]] = []
        self._serving: list[Replica] = []
        self._sessions: dict[str, _Session] = {}
        self._generation = 0  # publications so far
        self._restarts = 0
        self._available, self._updating = asyncio.Event(), asyncio.Lock()
        self._check_installation()

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """How many there should be."""
        return 1

    @abc.abstractmethod
    def _make_replica(self, number: int) -> Replica: ...

    @property
    def workers(self) -> int:
        """How many processes of one replica hold weights."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        return math.prod(int(self._engine_args.get(size, 1)) for size in sizes)

    def environment(self, *, on_cpu: bool) -> dict[str, str]:
        """What vLLM should find in its environment, in whatever process it is."""
        values = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
            "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(self.start_timeout)),
            "HF_HUB_OFFLINE": "1",  # the model is a folder here by now
            PARENT: str(os.getpid()),
        }
        if self.transport == "ipc":
            values["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # handles of GPU memory, from this process to its child
        if on_cpu:
            values |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the engine's process also be the worker
                "TORCH_COMPILE_DISABLE": "1",
                "OMP_NUM_THREADS": str(self.threads),
                "OMP_WAIT_POLICY": "passive",
                "GOMP_SPINCOUNT": "0",
            }
        return values

    def _check_installation(self) -> None:
        require_vllm()

    def vllm_arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """Arguments by the names of vLLM's `EngineArgs`."""
        arguments: dict[str, Any] = {
            "model": self._folder,
            "dtype": self.dtype,
            "max_model_len": self.max_context,
            "max_num_seqs": self.max_sequences,
            "enable_prefix_caching": True,
            "seed": random.SystemRandom().getrandbits(31),  # replicas must not sample unseeded requests alike
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # a model's own defaults must not filter what is sampled
            "weight_transfer_config": {"backend": BACKEND if self.transport == "file" else self.transport},
        }
        if self.record_routes:
            arguments["enable_return_routed_experts"] = True
        kv_cache_gib = 1.0 if on_cpu and self._kv_cache_gib is None else self._kv_cache_gib
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        if self.sleep_while_learning:
            if on_cpu:
                raise ValueError("sleep_while_learning needs a GPU: on a CPU vLLM has no sleep mode")
            arguments["enable_sleep_mode"] = True
        if on_cpu:
            arguments |= {"distributed_executor_backend": "uni", "enforce_eager": True}
            # A prompt whose prefill is cut in two kills the process: vLLM then turns back the seeded generator of its
            # request, which generators on a CPU refuse.
            arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(2048, self.max_context)}
        return arguments | self._engine_args

    # -- the contract ------------------------------------------------------------------------------------------------

    async def start(self, model: str | None = None) -> None:
        if self._publications is not None:
            raise EngineError("the engine is already started")
        name = model or self.model
        if name is None:
            raise ValueError("the engine was given no model")
        await asyncio.to_thread(self._look_at, name)
        self.version, self._restarts, self._failure = 0, 0, None
        self._available, self._updating = asyncio.Event(), asyncio.Lock()
        first = [asyncio.get_running_loop().create_future() for _ in range(self.replicas)]
        self._supervisors = [
            asyncio.create_task(self._supervise(number, started)) for number, started in enumerate(first)
        ]
        try:
            await asyncio.gather(*first)
        except BaseException:
            await self.close()
            raise

    def _look_at(self, name: str) -> None:
        from transformers import AutoConfig

        from fr_lightning.models import resolve_model

        self._folder = resolve_model(name)
        trust = bool(self._engine_args.get("trust_remote_code", False))
        config = AutoConfig.from_pretrained(self._folder, trust_remote_code=trust).get_text_config()
        self._vocab_size = config.vocab_size
        self.max_context = min(self.max_context, getattr(config, "max_position_embeddings", None) or self.max_context)
        layout = layout_of(self._folder, getattr(torch, self.dtype), trust_remote_code=trust)
        self._publications = Publications(layout, self._weights_folder)

    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion:
        self._raise_if_failed()
        tokens = checked_prompt(token_ids, vocab_size=self._vocab_size, max_context=self.max_context)
        parameters = request_parameters(sampling or Sampling(), self.max_context - len(tokens))
        if self._asleep:
            await self._wake_up()
        while True:
            place = await self._choose(session)
            told = min(place.told, len(tokens)) if self.record_routes else None
            if told is not None:
                parameters["routed_experts_prompt_start"] = told
            try:
                answer = await place.replica.generate(Question(tokens, parameters, session, place.cache_salt))
            except ReplicaDied:
                continue
            if answer.finish_reason == "abort" and self._mode.requests == "abort":
                continue  # by an update
            completion = answer.completion(None if told is None else len(tokens) - told)
            place.told = len(tokens) + len(completion.token_ids) - 1
            return completion

    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._raise_if_failed()
        assert self._publications is not None
        async with self._updating:
            if version < self.version:
                raise ValueError(f"the engine holds version {self.version}: {version} would be a step back")
            publication = await self._publications.write(named_tensors, version)
            self._generation += 1
            pauses = await asyncio.gather(
                *(replica.update(publication, self._mode) for replica in self._serving), return_exceptions=True
            )
            # One that failed is dead by now, and is replaced by one that begins with this publication.
            self.pause_seconds = max((pause for pause in pauses if isinstance(pause, float)), default=0.0)
            self.version = version
            self._publications.settle()
        await self._choose(None)

    async def sleep(self) -> None:
        # Before the first publication there would be nothing to wake up with.
        if self.sleep_while_learning and self._publications is not None and self._publications.latest is not None:
            async with self._updating:
                await asyncio.gather(*(replica.sleep() for replica in self._serving))

    async def forget(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def close(self) -> None:
        self._fail("the engine was closed")
        for replica in self._serving:
            replica.declare_dead("the engine was closed")
        supervisors, self._supervisors = self._supervisors, []
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        publications, self._publications = self._publications, None
        if publications is not None:
            publications.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
            self._available.set()

    @property
    def _asleep(self) -> list[Replica]:
        return [replica for replica in self._serving if replica.asleep]

    async def _wake_up(self) -> None:
        """With the weights published last: nobody publishes others, and something is asked."""
        assert self._publications is not None
        async with self._updating:
            latest = self._publications.latest
            if latest is not None:
                waking = (replica.update(latest, self._mode) for replica in self._asleep)
                await asyncio.gather(*waking, return_exceptions=True)

    async def _choose(self, session: str | None) -> _Session:
        """The replica that knows the session, else the one with the fewest requests, and the salt for its cache.

        Waits for one to serve.
        """
        while True:
            self._raise_if_failed()
            serving = [replica for replica in self._serving if not replica.dead.done()]
            if serving:
                break
            self._available.clear()
            await self._available.wait()
        place = self._sessions.get(session) if session is not None else None
        if place is None or place.replica not in serving:
            # Where updates leave old keys and values, a conversation may go on from its own, and from no other's.
            salt = str(self._generation) if self._mode.kv_cache == "keep" else None
            place = _Session(min(serving, key=lambda replica: replica.in_flight), salt)
            if session is not None:
                self._sessions[session] = place
        return place

    async def _supervise(self, number: int, started: asyncio.Future[None]) -> None:
        """Keep one replica running, until the engine is closed or the restarts are used up."""
        while True:
            replica = self._make_replica(number)
            try:
                reason = await self._run(replica, started)
            finally:
                await replica.close()
            if not started.done():
                started.set_exception(EngineError(f"vLLM did not start: {reason}"))
                return
            if self._restarts >= self.max_restarts:
                _log.error("vLLM replica %d is lost: %s", number, reason)
                if all(task.done() or task is asyncio.current_task() for task in self._supervisors):
                    self._fail(f"vLLM was replaced {self._restarts} times and failed again: {reason}")
                return
            self._restarts += 1
            _log.warning("restart %d of %d, replica %d of vLLM: %s", self._restarts, self.max_restarts, number, reason)

    async def _run(self, replica: Replica, started: asyncio.Future[None]) -> str:
        """Start a replica, let it serve, and return why it ended."""
        assert self._publications is not None
        try:
            async with asyncio.timeout(self.start_timeout):
                await replica.start()
            async with self._updating:  # an update that comes now finds it among those that serve
                if self._publications.latest is not None:
                    await replica.update(self._publications.latest, self._mode)
                self._serving.append(replica)
            self._available.set()
            if not started.done():
                started.set_result(None)
            return await replica.watch(self.stall_timeout)
        except TimeoutError:
            replica.declare_dead(f"it took no requests within {self.start_timeout:g} s (start_timeout)")
            return replica.dead.result()
        except Exception as error:
            replica.declare_dead(f"{type(error).__name__}: {error}")
            return replica.dead.result()
        finally:
            with contextlib.suppress(ValueError):
                self._serving.remove(replica)


@dataclass
class _Session:
    """Where a conversation's keys and values are, and how many of its tokens' routed experts were told."""

    replica: Replica
    cache_salt: str | None
    told: int = 0
