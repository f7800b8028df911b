"""Fork processes from one that has already imported torch, which saves seconds per process.

Each is a full process with its own environment, exit code and signals; only the start of Python is skipped.
`test_quickstart_benchmarks.py` and `test_chat.py` test the program from a cold start.
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
# Modules that commands import; none of them may start threads or look for a GPU.
_FORKS.set_forkserver_preload(
    [
        "agent_r1.cli.commands.play",
        "agent_r1.cli.train_command",
        "agent_r1.doctor.quick",
        "agent_r1.engines.local.local_engine",
        "agent_r1.recipes.quickstart.tiny",
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "tests.frozen",  # the last one
    ]
)


def start(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Run a module-level function in a fork that ends with the tests."""
    process = _FORKS.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start_program(words: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Run `agent-r1 WORDS` in a fork and append stdout and stderr to the log."""
    return start(_program, list(words), dict(environment), str(log))


def start_torchrun(words: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """The same for `torchrun WORDS`. What it starts are new processes of its own."""
    return start(_torchrun, list(words), dict(environment), str(log))


def _program(words: list[str], environment: dict[str, str], log: str) -> None:
    _take_over(environment, log)
    sys.argv = ["agent-r1", *words]
    main()


def _torchrun(words: list[str], environment: dict[str, str], log: str) -> None:
    from torch.distributed.run import main as torchrun

    _take_over(environment, log)
    torchrun(words)


def _take_over(environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
