"""What someone would try who has read the sandbox's source. Each attack gets a deadline and must leave no trace.

Whatever the attack prints: the session next door, opened before it, keeps its names and its files; the call comes
back in time; the outcome is never `unavailable`; and once the session is closed none of its processes is left.
"""

import ctypes
import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fr_lightning.envs.sandbox import PythonSandbox, ToolResult
from fr_lightning.envs.sandbox.zygote import process_table

TIMEOUT = 2.0

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
    code: str
    expect: str | None = None
    """What the output must contain."""
    status: set[str] = field(default_factory=lambda: {"ok"})
    forbid: str = "BROKEN"
    """What the output must not contain."""


def number(name: str) -> int:
    resolve = ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name
    result = resolve(name.encode())
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

NO_SUCH_FAMILY = {"AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16, "AF_PACKET": 17, "AF_ALG": 38, "AF_VSOCK": 40}

ATTACKS = [
    Attack(
        "forbidden-calls",
        f"for name, (number, *arguments) in {{"
        + ", ".join(f"{name!r}: ({number(name)}, {arguments})" for name, arguments in FORBIDDEN_CALLS.items())
        + "}.items():\n    answer = call(number, *arguments)\n    if answer != 'ENOSYS': print('BROKEN', name, answer)",
        "(no output)",
    ),
    Attack(
        "clone-into-namespaces",
        f"print([call({number('clone')}, flag | signal.SIGCHLD, 0, 0, 0, 0)"
        " for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)])",
        str(["ENOSYS"] * 7),
    ),
    Attack(
        "sockets-of-other-families",
        f"for name, family in {NO_SUCH_FAMILY}.items():\n    try: socket.socket(family, socket.SOCK_DGRAM);"
        " print('BROKEN', name)\n    except OSError as e: print(e.errno == errno.EAFNOSUPPORT)",
        "True\n" * len(NO_SUCH_FAMILY),
    ),
    Attack(
        "limits-raised-again",
        "import resource as r\nfor name in (r.RLIMIT_AS, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        "    try: r.setrlimit(name, (r.RLIM_INFINITY,) * 2); print('BROKEN', name)\n"
        "    except (ValueError, PermissionError, OSError): pass",
        "(no output)",
    ),
    Attack(
        "limits-of-init-changed",
        "import resource as r\ntry: print('BROKEN', r.prlimit(1, r.RLIMIT_AS, (1, 1)))\nexcept OSError as e: print(e)",
        "not implemented",
    ),
    Attack(
        "priority-of-init-changed",
        "try: os.setpriority(os.PRIO_PROCESS, 1, 19); print('BROKEN')\nexcept OSError as e: print(e)",
        "not implemented",
    ),
    Attack(
        "set-user-id-programs",
        "import subprocess\nfor name in ('su', 'mount', 'newgrp', 'passwd', 'bwrap'):\n"
        "    try:\n        p = subprocess.run([name, '-c', 'id -u'] if name == 'su' else [name, '--unshare-user', 'true'],"
        " capture_output=True)\n        if p.returncode == 0 or p.stdout.strip() == b'0': print('BROKEN', name)\n"
        "    except OSError: pass\nprint(os.getuid() != 0)",
        "True",
    ),
    Attack(
        "interpreter-poisoned",
        "import numpy, json\nfor path in (numpy.__file__, json.__file__, sys.executable, '/usr/bin/env',"
        " '/run/sandbox/repl.py', '/dev/null/x', '/x', '/etc/x', '/run/x', '/dev/x', '/proc/x'):\n"
        "    for mode in ('a', 'w'):\n        try: open(path, mode); print('BROKEN', path)\n        except OSError: pass\n"
        "try: os.chmod(os.path.dirname(json.__file__), 0o777); print('BROKEN')\nexcept OSError as e: print('refused')",
        "refused",
    ),
    Attack(
        "devices-and-kernel-files",
        "for path in ('/dev/mem', '/dev/kmsg', '/dev/tty', '/dev/ptmx', '/dev/pts', '/dev/vda', '/dev/fuse', '/dev/kvm',"
        " '/dev/nvidiactl', '/sys/kernel', '/proc/self/mem', '/proc/1/environ', '/proc/sys', '/proc/keys', '/etc/shadow',"
        " '/home', '/var', '/boot', '/mnt', '/run/docker.sock', '/run/dbus'):\n"
        "    if os.path.exists(path): print('BROKEN', path)",
        "(no output)",
    ),
    Attack(
        "parent-folders-listed",
        "import sysconfig\nplace = sysconfig.get_paths()['purelib']\nwhile place != '/':\n"
        "    place = os.path.dirname(place)\n"
        "for root in ('/root', '/home', '/work', '/opt', '/srv'):\n    if os.path.isdir(root):\n"
        "        for name in os.listdir(root):\n"
        "            if not any(p.startswith(f'{root}/{name}') for p in (*sys.path, sys.prefix, sys.base_prefix)):"
        " print('BROKEN', root, name)",
        "(no output)",
    ),
    Attack(
        "descriptors-inherited",
        "found = []\nfor fd in range(4096):\n    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\nfound",
        "[0, 1, 2, 3]",
    ),
    Attack(
        "host-environment-in-memory",
        "ctypes.c_char_p.in_dll(libc, 'environ')\n"
        "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\ni = 0\nnames = []\n"
        "while environ[i]: names.append(environ[i].split(b'=')[0].decode()); i += 1\n"
        "print('BROKEN' if 'SBX_TEST_SECRET' in names else 'clean')",
        "clean",
    ),
    Attack("reply-forged", "os.write(3, b'1 ok')\nprint('still here')", status={"ok", "died"}),
    Attack(
        "reply-forged-to-escape-the-deadline",
        "os.write(3, b'1 ok')\nwhile True: pass",
        status={"ok", "died"},
    ),
    Attack("reply-of-the-wrong-cell", "os.write(3, b'7 ok')\ntime.sleep(60)", "connection", {"died"}),
    Attack("reply-is-garbage", "os.write(3, bytes(range(256)) * 16)\ntime.sleep(60)", "connection", {"died"}),
    Attack("reply-claims-unavailable", "os.write(3, b'1 unavailable')\ntime.sleep(60)", "connection", {"died"}),
    Attack("reply-flood", "while True:\n    os.write(3, b'x' * 60000)", None, {"died"}),
    Attack(
        "descriptors-sent-to-the-trainer",
        "s = socket.socket(fileno=os.dup(3))\nfor i in range(200):\n"
        "    socket.send_fds(s, [b'init 1 {}'], [0, 1, 2])\ntime.sleep(60)",
        None,
        {"died"},
    ),
    Attack(
        "channel-shut-down-before-death",
        "socket.socket(fileno=3).shutdown(socket.SHUT_RDWR)\nos.kill(os.getpid(), 9)",
        None,
        {"died"},
    ),
    Attack("channel-shut-down", "socket.socket(fileno=3).shutdown(socket.SHUT_RDWR)\ntime.sleep(60)", None, {"died"}),
    Attack("all-descriptors-closed", "os.closerange(0, 256)\nwhile True: pass", None, {"died"}),
    Attack("interpreter-replaced", "os.execv('/usr/bin/sleep', ['sleep', '60'])", None, {"died"}),
    Attack(
        "main-thread-leaves-the-process",
        "threading.Thread(target=time.sleep, args=(60,)).start()\nlibc.pthread_exit(0)",
        None,
        {"died", "timeout"},
    ),
    Attack("stopped", "os.kill(os.getpid(), signal.SIGSTOP)", "lost", {"timeout"}),
    Attack(
        "interrupts-ignored",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "lost",
        {"timeout"},
    ),
    Attack(
        "interrupts-swallowed",
        "while True:\n    try:\n        while True: pass\n    except BaseException: print('no')",
        "lost",
        {"timeout"},
    ),
    Attack("interrupts-out-of-reach", "9**(9**9)", "lost", {"timeout"}),
    Attack(
        "init-killed",
        "for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\nprint('sent')",
        None,
        {"ok", "error", "died"},
    ),
    Attack(
        "init-drowned-in-signals",
        "end = time.time() + 1\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "while time.time() < end: os.kill(1, signal.SIGINT)\nprint('sent')",
        None,
        {"ok", "died"},
    ),
    Attack(
        "everyone-killed",
        "os.kill(-1, signal.SIGKILL)\nos.kill(-1, signal.SIGINT)\ntime.sleep(0.1)",
        None,
        {"ok", "error", "died"},
    ),
    Attack(
        "fork-goes-on-to-reply",
        "pids = [os.fork() for _ in range(3)]\nprint('cell', flush=True)",
        "cell",
    ),
    Attack(
        "daemon-that-keeps-the-output-open",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        time.sleep(600)\n    os._exit(0)\nprint('left one behind')",
        "left one behind",
    ),
    Attack(
        "fork-bomb-that-restarts-itself",
        "def bomb():\n    while True:\n        try:\n            if os.fork() == 0: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "        except OSError: pass\nbomb()",
        "lost",
        {"timeout"},
    ),
    Attack(
        "thread-bomb",
        "started = 0\ntry:\n    while True:\n        threading.Thread(target=time.sleep, args=(60,), daemon=True).start();"
        " started += 1\nexcept RuntimeError: print(started <= 33)",
        "True",
    ),
    Attack(
        "zombies",
        "made = 0\ntry:\n    while True:\n        if os.fork() == 0: os._exit(0)\n        made += 1\n"
        "except OSError: print(made <= 33)",
        "True",
    ),
    Attack(
        "memory-of-many-processes",
        "for _ in range(16):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (150 << 20)\n        time.sleep(60)\n"
        "        os._exit(0)\ntime.sleep(60)",
        "MiB of memory",
        {"died"},
    ),
    Attack(
        "memory-of-many-processes-hidden",
        "libc.prctl(4, 0, 0, 0, 0)\nfor _ in range(16):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (150 << 20)\n"
        "        time.sleep(60)\n        os._exit(0)\ntime.sleep(60)",
        "MiB of memory",
        {"died"},
    ),
    Attack(
        "memory-shared-by-many-processes",
        "import mmap\nfor _ in range(16):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 150 << 20)\n"
        "        for i in range(0, 150 << 20, 4096): m[i] = 1\n        time.sleep(60)\ntime.sleep(60)",
        "MiB of memory",
        {"died"},
    ),
    Attack(
        "memory-in-crumbs",
        "x = []\nwhile True: x.append([len(x)] * 3)",
        "MemoryError",
        {"error", "died"},
    ),
    Attack(
        "memory-in-one-gulp",
        "'x' * (1 << 40)",
        "MemoryError",
        {"error"},
    ),
    Attack(
        "disk-in-two-places",
        "total = 0\ntry:\n    for i in range(64):\n        for place in ('/tmp', '/dev/shm'):\n"
        "            with open(f'{place}/{i}', 'wb') as f:\n                for _ in range(8): total += f.write(b'x' * (1 << 20))\n"
        "except OSError as e: print(errno.errorcode[e.errno], total <= 64 << 20)",
        "ENOSPC True",
    ),
    Attack(
        "disk-in-inodes",
        "n = 0\ntry:\n    while True: os.close(os.open(f'/tmp/{n}', os.O_CREAT)); n += 1\nexcept OSError as e: print(n <= 16384)",
        "True",
    ),
    Attack(
        "disk-in-one-huge-file",
        "for grow in (lambda f: f.truncate(1 << 40), lambda f: os.posix_fallocate(f.fileno(), 0, 1 << 40)):\n"
        "    try:\n        with open('/tmp/x', 'wb') as f: grow(f)\n        print('BROKEN')\n    except OSError: print('refused')",
        "refused\nrefused",
    ),
    Attack(
        "disk-of-unlinked-files",
        "kept = []\ntry:\n    while True:\n        f = open('/dev/shm/x', 'wb', buffering=0); kept.append(f); os.unlink('/dev/shm/x')\n"
        "        f.write(b'x' * (4 << 20)) == 4 << 20 or f.write(b'x')\nexcept OSError as e: print(len(kept) <= 17)",
        "True",
    ),
    Attack("output-flood-from-c", "import subprocess\nsubprocess.run(['yes'])", "MiB of output", {"flood"}),
    Attack(
        "output-flood-from-behind",
        "if os.fork() == 0:\n    signal.signal(signal.SIGPIPE, signal.SIG_IGN)\n    while True: os.write(1, b'x' * 65536)\n"
        "print('back')",
        None,
        {"ok", "flood"},
    ),
    Attack(
        "output-flood-in-a-traceback",
        "raise ValueError('x' * (1 << 26))",
        "MiB of output",
        {"flood"},
    ),
    Attack("output-is-not-text", r"os.write(1, b'\xff\xfe\x00\x1b[2J\xed\xa0\x80 end')", "end"),
    Attack("repr-that-loops", "class A:\n    def __repr__(self):\n        while True: pass\nA()", "lost", {"timeout"}),
    Attack(
        "exception-that-fights-its-report",
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\n    __traceback__ = property(lambda s: 1 / 0)\n"
        "    __cause__ = property(lambda s: s)\nraise E",
        None,
        {"error"},
    ),
    Attack(
        "exceptions-in-a-ring",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        "ValueError: a",
        {"error"},
    ),
    Attack("parser-overflow", "exec('(' * 100_000)", None, {"error", "died"}),
    Attack("compiler-overflow", "eval('-' * 1_000_000 + '1')", None, {"error", "died"}),
    Attack(
        "stack-overflow",
        "sys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x')\nA().x",
        None,
        {"error", "died", "timeout"},
    ),
    Attack(
        "tools-of-the-interpreter-replaced",
        "import builtins, traceback, linecache, contextlib\nfor module in (os, socket, traceback, linecache, contextlib, signal, time):\n"
        "    for name in list(vars(module)):\n        if not name.startswith('__'): setattr(module, name, None)\n"
        "sys.stdout = sys.stderr = sys.displayhook = None\nvars(builtins).clear()\n1 / 0",
        None,
        {"ok", "error", "died"},
    ),
    Attack("exits-in-a-thread", "threading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(60)", None, {"died"}),
    Attack("exit-code-of-a-signal", "os._exit(137)", None, {"died"}),
    Attack("core-dumped", "os.abort()", "SIGABRT", {"died"}),
]

if platform.machine() == "x86_64":
    RUN = "\nimport mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('{code}'))\n"
    RUN += "print('BROKEN', ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
    ATTACKS += [  # getpid in 32-bit mode (int 0x80); and through the x32 numbers
        Attack("32-bit-calls", RUN.format(code="b814000000cd80c3"), "SIGSYS", {"died"}),
        Attack("x32-calls", f"print('BROKEN', call({0x40000000 + 39}))", "SIGSYS", {"died"}),
    ]


@pytest.fixture(scope="module", autouse=True)
def secret() -> Iterator[None]:
    os.environ["SBX_TEST_SECRET"] = "SBX_TEST_SECRET"
    yield
    del os.environ["SBX_TEST_SECRET"]


@pytest.fixture(scope="module")
def sandbox(secret, runner) -> Iterator[PythonSandbox]:
    sandbox = runner.run(PythonSandbox(timeout=TIMEOUT, memory_mb=512).__aenter__())
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


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(sandbox: PythonSandbox, runner, attack: Attack):
    async def play() -> tuple[ToolResult, ToolResult, ToolResult, set[int], int]:
        neighbour = await sandbox.session()
        await neighbour.run("secret = 42\nfor p in ('/tmp/s', '/dev/shm/s'): open(p, 'w').write('mine')")
        before, descriptors = descendants(), psutil.Process().num_fds()
        async with await sandbox.session() as session:
            result = await session.run(PRELUDE + attack.code)
            again = await session.run("print('next')")
        after = await neighbour.run("print(secret, *(open(p).read() for p in ('/tmp/s', '/dev/shm/s')))")
        extra, open_descriptors = settled(before), psutil.Process().num_fds() - descriptors
        await neighbour.close()
        return result, again, after, extra, open_descriptors

    result, again, after, extra, open_descriptors = runner.run(play())
    assert result.status in attack.status, result
    assert attack.expect is None or attack.expect in result.output, result
    assert attack.forbid not in result.output
    assert len(result.output) <= 8192
    assert result.seconds < TIMEOUT + 1.5
    assert again.status != "unavailable"
    assert (after.status, after.output) == ("ok", "42 mine mine\n")
    assert not extra
    assert open_descriptors == 0


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
            "s = socket.socket(socket.AF_UNIX)\ntry: s.connect('\\0meet'); print('BROKEN')\nexcept OSError as e: print(e)",
        ),
        ("open('/dev/shm/x', 'w').write('x')", "print('BROKEN' if os.listdir('/dev/shm') else 'empty')"),
        ("open('/tmp/x', 'w').write('x')", "print('BROKEN' if os.listdir('/tmp') else 'empty')"),
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
