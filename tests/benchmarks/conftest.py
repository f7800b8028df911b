"""Marks the tests of the scripts in benchmarks/. Commands of experiments run in forks, which need not import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from tests.forked import start_program


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("benchmarks")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every command of an experiment in a fork."""
    monkeypatch.setattr("benchmarks.recipes.subprocess", SimpleNamespace(run=_run, STDOUT=subprocess.STDOUT))


def _run(
    command: Sequence[str], *, stdout: IO[str], stderr: int, check: bool, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    assert command[:3] == [sys.executable, "-m", "agent_r1.cli"]
    assert (stderr, check) == (subprocess.STDOUT, False)
    process = start_program(command[3:], env, Path(stdout.name))
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode)
