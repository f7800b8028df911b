"""How a process gives up its rights: a small file system, separate namespaces, limits, filtered system calls.

In two steps. The zygote confines itself once (`enter`): a read-only view of the file system, no network, no privileges.
Each run forked from it goes further (`confine_run`): user, process, network and mount namespaces of its own, an empty
/tmp, limits, no capabilities, and a filter on system calls. When the first process of a process namespace ends, the
kernel kills all others in it, so nothing of a run is left.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

from agent_r1.tools.python.inside import kernel

NOBODY = 65534  # root becomes this user, because the kernel does not limit root's processes
MIB = 1 << 20
SEPARATE = kernel.NEW_NS | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS
MAX_PENDING_SIGNALS = 256  # each takes kernel memory
NEW_ROOT = "/tmp"  # where the view is assembled; any folder that exists


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The host's instructions for a zygote; sent as JSON."""

    isolated: bool  # False: limits only
    folders: list[tuple[str, str]]  # this and the next two: see `View`
    links: list[tuple[str, str]]
    hidden: list[str]
    preload: list[str]  # modules to import once for all runs
    warm_up: list[str]  # our own programs, run once, so that every run starts with warm libraries
    search: list[str]  # where modules are found
    cpu_seconds: int
    memory_mb: int
    processes: int
    file_mb: int
    open_files: int
    scratch_mb: int
    proc: int = -1  # a descriptor of the host's /proc, which the view lacks
    control: int = -1  # a descriptor of the socket that requests arrive on


def enter(orders: Orders) -> None:
    """Confine the zygote. Returns in the first process of a new process namespace; the calling process waits for it."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(SEPARATE if uid == 0 else SEPARATE | kernel.NEW_USER)
    if uid != 0:
        _map_user(orders.proc, uid, gid)
    _build_view(orders)
    if uid == 0:
        _become_nobody()
        uid, gid = NOBODY, NOBODY
    # Also a user namespace: only its owner may create process namespaces, one for each run.
    kernel.unshare(kernel.NEW_USER | kernel.NEW_PID | kernel.NEW_NS)
    _map_user(orders.proc, uid, gid)
    kernel.restrict_mount("/", kernel.READ_ONLY)
    inner = os.fork()
    if inner:
        os.close(orders.control)  # otherwise the end of the host would go unnoticed
        _, status = os.waitpid(inner, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent(signal.SIGKILL)


def _become_nobody() -> None:
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:  # root of a user namespace without other users
        raise OSError(error.errno, f"root cannot become user {NOBODY}: {error.strerror}") from error
    kernel.own_proc_files()


def confine_run(orders: Orders, base_bytes: int) -> None:
    """Confine the process of one run, which is already the first of a process namespace (see `zygote.py`)."""
    os.setsid()  # process groups span process namespaces: kill(0) would reach the zygote and other runs
    if orders.isolated:
        uid, gid = os.getuid(), os.getgid()
        # One user namespace per run, because the kernel counts processes per user and user namespace.
        kernel.unshare(SEPARATE | kernel.NEW_USER)
        _map_user(orders.proc, uid, gid)
        options = f"size={orders.scratch_mb}m,nr_inodes=4096,mode=0700"
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.chdir("/tmp")
    _write(orders.proc, "self/oom_score_adj", "1000")  # the first to be killed when memory runs out
    os.close(orders.proc)
    _set_limits(orders, base_bytes)
    kernel.no_new_privileges()
    kernel.forbid_huge_pages()
    if orders.isolated:
        kernel.drop_capabilities()
    kernel.filter_system_calls()


def _set_limits(orders: Orders, base_bytes: int) -> None:
    limits = {
        resource.RLIMIT_AS: base_bytes + orders.memory_mb * MIB,
        resource.RLIMIT_CPU: orders.cpu_seconds,
        resource.RLIMIT_FSIZE: orders.file_mb * MIB,
        resource.RLIMIT_NOFILE: orders.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if orders.isolated:  # without user namespaces, these would count all processes of the user
        limits[resource.RLIMIT_NPROC] = orders.processes
        limits[resource.RLIMIT_SIGPENDING] = MAX_PENDING_SIGNALS
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _build_view(orders: Orders) -> None:
    """Change to a read-only root that contains only what the orders name."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    # Open all sources first: mounting the new root may hide some of them.
    held = [(os.open(source, os.O_PATH), place) for source, place in orders.folders]
    kernel.mount("tmpfs", NEW_ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    for fd, place in held:
        target = NEW_ROOT + place
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{fd}", target, "", kernel.MS_BIND | kernel.MS_REC)
        device = kernel.NO_DEV if not place.startswith("/dev/") else 0
        kernel.restrict_mount(target, kernel.READ_ONLY | kernel.NO_SUID | device)
        os.close(fd)
    for place in orders.hidden:
        kernel.mount("tmpfs", NEW_ROOT + place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4k,mode=0755")
        kernel.restrict_mount(NEW_ROOT + place, kernel.READ_ONLY)
    for target, place in orders.links:
        os.makedirs(os.path.dirname(NEW_ROOT + place), exist_ok=True)
        os.symlink(target, NEW_ROOT + place)
    os.makedirs(NEW_ROOT + "/tmp", exist_ok=True)
    kernel.change_root(NEW_ROOT)


def _map_user(proc: int, uid: int, gid: int) -> None:
    """Keep the user's ids in the new user namespace. Without this, no file could be created there."""
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{uid} {uid} 1")
    _write(proc, "self/gid_map", f"{gid} {gid} 1")


def _write(proc: int, name: str, text: str) -> None:
    fd = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(fd, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"writing {text!r} to /proc/{name}: {error.strerror}") from error
    finally:
        os.close(fd)


def _read(proc: int, name: str) -> bytes:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=proc), "rb") as file:
        return file.read()


def address_space(proc: int) -> int:
    """Return the bytes of address space that this process uses."""
    return int(_read(proc, "self/statm").split()[0]) * resource.getpagesize()


def count_threads(proc: int) -> int:
    return int(_read(proc, "self/stat").rpartition(b")")[2].split()[17])


def find_children(proc: int) -> set[int]:
    """Return the child processes. Searches all processes, because few kernels list children."""
    found = set()
    for name in filter(str.isdigit, os.listdir(proc)):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            after_name = _read(proc, f"{name}/stat").rpartition(b")")[2]  # the name may contain anything
            if int(after_name.split()[1]) == os.getpid():
                found.add(int(name))
    return found


def load_libraries(orders: Orders) -> None:
    sys.path[:0] = orders.search
    for name in orders.preload:
        __import__(name)
    for program in orders.warm_up:
        exec(program, {})
