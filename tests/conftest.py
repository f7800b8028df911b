"""Shared fixtures: the command line, a private cache, reproducible property tests in CI."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch and numpy are imported: with tiny matrices, a second thread only takes time from the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Examples may take any time: a busy machine is not a failure.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", patient)
settings.register_profile("ci", patient, derandomize=True)  # reproducible failures in CI
settings.load_profile("ci" if os.environ.get("CI") else "patient")


@dataclass(frozen=True)
class Ended:
    """The result of a finished command."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]
# Folders whose files take longest.
TRAINING = {
    "train",
    "learning",
    "recipes",
    "doctor",
    "vision",
    "share",
    "cli",
    "api",
    "benchmarks",
    "docs",
    "shown",
    "learn",
    "tools",
}


def pytest_configure() -> None:
    """A shell ignores SIGINT in what it starts in the background; tests of Ctrl-C need it there too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long files first: a file stays on one worker, and one that begins last would run alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, item.path.parent.name not in TRAINING))


@dataclass
class Frozen:
    """What this process knows about its frozen objects. Counting them would take longer than most tests."""

    thawed: bool = True  # nothing is frozen
    file: Path | None = None  # the last test file in which objects were frozen


_frozen = Frozen()
_unfreeze = gc.unfreeze


def _note_and_unfreeze() -> None:
    _unfreeze()
    _frozen.thawed = True


gc.unfreeze = _note_and_unfreeze


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep torch and transformers out of garbage collections: a run begins with a full one, which would visit half a
    million objects and take a quarter of the time of a tiny run. A run thaws everything at its end."""
    if _frozen.thawed:
        if item.path != _frozen.file:  # once per file, so that garbage cannot pile up
            gc.collect()
        gc.freeze()
        _frozen.thawed, _frozen.file = False, item.path


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    from agent_r1.cli.app import command_line

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
    """A private cache, shared by the tests of a file so that they build a warm start once."""
    import torch

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
