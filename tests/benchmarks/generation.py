"""Tokens per second of the embedded engine beside `model.generate`, on the same weights, threads and work.

    python -m tests.benchmarks.generation --model HuggingFaceTB/SmolLM2-135M-Instruct --rounds 3

Both run in a process of their own with the same environment, one at a time and in turn, so that a machine that slows
down slows both. On a machine that others use, `--clock cpu` counts CPU seconds of the two processes instead.

The work: prompts of 20 to 80 tokens, log-normal completion lengths forced by `max_tokens`. `generate` takes it in waves
as large as the engine's batch, each left-padded and as long as its longest completion; only the tokens asked for count.
In the second part each conversation has several turns, which `generate` prefills from the start. `generate` is not
asked for log-probabilities; the engine always computes them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil
import torch

from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.models import load_causal_lm, resolve_model


@dataclass(frozen=True)
class Conversation:
    """`prompts[k]` is appended before turn k, which draws `lengths[k]` tokens."""

    prompts: list[list[int]]
    lengths: list[int]


def conversations(count: int, turns: int, vocabulary: int, seed: int) -> list[Conversation]:
    rng = random.Random(seed)

    def length() -> int:
        return min(240, max(4, round(rng.lognormvariate(3.7, 0.8))))

    def text() -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(20, 80))]

    return [Conversation([text() for _ in range(turns)], [length() for _ in range(turns)]) for _ in range(count)]


def generate_in_waves(model, work: list[Conversation], size: int) -> tuple[float, float]:
    """CPU and wall seconds `model.generate` takes."""
    start = time.process_time(), time.perf_counter()
    for first in range(0, len(work), size):
        wave = work[first : first + size]
        histories: list[list[int]] = [[] for _ in wave]
        for turn in range(len(wave[0].prompts)):
            for history, conversation in zip(histories, wave, strict=True):
                history.extend(conversation.prompts[turn])
            width, new = max(map(len, histories)), max(conversation.lengths[turn] for conversation in wave)
            ids = torch.tensor([[0] * (width - len(history)) + history for history in histories])
            mask = torch.tensor([[0] * (width - len(history)) + [1] * len(history) for history in histories])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new, min_new_tokens=new
                )
            for history, conversation, row in zip(histories, wave, out[:, width:].tolist(), strict=True):
                history.extend(row[: conversation.lengths[turn]])
    return time.process_time() - start[0], time.perf_counter() - start[1]


def serve_generate(connection: Connection, folder: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = load_causal_lm(folder, dtype=getattr(torch, dtype))
    config = model.generation_config
    config.eos_token_id, config.pad_token_id, config.temperature, config.top_p = None, 0, 1.0, 1.0
    connection.send(model.config.vocab_size)
    while (job := connection.recv()) is not None:
        connection.send(generate_in_waves(model, *job))


async def run_engine(engine: EmbeddedEngine, work: list[Conversation]) -> tuple[float, float]:
    """CPU and wall seconds the engine takes."""
    child = next(c for c in psutil.Process().children() if "embedded_worker" in " ".join(c.cmdline()))

    def cpu_seconds() -> float:
        return child.cpu_times().user + child.cpu_times().system

    async def play(number: int, conversation: Conversation) -> None:
        history: list[int] = []
        for prompt, length in zip(conversation.prompts, conversation.lengths, strict=True):
            history.extend(prompt)
            completion = await engine.generate(history, Sampling(max_tokens=length), session=str(number))
            assert len(completion.token_ids) == length
            history.extend(completion.token_ids)
        await engine.forget(str(number))

    start = cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(play(number, conversation) for number, conversation in enumerate(work)))
    return cpu_seconds() - start[0], time.perf_counter() - start[1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument(
        "--turns", type=int, default=4, help="of the second part, which has requests / turns conversations"
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--clock", default="wall", choices=["cpu", "wall"])
    options = parser.parse_args()
    clock = ("cpu", "wall").index(options.clock)
    folder = resolve_model(options.model)
    os.environ.update(OMP_NUM_THREADS=str(options.threads), OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")

    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    context.Process(target=serve_generate, args=(theirs, folder, options.dtype, options.threads), daemon=True).start()
    vocabulary = connection.recv()
    engine = EmbeddedEngine(
        model=folder, dtype=options.dtype, max_sequences=options.concurrency, threads=options.threads
    )
    await engine.start()
    await run_engine(engine, conversations(4, 2, vocabulary, seed=0))
    connection.send((conversations(4, 2, vocabulary, seed=0), options.concurrency))
    connection.recv()

    for name, count, turns in (
        ("single-turn", options.requests, 1),
        (f"{options.turns} turns", options.requests // options.turns, options.turns),
    ):
        speeds: list[tuple[float, float]] = []
        for number in range(options.rounds):
            work = conversations(count, turns, vocabulary, seed=number + 1)
            tokens = sum(sum(conversation.lengths) for conversation in work)
            ours = tokens / (await run_engine(engine, work))[clock]
            connection.send((work, options.concurrency))
            theirs_speed = tokens / connection.recv()[clock]
            speeds.append((ours, theirs_speed))
            print(
                f"{name} {number + 1}: {tokens} tokens; per {options.clock} second: "
                f"engine {ours:.0f}, generate {theirs_speed:.0f}",
                flush=True,
            )
        ratios = [ours / generate for ours, generate in speeds]
        print(
            f"{name}: engine {statistics.median(s[0] for s in speeds):.0f} tokens per {options.clock} second, generate "
            f"{statistics.median(s[1] for s in speeds):.0f}; ratio median {statistics.median(ratios):.2f}, "
            f"from {min(ratios):.2f} to {max(ratios):.2f}",
            flush=True,
        )
    connection.send(None)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
