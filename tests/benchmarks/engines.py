"""The engines beside each other: tokens per second on the same work, and what a weight update costs.

    python -m tests.benchmarks.engines --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype bfloat16 --rounds 3

All engines are up all the time and idle while another works, in turn, so that a machine that slows down slows all. The
work is that of `tests.benchmarks.generation`: log-normal completion lengths forced by `max_tokens`, conversations of
one turn, and of several. An update publishes the model's own weights while `--concurrency` requests are in flight:
`update` is until every later token is drawn under them, `pause` how long of it no token was drawn. Ratios are to the
first engine in the same round: on a machine that others use, they say more than the numbers they are made of, and
`--clock cpu`, which counts tokens per CPU second of all processes of the run, more still (updates stay in wall time).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil

from fr_lightning.engines.base import Engine, Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.engines.server import VLLMServers
from fr_lightning.engines.vllm import VLLMEngine
from fr_lightning.models import load_causal_lm, resolve_model
from tests.benchmarks.generation import Conversation, conversations

KINDS = {"embedded": EmbeddedEngine, "vllm": VLLMEngine, "servers": VLLMServers}


def cpu_seconds() -> float:
    """Of this process and all it started; an engine that is idle adds next to nothing."""
    us = psutil.Process()
    times = [process.cpu_times() for process in (us, *us.children(recursive=True))]
    return sum(time.user + time.system for time in times)


CLOCKS = {"wall": time.perf_counter, "cpu": cpu_seconds}


async def play(engine: Engine, work: list[Conversation], clock: Callable[[], float] = time.perf_counter) -> float:
    """Tokens drawn per second."""

    async def converse(number: int, conversation: Conversation) -> int:
        history: list[int] = []
        for prompt, length in zip(conversation.prompts, conversation.lengths, strict=True):
            history.extend(prompt)
            completion = await engine.generate(history, Sampling(max_tokens=length), session=str(number))
            assert len(completion.token_ids) == length
            history.extend(completion.token_ids)
        await engine.forget(str(number))
        return sum(conversation.lengths)

    began = clock()
    tokens = await asyncio.gather(*(converse(number, conversation) for number, conversation in enumerate(work)))
    return sum(tokens) / (clock() - began)


async def update(engine: Engine, model: Any, in_flight: int) -> tuple[float, float]:
    """Seconds of an update, and of its pause."""
    busy = [asyncio.ensure_future(engine.generate([1, 2, 3], Sampling(max_tokens=120))) for _ in range(in_flight)]
    await engine.generate([1], Sampling(max_tokens=2))
    began = time.perf_counter()
    await engine.update_weights(model.named_parameters(), engine.version + 1)
    seconds = time.perf_counter() - began
    await asyncio.gather(*busy)
    return seconds, engine.pause_seconds


def summary(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--engines", nargs="+", default=["embedded", "vllm"], choices=list(KINDS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    folder = resolve_model(options.model)
    model = load_causal_lm(folder)
    size = sum(parameter.numel() for parameter in model.parameters())
    engines: dict[str, Engine] = {}
    for name in options.engines:
        engines[name] = KINDS[name](model=folder, dtype=options.dtype, max_sequences=options.concurrency)
        began = time.perf_counter()
        await engines[name].start()
        print(f"{name}: up in {time.perf_counter() - began:.1f} s", flush=True)
        await play(engines[name], conversations(4, 2, model.config.vocab_size, seed=0))

    measured: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        single = conversations(options.requests, 1, model.config.vocab_size, seed=2 * number + 1)
        several = conversations(
            options.requests // options.turns, options.turns, model.config.vocab_size, seed=2 * number + 2
        )
        for name, engine in engines.items():
            seconds, pause = await update(engine, model, options.concurrency)
            for what, value in (
                ("single-turn tokens/s", await play(engine, single, clock)),
                (f"{options.turns}-turn tokens/s", await play(engine, several, clock)),
                ("update ms", 1e3 * seconds),
                ("pause ms", 1e3 * pause),
            ):
                measured.setdefault((what, name), []).append(value)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    print(
        f"{options.model}, {size / 1e6:.1f} M parameters, {options.dtype}, tokens per {options.clock} second: "
        "median (lowest to highest)"
    )
    for (what, name), values in sorted(measured.items()):
        ratios = [value / first for value, first in zip(values, measured[what, options.engines[0]], strict=True)]
        ratio = f"; ratio {summary(ratios, 2)}" if name != options.engines[0] else ""
        print(f"  {what:22} {name:9} {summary(values, 1)}{ratio}")
    for engine in engines.values():
        await engine.close()


if __name__ == "__main__":
    os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
    asyncio.run(main())
