"""What the Python sandbox costs, beside a fresh `python -c` per call; and whether thousands of sessions leave a trace.

    python tests/benchmarks/sandbox.py               # the table: under a minute
    python tests/benchmarks/sandbox.py --endure 10000  # the footprint before, during and after

Times are medians with the 95th percentile in brackets. Both ways run alternately, so that they share the machine's
other load; memory is the sum of proportional set sizes, read from outside.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fr_lightning.envs.sandbox import PythonSandbox

CODE = "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))"
PLAIN = "print(6 * 7)"


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f} ms ({statistics.quantiles(seconds, n=20)[-1] * 1e3:.2f})"


def subprocess_seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return time.perf_counter() - start


def memory_mb(processes: list[psutil.Process], kind: str) -> float:
    return sum(getattr(process.memory_full_info(), kind) for process in processes) / (1 << 20)


async def compare(rounds: int) -> None:
    start = time.perf_counter()
    async with PythonSandbox() as sandbox:
        rows = [("start-up, once", f"{(time.perf_counter() - start) * 1e3:.0f} ms", "none")]
        first: list[float] = []
        close: list[float] = []
        later: list[float] = []
        alone: list[float] = []
        first_sympy: list[float] = []
        later_sympy: list[float] = []
        alone_sympy: list[float] = []
        for _ in range(rounds):
            for code, new, again, plain in (
                (PLAIN, first, later, alone),
                (CODE, first_sympy, later_sympy, alone_sympy),
            ):
                start = time.perf_counter()
                session = await sandbox.session()
                assert (await session.run(code)).status == "ok"
                new.append(time.perf_counter() - start)
                again += [(await session.run(code)).seconds for _ in range(5)]
                start = time.perf_counter()
                await session.close()
                close.append(time.perf_counter() - start)
                plain.append(subprocess_seconds(code))
        rows += [
            ("new session and its first call", summary(first), summary(alone)),
            ("a later call", summary(later), summary(alone)),
            ("new session and its first call, sympy", summary(first_sympy), summary(alone_sympy)),
            ("a later call, sympy", summary(later_sympy), summary(alone_sympy)),
            ("closing a session", summary(close), "none"),
            ("calls per second, 32 sessions at once", await rate(sandbox), subprocess_rate()),
            ("sessions per second, 32 at once", await session_rate(sandbox), subprocess_rate()),
        ]
        rows += await memory(sandbox)
    print("| | sandbox | `python -c` |\n| --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


async def rate(sandbox: PythonSandbox, sessions: int = 32, calls: int = 100) -> str:
    opened = [await sandbox.session() for _ in range(sessions)]
    await asyncio.gather(*(session.run("x = 0") for session in opened))

    async def play(session) -> None:
        for _ in range(calls):
            assert (await session.run("x += 1; print(x)")).status == "ok"

    start = time.perf_counter()
    await asyncio.gather(*map(play, opened))
    seconds = time.perf_counter() - start
    await asyncio.gather(*(session.close() for session in opened))
    return f"{sessions * calls / seconds:.0f}"


async def session_rate(sandbox: PythonSandbox, sessions: int = 192) -> str:
    limit = asyncio.Semaphore(32)

    async def play() -> None:
        async with limit, await sandbox.session() as session:
            assert (await session.run(PLAIN)).status == "ok"

    start = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(sessions)))
    return f"{sessions / (time.perf_counter() - start):.0f}"


def subprocess_rate(calls: int = 64) -> str:
    start = time.perf_counter()
    running: list[subprocess.Popen] = []
    for _ in range(calls):
        running.append(subprocess.Popen([sys.executable, "-c", PLAIN], stdout=subprocess.DEVNULL))
        if len(running) == 32:
            running.pop(0).wait()
    for process in running:
        process.wait()
    return f"{calls / (time.perf_counter() - start):.0f}"


async def memory(sandbox: PythonSandbox, sessions: int = 32) -> list[tuple[str, str, str]]:
    mine = psutil.Process()
    warm = memory_mb(mine.children(recursive=True), "pss")
    opened = [await sandbox.session() for _ in range(sessions)]
    for session in opened:
        await session.run(CODE)
    grown = memory_mb(mine.children(recursive=True), "pss") - warm
    for session in opened:
        await session.close()
    lone = subprocess.Popen([sys.executable, "-c", CODE + "\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert lone.stdin is not None
    assert lone.stdout is not None
    lone.stdout.readline()
    alone = memory_mb([psutil.Process(lone.pid)], "uss")
    lone.communicate(b"\n")
    return [
        ("memory, warm and idle", f"{warm:.0f} MiB", "none"),
        ("memory per live session (of 32), sympy used", f"{grown / sessions:.1f} MiB", f"{alone:.0f} MiB"),
    ]


def footprint() -> str:
    mine = psutil.Process()
    children = mine.children(recursive=True)
    below = len(os.listdir(tempfile.gettempdir())), len(os.listdir("/dev/shm"))
    zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in children)
    used = psutil.virtual_memory()
    return (
        f"trainer {mine.memory_info().rss / (1 << 20):.1f} MiB, sandbox {memory_mb(children, 'pss'):.1f} MiB, "
        f"host used {used.used / (1 << 20):.0f} MiB, slab {slab_mb():.0f} MiB; {len(children)} processes "
        f"({zombies} zombies), {mine.num_fds()} descriptors, {below[0]} + {below[1]} files in the temporary folders"
    )


def slab_mb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("SUnreclaim:")) / 1024


async def endure(sessions: int) -> None:
    kinds: list[Callable[[int], str]] = [
        lambda n: f"x = {n}\nprint(x)",
        lambda n: "open('f', 'wb').write(b'x' * 10**6)",
        lambda n: "import os\nos.fork()",
        lambda n: CODE,
        lambda n: "import os\nos._exit(1)",
        lambda n: "1 / 0",
    ]
    statuses: dict[str, int] = {}
    async with PythonSandbox() as sandbox:
        limit = asyncio.Semaphore(8)

        async def play(number: int) -> None:
            async with limit, await sandbox.session() as session:
                status = (await session.run(kinds[number % len(kinds)](number), timeout=60)).status
                statuses[status] = statuses.get(status, 0) + 1

        await asyncio.gather(*map(play, range(100)))
        start, done = time.perf_counter(), 100
        print(f"{done:6d} sessions: {footprint()}", flush=True)
        while done < sessions:
            step = max(1, min(sessions // 5, sessions - done))
            await asyncio.gather(*map(play, range(done, done + step)))
            done += step
            print(f"{done:6d} sessions: {footprint()}", flush=True)
        print(f"{(sessions - 100) / (time.perf_counter() - start):.0f} sessions per second; {statuses}")
    print(f"  closed: {footprint()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="new sessions of each kind")
    parser.add_argument("--endure", type=int, metavar="SESSIONS", help="open and close so many sessions instead")
    arguments = parser.parse_args()
    asyncio.run(endure(arguments.endure) if arguments.endure else compare(arguments.rounds))
