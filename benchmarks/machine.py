"""Where and on what a benchmark ran; goes into every result file."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    return {
        # A copy that travelled without its history is told by whoever sent it.
        "commit": os.environ.get("AGENT_R1_COMMIT") or _output("git", "rev-parse", "--short=12", "HEAD") or "unknown",
        "changed_files": len(_output("git", "status", "--porcelain", "--untracked-files=no").splitlines()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent).stdout.strip()
