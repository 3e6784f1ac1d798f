"""Run by root, in a process of its own, on the way to bubblewrap: give up root first.

    python -I launch.py UID bwrap ... --ro-bind SOURCE TARGET ... -- command

Bubblewrap run by root makes a sandbox that root's files and limits do not bind, so it is run by a user without
rights. That user may not be able to reach the interpreter (one in root's own home): the sources of all
read-only binds, and bubblewrap, are therefore mounted where it can, in a mount namespace that ends with the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18
STAGE = "/tmp"


def stage(arguments: list[str]) -> list[str]:
    """Mount the program and the source of every `--ro-bind` under a reachable folder; returns their names there."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    positions = [0] + [index + 1 for index, argument in enumerate(arguments) if argument == "--ro-bind"]
    handles = {index: os.open(arguments[index], os.O_PATH) for index in positions}  # before the stage hides them
    check(libc.mount(b"tmpfs", STAGE.encode(), b"tmpfs", 0, b"size=64k,mode=0755"))
    staged = list(arguments)
    for index, handle in handles.items():
        place = f"{STAGE}/{index or os.path.basename(arguments[0])}"
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT))
        check(libc.mount(f"/proc/self/fd/{handle}".encode(), place.encode(), None, MS_BIND | MS_REC, None))
        os.close(handle)
        staged[index] = place
    return staged


def main() -> None:
    uid, command = int(sys.argv[1]), sys.argv[2:]
    try:
        command = stage(command)
    except OSError as error:  # root without the right to mount; the user may still be able to read it all
        print(f"cannot stage the interpreter: {error}", file=sys.stderr)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    os.chdir("/")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
