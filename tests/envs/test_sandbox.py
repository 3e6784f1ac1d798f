"""What the Python tool gives the model, call by call."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fr_lightning.envs.sandbox import PythonSandbox, ToolResult
from fr_lightning.envs.sandbox.output import Output

CASES = [json.loads(line) for line in (Path(__file__).parent / "tool_cases.jsonl").read_text().splitlines()]
LOST = "all variables, imports and files are lost"


@pytest.fixture(scope="module")
def sandbox(runner: asyncio.Runner) -> Iterator[PythonSandbox]:
    os.environ["SBX_TEST_SECRET"] = "SBX_TEST_SECRET"
    sandbox = runner.run(PythonSandbox(timeout=2.0, memory_mb=512).__aenter__())
    yield sandbox
    runner.run(sandbox.close())
    del os.environ["SBX_TEST_SECRET"]


def play(runner: asyncio.Runner, sandbox: PythonSandbox, *cells: str, timeout: float | None = None) -> list[ToolResult]:
    """The cells in one new session."""

    async def session() -> list[ToolResult]:
        async with await sandbox.session() as session:
            return [await session.run(cell, timeout) for cell in cells]

    return runner.run(session())


def meets(result: ToolResult, expect: dict[str, str]) -> bool:
    match expect:
        case {"stdout_contains": text}:
            return result.status in ("ok", "error") and text in result.output and result.output != ""
        case {"error_contains": text}:
            return text in result.output
        case {"killed": status}:
            return result.status == status and LOST in result.output
        case {"blocked": _}:
            return result.status != "unavailable"
    raise ValueError(expect)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_shared_case(sandbox: PythonSandbox, runner: asyncio.Runner, case: dict[str, Any]):
    before = [
        other["code"] for other in CASES[: CASES.index(case)] if other.get("session", 0) == case.get("session", 1)
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = case["code"].replace("{PORT}", str(listener.getsockname()[1]))
        timeout = 1.0 if case["expect"].get("killed") == "timeout" else 30.0
        result = play(runner, sandbox, *before, code, timeout=timeout)[-1]
    assert meets(result, case["expect"]), result
    assert "LEAK" not in result.output
    assert "CONNECTED" not in result.output
    assert 'File "/' not in result.output


def test_a_session_is_a_notebook(sandbox: PythonSandbox, runner: asyncio.Runner):
    first, second, third, fourth = play(
        runner,
        sandbox,
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint('out again')\n1, None",
        "x = _",
        "x",
        "None",
    )
    assert first.output == "out\nerr\nout again\n(1, None)\n"
    assert [second.output, third.output, fourth.output] == ["(no output)", "(1, None)\n", "(no output)"]
    assert {r.status for r in (first, second, third, fourth)} == {"ok"}


def test_a_traceback_holds_the_models_frames_only(sandbox: PythonSandbox, runner: asyncio.Runner):
    cells = [
        "def f(x):\n    import numpy as np\n    return np.linalg.inv(np.zeros((x, x)))",
        "def g():\n    try:\n        f(2)\n    except Exception as e:\n        raise KeyError('k') from e\ng()",
        "import sympy\nsympy.solve('x +* 2')",
        "def h(n): return k(n + 1)\ndef k(n): return h(n)\nh(0)",
        "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])",
    ]
    _, chained, deep, mutual, group = play(runner, sandbox, *cells)
    assert "LinAlgError: Singular matrix" in chained.output
    assert "The above exception was the direct cause of" in chained.output
    assert '<cell 1>", line 3, in f' in chained.output
    assert "return np.linalg.inv" in chained.output
    for result in (chained, deep, mutual, group):
        assert result.status == "error"
        files = [line.split('"')[1] for line in result.output.splitlines() if line.lstrip(" |").startswith("File ")]
        assert all(file.startswith("<") for file in files), result.output
    assert "RecursionError" in mutual.output
    assert len(mutual.output.splitlines()) <= 45
    assert "TypeError: b" in group.output


def test_state_after_an_exception_an_exit_and_a_full_memory(sandbox: PythonSandbox, runner: asyncio.Runner):
    results = play(
        runner,
        sandbox,
        "kept = 1\nraise SystemExit('bye')",
        "x = []\nwhile True: x.append(bytearray(10**7))",
        "del x\nkept + len(bytearray(10**8)) - 10**8",
        timeout=30.0,
    )
    assert [r.status for r in results] == ["error", "error", "ok"]
    assert "SystemExit: bye" in results[0].output
    assert results[1].output.endswith("MemoryError\n")
    assert results[2].output == "1\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import os; os.abort()", "died"),
        ("while True: print('x' * 10**6)", "flood"),
    ],
)
def test_a_lost_interpreter_says_so_and_the_next_call_starts_afresh(sandbox, runner, code: str, status: str):
    cells = [
        "x = 1; open('file', 'w').write('x')",
        f"print('so far')\n{code}",
        "import os; print('x' in globals(), os.path.exists('file'))",
    ]
    kept, lost, fresh = play(runner, sandbox, *cells, timeout=0.5)
    assert kept.status == "ok"
    assert (lost.status, fresh.status) == (status, "ok")
    assert "so far" in lost.output
    assert LOST in lost.output
    assert fresh.output == "False False\n"


def test_a_timeout_shows_where_the_code_was_and_keeps_to_its_deadline(sandbox, runner):
    result = play(runner, sandbox, "def wait():\n    while True:\n        pass\nwait()", timeout=0.3)[0]
    assert 0.3 <= result.seconds < 1.3
    assert 'File "<cell 1>", line 4' in result.output
    assert "the time limit of 0.3 s" in result.output


def test_output_keeps_its_beginning_and_its_end(sandbox, runner):
    result = play(runner, sandbox, "print('start'); print('x' * 10**6); print('finish'); 1 / 0")[0]
    assert result.truncated
    assert len(result.output) <= sandbox.output_chars
    assert result.output.startswith("start\nxxx")
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert not play(runner, sandbox, "print('x' * 8000)")[0].truncated


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.integers(64, 200), st.integers(1, 7), st.booleans()
)
def test_output_in_bounded_memory(texts: list[str], limit: int, step: int, with_note: bool):
    output, data, note = Output(limit), "".join(texts).encode(), "[note]" if with_note else ""
    for start in range(0, len(data), step):
        output.feed(data[start : start + step])
        assert len(output.head) + len(output.tail) <= 2 * limit
    output.feed(b"", final=True)
    text, truncated = output.text(note)
    whole = "".join(texts)
    assert len(text) <= limit
    assert text.endswith(note)
    if not truncated:
        assert text.startswith(whole)
    else:
        left_out = int(text.split("[... ")[-1].split(" characters left out")[0])
        shown = (
            text.removesuffix(note)
            .replace(f"\n[... {left_out} characters left out ...]\n", "")
            .removesuffix("\n" * with_note)
        )
        assert len(whole) - left_out in (len(shown), len(shown) + 1)


def test_a_fork_that_runs_on_to_the_end_of_its_cell_ends_there(sandbox, runner):
    forked, after, last = play(
        runner, sandbox, "import os, time\nx = 1\nif os.fork() == 0: time.sleep(0.1)", "x", "time.sleep(0.3); x"
    )
    assert [forked.status, after.status, last.status] == ["ok"] * 3
    assert [forked.output, after.output, last.output] == ["(no output)", "1\n", "1\n"]


def test_libraries_work_as_they_do_outside(sandbox, runner):
    results = play(
        runner,
        sandbox,
        "import multiprocessing as m\ndef square(x): return x * x\nwith m.Pool(2) as p: print(p.map(square, range(4)))",
        "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)",
        "import concurrent.futures as c\nwith c.ThreadPoolExecutor(4) as e: print(sum(e.map(abs, range(-3, 0))))",
        "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 7\nasyncio.run(f())",
        "import sqlite3; sqlite3.connect('x.db').execute('select 1 + 1').fetchall()",
        "import tempfile, shutil\nwith tempfile.NamedTemporaryFile() as f: print(shutil.copy2(f.name, 'copy'))",
        "from dataclasses import *\n@dataclass\nclass P:\n    x: int\nimport pickle; pickle.loads(pickle.dumps(P(3)))",
        "import inspect; print(inspect.getsource(square))",
        "import ctypes; ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 5)()",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as s: print('caught')\ns.getvalue()",
        "import sys, io; sys.stdout = io.StringIO(); print('swallowed')",
        "print('heard again')",
    )
    assert [r.status for r in results] == ["ok"] * len(results), results
    expected = ["[0, 1, 4, 9]\n", "hi\n\n", "6\n", "7\n", "[(2,)]\n", "copy\n", "P(x=3)\n"]
    expected += ["def square(x): return x * x\n\n", "5\n", "'caught\\n'\n", "(no output)", "heard again\n"]
    assert [r.output for r in results] == expected


def test_sessions_draw_different_random_numbers(sandbox, runner):
    code = "import numpy as np, random\nprint(np.random.rand(), random.random())"
    draws = {number for _ in range(3) for number in play(runner, sandbox, code)[0].output.split()}
    assert len(draws) == 6


def test_code_that_is_not_python(sandbox, runner):
    results = play(runner, sandbox, "", "\x00", "\ud800 = 1", "x" * 200_000, "if", "return 1", "'''")
    assert [r.status for r in results] == ["ok", *["error"] * 6]
    assert results[0].output == "(no output)"
    assert "too long" in results[3].output
    assert "SyntaxError" in results[4].output


def test_many_sessions_at_once_keep_their_own_state_and_the_loop_its_pulse(sandbox, runner):
    async def one(number: int) -> list[str]:
        async with await sandbox.session() as session:
            await session.run(f"x = {number}")
            return [(await session.run("x += 1; print(x)")).output for _ in range(3)]

    async def pulse(longest: list[float]) -> None:
        while True:
            start = time.monotonic()
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.monotonic() - start)

    async def all_of_them() -> tuple[list[list[str]], float]:
        longest = [0.0]
        task = asyncio.create_task(pulse(longest))
        outputs = await asyncio.gather(*map(one, range(32)))
        task.cancel()
        return outputs, longest[0]

    outputs, longest = runner.run(all_of_them())
    assert outputs == [[f"{number + step}\n" for step in (1, 2, 3)] for number in range(32)]
    assert longest < 0.5
