"""An engine that can sleep does so between collecting and the new weights, never while it samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.ranks.crew import Crew
from tests.conftest import Cli

MINI = str(Path(__file__).parents[1] / "mini" / "base.yaml")


def test_the_engine_sleeps_while_the_learner_works(
    cli: Cli, cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    load_weights, together, depth = LocalEngine.load_weights, Crew.all, 0

    async def count(crew: Crew, part: Any) -> list[Any]:
        nonlocal depth
        depth += 1
        try:
            return await together(crew, part)
        finally:
            depth -= 1

    async def sleep(engine: LocalEngine) -> None:
        assert engine.num_requests == 0
        assert depth == 1  # an error reaches all ranks, which save together
        events.append("sleep")

    async def load(engine: LocalEngine, source: Any, version: int) -> None:
        events.append(f"load {version}")
        await load_weights(engine, source, version)

    monkeypatch.setattr(Crew, "all", count)
    monkeypatch.setattr(LocalEngine, "sleep", sleep, raising=False)
    monkeypatch.setattr(LocalEngine, "load_weights", load)
    ended = cli("train", MINI, "sft.demos=null", "trainer.steps=2", "--run", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert events == ["sleep", "load 1", "sleep", "load 2"]
