"""Our engine and another one, taking turns: decoding, prompts plus decoding, and multi-turn tool episodes.

Each rival is a file `NAME_engine.py` in this folder with a function `make_rival`. Both engines stay on the same GPU for
the whole benchmark, with their weights and caches; only one of them computes at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from agent_r1.bench.engine_speed import EngineBench, EngineSizes, Run
from agent_r1.bench.models import BenchModel
from agent_r1.bench.results import Row
from agent_r1.engines.base import Sampler
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.errors import ConfigError, did_you_mean


class EngineRival(Protocol):
    """Another engine with a model of the same shape."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Added to the settings of each row."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    def run(self, work: Any) -> Any:
        """Run a coroutine. An engine may be tied to its own event loop."""
        ...

    def close(self) -> None: ...


MakeEngineRival = Callable[[BenchModel, EngineSizes, torch.device], EngineRival]


def find_engine_rival(name: str) -> MakeEngineRival:
    known = sorted(path.name.removesuffix("_engine.py") for path in Path(__file__).parent.glob("*_engine.py"))
    if name not in known:
        raise ConfigError(f"--against {name}: there is no such engine.{did_you_mean(name, known)}")
    try:
        found: MakeEngineRival = importlib.import_module(f"benchmarks.speed.{name}_engine").make_rival
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--against {name}: {error}; benchmarks/speed/{name}_engine.py says what to install"
        ) from error
    return found


@dataclass(kw_only=True)
class EngineAgainst(EngineBench):
    make_rival: MakeEngineRival
    _rival: EngineRival | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """Without `actions`, which need an engine of their own."""
        return {name: measure for name, measure in super().groups.items() if name != "actions"}

    @property
    def rival(self) -> EngineRival:
        """Started before our engine: it takes a share of all memory, and fails if less is free."""
        if self._rival is None:
            self._rival = self.make_rival(self.model, self.sizes, self.device)
        return self._rival

    def engine(self) -> LocalEngine:
        assert self.rival
        return super().engine()

    @property
    def rival_settings(self) -> dict[str, Any]:
        return {"against": self.rival.name, **self.rival.settings}

    def samplers(self) -> dict[str, tuple[Sampler, Run]]:
        rival = self.rival
        return super().samplers() | {rival.name: (rival.sampler, rival.run)}

    def close(self) -> None:
        if self._rival is not None:
            self._rival.close()
            self._rival = None
        super().close()
