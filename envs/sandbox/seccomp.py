"""The system calls a session may make, compiled by libseccomp to a kernel filter.

Invariant: this is a list of what is allowed. A call that is not on it, or that a newer kernel adds, answers "function
not implemented", which the C library knows how to live with; a call through another processor mode (32-bit, x32) kills.
What the list leaves out on purpose: namespaces, mounts, tracing, keys, BPF, io_uring, System V IPC and memfd (memory
that no limit would count), other processes' limits and priorities, sockets of any family but local ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range sendfile splice tee
copy_file_range open openat openat2 creat dup dup2 dup3 pipe pipe2 fcntl ioctl flock fsync fdatasync sync_file_range
truncate ftruncate fallocate fadvise64 readahead stat fstat lstat newfstatat statx statfs fstatfs access faccessat
faccessat2 getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir link linkat unlink
unlinkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime
utimes futimesat utimensat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr

select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime

brk mmap munmap mremap mprotect madvise msync membarrier rseq futex futex_waitv futex_wait futex_wake futex_requeue
set_robust_list get_robust_list set_tid_address arch_prctl prctl getrandom

fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal getpid getppid
gettid getpgrp getpgid setpgid getsid setsid getuid geteuid getgid getegid getresuid getresgid getgroups capget
getpriority getrlimit setrlimit getrusage times sysinfo uname getcpu sched_yield sched_getaffinity sched_getparam
sched_getscheduler sched_get_priority_max sched_get_priority_min

rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigqueueinfo
rt_tgsigqueueinfo sigaltstack restart_syscall pause alarm getitimer setitimer timer_create timer_settime timer_gettime
timer_getoverrun timer_delete nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time

bind connect listen accept accept4 getsockname getpeername sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg shutdown
getsockopt setsockopt
""".split()

EQUAL, NOT_EQUAL, MASKED_EQUAL = 4, 1, 7  # enum scmp_compare
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag that clone(2) takes
AF_UNIX = 1

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000

Condition = tuple[int, int, int, int]
"""Argument number, comparison, and its one or two operands."""


def refuse(code: int) -> int:
    """The filter action that answers a call with an error number."""
    return 0x00050000 | code


CONDITIONAL: list[tuple[str, int, list[Condition]]] = [
    ("clone", ALLOW, [(0, MASKED_EQUAL, NEW_NAMESPACES, 0)]),
    ("socket", ALLOW, [(0, EQUAL, AF_UNIX, 0)]),
    ("socket", refuse(errno.EAFNOSUPPORT), [(0, NOT_EQUAL, AF_UNIX, 0)]),
    ("socketpair", ALLOW, [(0, EQUAL, AF_UNIX, 0)]),
    ("prlimit64", ALLOW, [(0, EQUAL, 0, 0)]),  # the caller itself
    ("sched_setaffinity", ALLOW, [(0, EQUAL, 0, 0)]),
    ("setpriority", ALLOW, [(0, EQUAL, 0, 0), (1, EQUAL, 0, 0)]),
]


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@cache
def compile_filter() -> bytes:
    """The filter as an array of BPF instructions for this machine's processor.

    Raises:
        OSError: libseccomp is not installed, or refuses a rule.
    """
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(refuse(errno.ENOSYS))))

    def check(result: int) -> None:
        if result < 0:
            raise OSError(-result, f"libseccomp: {os.strerror(-result)}")

    def add(name: str, action: int, conditions: list[Condition]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this processor, or this libseccomp, has no such call
            return
        comparisons = (_Comparison * len(conditions))(*conditions)
        check(library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(conditions), comparisons))

    try:
        check(library.seccomp_attr_set(context, 2, ctypes.c_uint32(KILL_PROCESS)))  # another processor mode
        library.seccomp_attr_set(context, 8, ctypes.c_uint32(2))  # a binary search, where the library is new enough
        for name in ALLOWED:
            add(name, ALLOW, [])
        for name, action, conditions in CONDITIONAL:
            add(name, action, conditions)
        with open(os.memfd_create("seccomp"), "w+b") as file:
            check(library.seccomp_export_bpf(context, file.fileno()))
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)
