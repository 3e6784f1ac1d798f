"""Every attack of sandbox_attacks.txt, every forbidden system call, and every way from one session to another.

Whatever an attack comes to: the session next door, opened before it, keeps its names and its files; the call comes
back in time; the outcome is never `unavailable`; and once the session is closed none of its processes is left.
"""

import ast
import asyncio
import ctypes
import os
import platform
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from fr_lightning.envs.sandbox import PythonSandbox, ToolResult
from fr_lightning.envs.sandbox.zygote import process_table

TIMEOUT = 20.0

PRELUDE = """
import ctypes, errno, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return "got %d" % result if result >= 0 else errno.errorcode[ctypes.get_errno()]
"""


@dataclass(frozen=True)
class Attack:
    name: str
    status: set[str]
    output: str
    seconds: float
    code: str


def read_attacks() -> Iterator[Attack]:
    for block in re.split("^=== ", (Path(__file__).parent / "sandbox_attacks.txt").read_text(), flags=re.M)[1:]:
        head, code = block.split("\n---\n", 1)
        name, *lines = head.splitlines()
        fields = dict(line.split(": ", 1) for line in lines)
        if fields.get("processor", platform.machine()) == platform.machine():
            output, seconds = ast.literal_eval(fields.get("output", "''")), float(fields.get("seconds", TIMEOUT))
            yield Attack(name, set(fields["status"].split()), output, seconds, code)


def number(name: str) -> int:
    """The system call's number on this processor."""
    result = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name(name.encode())
    assert result >= 0, name
    return result


FORBIDDEN_CALLS = {
    "unshare": "0x10000000",
    "setns": "0, 0",
    "clone3": "0, 0",
    "mount": "b'x', b'/tmp', b'tmpfs', 0, 0",
    "umount2": "b'/proc', 2",
    "pivot_root": "b'/tmp', b'/tmp'",
    "chroot": "b'/tmp'",
    "open_tree": "-100, b'/', 1",
    "fsopen": "b'tmpfs', 0",
    "ptrace": "16, 1, 0, 0",
    "process_vm_readv": "1, 0, 0, 0, 0, 0",
    "pidfd_getfd": "0, 0, 0",
    "kcmp": "1, 1, 0, 0, 0",
    "memfd_create": "b'x', 0",
    "shmget": "0, 1 << 30, 0o1600",
    "msgget": "0, 0o1600",
    "semget": "0, 1, 0o1600",
    "mq_open": "b'x', 0o102, 0o600, 0",
    "io_uring_setup": "1, 0",
    "bpf": "0, 0, 0",
    "perf_event_open": "0, 0, 0, 0, 0",
    "userfaultfd": "1",
    "add_key": "b'user', b'x', b'y', 1, -3",
    "keyctl": "0, -3, 1",
    "open_by_handle_at": "-100, 0, 0",
    "inotify_init1": "0",
    "mknodat": "-100, b'/tmp/disk', 0o60600, 0xfe00",
    "setresuid": "0, 0, 0",
    "sched_setscheduler": "1, 5, 0",
    "mlock": "0, 4096",
    "personality": "0x0040000",
    "sethostname": "b'x', 1",
    "reboot": "0, 0, 0, 0",
    "kexec_load": "0, 0, 0, 0",
    "seccomp": "1, 0, 0",
}


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    os.environ["SBX_TEST_SECRET"] = "SBX_TEST_SECRET"
    yield
    del os.environ["SBX_TEST_SECRET"]


@pytest.fixture(scope="module")
def sandbox(secret, runner) -> Iterator[PythonSandbox]:
    sandbox = runner.run(PythonSandbox(timeout=TIMEOUT, memory_mb=256).__aenter__())
    yield sandbox
    runner.run(sandbox.close())


def descendants() -> set[int]:
    """Processes below this one that are alive or unreaped."""
    table = process_table()
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, (parent, _) in table.items() if parent in frontier}
        found |= frontier
    return found


def settled(wanted: set[int]) -> set[int]:
    """The processes that should not be there, once those that are on their way out have had their time."""
    deadline = time.monotonic() + 5
    while (extra := descendants() - wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    return extra


@pytest.mark.parametrize("attack", list(read_attacks()), ids=lambda attack: attack.name)
def test_attack(sandbox: PythonSandbox, runner, attack: Attack):
    async def play() -> tuple[ToolResult, ToolResult, ToolResult, set[int], int]:
        neighbour = await sandbox.session()
        await neighbour.run("secret = 42\nfor p in ('/tmp/s', '/dev/shm/s'): open(p, 'w').write('mine')")
        before, descriptors = descendants(), psutil.Process().num_fds()
        async with await sandbox.session() as session:
            result = await session.run(PRELUDE + attack.code, attack.seconds)
            again = await session.run("print('next')", attack.seconds)
        after = await neighbour.run("print(secret, *(open(p).read() for p in ('/tmp/s', '/dev/shm/s')))")
        extra, open_descriptors = settled(before), psutil.Process().num_fds() - descriptors
        await neighbour.close()
        return result, again, after, extra, open_descriptors

    result, again, after, extra, open_descriptors = runner.run(play())
    assert result.status in attack.status, result
    assert attack.output in result.output, result
    assert "BROKEN" not in result.output, result
    assert len(result.output) <= 8192
    assert result.seconds < attack.seconds + 3
    assert again.status != "unavailable"
    assert (after.status, after.output) == ("ok", "42 mine mine\n")
    assert not extra
    assert open_descriptors == 0


def answers(runner: asyncio.Runner, sandbox: PythonSandbox, code: str) -> str:
    async def play() -> str:
        async with await sandbox.session() as session:
            return (await session.run(PRELUDE + code)).output

    return runner.run(play())


@pytest.mark.parametrize(("name", "arguments"), FORBIDDEN_CALLS.items())
def test_forbidden_call(sandbox: PythonSandbox, runner: asyncio.Runner, name: str, arguments: str):
    assert answers(runner, sandbox, f"print(call({number(name)}, {arguments}))") == "ENOSYS\n"


@pytest.mark.parametrize("flag", [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_into_a_new_namespace(sandbox: PythonSandbox, runner: asyncio.Runner, flag: int):
    code = f"print(call({number('clone')}, {flag} | signal.SIGCHLD, 0, 0, 0, 0))"
    assert answers(runner, sandbox, code) == "ENOSYS\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_ALG", "AF_VSOCK"])
def test_sockets_of_other_families(sandbox: PythonSandbox, runner: asyncio.Runner, family: str):
    code = f"print(call({number('socket')}, socket.{family}, 2, 0))\n"
    code += f"print(call({number('socketpair')}, socket.{family}, 2, 0, 0))"
    assert answers(runner, sandbox, code) == "EAFNOSUPPORT\nENOSYS\n"


def test_the_same_calls_succeed_without_isolation(runner):
    """The attacks above would be noticed if they worked: where nothing holds, these do."""

    async def play() -> str:
        async with PythonSandbox(isolation="unsafe_none", preload=()) as sandbox, await sandbox.session() as session:
            code = f"print(call({number('memfd_create')}, b'x', 0)[:3], call({number('inotify_init1')}, 0)[:3])\n"
            code += "print(os.path.exists('/etc/passwd'), socket.socket(socket.AF_INET).fileno() > 0)"
            return (await session.run(PRELUDE + code)).output

    assert runner.run(play()) == "got got\nTrue True\n"


@pytest.mark.parametrize(
    ("leave", "look"),
    [
        (
            "s = socket.socket(socket.AF_UNIX); s.bind('\\0meet'); s.listen()",
            "try: socket.socket(socket.AF_UNIX).connect('\\0meet'); print('BROKEN')\nexcept OSError as e: print(e)",
        ),
        ("open('/dev/shm/x', 'w').write('x')", "print('BROKEN' if os.path.exists('/dev/shm/x') else 'empty')"),
        ("open('/tmp/x', 'w').write('x')", "print('BROKEN' if os.path.exists('/tmp/x') else 'empty')"),
        (
            "from multiprocessing.shared_memory import SharedMemory; m = SharedMemory('meet', create=True, size=9)",
            "from multiprocessing.shared_memory import SharedMemory\n"
            "try: SharedMemory('meet'); print('BROKEN')\nexcept FileNotFoundError as e: print(e)",
        ),
        ("import numpy; numpy.pi = 3; sys.modules['json'] = None", "import numpy, json; print(numpy.pi)"),
        ("import builtins; builtins.print = None", "print('mine')"),
        ("os.environ['X'] = 'x'", "print('BROKEN' if 'X' in os.environ else 'clean')"),
        ("x = 1", "print('BROKEN' if 'x' in globals() else 'clean')"),
        ("os.sched_setaffinity(0, [0])", "print(len(os.sched_getaffinity(0)))"),
    ],
)
def test_nothing_passes_from_one_session_to_another(sandbox: PythonSandbox, runner, leave: str, look: str):
    async def play() -> tuple[ToolResult, ToolResult]:
        async with await sandbox.session() as first, await sandbox.session() as second:
            left = await first.run(PRELUDE + leave)
            seen = await second.run(PRELUDE + look)
            async with await sandbox.session() as third:
                assert (await third.run(PRELUDE + look)).output == seen.output
            return left, seen

    left, seen = runner.run(play())
    assert left.status == "ok", left
    assert seen.status == "ok", seen
    assert "BROKEN" not in seen.output
    assert seen.output.strip() not in ("3", "")


def test_a_listener_on_the_host_is_out_of_reach(sandbox: PythonSandbox, runner, tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as by_name, socket.socket(socket.AF_UNIX) as by_path:
        by_name.bind("\0fr-lightning-test")
        by_path.bind(str(tmp_path / "socket"))
        by_name.listen()
        by_path.listen()
        code = f"for place in ('\\0fr-lightning-test', {str(tmp_path / 'socket')!r}):\n"
        code += "    s = socket.socket(socket.AF_UNIX)\n    try: s.connect(place); print('BROKEN')\n"
        code += "    except OSError as e: print(type(e).__name__)"

        async def play() -> ToolResult:
            async with await sandbox.session() as session:
                return await session.run(PRELUDE + code)

        assert runner.run(play()).output == "ConnectionRefusedError\nFileNotFoundError\n"
