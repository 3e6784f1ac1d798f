"""How the sandbox starts, what it refuses, what happens when its own parts die, and that it leaves nothing behind."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fr_lightning
from fr_lightning.envs.sandbox import PythonSandbox, SandboxUnavailable, ToolResult, isolation

LOST = "all variables, imports and files are lost"


@pytest.fixture(scope="module")
def sandbox(runner: asyncio.Runner) -> Iterator[PythonSandbox]:
    sandbox = runner.run(PythonSandbox(timeout=5.0).__aenter__())
    yield sandbox
    runner.run(sandbox.close())


def test_a_cancelled_call_leaves_nothing_running(sandbox, runner):
    async def cancelled() -> tuple[set[psutil.Process], str]:
        session = await sandbox.session()
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run("x = 1\nwhile True: pass", timeout=60), 0.3)
        left = set(psutil.Process().children(recursive=True)) - before
        output = (await session.run("'x' in globals()")).output
        await session.close()
        return left, output

    assert runner.run(cancelled()) == (set(), "False\n")


def test_a_closed_session_and_a_closed_sandbox_refuse(runner):
    async def closed() -> None:
        async with PythonSandbox(preload=()) as sandbox:
            session, other = await sandbox.session(), await sandbox.session()
            await session.close()
            await session.close()
            with pytest.raises(RuntimeError, match="session is closed"):
                await session.run("1")
        with pytest.raises(RuntimeError, match="sandbox is closed"):
            await other.run("1")
        with pytest.raises(RuntimeError, match="sandbox is closed"):
            await sandbox.session()

    runner.run(closed())


def below_python(process: psutil.Process) -> bool:
    """Whether its parent is a Python too, as a session's is; the zygote's is bubblewrap."""
    parent = process.parent()
    return parent is not None and parent.name() != "bwrap"


def test_the_sandboxs_own_death_is_unavailable_and_the_next_call_works(runner, caplog):
    async def killed() -> list[ToolResult]:
        before = set(psutil.Process().children(recursive=True))
        async with (
            PythonSandbox(preload=()) as sandbox,
            await sandbox.session() as waiting,
            await sandbox.session() as running,
        ):
            assert (await waiting.run("x = 1")).status == "ok"
            call = asyncio.create_task(running.run("import time; time.sleep(60)", timeout=30))
            await asyncio.sleep(0.2)
            started = set(psutil.Process().children(recursive=True)) - before
            (zygote,) = [p for p in started if p.name() != "bwrap" and not below_python(p)]
            zygote.kill()
            return [await call, await waiting.run("x"), await waiting.run("1 + 1")]

    during, between, after = runner.run(killed())
    assert during.status == between.status == "unavailable"
    assert LOST in between.output
    assert during.seconds < 5
    assert (after.status, after.output) == ("ok", "2\n")
    assert "starting another" in caplog.text


def test_a_session_killed_from_outside_is_unavailable(sandbox, runner):
    async def killed() -> list[ToolResult]:
        async with await sandbox.session() as session:
            before = set(psutil.Process().children(recursive=True))
            call = asyncio.create_task(session.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.3)
            init, interpreter = sorted(set(psutil.Process().children(recursive=True)) - before, key=lambda p: p.pid)
            assert interpreter.ppid() == init.pid
            init.kill()
            return [await call, await session.run("1 + 1")]

    during, after = runner.run(killed())
    assert (during.status, after.status) == ("unavailable", "ok")


# -- starting ---------------------------------------------------------------------------------------------------------


def start(runner: asyncio.Runner, **settings: Any) -> str:
    async def enter() -> str:
        async with PythonSandbox(**settings) as sandbox:
            return sandbox.isolation_in_force

    return runner.run(enter())


def test_the_level_in_force_is_told_and_logged(runner, caplog):
    with caplog.at_level(logging.INFO):
        assert start(runner, preload=()) == "namespaces"
        assert "isolation in force: namespaces" in caplog.text
        assert start(runner, preload=(), isolation="unsafe_none") == "unsafe_none"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "NO ISOLATION" in warning.getMessage()


def test_without_bubblewrap_it_refuses_and_names_the_package(runner, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="install the package `bubblewrap`"):
        start(runner)
    assert start(runner, preload=(), isolation="unsafe_none") == "unsafe_none"


def test_a_sandbox_that_does_not_hold_is_refused(runner, monkeypatch, tmp_path):
    """A `bwrap` that lets something of the host in: it starts, and the probe finds out."""
    (tmp_path / "bwrap").write_text(f'#!/bin/sh\nexec {shutil.which("bwrap")} --ro-bind /etc /etc "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match=r"does not hold.*no host files"):
        start(runner, preload=())


def test_an_interpreter_in_tmp_stays_in_view_and_out_of_reach(runner, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)  # what is the user's own alone is out of the sandbox's reach as well
        (Path(folder) / "package.py").write_text("x = 42")
        folders = [*isolation.interpreter_folders(), folder]
        monkeypatch.setattr(isolation, "interpreter_folders", lambda: folders)

        async def look() -> list[str]:
            async with PythonSandbox(preload=()) as sandbox, await sandbox.session() as session:
                cells = [
                    f"import sys; sys.path.append({folder!r}); import package; package.x",
                    f"open('{folder}/y', 'w')",
                ]
                return [(await session.run(cell)).output for cell in cells]

        seen, written = runner.run(look())
    assert seen == "42\n"
    assert "Read-only file system" in written


def test_a_module_that_is_not_there_is_named(runner):
    with pytest.raises(SandboxUnavailable, match=r"No module named 'no_such_module'[^$]*`preload`"):
        start(runner, preload=("no_such_module",))


@pytest.mark.parametrize(
    "settings", [{"isolation": "none"}, {"timeout": 0}, {"memory_mb": 0}, {"output_chars": 10}, {"processes": -1}]
)
def test_settings_that_make_no_sense(settings: dict[str, Any]):
    with pytest.raises(ValueError):
        PythonSandbox(**settings)


SCRIPT = """
import asyncio, os, sys
from fr_lightning.envs.sandbox import PythonSandbox, SandboxUnavailable
async def main():
    try:
        async with PythonSandbox(preload=()) as sandbox, await sandbox.session() as session:
            await session.run("import os\\nif os.fork() == 0:\\n    os.setsid()\\n    while True: pass")
            print(os.getuid(), sandbox.isolation_in_force, (await session.run("1 + 1")).output, flush=True)
            if "wait" in sys.argv:
                await session.run("while True: pass", timeout=600)
    except SandboxUnavailable as error:
        print(error)
asyncio.run(main())
"""


def as_ordinary_user(*options: str) -> list[str]:
    """Command prefix that runs a Python as a user without rights, its folders in view even if they are root's own."""
    if os.getuid() != 0:
        return ["bwrap", "--dev-bind", "/", "/", *options]
    folders = {Path(sys.prefix), Path(sys.base_prefix), Path(fr_lightning.__file__).resolve().parent.parent}
    closed = {p for folder in folders for p in folder.parents if not p.stat().st_mode & 0o001}
    view = [word for place in closed for word in ("--tmpfs", str(place))]
    for folder in folders:
        if closed & set(folder.parents):
            for parent in reversed([p for p in folder.parents if closed & set(p.parents)]):
                view += ["--perms", "0755", "--dir", str(parent)]
            view += ["--ro-bind", str(folder), str(folder)]
    user = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "--inh-caps=-all", "--ambient-caps=-all"]
    inner = ["bwrap", "--dev-bind", "/", "/", *options] if options else []
    return ["bwrap", "--dev-bind", "/", "/", "--cap-add", "ALL", *view, *user, *inner]


def test_as_an_ordinary_user():
    done = subprocess.run(
        [*as_ordinary_user(), sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [str(os.getuid() or 1234), "namespaces", "2"], done


def test_where_namespaces_are_forbidden_it_refuses_and_says_what_to_do():
    command = as_ordinary_user("--unshare-user", "--disable-userns")
    done = subprocess.run([*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert "forbids user namespaces" in done.stdout, done
    assert "unsafe_none" in done.stdout


# -- nothing left behind ----------------------------------------------------------------------------------------------


def test_a_trainer_that_is_killed_takes_everything_along():
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, "wait"], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    assert "namespaces" in trainer.stdout.readline()
    time.sleep(0.3)
    processes = psutil.Process(trainer.pid).children(recursive=True)
    assert len(processes) >= 5  # bubblewrap twice, the zygote, an init, the interpreter, its child
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


def test_hundreds_of_sessions_leave_nothing_behind(sandbox, runner):
    def footprint() -> tuple[int, int, set[str]]:
        me = psutil.Process()
        return me.num_fds(), len(me.children(recursive=True)), set(os.listdir(tempfile.gettempdir()))

    async def one(number: int) -> str:
        async with await sandbox.session() as session:
            code = ("print(1)", "import os; os.fork()", "open('f', 'w').write('x' * 10**6)", "import os; os._exit(1)")
            return (await session.run(code[number % 4])).status

    async def many(count: int) -> list[str]:
        statuses = []
        for start in range(0, count, 8):
            statuses += await asyncio.gather(*map(one, range(start, start + 8)))
        return statuses

    runner.run(many(8))
    before = footprint()
    statuses = runner.run(many(200))
    assert statuses == ["ok", "ok", "ok", "died"] * 50
    deadline = time.monotonic() + 5
    while (after := footprint())[:2] != before[:2] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after[:2] == before[:2]
    assert not {name for name in after[2] - before[2] if "fr-lightning" in name or "sandbox" in name}


def test_without_isolation_nothing_is_left_behind_either(runner):
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(600)"

    async def messy() -> tuple[list[str], Path, list[psutil.Process]]:
        before = set(psutil.Process().children(recursive=True))
        async with PythonSandbox(isolation="unsafe_none", preload=()) as sandbox, await sandbox.session() as session:
            cells = [
                "x = 1\nopen('f', 'w').write('x')",
                "import os; print(os.getcwd())",
                daemon,
                "x",
                "while True: pass",
                "x",
            ]
            results = [await session.run(cell, timeout=0.3) for cell in cells]
            await session.run(daemon)
            processes = set(psutil.Process().children(recursive=True)) - before
        return [r.status for r in results], Path(results[1].output.strip()), list(processes)

    statuses, folder, processes = runner.run(messy())
    assert statuses == ["ok", "ok", "ok", "ok", "timeout", "error"]
    assert not folder.parent.exists()
    assert len(processes) >= 4  # the zygote, an init, the interpreter, its daemon
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
