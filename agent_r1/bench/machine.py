"""The machine and the versions a benchmark ran with; stored in every result file."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from agent_r1.errors import ConfigError

HERE = Path(__file__).parent


def machine() -> dict[str, Any]:
    return {
        "commit": commit(),
        "changed_files": changed_files(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    # Set AGENT_R1_COMMIT for a copy of the repository without its history.
    return os.environ.get("AGENT_R1_COMMIT") or _git("rev-parse", "--short=12", "HEAD") or "unknown"


def changed_files() -> int | None:
    """Number of files changed since the commit; None for a copy without its history."""
    if os.environ.get("AGENT_R1_COMMIT"):
        return None
    return len(_git("status", "--porcelain", "--untracked-files=no").splitlines())


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {name!r}: choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    cuda = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def accelerator(device: torch.device) -> str:
    """Name of the GPU or processor; only results with the same name are compared."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def slug(name: str) -> str:
    """Make a name fit for a file name: NVIDIA H200 -> nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()
    except FileNotFoundError:  # git is not installed
        return ""
