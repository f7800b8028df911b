"""A model call that a flow leaves behind ends with the episode, so nothing of it runs when the weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.flows import episode as episode_module
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.types import Observation, StopReason, TaskRow, Trajectory, Transition
from tests.chatml import collector, row, tokenizer
from tests.engines.engine_sides import both, make_engine
from tests.engines.tiny_models import tiny

ASKED = Observation(text="x")


class Slow(ScriptedEngine):
    """Answers the first call of an episode and never another one."""

    def __init__(self) -> None:
        super().__init__(lambda call: "a", tokenizer=tokenizer())
        self.running = 0

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        completion = await super().generate(prompt, sampling, session=session)
        if self.calls[-1].turn:
            self.running += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.running -= 1
        return completion


def no_env(row: TaskRow) -> AgentEnv:
    raise AssertionError


async def begun(act: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(act)
    for _ in range(3):  # it renders and asks the engine
        await asyncio.sleep(0)
    return task


async def not_awaited(episode: Episode) -> None:
    await begun(episode.act(ASKED))


async def at_once(episode: Episode) -> None:
    await asyncio.gather(episode.act(ASKED), episode.act(ASKED))


async def given_up(episode: Episode) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(episode.act(ASKED), 0.01)


async def stubborn(episode: Episode) -> None:
    async def go_on() -> None:
        with suppress(asyncio.CancelledError):
            await episode.act(ASKED)
        await asyncio.sleep(60)

    await begun(go_on())


def flow(second: Callable[[Episode], Coroutine[Any, Any, None]]) -> Callable[[TaskRow], AgentFlowBase]:
    """An answer, and in the episode of row `r` something else after it."""

    class Flow(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await episode.act(Observation(messages=row.prompt))
            if row.row_id == "r":
                await second(episode)
            return StopReason.ANSWERED

    return lambda _: Flow(no_env)


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (not_awaited, None),
        (given_up, None),
        (stubborn, None),
        (at_once, "RuntimeError: episode.act was called while another call runs; await that one first"),
    ],
)
def test_nothing_of_an_episode_is_sampled_any_more_when_it_has_been_played(
    second: Callable[[Episode], Coroutine[Any, Any, None]], error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_module, "CANCEL_SECONDS", 0.2)  # who is stubborn is left behind then
    engine = Slow()

    async def main() -> list[Trajectory]:
        groups = await collector(engine, make_flow=flow(second))([row(), row("other")], seed=0)
        assert engine.running == 0
        return [group.trajectories[0] for group in groups]

    mine, other = asyncio.run(main())
    assert mine.stop is (StopReason.ANSWERED if error is None else StopReason.ERROR)
    assert error in (mine.error or "") if error else mine.error is None
    assert len(mine.steps) == 1
    assert (other.stop, other.error) == (StopReason.ANSWERED, None)
    assert len(engine.calls) == 3  # one each, and the one left behind
    assert sorted(engine.released) == sorted([mine.trajectory_id, other.trajectory_id])


@both
def test_new_weights_can_be_loaded_after_a_call_was_left_behind(side: dict[str, Any]) -> None:
    model = tiny("llama", vocab_size=300)
    engine = make_engine(model, max_cached_tokens=1024, **side)

    class Hasty(AgentFlowBase):
        async def run(self, row: TaskRow, episode: Episode) -> StopReason:
            await not_awaited(episode)
            assert engine.num_requests == 1
            return StopReason.ANSWERED

    async def main() -> None:
        collect = collector(engine, make_flow=lambda _: Hasty(no_env), max_response_tokens=60, max_context_tokens=120)
        [group] = await collect([row()], seed=0)
        assert group.trajectories[0].error == "the flow ended without a single model call"
        assert engine.num_requests == 0
        await engine.load_weights(model.named_parameters(), version=1)
        await engine.close()

    asyncio.run(main())


def test_an_answer_that_comes_after_the_episode_does_not_change_its_trajectory() -> None:
    late: list[asyncio.Task[None]] = []

    async def main() -> Trajectory:
        is_over = asyncio.Event()

        class Leaves(AgentFlowBase):
            async def run(self, row: TaskRow, episode: Episode) -> StopReason:
                await episode.act(Observation(messages=row.prompt))
                late.append(asyncio.create_task(self.answer(episode)))
                return StopReason.ANSWERED

            async def answer(self, episode: Episode) -> None:
                await is_over.wait()
                episode.observe(Transition(terminated=True, reward=5.0, feedback="late"))

        [group] = await collector(["x"], make_flow=lambda _: Leaves(no_env))([row()], seed=0)
        is_over.set()
        await asyncio.wait(late)
        return group.trajectories[0]

    [step] = asyncio.run(main()).steps
    assert (step.reward, step.feedback) == (0.0, "")
    assert "after the episode had ended" in str(late[0].exception())
