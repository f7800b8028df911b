"""Linux calls that Python lacks: namespaces, mounts, capabilities, installing a filter.

Each function is one call and raises OSError that names it. For x86_64 and aarch64, whose system-call numbers differ.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from ctypes import c_char_p, c_int, c_long, c_ulong, c_void_p
from functools import cache

from agent_r1.tools.python.inside import calls

NEW_USER, NEW_PID, NEW_NET, NEW_NS, NEW_IPC, NEW_UTS = 0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000, 0x4000000

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
READ_ONLY, NO_SUID, NO_DEV = 1, 2, 4  # flags of mount_setattr
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_SUBREAPER = 1, 4, 22, 36
_PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 38, 41

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = c_long
_LIBC.mount.argtypes = [c_char_p, c_char_p, c_char_p, c_ulong, c_char_p]

MACHINE = platform.machine()
_NUMBERS = {  # numbers on x86_64 and on aarch64
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "capset": (126, 91),
}


def unshare(flags: int) -> None:
    _check(_LIBC.unshare(c_int(flags)), f"unshare({flags:#x})")


def set_pid_namespace(fd: int) -> None:
    _check(_LIBC.setns(c_int(fd), c_int(NEW_PID)), "setns(pid)")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(result, f"mount({source!r}, {target!r}, {kind!r})")


def restrict_mount(target: str, attributes: int) -> None:
    """Set attributes on the mount at `target` and on all mounts below it."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = _syscall("mount_setattr", _AT_FDCWD, c_char_p(target.encode()), _AT_RECURSIVE, c_char_p(attr), len(attr))
    _check(result, f"mount_setattr({target!r})")


def change_root(folder: str) -> None:
    """Make the mount point `folder` the root and detach the old one."""
    os.chdir(folder)
    _check(_syscall("pivot_root", c_char_p(b"."), c_char_p(b".")), f"pivot_root({folder!r})")
    _check(_LIBC.umount2(b".", c_int(_DETACH)), "umount2(old root)")
    os.chdir("/")


def drop_capabilities() -> None:
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_syscall("capset", c_char_p(header), c_char_p(data)), "capset")


def die_with_parent(signal: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    _prctl(_PR_SET_SUBREAPER, 1)


def own_proc_files() -> None:
    """Take back /proc/self, which belongs to root after a change of user."""
    _prctl(_PR_SET_DUMPABLE, 1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def forbid_huge_pages() -> None:
    """Disable huge pages. One stays allocated, and is not counted, while any part of it is mapped."""
    _prctl(_PR_SET_THP_DISABLE, 1)


@cache
def compile_filter() -> bytes:
    _column()
    return b"".join(struct.pack("HBBI", *instruction) for instruction in calls.program(MACHINE))


def filter_system_calls() -> None:
    """Refuse, for good, all calls that `calls.py` does not allow. Needs `no_new_privileges`."""
    instructions = compile_filter()
    buffer = ctypes.create_string_buffer(instructions, len(instructions))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", c_void_p))

    program = Program(len(instructions) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _column() -> int:
    if MACHINE not in calls.MACHINES:
        known = " and ".join(calls.MACHINES)
        raise OSError(calls.ENOSYS, f"the sandbox supports {known}, but this machine is {MACHINE!r}")
    return list(calls.MACHINES).index(MACHINE)


def _syscall(name: str, *arguments: object) -> int:
    result: int = _LIBC.syscall(c_long(_NUMBERS[name][_column()]), *arguments)
    return result


def _prctl(option: int, value: int, more: int = 0) -> None:
    _check(_LIBC.prctl(c_int(option), c_ulong(value), c_ulong(more), c_ulong(0), c_ulong(0)), f"prctl({option})")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
