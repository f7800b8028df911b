"""The command line as people use it, and a cache that is not the user's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from agent_r1.cli.app import command_line


@dataclass(frozen=True)
class Ended:
    """A command that is over."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*words: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["agent-r1", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all tests of a file, so that they make a warm start once."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
