"""Inside the sandbox: one warm interpreter that forks every session, and never runs a line of the model's code.

A session is two processes: an init that reaps and forwards the deadline's interrupt, and the interpreter that runs
the cells (repl.py). Invariant: before the first cell a session has its own user, process, mount, IPC and network
namespaces, one private tmpfs behind /tmp and /dev/shm, no /proc, no capability, its limits and its system-call
filter, and holds no descriptor but its streams and its control socket. The zygote is the parent of every init, so it
alone says how a session ended; and it ends itself, and thereby everything, when the trainer does.

Runs from a bare path with the standard library only; nothing here imports the project.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from .repl import REPORT_BYTES, Repl  # noqa: TID251 (inside, this folder is a package of its own)

WARM_UP = {
    "numpy": "import numpy as n; n.linalg.inv(n.eye(3) * 2) @ n.random.default_rng(0).random(3); str(n.arange(3) / 2)",
    "sympy": "import sympy as s; x = s.symbols('x'); s.solve(x**2 - 5*x + 6, x); s.integrate(s.sin(x) * x, x);"
    " s.simplify((x**2 - 1) / (x - 1)); s.factor(x**3 - 1); str(s.N(s.sqrt(2))); s.Matrix([[1, 2], [3, 4]]).inv();"
    " s.nsimplify(0.5); s.parse_expr('2*x'); s.diff(x**x, x); s.limit(s.sin(x) / x, x, 0)",
}
"""What to exercise of a preloaded module: most of a first call's time is lazy imports and caches."""

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC = 1, 2, 4, 4096, 16384
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
CONTROL = 3
"""The control socket's descriptor in a session; 0, 1 and 2 are its streams."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


class Zygote:
    """Of the settings `memory` and `disk` are bytes, `filter` is BPF, and without `namespaces` nothing is isolated."""

    def __init__(self, control: socket.socket, trainer: int, settings: dict[str, Any]):
        self.control = control
        self.trainer = trainer  # a pidfd: readable once the trainer is dead
        self.settings = settings
        self.filter = base64.b64decode(settings["filter"])
        self.namespaces: bool = settings["namespaces"]
        self.launchers: set[int] = set()  # forks on their way to become an init
        self.inits: set[int] = set()  # without namespaces only
        self.folder = "/tmp" if self.namespaces else tempfile.mkdtemp(prefix="fr-lightning-sandbox-")
        self.page = resource.getpagesize()
        for name in settings["preload"]:
            importlib.import_module(name)
            exec(WARM_UP.get(name, ""), {})
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with open("/proc/self/statm") as file:
            self.base_size, self.base_resident = (int(pages) * self.page for pages in file.read().split()[:2])
        gc.collect()
        gc.freeze()  # forks share these pages: keep the collector from writing into them
        gc.disable()

    def serve(self) -> NoReturn:
        wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.trainer, wake):
            poll.register(descriptor, select.POLLIN)
        pause, watch_at = 0.1, 0.0
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll(pause * 1000)}
                if self.trainer in ready:
                    return self.stop()
                if wake in ready:
                    os.read(wake, 4096)
                self.reap()
                if self.control.fileno() in ready:
                    message, descriptors, _, _ = socket.recv_fds(self.control, 64, 2)
                    if message != b"spawn":
                        return self.stop()
                    self.spawn(*descriptors)
                start = time.monotonic()
                if start >= watch_at:
                    self.watch_memory()
                    pause = min(max(0.1, 20 * (time.monotonic() - start)), 0.5)
                    watch_at = start + pause
        except ConnectionError:
            return self.stop()

    def stop(self) -> NoReturn:
        while True:  # the orphans of each one killed become children of this process in their turn
            children = [pid for pid, (parent, _) in process_table().items() if parent == os.getpid()]
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if not children:
                break
        if not self.namespaces:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def reap(self) -> None:
        """Tell the trainer of every session that ended; its waitid status says how."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.launchers:
                    self.launchers.discard(pid)
                    continue
                if pid in self.inits:
                    self.inits.discard(pid)
                    shutil.rmtree(f"{self.folder}/{pid}", ignore_errors=True)
                self.control.send(f"exit {pid} {os.waitstatus_to_exitcode(status)}".encode())

    def watch_memory(self) -> None:
        """Kill sessions whose processes together hold more than their share; each alone is held by its own limit.

        Resident sizes count pages shared with this process once for every fork, so they only raise the suspicion;
        the proportional sizes decide. A process that hides its own is taken at its resident size.
        """
        table = process_table()
        sessions: dict[int, list[int]] = {}
        for pid in table:
            ancestor = pid
            while ancestor in table and table[ancestor][0] != os.getpid():
                ancestor = table[ancestor][0]
            if ancestor in table:
                sessions.setdefault(ancestor, []).append(pid)
        limit = self.settings["memory"] + self.base_resident
        for init, members in sessions.items():
            if not self.namespaces and init not in self.inits:
                os.kill(init, signal.SIGKILL)  # left behind by a session that is gone
                continue
            resident = {pid: table[pid][1] * self.page for pid in members}
            if sum(resident.values()) > limit and sum(map(proportional_size, resident, resident.values())) > limit:
                self.control.send(f"memory {init}".encode())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(init, signal.SIGKILL)

    def spawn(self, control: int, output: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=control) as session:
                session.send(f"failed fork: {error}".encode())
            os.close(output)
            return
        if pid == 0:
            try:
                self.become_session(control, output)
            except BaseException:
                with contextlib.suppress(BaseException):
                    os.write(CONTROL, f"failed {traceback.format_exc()[-2000:]}".encode())
            finally:
                os._exit(1)
        (self.launchers if self.namespaces else self.inits).add(pid)
        os.close(control)
        os.close(output)

    # -- from here on in a fork ------------------------------------------------------------------------------------

    def become_session(self, control: int, output: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(control, CONTROL)
        os.set_inheritable(CONTROL, False)
        self.control.detach()
        os.closerange(CONTROL + 1, 1 << 20)
        session = socket.socket(fileno=CONTROL)
        if self.namespaces:
            namespaces = self.enter_namespaces()
            init = os.fork()
            if init:
                announce(session, init, namespaces)
                os._exit(0)
            drop_capabilities()
            os.chdir("/tmp")
        else:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            announce(session, os.getpid(), {})
            os.mkdir(f"{self.folder}/{os.getpid()}", 0o700)
            os.chdir(f"{self.folder}/{os.getpid()}")
        interpreter = os.fork()
        if interpreter:
            supervise(interpreter)
        if not self.namespaces:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self.set_limits()
        if self.filter:
            self.install_filter()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # or all sessions would draw the same numbers
        gc.enable()
        repl = Repl(session)
        session.send(b"ready")
        try:
            repl.serve()
        finally:  # past its start a session has no failures of the sandbox's to report
            os._exit(1)

    def enter_namespaces(self) -> dict[str, int]:
        """Move into fresh namespaces; returns their identities, for the trainer to compare with its own."""
        uid, gid = os.getuid(), os.getgid()
        flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET
        check(libc.unshare(flags), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        interpreter = {folder: os.open(folder, os.O_PATH) for folder in self.settings["interpreter_in_tmp"]}
        disk = self.settings["disk"]
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes={disk >> 12},mode=0700")
        for name, mode in (("shm", 0o1777), ("tmp", 0o1777)):  # one quota behind both
            os.mkdir(f"/tmp/{name}", mode)
            os.chmod(f"/tmp/{name}", mode)
        mount("/tmp/shm", "/dev/shm", "", MS_BIND)
        mount("/tmp/tmp", "/tmp", "", MS_BIND)
        for folder, handle in interpreter.items():
            os.makedirs(folder)
            mount(f"/proc/self/fd/{handle}", folder, "", MS_BIND | MS_REC)
            os.close(handle)
        identities = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in ("user", "mnt", "ipc", "net")}
        mount("tmpfs", "/proc", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k")
        return identities

    def set_limits(self) -> None:
        memory = self.base_size + self.settings["memory"]
        limits = {
            resource.RLIMIT_AS: (memory, memory + REPORT_BYTES),
            resource.RLIMIT_FSIZE: (self.settings["disk"],) * 2,
            resource.RLIMIT_NOFILE: (64, 64),  # each socket can hold 200 KiB that no limit counts
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
            resource.RLIMIT_SIGPENDING: (256, 256),
        }
        if self.namespaces:  # elsewhere the kernel would count all of the user's processes
            limits[resource.RLIMIT_NPROC] = (self.settings["processes"] + 2,) * 2
        for name, (soft, hard) in limits.items():
            ceiling = resource.getrlimit(name)[1]
            if ceiling != resource.RLIM_INFINITY:
                soft, hard = min(soft, ceiling), min(hard, ceiling)
            resource.setrlimit(name, (soft, hard))

    def install_filter(self) -> None:
        class Program(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

        code = ctypes.create_string_buffer(self.filter, len(self.filter))
        program = Program(len(self.filter) // 8, ctypes.cast(code, ctypes.c_void_p))
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def announce(session: socket.socket, init: int, namespaces: dict[str, int]) -> None:
    """Hand the trainer a pidfd of the session's init: its end is the end of all the session's processes."""
    handle = os.pidfd_open(init)
    socket.send_fds(session, [f"init {init} {json.dumps(namespaces)}".encode()], [handle])
    os.close(handle)


def supervise(interpreter: int) -> NoReturn:
    """The session's init: reap what is orphaned, pass the deadline's interrupt on, end with the interpreter."""
    os.closerange(0, CONTROL + 1)

    def interrupt(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(interpreter, signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == interpreter:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def drop_capabilities() -> None:
    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(ctypes.byref(header), none), "capset")


def process_table() -> dict[int, tuple[int, int]]:
    """Parent and resident pages of every process that can be seen."""
    table: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # a process may put anything in its name
                table[int(name)] = int(fields[1]), int(fields[21])
    return table


def proportional_size(pid: int, otherwise: int) -> int:
    """Bytes of memory, each page divided by the number of processes that map it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return otherwise


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[2]))
    try:
        zygote = Zygote(control, int(sys.argv[3]), json.loads(control.recv(1 << 18)))
    except BaseException as error:
        control.send(f"failed {type(error).__name__}: {error}".encode()[:4000])
        os._exit(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(quiet, descriptor)
    os.close(quiet)
    control.send(b"ready")
    zygote.serve()
