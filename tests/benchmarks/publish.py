"""How long an update of the embedded engine's weights takes, and how many bytes it moves, by the size of the model.

    python -m tests.benchmarks.publish --models embedded HuggingFaceTB/SmolLM2-135M-Instruct --rounds 20

The time is from handing over the weights until the engine samples under them; `pause` is how long of it generation
stood still. Measured with an idle engine and with one that generates all the time, in turn. The lower bound is what
the machine needs to copy as many bytes twice from memory to memory (into the shared buffer, out of it into the
model), measured in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch

from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.models import load_causal_lm, resolve_model

MIB = 2**20


def copy_seconds(tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> float:
    """Of two copies of all of them."""
    began = time.perf_counter()
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.copy_(tensor)
        tensor.copy_(buffer)
    return time.perf_counter() - began


async def keep_busy(engine: EmbeddedEngine, requests: int) -> None:
    async def one(number: int) -> None:
        while True:
            await engine.generate([5 + number], Sampling(max_tokens=128))

    await asyncio.gather(*(one(number) for number in range(requests)))


async def measure(name: str, rounds: int, requests: int) -> None:
    folder = resolve_model(name)
    model = load_causal_lm(folder)
    weights = [(key, tensor.detach()) for key, tensor in model.named_parameters()]
    size = sum(tensor.nbytes for _, tensor in weights)
    tensors = [tensor for _, tensor in weights]
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    engine = EmbeddedEngine(max_context=256, max_sequences=requests)
    await engine.start(folder)
    found: dict[str, list[float]] = {"copy": [], "idle": [], "busy": [], "busy pause": []}
    version = 0
    for _ in range(rounds + 1):  # the first round warms up
        found["copy"].append(copy_seconds(tensors, buffers))
        for state in ("idle", "busy"):
            load = asyncio.create_task(keep_busy(engine, requests)) if state == "busy" else None
            if load is not None:
                await asyncio.sleep(0.3)
            version += 1
            began = time.perf_counter()
            await engine.update_weights(weights, version)
            found[state].append(time.perf_counter() - began)
            if load is not None:
                found["busy pause"].append(engine.pause_seconds)
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
    await engine.close()
    median = {key: statistics.median(values[1:]) for key, values in found.items()}
    worst = {key: max(values[1:]) for key, values in found.items()}
    print(f"{name}: {size / MIB:,.1f} MiB, {rounds} rounds; lower bound {1000 * median['copy']:.1f} ms")
    for key in ("idle", "busy", "busy pause"):
        middle, longest, times = 1000 * median[key], 1000 * worst[key], median[key] / median["copy"]
        print(f"  {key:<11} median {middle:8.1f} ms, worst {longest:8.1f} ms, {times:.1f} × the bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["embedded", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16, help="in flight while the engine is busy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        asyncio.run(measure(name, args.rounds, args.requests))


if __name__ == "__main__":
    main()
