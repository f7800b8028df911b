"""Agent loops play what a local run plays. No Ray: an actor here is an object in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import places
from agent_r1.backends.verl.inside.agent_loop import AgentLoop, Purpose, RemoteCollector
from agent_r1.backends.verl.inside.sampler import SESSION, VerlSampler
from agent_r1.backends.verl.reader import load_reader
from agent_r1.backends.verl.rows import unpack_group
from agent_r1.build.collectors import eval_collector, train_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.build.start import base_model
from agent_r1.build.task import build_task
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.base import Completion, Engine, Prompt, Sampling
from agent_r1.errors import RolloutError
from agent_r1.rollout.collect import RowQueue
from agent_r1.types import Group, Trajectory

MINI = str(Path(__file__).parents[1] / "mini" / "base.yaml")
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(autouse=True)
def _end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is not stopped resolves paths for the rest of its process, which here goes on with other tests."""
    monkeypatch.setattr(places, "_start", None)
    monkeypatch.setattr(places, "_uses", 0)


@dataclass
class Output:
    """As verl's servers answer."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=lambda: {"global_steps": 7})


@dataclass
class Client:
    """As verl's client of its servers, over an engine in this process."""

    engine: Engine
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Output:
        self.asked.append(sampling_params)
        sampling = Sampling(
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            top_k=max(0, sampling_params["top_k"]),
            stop_ids=tuple(sampling_params["stop_token_ids"]),
            seed=sampling_params["seed"],
        )
        done = await self.engine.generate(Prompt(prompt_ids), sampling, session=request_id)
        self.engine.release(request_id)
        return Output(done.token_ids, done.logprobs)


class Remote:
    """A method of an actor."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self.remote = method


class Handle:
    """An actor."""

    def __init__(self, loop: AgentLoop) -> None:
        self.play = Remote(loop.play)


@dataclass
class Setup:
    config: RunConfig
    directory: str
    engine: Engine

    async def loops(self, count: int, tmp_path: Path) -> list[Handle]:
        made = []
        for number in range(count):
            log = str(tmp_path / f"loop_{number}.log")
            loop = AgentLoop(self.config.model_dump(mode="json"), folder=str(Path.cwd()), log=log, loops=count)
            await loop.start(Client(self.engine), "agent_r1", self.directory)
            made.append(Handle(loop))
        return made

    def collector(self, loops: list[Handle], purpose: Purpose, size: int) -> RemoteCollector:
        return RemoteCollector(loops=loops, purpose=purpose, group_size=size, max_concurrent=8)


@pytest.fixture
def setup() -> Setup:
    config = load_config(MINI, ["sft.demos=null"])
    directory = str(base_model(config))
    return Setup(config, directory, build_engine(config, load_model(config, directory)))


def assert_same(found: list[Group], expected: list[Group]) -> None:
    """Up to the clock, to who counts versions, and to rounding: requests meet in other batches."""

    def bare(trajectory: Trajectory) -> Trajectory:
        gone: dict[str, Any] = {"generate_seconds": 0.0, "env_seconds": 0.0, "start_seconds": None, "versions": ()}
        steps = [replace(step, response_logprobs=[0.0] * len(step.response_ids), **gone) for step in trajectory.steps]
        return replace(trajectory, steps=steps, seconds=0.0, started=None)

    pairs = [
        (mine, theirs)
        for a, b in zip(found, expected, strict=True)
        for mine, theirs in zip(a.trajectories, b.trajectories, strict=True)
    ]
    for mine, theirs in pairs:
        assert bare(mine) == bare(theirs)
        for a, b in zip(mine.steps, theirs.steps, strict=True):
            assert a.response_logprobs == pytest.approx(b.response_logprobs, abs=1e-4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_agent_loops_play_and_score_what_a_collector_would(
    setup: Setup, tmp_path: Path, count: int, purpose: Purpose
) -> None:
    config, task = setup.config, build_task(setup.config)
    rows = task.train_rows()[:5]
    renderer = load_reader(config, setup.directory).renderer
    local = {"train": train_collector, "eval": eval_collector}[purpose](config, task, renderer, setup.engine)
    seen: list[Trajectory] = []

    async def play() -> tuple[list[Group], list[Group]]:
        played = await local.claimed(RowQueue(rows, first=2), seed=5)
        expected = await task.scorer([played[ticket] for ticket in sorted(played)])
        remote = setup.collector(await setup.loops(count, tmp_path), purpose, local.group_size)
        found = await remote.claimed(RowQueue(rows, first=2), seed=5, on_episode=seen.append)
        return expected, [found[ticket] for ticket in sorted(found)]

    expected, found = asyncio.run(play())
    assert_same(found, expected)
    assert [group.row for group in found] == rows
    assert len(seen) == len(rows) * local.group_size
    assert {step.versions[0][0] for group in found for t in group.trajectories for step in t.steps} == {7}


def test_a_dead_agent_loop_ends_the_collection_at_once(setup: Setup, tmp_path: Path) -> None:
    class Died(Exception):
        pass

    async def play() -> None:
        loops = await setup.loops(2, tmp_path)

        async def dead(*_: Any) -> None:
            raise Died

        loops[1].play = Remote(dead)
        await setup.collector(loops, "train", 4).claimed(RowQueue(build_task(setup.config).train_rows()), seed=1)

    with pytest.raises(Died):
        asyncio.run(play())


def test_an_episode_that_hangs_fails_alone(setup: Setup, tmp_path: Path) -> None:
    config = setup.config
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"episode_seconds": 2.0})})
    row, never = build_task(config).train_rows()[0], asyncio.Event()
    stop_id = load_reader(config, setup.directory).renderer.stop_ids[0]

    class OneHangs:
        calls = 0

        async def generate(self, request_id: str, **asked: Any) -> Output:
            self.calls += 1
            if self.calls == 1:
                await never.wait()
            return Output([stop_id], [-1.0])

    async def play() -> list[Trajectory]:
        loop = AgentLoop(config.model_dump(mode="json"), folder=str(Path.cwd()), log=str(tmp_path / "log"), loops=1)
        await loop.start(OneHangs(), "agent_r1", setup.directory)
        return unpack_group(row, await loop.play("train", row, 0, 1)).trajectories

    assert sorted(trajectory.stop.is_failure for trajectory in asyncio.run(play())) == [False, False, False, True]


SAMPLING = Sampling(max_tokens=4, temperature=0.5, stop_ids=(2,), seed=2**63 + 5)


class Scripted:
    def __init__(self, output: Output) -> None:
        self.output = output

    async def generate(self, request_id: str, **asked: Any) -> Output:
        return self.output


def sample(output: Output) -> Completion:
    sampler = VerlSampler(Scripted(output), engine="vllm")
    return asyncio.run(sampler.generate(Prompt([1]), SAMPLING, session="s"))


def test_the_last_token_tells_why_a_response_ended() -> None:
    assert sample(Output([5, 2], [-1.0, -2.0])).stop == "stop"
    assert sample(Output([5, 6], [-1.0, -2.0])).stop == "length"
    assert sample(Output([5, 6], [-1.0, -2.0], stop_reason="aborted")).stop == "abort"


@pytest.mark.parametrize("output", [Output([5], None), Output([5, 6], [-1.0]), Output([], [])])
def test_a_response_without_its_log_probs_is_refused(output: Output) -> None:
    with pytest.raises(RolloutError, match="training needs one log-prob per token"):
        sample(output)


def test_servers_get_only_what_they_understand() -> None:
    given = {engine: VerlSampler(None, engine=engine).parameters(SAMPLING, "s") for engine in ("vllm", "sglang", "own")}
    assert given["vllm"]["seed"] == 5  # vLLM takes 63 bits
    assert "seed" not in given["sglang"]
    assert given["own"][SESSION] == "s"
    assert SESSION not in given["vllm"]
    assert given["vllm"]["top_k"] == -1
