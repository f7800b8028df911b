"""System calls that the sandbox refuses: the filter for each machine, and attacks on the real one."""

from __future__ import annotations

import asyncio
import platform
import re
from pathlib import Path

import pytest

from agent_r1.tools.python.inside import calls
from agent_r1.tools.python.inside.calls import ALLOWED, MACHINES, RULED, numbers
from agent_r1.tools.python.sandbox import Sandbox
from tests.tools.python_boxes import boxes as boxes
from tests.tools.python_boxes import isolated as isolated
from tests.tools.python_boxes import roomy as roomy
from tests.tools.python_boxes import run, together, works

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOTTY, ENOSYS = 1, 25, 38

REFUSED = """
    semget=64/190 semop=65/193 semctl=66/191 shmget=29/194 shmat=30/196 shmctl=31/195 msgget=68/186 msgsnd=69/189
    mq_open=240/180 memfd_create=319/279 memfd_secret=447/447 vmsplice=278/75 splice=275/76 tee=276/77 sendfile=40/71
    copy_file_range=326/285 socket=41/198 bind=49/200 listen=50/201 accept=43/202 connect=42/203 setsockopt=54/208
    sendmsg=46/211 sendmmsg=307/269 recvmsg=47/212 flock=73/32 inotify_init1=294/26 inotify_add_watch=254/27
    fanotify_init=300/262 fanotify_mark=301/263 signalfd4=289/74 timerfd_create=283/85 timer_create=222/107
    eventfd2=290/19 io_setup=206/0 io_submit=209/2 io_uring_setup=425/425 io_uring_enter=426/426
    io_uring_register=427/427 userfaultfd=323/282 add_key=248/217 request_key=249/218 keyctl=250/219 bpf=321/280
    perf_event_open=298/241 ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271 kcmp=312/272
    pidfd_open=434/434 pidfd_getfd=438/438 pidfd_send_signal=424/424 process_madvise=440/440 unshare=272/97
    setns=308/268 mount=165/40 umount2=166/39 pivot_root=155/41 chroot=161/51 open_tree=428/428 move_mount=429/429
    fsopen=430/430 fsconfig=431/431 fsmount=432/432 fspick=433/433 mount_setattr=442/442 name_to_handle_at=303/264
    open_by_handle_at=304/265 mlock=149/228 mlock2=325/284 mlockall=151/230 mbind=237/235 move_pages=279/239
    migrate_pages=256/238 set_mempolicy=238/237 remap_file_pages=216/234 sync=162/81 syncfs=306/267
    sync_file_range=277/84 fadvise64=221/223 readahead=187/213 mincore=27/232 setxattr=188/5 fsetxattr=190/7
    sched_setaffinity=203/122 sched_setscheduler=144/119 setpriority=141/140 ioprio_set=251/30 setuid=105/146
    setgid=106/144 setresuid=117/147 setgroups=116/159 capset=126/91 personality=135/92 seccomp=317/277
    syslog=103/116 reboot=169/142 kexec_load=246/104 init_module=175/105 finit_module=313/273 swapon=167/224
    quotactl=179/60 settimeofday=164/170 clock_settime=227/112 adjtimex=159/171
    rt_sigqueueinfo=129/138 landlock_create_ruleset=444/444 lookup_dcookie=212/18 execveat=322/281
"""


def verdict(machine: str, number: int, *arguments: int, of: int | None = None) -> int:
    """Interpret the filter for `machine`, a classic BPF program, and return its answer."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    words = {0: number, 4: MACHINES[machine] if of is None else of}
    words |= {16 + 8 * place: value & 0xFFFFFFFF for place, value in enumerate(padded)}
    program, at, value = calls.program(machine), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            value = words[operand]
        elif code == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand}[code]
            at += if_true if holds else if_false


# -- the filter, for both kinds of machine -----------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_what_is_not_listed(machine: str) -> None:
    for number in numbers(ALLOWED, machine).values():
        assert verdict(machine, number) == ALLOW
    for name, number in numbers(REFUSED, machine).items():
        assert verdict(machine, number) == ERRNO | EPERM, name
    listed = {*numbers(ALLOWED, machine).values(), *numbers(RULED, machine).values()}
    others = [number for number in range(600) if number not in listed]
    assert {verdict(machine, number) for number in others} == {ERRNO | EPERM, ERRNO | ENOSYS}
    assert verdict(machine, 10_000) == ERRNO | ENOSYS  # a future kernel's
    assert verdict(machine, 0x40000000) == ERRNO | ENOSYS  # read, as x32 calls it
    assert verdict(machine, 1, of=0x40000003) == KILL  # exit, as a 32-bit program calls it
    assert len(calls.program(machine)) <= 4096  # the kernel's limit
    assert set(numbers(RULED, "x86_64")) == set(calls.RULES)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("mmap", [(0, 4096, 3, 0x22), (0, 4096, 5, 0x812)], [(0, 4096, 3, 0x40022), (0, 4096, 3, 0x2022)]),
        ("mremap", [(0, 1, 2, 0), (0, 1, 2, 1)], [(0, 1, 2, 3), (0, 1, 2, 5)]),
        ("madvise", [(0, 1, 4), (0, 1, 8)], [(0, 1, 14), (0, 1, 25), (0, 1, 12), (0, 1, 100)]),
        ("clone", [(0x11,), (0x3D0F00,), (0x4111,)], [(0x10000011,), (0x20011,), (0x40000011,), (0x8011,)]),
        ("futex", [(0, 0x80), (0, 0x189), (0, 1)], [(0, 6), (0, 0x86), (0, 13), (0, 12)]),
        ("fcntl", [(3, 1), (3, 4, 0x800), (3, 1030)], [(3, 1031), (3, 1024), (3, 1026), (3, 37), (3, 8), (3, 10)]),
        ("prctl", [(15,)], [(22, 2), (4, 1), (36, 1), (41, 0), (0x53564D41,)]),
        ("mknodat", [(-100, 0, 0o010644)], [(-100, 0, 0o020644), (-100, 0, 0o140644)]),
        ("socketpair", [(1, 1), (1, 0o2004001)], [(1, 2), (1, 5), (2, 1), (16, 1)]),
        ("sendto", [(3, 0, 1, 0), (3, 0, 1, 0x4040)], [(3, 0, 1, 1), (3, 0, 1, 0x4000000)]),
        ("recvfrom", [(3, 0, 1, 0), (3, 0, 1, 0x42)], [(3, 0, 1, 1), (3, 0, 1, 0x2000)]),
        ("getsockopt", [(3, 1, 3), (3, 1, 38)], [(3, 1, 17), (3, 1, 77), (3, 6, 3)]),
    ],
)
def test_dangerous_arguments_are_refused(
    machine: str, name: str, allowed: list[tuple[int, ...]], refused: list[tuple[int, ...]]
) -> None:
    number = numbers(RULED, machine)[name]
    assert [verdict(machine, number, *arguments) for arguments in allowed] == [ALLOW] * len(allowed)
    assert [verdict(machine, number, *arguments) for arguments in refused] == [ERRNO | EPERM] * len(refused)


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_that_fail_or_succeed_in_their_own_way(machine: str) -> None:
    number = numbers(RULED, machine)
    assert verdict(machine, number["clone3"]) == ERRNO | ENOSYS  # libc then uses clone
    assert verdict(machine, number["ioctl"], 0, 0x5412) == ERRNO | ENOTTY  # typing into a terminal
    assert verdict(machine, number["fcntl"], 3, 6) == ERRNO  # a record lock: it seems to succeed


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_match_the_kernel_headers(machine: str) -> None:
    headers = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}
    header = Path("/usr/include") / headers[machine]
    if not header.exists():
        pytest.skip(f"no kernel headers: {header}")
    text = header.read_text(encoding="utf-8")
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", text, re.M)}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    for name, number in numbers(ALLOWED + RULED + REFUSED, machine).items():
        if name in known or number <= max(known.values()):
            assert known.get(name) == number, name


# -- attacks ----------------------------------------------------------------------------------------------------------


RAW = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
answers = {{}}
for name, number in {refused}.items():
    ctypes.set_errno(0)
    answers[name] = libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno()
print([name for name, answer in answers.items() if answer != (-1, 1)])
"""


def test_refused_calls_never_reach_the_kernel(roomy: Sandbox) -> None:
    attack = roomy.run(RAW.format(refused=numbers(REFUSED, platform.machine())))
    neighbour = roomy.run("import time\ntime.sleep(0.2)\n'alive'")
    refused, alive = together(attack, neighbour)
    assert (refused.stdout, refused.error) == ("[]\n", None)
    assert alive.stdout == "'alive'\n"
    assert works(roomy)


def test_semaphores_take_no_kernel_memory(roomy: Sandbox) -> None:
    code = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    print(sum(libc.semget(0, 32000, 0o1600) >= 0 for _ in range(600)))  # 2 MB each
    """
    assert run(roomy, code).stdout == "0\n"


def test_pipes_pin_no_pages_and_do_not_grow(roomy: Sandbox) -> None:
    code = """
    import ctypes, fcntl, mmap, os
    libc = ctypes.CDLL(None, use_errno=True)
    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    memory = mmap.mmap(-1, 4 << 20)
    piece = Piece(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096)
    read, write = os.pipe()
    print(libc.vmsplice(write, ctypes.byref(piece), ctypes.c_ulong(1), 0))
    file = os.open("/dev/zero", os.O_RDONLY)
    print(libc.splice(file, None, write, None, ctypes.c_size_t(4096), 0))
    print(libc.fcntl(write, 1031, 1 << 20))
    """
    assert run(roomy, code).stdout == "-1\n-1\n-1\n"


def test_huge_pages_are_off(roomy: Sandbox) -> None:
    # With them, a process that unmaps all but 4 KB of each 2 MB keeps the 2 MB, and only the 4 KB are counted.
    async def look() -> str:
        await roomy.run("x = 1", session="s")
        handle = roomy._sessions["s"].process._handle  # type: ignore[union-attr]
        found = re.search(r"Pid:\t(\d+)", Path(f"/proc/self/fdinfo/{handle}").read_text(encoding="utf-8"))
        assert found is not None
        status = Path(f"/proc/{found[1]}/status").read_text(encoding="utf-8")
        await roomy.release("s")
        return status

    status = asyncio.run(look())
    if "THP_enabled" not in status:
        pytest.skip("this kernel does not report huge pages")
    assert "THP_enabled:\t0\n" in status
    code = """
    import ctypes, mmap
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(2 << 20)
    print([hex(libc.mmap(None, size, 3, 0x22 | flag, -1, ctypes.c_long(0))) for flag in (0x40000, 0x2000)])
    try:
        mmap.mmap(-1, 4 << 20).madvise(14)
    except PermissionError:
        print("no")
    """
    assert run(roomy, code).stdout == f"{[hex(2**64 - 1)] * 2}\nno\n"


def test_sockets_hold_little_memory(roomy: Sandbox) -> None:
    code = """
    import socket
    refused = []
    def attempt(what, function, *arguments):
        try:
            function(*arguments)
        except PermissionError:
            refused.append(what)
    attempt("inet", socket.socket)
    attempt("unix", socket.socket, socket.AF_UNIX)
    attempt("datagrams", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
    held, kept = 0, []
    try:
        while True:
            pair = socket.socketpair()
            kept.append(pair)
            for one in pair:
                one.setblocking(False)
                while True:
                    try:
                        held += one.send(b"x" * 4096)
                    except BlockingIOError:
                        break
    except OSError:
        pass
    attempt("bigger buffers", kept[0][0].setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    attempt("descriptors", socket.send_fds, kept[0][0], [b"x"], [0])
    print(*refused, sep=", ")
    print(held)
    """
    refused, held = run(roomy, code).stdout.splitlines()
    assert refused == "inet, unix, datagrams, bigger buffers, descriptors"
    default = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="utf-8"))
    assert 0 < int(held) <= roomy.limits.open_files * default


def test_shared_files_cannot_be_locked_or_watched(roomy: Sandbox) -> None:
    code = """
    import ctypes, fcntl, os, tempfile
    libc = ctypes.CDLL(None, use_errno=True)
    shared = open(os.__file__)
    for attempt in (
        lambda: fcntl.flock(shared, fcntl.LOCK_SH),
        lambda: fcntl.fcntl(shared, fcntl.F_SETLEASE, fcntl.F_RDLCK),
        lambda: fcntl.fcntl(os.open("/", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_MODIFY),
    ):
        try:
            attempt()
            print("done")
        except PermissionError:
            print("refused")
    print(libc.inotify_init(), libc.inotify_init1(0), libc.fanotify_init(0, 0))
    own = tempfile.TemporaryFile()
    fcntl.lockf(own, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    # Record locks seem to succeed but have no effect: the child gets the lock that its parent holds.
    assert run(roomy, code).stdout == "refused\nrefused\nrefused\n-1 -1 -1\n5\n"


def test_times_of_devices_cannot_be_set(isolated: Sandbox) -> None:
    code = """
    import os
    touched = []
    for place in ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", 0, os.__file__, "/"):
        try:
            os.utime(place)
            touched.append(place)
        except OSError:
            pass
    print(touched)
    print(open("/dev/null", "w").write("x"), open("/dev/zero", "rb").read(1))
    """
    assert run(isolated, code).stdout == "[]\n1 b'\\x00'\n"
