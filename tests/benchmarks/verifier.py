"""Checks per second and latency of `MathVerifier` beside plain math-verify, on the same cases.

    python -m tests.benchmarks.verifier --rounds 5

One process, one case at a time, each case by one and then by the other, in a new order every round; math-verify with
its defaults in the main thread (the only place where its timeouts work). Cases come from `tests/envs/math_cases.jsonl`
without its denial-of-service ones. "right" counts verdicts as the file expects them; "false" those wrongly correct.

Then all cases, denial of service included, are checked at once from an asyncio loop, and the longest gap between two
beats of a 1 ms heartbeat on that loop is reported, beside that of a loop which only sleeps: what the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import math_verify

from fr_lightning.envs.verifier import MathVerifier

CASES = Path(__file__).parents[1] / "envs" / "math_cases.jsonl"


def plain(response: str, answer: str) -> bool:
    return math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(response))


async def longest_pause(work: Awaitable[object]) -> float:
    """Seconds of the longest gap between two beats while `work` is done."""
    working, longest, last = asyncio.ensure_future(work), 0.0, time.perf_counter()
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await working
    return longest


def heartbeat(verifier: MathVerifier, cases: list[dict]) -> tuple[float, float]:
    """Longest pause with every case checked at once, and with nothing to do for as long."""

    async def checks() -> None:
        await asyncio.gather(*(verifier.verify(case["prediction"], case["gold"]) for case in cases))

    start = time.perf_counter()
    busy = asyncio.run(longest_pause(checks()))
    return busy, asyncio.run(longest_pause(asyncio.sleep(time.perf_counter() - start)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    every = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    cases = [case for case in every if not case["id"].startswith("dos")]
    rng = random.Random(arguments.seed)
    with MathVerifier() as verifier:
        graders: dict[str, Callable[[str, str], bool]] = {
            "MathVerifier": lambda response, answer: verifier.verify_sync(response, answer).correct,
            "math-verify": plain,
        }
        seconds: dict[str, list[float]] = {name: [] for name in graders}
        right = dict.fromkeys(graders, 0)
        false = dict.fromkeys(graders, 0)
        for round_number in range(arguments.rounds + 1):  # the first is a warm-up
            for case in rng.sample(cases, len(cases)):
                for name in rng.sample(list(graders), len(graders)):
                    start = time.perf_counter()
                    correct = graders[name](case["prediction"], case["gold"])
                    elapsed = time.perf_counter() - start
                    if round_number:
                        seconds[name].append(elapsed)
                        right[name] += correct is case["expected"]
                        false[name] += correct and not case["expected"]
        pauses = [heartbeat(verifier, every) for _ in range(arguments.rounds)]
    print(f"{len(cases)} cases, {arguments.rounds} rounds")
    print(f"{'grader':14}{'checks/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'right':>8}{'false':>7}")
    for name, values in seconds.items():
        quantiles = statistics.quantiles(values, n=100)
        print(
            f"{name:14}{len(values) / sum(values):10.0f}{1e3 * quantiles[49]:9.2f}{1e3 * quantiles[98]:9.2f}"
            f"{1e3 * max(values):9.2f}{right[name] / arguments.rounds:8.1f}{false[name] / arguments.rounds:7.1f}"
        )
    busy, idle = (statistics.median(column) * 1e3 for column in zip(*pauses, strict=True))
    worst = 1e3 * max(pause for pause, _ in pauses)
    print(f"longest pause of the loop: {busy:.1f} ms (worst {worst:.1f}); of an idle one {idle:.1f} ms")


if __name__ == "__main__":
    main()
