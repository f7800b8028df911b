"""Processes that need not import torch: forks of one that has, which takes seconds once instead of every time.

Each is a whole process, with an environment, an exit code and signals of its own; only what Python does at its start is
not done again. That the program starts from nothing is for `test_quickstart_benchmarks.py` and `test_chat.py` to show.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agent_r1.cli.app import main

_FORKS = multiprocessing.get_context("forkserver")
# What commands import on their way, and nothing that starts threads or looks for a GPU.
_FORKS.set_forkserver_preload(
    ["agent_r1.cli.commands.collect", "agent_r1.recipes.quickstart.tiny", "matplotlib.figure"]
)


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """`function` must be one of a module, so that the process finds it. It does not outlive the tests."""
    process = _FORKS.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start_program(words: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """`agent-r1 WORDS`, whose output, errors included, is added to the log."""
    return start(_program, list(words), dict(environment), str(log))


def _program(words: list[str], environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = ["agent-r1", *words]
    main()
