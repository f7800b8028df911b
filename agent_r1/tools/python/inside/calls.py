"""The system calls that sandboxed code may make, and the seccomp filter that refuses all others.

An allow-list: calls that are not named here, including those of future kernels, are refused. Calls that are needed but
dangerous with some arguments are in `RULES`. A filter sees numbers, not what pointers refer to, so it cannot check
paths and structures; the file system that code sees (`confine.py`) takes care of paths.
"""

from __future__ import annotations

from dataclasses import dataclass

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
EPERM, ENOTTY, ENOSYS = 1, 25, 38
NO_ERROR = 0  # the call appears to succeed
FIRST_UNKNOWN = 470  # the first number that Linux 6.17 does not use

# Each call with its numbers on x86_64 and on aarch64, which lacks the older calls.
ALLOWED = """
    read=0/63 write=1/64 readv=19/65 writev=20/66 pread64=17/67 pwrite64=18/68 preadv=295/69 pwritev=296/70
    lseek=8/62 open=2/- openat=257/56 creat=85/- close=3/57 close_range=436/436 dup=32/23 dup2=33/- dup3=292/24
    stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79 statx=332/291 statfs=137/43 fstatfs=138/44 access=21/-
    faccessat=269/48 faccessat2=439/439 readlink=89/- readlinkat=267/78 getdents=78/- getdents64=217/61 getcwd=79/17
    chdir=80/49 fchdir=81/50 mkdir=83/- mkdirat=258/34 rmdir=84/- unlink=87/- unlinkat=263/35 rename=82/-
    renameat=264/38 renameat2=316/276 link=86/- linkat=265/37 symlink=88/- symlinkat=266/36 chmod=90/- fchmod=91/52
    fchmodat=268/53 fchmodat2=452/452 chown=92/- fchown=93/55 lchown=94/- fchownat=260/54 umask=95/166
    truncate=76/45 ftruncate=77/46 fallocate=285/47 fsync=74/82 fdatasync=75/83 utime=132/- utimes=235/-
    futimesat=261/- utimensat=280/88 getxattr=191/8 lgetxattr=192/9 fgetxattr=193/10 listxattr=194/11
    llistxattr=195/12 flistxattr=196/13

    brk=12/214 mprotect=10/226 munmap=11/215 msync=26/227

    fork=57/- vfork=58/- execve=59/221 exit=60/93 exit_group=231/94 wait4=61/260 waitid=247/95 kill=62/129
    tkill=200/130 tgkill=234/131 getpid=39/172 getppid=110/173 gettid=186/178 getpgid=121/155 getpgrp=111/-
    getsid=124/156 setpgid=109/154 setsid=112/157 set_tid_address=218/96 set_robust_list=273/99 rseq=334/293
    rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136 rt_sigsuspend=130/133
    rt_sigtimedwait=128/137 sigaltstack=131/132 pause=34/- restart_syscall=219/128 sched_yield=24/124
    sched_getaffinity=204/123 sched_getparam=143/121 sched_getscheduler=145/120 sched_get_priority_max=146/125
    sched_get_priority_min=147/126 sched_rr_get_interval=148/127 getpriority=140/141

    time=201/- gettimeofday=96/169 clock_gettime=228/113 clock_getres=229/114 nanosleep=35/101
    clock_nanosleep=230/115 alarm=37/- getitimer=36/102 setitimer=38/103 select=23/- pselect6=270/72 poll=7/-
    ppoll=271/73 pipe=22/- pipe2=293/59 epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21 epoll_wait=232/-
    epoll_pwait=281/22 getsockname=51/204 getpeername=52/205 shutdown=48/210

    getuid=102/174 geteuid=107/175 getgid=104/176 getegid=108/177 getresuid=118/148 getresgid=120/150
    getgroups=115/158 capget=125/90 getrlimit=97/163 setrlimit=160/164 prlimit64=302/261 getrusage=98/165
    times=100/153 uname=63/160 sysinfo=99/179 getcpu=309/168 getrandom=318/278
"""
RULED = """
    mmap=9/222 mremap=25/216 madvise=28/233 clone=56/220 clone3=435/435 futex=202/98 fcntl=72/25 ioctl=16/29
    prctl=157/167 arch_prctl=158/- mknod=133/- mknodat=259/33 socketpair=53/199 sendto=44/206 recvfrom=45/207
    getsockopt=55/209
"""

ALL_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Check:
    """An argument must have one of `values`, apart from the bits in `ignore`; otherwise the call fails with `errno`."""

    argument: int  # only its lower 32 bits, as the kernel reads no more of these arguments
    values: tuple[int, ...] = (0,)
    ignore: int = 0
    errno: int = EPERM


NEW_NAMESPACES = 0x7E020080
_PARENT_PTRACE_PIDFD = 0x8000 | 0x2000 | 0x1000  # would create a sibling, a traced child, a pidfd
_LOCKED_HUGETLB_GROWSDOWN = 0x2000 | 0x40000 | 0x100
_DESCRIPTORS = (0, 1, 2, 3, 4, 5, 1030, 1032)  # duplicates, flags, GETLK, the size of a pipe
_RECORD_LOCKS = (6, 7)  # SETLK, SETLKW
_FIFO = Check(1, (0o010000,), ignore=0o7777)

RULES: dict[str, tuple[Check, ...]] = {
    "mmap": (Check(3, ignore=ALL_BITS & ~_LOCKED_HUGETLB_GROWSDOWN),),
    "mremap": (Check(3, ignore=1),),  # MAYMOVE, which is what realloc needs
    "madvise": (Check(2, (0, 1, 2, 3, 4, 8, 10, 11, 16, 17)),),  # no huge, shared or prefaulted pages
    "clone": (Check(0, ignore=ALL_BITS & ~(NEW_NAMESPACES | _PARENT_PTRACE_PIDFD)),),
    "clone3": (Check(0, (), errno=ENOSYS),),  # its flags are behind a pointer; libc falls back to clone
    "futex": (Check(1, (0, 1, 3, 4, 5, 9, 10), ignore=0x180),),  # no priority inheritance, which has a history of holes
    # Record locks take kernel memory and affect files of others. sqlite needs them, so they seem to succeed.
    "fcntl": (Check(1, (*_DESCRIPTORS, *_RECORD_LOCKS)), Check(1, _DESCRIPTORS, errno=NO_ERROR)),
    "ioctl": (
        Check(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), errno=ENOTTY),
    ),  # requests of a terminal, FION*, FIO*CLEX
    "prctl": (Check(0, (15, 16)),),  # a thread's name
    "arch_prctl": (Check(0, (0x1002, 0x1003)),),  # the FS register, which every program sets when it starts
    "mknod": (_FIFO,),
    "mknodat": (Check(2, _FIFO.values, _FIFO.ignore),),
    # asyncio wakes itself through a pair of unix streams. Without sendmsg no descriptors are passed, and without
    # setsockopt no buffer grows.
    "socketpair": (Check(0, (1,)), Check(1, (1,), ignore=0o2004000)),
    "sendto": (Check(3, ignore=0x4040),),  # NOSIGNAL, DONTWAIT
    "recvfrom": (Check(3, ignore=0x162),),  # PEEK, TRUNC, DONTWAIT, WAITALL
    "getsockopt": (Check(1, (1,)), Check(2, (3, 4, 7, 8, 30, 38, 39))),  # TYPE, ERROR, *BUF, LISTENS, PROTOCOL, DOMAIN
}

Instruction = tuple[int, int, int, int]  # classic BPF: code, jump if true, jump if false, value
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANSWER = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CHUNK = 200  # comparisons that jump to one answer: a jump spans at most 255 instructions


def numbers(table: str, machine: str) -> dict[str, int]:
    column = list(MACHINES).index(machine)
    pairs = (entry.split("=") for entry in table.split())
    return {name: int(each.split("/")[column]) for name, each in pairs if each.split("/")[column] != "-"}


def program(machine: str) -> list[Instruction]:
    """Return the filter for `machine`. `seccomp_data` holds number, machine, instruction pointer and arguments."""
    steps: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, MACHINES[machine]), (_ANSWER, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, 0))
    allowed = list(numbers(ALLOWED, machine).values())
    for start in range(0, len(allowed), _CHUNK):
        chunk = allowed[start : start + _CHUNK]
        last = len(chunk) - 1
        steps += [(_EQUAL, last - place, place == last, number) for place, number in enumerate(chunk)]
        steps.append((_ANSWER, 0, 0, _ALLOW))
    for name, number in numbers(RULED, machine).items():
        body = [step for check in RULES[name] for step in _check_steps(check)]
        steps += [(_EQUAL, 0, len(body) + 1, number), *body, (_ANSWER, 0, 0, _ALLOW)]
    # On ENOSYS, libraries assume an older kernel and fall back. This includes the x32 calls of x86_64.
    return [*steps, (_AT_LEAST, 0, 1, FIRST_UNKNOWN), (_ANSWER, 0, 0, _ERRNO | ENOSYS), (_ANSWER, 0, 0, _ERRNO | EPERM)]


def _check_steps(check: Check) -> list[Instruction]:
    """Instructions that continue past their end if the argument passes."""
    count = len(check.values)
    steps = [(_LOAD, 0, 0, 16 + 8 * check.argument), (_AND, 0, 0, ALL_BITS & ~check.ignore)]
    steps += [(_EQUAL, count - place, 0, value) for place, value in enumerate(check.values)]
    return [*steps, (_ANSWER, 0, 0, _ERRNO | check.errno)]
