"""A private file system for commands of a Harbor task, made of Linux namespaces. Not a container.

Programs, libraries and settings are those of this machine (`/usr`, `/bin`, `/lib*`, `/etc`, read-only). The task's
directories start empty and keep what commands write between calls; everything else is gone after each call. There is no
network unless asked for, and no process survives its call. Commands run as root of a user namespace with the rights of
this user, and their memory is limited per process only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agent_r1.errors import ConfigError

KEPT = ("app", "home", "logs", "root", "srv", "tmp", "var", "workspace")  # directories that commands may write to
SHARED = ("bin", "etc", "lib", "lib32", "lib64", "sbin", "usr")  # directories of this machine, read-only
MADE = (".host", "dev", "proc")  # directories made by the script below
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_BYTES = 200_000  # limit on the output of a command; the rest is dropped

# Arguments: root, directory of the kept ones, memory in KiB, mounts as SOURCE=TARGET=ro|rw ..., --, workdir, command
_ENTER = """
set -e
R=$1; K=$2; M=$3; shift 3
mount -t tmpfs tmpfs "$R"
for d in usr bin sbin lib lib32 lib64 etc; do
  if [ -L /$d ]; then ln -s "$(readlink /$d)" "$R/$d"
  elif [ -d /$d ]; then
    mkdir "$R/$d"; mount --rbind /$d "$R/$d"
    mount -o remount,bind,ro "$R/$d" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$R/$d"
  fi
done
for d in "$K"/*; do mkdir "$R/${d##*/}"; mount --bind "$d" "$R/${d##*/}"; done
while [ "$1" != -- ]; do
  s=${1%%=*}; t=${1#*=}; m=${t##*=}; t=${t%=*}; shift
  rm -rf "$R$t"; mkdir -p "$R$t"; mount --bind "$s" "$R$t"
  [ "$m" = rw ] || mount -o remount,bind,ro "$R$t" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$R$t"
done
mkdir "$R/dev" "$R/proc" "$R/.host"
for d in null zero full random urandom; do : > "$R/dev/$d"; mount --bind /dev/$d "$R/dev/$d"; done
mount -t proc proc "$R/proc"
pivot_root "$R" "$R/.host"
umount -l /.host
ulimit -v "$M"
shift; cd "$1"; shift
exec "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    output: str
    code: int | None  # None: it took too long and was killed


class Box:
    """The directories of one episode."""

    def __init__(self, *, workdir: str, network: bool, memory_mb: int) -> None:
        self.workdir, self._network, self._memory_mb = workdir, network, memory_mb
        self._folder = Path(tempfile.mkdtemp(prefix="agent-r1-harbor-"))
        for name in {*KEPT, workdir.strip("/").partition("/")[0]}:
            (self._folder / "kept" / name).mkdir(parents=True)
        (self._folder / "root").mkdir()
        self.host(workdir).mkdir(parents=True, exist_ok=True)

    def host(self, path: str) -> Path:
        """Where a kept path is on this machine. Only safe before the first command, which may create links."""
        return self._folder / "kept" / path.strip("/")

    async def run(
        self,
        *command: str,
        seconds: float,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, tuple[Path, str]] | None = None,  # path inside -> (directory here, ro or rw)
    ) -> Outcome:
        """Run a command. Output and errors are mixed."""
        binds = [f"{source}={path}={mode}" for path, (source, mode) in (mounts or {}).items()]
        root, kept = self._folder / "root", self._folder / "kept"
        process = await asyncio.create_subprocess_exec(
            *_unshare(self._network),
            *("/bin/sh", "-c", _ENTER, "sh", str(root), str(kept), str(self._memory_mb * 1024)),
            *(*binds, "--", self.workdir, *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TERM": "dumb", **(env or {})},
            start_new_session=True,
        )
        output = bytearray()
        try:
            async with asyncio.timeout(seconds):
                assert process.stdout is not None
                while data := await process.stdout.read(65536):
                    output += data[: OUTPUT_BYTES - len(output)]
                code: int | None = await process.wait()
        except TimeoutError:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and with it, through --kill-child, all processes inside
            await process.wait()
        return Outcome(output=output.decode(errors="replace"), code=code)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _unshare(network: bool) -> list[str]:
    private = ["--user", "--map-root-user", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    return ["unshare", *private, *([] if network else ["--net"])]


@cache
def require_namespaces() -> None:
    """Raise ConfigError if this machine does not allow them."""
    try:
        subprocess.run(
            [*_unshare(False), "/bin/sh", "-c", "mount -t tmpfs tmpfs /mnt"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip()
        raise ConfigError(
            f"tasks of Harbor need user namespaces (the program unshare), which do not work here: {said or error}"
        ) from error
