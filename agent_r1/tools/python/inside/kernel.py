"""The Linux calls that Python has no function for: namespaces, mounts, capabilities, system-call filters.

Thin and stateless: each function is one call, and raises OSError with what was tried. Nothing here knows what a sandbox
is made of; `confine.py` does. Written for x86_64 and aarch64, whose system-call numbers differ.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from ctypes import c_char_p, c_int, c_long, c_ulong, c_void_p

NEW_USER, NEW_PID, NEW_NET, NEW_NS, NEW_IPC, NEW_UTS = 0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000, 0x4000000
NEW_ANY = 0x7E020080  # all of them, with cgroup and time

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
READ_ONLY, NO_SUID, NO_DEV = 1, 2, 4  # of mount_setattr
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = c_long
_LIBC.mount.argtypes = [c_char_p, c_char_p, c_char_p, c_ulong, c_char_p]

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
MACHINE = platform.machine()
_NUMBERS: dict[str, tuple[int, int]] = {  # of x86_64, of aarch64
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # New namespaces and mounts: in a user namespace of its own, code could mount a tmpfs of any size.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes' memory, keys that belong to a user, and the parts of a kernel with a history of holes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
_CLONE, _CLONE3, _SOCKET, _CAPSET = (56, 220), (435, 435), (41, 198), (126, 91)
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_FAMILIES = (1, 2, 10)  # unix, inet, inet6: those that a network namespace cuts off; vsock, for one, it does not


def unshare(flags: int) -> None:
    _check(_LIBC.unshare(c_int(flags)), f"unshare({flags:#x})")


def set_pid_namespace(fd: int) -> None:
    _check(_LIBC.setns(c_int(fd), c_int(NEW_PID)), "setns(pid)")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(result, f"mount({source!r}, {target!r}, {kind!r})")


def restrict_mount(target: str, attributes: int) -> None:
    """Set attributes on the mount at `target` and on all that are mounted below it."""
    attr = struct.pack("QQQQ", attributes, 0, 0, 0)
    result = _syscall("mount_setattr", _AT_FDCWD, c_char_p(target.encode()), _AT_RECURSIVE, c_char_p(attr), len(attr))
    _check(result, f"mount_setattr({target!r})")


def change_root(folder: str) -> None:
    """Make `folder`, a mount point, the root, and let go of the old one."""
    os.chdir(folder)
    _check(_syscall("pivot_root", c_char_p(b"."), c_char_p(b".")), f"pivot_root({folder!r})")
    _check(_LIBC.umount2(b".", c_int(_DETACH)), "umount2(old root)")
    os.chdir("/")


def drop_capabilities() -> None:
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_LIBC.syscall(c_long(_CAPSET[_column()]), c_char_p(header), c_char_p(data)), "capset")


def die_with_parent(signal: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    _prctl(_PR_SET_SUBREAPER, 1)


def own_proc_files() -> None:
    """After a change of user, /proc/self belongs to root until the process says that it may be looked at."""
    _prctl(_PR_SET_DUMPABLE, 1)


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls() -> None:
    """Refuse, for good, the calls named above; needs `no_new_privileges`."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _program(MACHINES[MACHINE], _column()))
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", c_void_p))

    described = Program(len(program) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(described))


def _program(machine: int, column: int) -> list[tuple[int, int, int, int]]:
    """Classic BPF: (code, jump if true, jump if false, value); `seccomp_data` holds number, machine, ip, arguments."""
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000

    def refuse(errno: int) -> tuple[int, int, int, int]:
        return (answer, 0, 0, 0x00050000 | errno)

    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if machine == MACHINES["x86_64"]:
        program += [(at_least, 0, 1, 0x40000000), refuse(_ENOSYS)]  # the x32 numbers of the same calls
    for numbers in _NUMBERS.values():
        program += [(equal, 0, 1, numbers[column]), refuse(_EPERM)]
    program += [(equal, 0, 1, _CLONE3[column]), refuse(_ENOSYS)]  # a filter cannot read its flags; libc falls back
    # The first argument stands at offset 16; its lower half comes first on both machines.
    program += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, NEW_ANY), refuse(_EPERM)]
    program += [(load, 0, 0, 0), (equal, 0, 2 + len(_FAMILIES), _SOCKET[column]), (load, 0, 0, 16)]
    for index, family in enumerate(_FAMILIES):
        program.append((equal, len(_FAMILIES) - index, 0, family))
    program.append(refuse(_EAFNOSUPPORT))
    program.append((answer, 0, 0, allow))
    return program


def _column() -> int:
    if MACHINE not in MACHINES:
        raise OSError(_ENOSYS, f"the system calls of {MACHINE!r} are not known here, only those of {list(MACHINES)}")
    return list(MACHINES).index(MACHINE)


def _syscall(name: str, *arguments: object) -> int:
    result: int = _LIBC.syscall(c_long(_NUMBERS[name][_column()]), *arguments)
    return result


def _prctl(option: int, value: int, more: int = 0) -> None:
    _check(_LIBC.prctl(c_int(option), c_ulong(value), c_ulong(more), c_ulong(0), c_ulong(0)), f"prctl({option})")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
