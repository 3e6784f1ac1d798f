"""How the sandbox is started, and how it is known to hold.

Two levels: `namespaces` (bubblewrap and everything the package promises) and `unsafe_none` (a plain process, for
machines where the first is forbidden and the user says so). Invariant: a level is in force only once a session was
tried at start-up and showed it, from outside by its namespaces and from inside by attempts that failed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fr_lightning.envs.base import NotReady

Isolation = Literal["auto", "namespaces", "unsafe_none"]

PACKAGE = Path(__file__).resolve().parent
INSIDE = "/run/sandbox"
"""Where the sandbox sees the modules of this package that run inside it."""
BOOTSTRAP = (
    "import sys, types; package = types.ModuleType('sandbox'); package.__path__ = [sys.argv[1]]; "
    "sys.modules['sandbox'] = package; from sandbox.zygote import main; main()"
)
"""Imports the zygote from a bare folder, without this package's __init__ and all that it would load."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MPLCONFIGDIR": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread each: a fork keeps one thread only, and a session's address space is limited.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
UNPRIVILEGED_UID = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")

FORBIDDEN_HINT = (
    'This machine or container forbids user namespaces. Docker: add "--security-opt seccomp=unconfined '
    '--security-opt apparmor=unconfined --security-opt systempaths=unconfined". Ubuntu 24.04: '
    '"sysctl -w kernel.apparmor_restrict_unprivileged_userns=0", or an AppArmor profile for bwrap. To run the '
    'model\'s code without any isolation, which lets it do whatever this user can, ask for isolation="unsafe_none".'
)


class SandboxUnavailable(NotReady):
    """The sandbox cannot be started at the isolation asked for; the message says what to install or to allow."""

    failure_kind = "tool_unavailable"


def command(isolation: Isolation, control: int, trainer: int) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the zygote, which inherits the two descriptors.

    Raises:
        SandboxUnavailable: not Linux, or bubblewrap is not installed.
    """
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"the Python sandbox needs Linux namespaces; this is {sys.platform}")
    if isolation == "unsafe_none":
        return [*_zygote(str(PACKAGE), control, trainer)], ENVIRONMENT
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxUnavailable(
            "the Python sandbox needs bubblewrap, and no `bwrap` is on the PATH: install the package `bubblewrap` "
            "(`apt install bubblewrap`, `dnf install bubblewrap`, `apk add bubblewrap`)"
        )
    line = [bubblewrap, *_bubblewrap_options(), "--", *_zygote(INSIDE, control, trainer)]
    if os.getuid() == 0:
        line = [sys.executable, "-I", "-S", str(PACKAGE / "launch.py"), str(UNPRIVILEGED_UID), *line]
    return line, {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}


def _zygote(folder: str, control: int, trainer: int) -> list[str]:
    return [sys.executable, "-I", "-c", BOOTSTRAP, folder, str(control), str(trainer)]


def _bubblewrap_options() -> list[str]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    options += ["--cap-drop", "ALL", "--hostname", "sandbox"]
    for folder in ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            options += ["--ro-bind", folder, folder]
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        if os.path.exists(file):
            options += ["--ro-bind", file, file]
    for folder in interpreter_folders():
        options += ["--ro-bind", folder, folder]
    for module in ("zygote.py", "repl.py"):
        options += ["--ro-bind", str(PACKAGE / module), f"{INSIDE}/{module}"]
    options += ["--tmpfs", "/dev", "--dir", "/dev/shm", "--dir", "/tmp", "--proc", "/proc"]
    for device in DEVICES:  # not bubblewrap's --dev: sessions would share its writable folder and terminals
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        options += ["--setenv", name, value]
    return options


def interpreter_folders() -> list[str]:
    """Folders outside /usr that hold this interpreter, its standard library and its packages; outer ones first."""
    binary = Path(sys.executable).resolve()
    candidates = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.base_exec_prefix), binary.parent.parent}
    kept: list[Path] = []
    for folder in sorted(candidates, key=lambda path: len(path.parts)):
        if len(folder.parts) > 1 and not any(folder.is_relative_to(outer) for outer in (Path("/usr"), *kept)):
            kept.append(folder)
    return [str(folder) for folder in kept]


def interpreter_in_tmp() -> list[str]:
    """Of those, the ones that a session's private folders would hide."""
    return [folder for folder in interpreter_folders() if folder.startswith(("/tmp/", "/dev/shm/"))]


def explain_failure(message: str) -> str:
    """What a zygote that did not start said, and what to do about it."""
    text = message.strip() or "it ended without a word"
    if "failed ModuleNotFoundError" in text or "failed ImportError" in text:
        hint = "Install the module beside this interpreter, or take it out of `preload`."
    elif any(sign in text for sign in ("namespace", "not permitted", "ermission denied", "uid map", "No space left")):
        hint = FORBIDDEN_HINT
    else:
        hint = "`bwrap` must be able to start this Python interpreter with only its own folders in view."
    return f"the Python sandbox did not start: {text}\n{hint}"


def shared_namespaces(identities: dict[str, int]) -> list[str]:
    """Of the namespaces a session reported, those that are this process's own."""
    required = ("user", "mnt", "ipc", "net")
    return [name for name in required if identities.get(name) in (None, os.stat(f"/proc/self/ns/{name}").st_ino)]


PROBE = f"""
import ctypes as _c, os as _o, socket as _s
_libc = _c.CDLL(None)
def _fails(attempt, *arguments):
    try:
        return attempt(*arguments) == -1
    except OSError:
        return True
_claims = {{
    "its own process numbers": _o.getpid() == 2 and _o.getppid() == 1,
    "no capability and no root": _o.getuid() != 0 and _libc.prctl(24, 0, 0, 0, 0) == -1,
    "a system-call filter": _libc.prctl(21, 0, 0, 0, 0) == 2 and _libc.prctl(39, 0, 0, 0, 0) == 1,
    "no new namespaces": _fails(_libc.unshare, 0x10000000),
    "no network": _fails(_s.socket, _s.AF_INET),
    "no host files": not any(map(_o.path.exists, ("/etc/passwd", "/sys/kernel", "/proc/self", "/proc/1", "/dev/pts"))),
    "a read-only root": all(_fails(_o.mkdir, place) for place in ("/probe", "/dev/probe", "/usr/probe")),
    "a clean environment": set(_o.environ) <= set({sorted([*ENVIRONMENT, "PWD", "LC_CTYPE"])!r}),
}}
print("; ".join(name for name, holds in _claims.items() if not holds) or "holds")
"""
"""A cell that tries what a session must not be able to do; prints `holds`, or the names of what failed."""


def describe(isolation: str, preload: Sequence[str]) -> str:
    warm = f", {' and '.join(preload)} preloaded" if preload else ""
    if isolation == "unsafe_none":
        return f"python sandbox: NO ISOLATION in force (unsafe_none): the model's code can do what this user can{warm}"
    return f"python sandbox: isolation in force: {isolation}{warm}"
