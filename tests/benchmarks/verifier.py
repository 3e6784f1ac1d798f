"""Checks per second and latency of `MathVerifier` beside plain math-verify, on the same cases.

    python -m tests.benchmarks.verifier --rounds 5

One process, one case at a time, each case by one and then by the other, in a new order every round; math-verify with
its defaults in the main thread (the only place where its timeouts work). Cases come from `tests/envs/math_cases.jsonl`
without its denial-of-service ones. "right" counts verdicts as the file expects them; "false" those wrongly correct.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import math_verify

from fr_lightning.envs.verifier import MathVerifier

CASES = Path(__file__).parents[1] / "envs" / "math_cases.jsonl"


def plain(response: str, answer: str) -> bool:
    return math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(response))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    cases = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    cases = [case for case in cases if not case["id"].startswith("dos")]
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
    print(f"{len(cases)} cases, {arguments.rounds} rounds")
    print(f"{'grader':14}{'checks/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'right':>8}{'false':>7}")
    for name, values in seconds.items():
        quantiles = statistics.quantiles(values, n=100)
        print(
            f"{name:14}{len(values) / sum(values):10.0f}{1e3 * quantiles[49]:9.2f}{1e3 * quantiles[98]:9.2f}"
            f"{1e3 * max(values):9.2f}{right[name] / arguments.rounds:8.1f}{false[name] / arguments.rounds:7.1f}"
        )


if __name__ == "__main__":
    main()
