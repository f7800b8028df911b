"""Worker processes for environments, when nothing goes wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_r1 import check_env, tool
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.hosts import WorkerEnv
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.processes.protocol import EnvFault, dump, load
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.flows.recording import MAX_INFO_NESTING
from agent_r1.tokens.formats.base import MAX_NESTING
from agent_r1.types import Observation, StopReason, Transition
from tests.envs.worker_envs import Counting, Double, Knowing, Sure, action, double, row
from tests.envs.worker_helpers import is_alive, play, pool_of, run, started, without_info

pool = pool_of(processes=2)


def counting(pool: EnvPool, cls: type[AgentEnv] = Counting, **kwargs: Any) -> WorkerEnv:
    return pool.env(cls, "counting", kwargs)


def pids(shown: list[Observation | Transition]) -> set[int]:
    return {item.info["pid"] for item in shown if isinstance(item, Transition)}


def test_an_env_plays_as_in_this_process(pool: EnvPool) -> None:
    there = run(play(counting(pool, start=4), ["1", "2", "end"]))
    here = run(play(Counting(start=4), ["1", "2", "end"]))
    assert without_info(there) == without_info(here)
    # 4, 4 + 1, 4 + 1 + 2, and the sum is paid in the end
    assert without_info(there)[-1] == (None, 7.0, True)
    assert os.getpid() not in pids(there)


def test_the_values_of_an_answer_arrive(pool: EnvPool) -> None:
    async def sent() -> Transition:
        env = await started(pool, Counting, "values")
        return await env.step(action("values"))

    shown = run(sent())
    assert shown.observation == Observation(messages=[{"role": "user", "content": "\ud800 \u20ac"}])
    assert (shown.reward, shown.terminated, shown.stop) == (0.25, True, StopReason.PARSE_LIMIT)
    assert [type(value) for value in (shown.reward, shown.terminated, shown.stop)] == [float, bool, StopReason]
    info: Any = shown.info
    assert (info["pair"], info["7"]) == ([1, ["a", None]], "seven")  # as JSON has it
    assert (info["half"], info["array"]) == ("\ud800", [0.5, True])
    [call] = shown.calls
    assert (call.name, call.text_span, call.info) == ("go", (0, 2), {"n": 3})


def test_a_worker_env_passes_check_env(pool: EnvPool) -> None:
    run(check_env(lambda: counting(pool), row(), ["1", "2", "end"]))


def test_two_hundred_episodes_on_two_processes_keep_their_own_counts() -> None:
    pool = EnvPool(processes=2, step_seconds=60)

    async def one(number: int) -> tuple[float, set[int]]:
        texts = [str(number), str(number), "1", "end"]
        shown = await play(counting(pool, start=number % 7), texts, row_id=f"r{number}")
        last = shown[-1]
        assert isinstance(last, Transition)
        return last.reward, pids(shown)

    async def all_of_them() -> list[tuple[float, set[int]]]:
        return await asyncio.gather(*(one(number) for number in range(200)))

    played = run(all_of_them())
    assert [reward for reward, _ in played] == [number % 7 + 2 * number + 1 for number in range(200)]
    assert all(len(hosts) == 1 for _, hosts in played)  # an episode stays where it began
    hosts = [next(iter(hosts)) for _, hosts in played]
    assert {hosts.count(pid) for pid in hosts} == {100}  # two processes, evenly
    pool.close()


def test_messages_may_be_larger_than_a_socket_buffer(pool: EnvPool) -> None:
    async def echoed() -> list[str]:
        names = [letter * 3_000_000 for letter in "abcd"]
        played = await asyncio.gather(*(play(counting(pool), ["1"], row_id=name) for name in names))
        shown = [
            first.messages[0]["content"] for first, _ in played if isinstance(first, Observation) and first.messages
        ]
        return [f"{text[0]} {len(text)}" for text in shown]

    assert run(echoed()) == [f"{letter} 3000003" for letter in "abcd"]  # and ": 0"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scripts=st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=40),
)
def test_any_interleaving_gives_what_each_episode_gives_alone(
    pool: EnvPool, scripts: list[list[int]], order: list[int]
) -> None:
    """Episodes continue in a drawn order, some together."""

    async def interleaved() -> list[list[Observation | Transition]]:
        gates = [asyncio.Semaphore(0) for _ in scripts]

        async def one(number: int) -> list[Observation | Transition]:
            env, shown = counting(pool, start=number), []
            for text in [None, *scripts[number]]:
                await gates[number].acquire()
                shown.append(await (env.reset(row()) if text is None else env.step(action(str(text)))))
            await env.close()
            return shown

        tasks = [asyncio.create_task(one(number)) for number in range(len(scripts))]
        for index, drawn in enumerate(order):
            gates[drawn % len(gates)].release()
            if index % 3 == 0:
                await asyncio.sleep(0)
        for gate, script in zip(gates, scripts, strict=True):
            for _ in range(len(script) + 1):
                gate.release()
        return list(await asyncio.gather(*tasks))

    alone = [run(play(Counting(start=number), [str(text) for text in script])) for number, script in enumerate(scripts)]
    assert [without_info(shown) for shown in run(interleaved())] == [without_info(shown) for shown in alone]


def test_a_worker_env_has_the_name_and_the_flags_of_its_class(pool: EnvPool) -> None:
    assert [type(counting(pool, cls)).__name__ for cls in (Counting, Knowing)] == ["Counting", "Knowing"]
    assert [counting(pool, cls).sees_ground_truth for cls in (Counting, Knowing)] == [False, True]
    assert [counting(pool, cls).deterministic for cls in (Counting, Sure)] == [False, True]


def test_tool_schemas_are_those_of_the_env_as_it_is_now(pool: EnvPool) -> None:
    async def names() -> list[list[str]]:
        env, seen = counting(pool), []
        await env.reset(row())
        for text in ("1", "new tools", "2"):
            await env.step(action(text))
            seen.append([schema["function"]["name"] for schema in env.tool_schemas])
        await env.close()
        return seen

    assert run(names()) == [["add"], ["add", "subtract"], ["add", "subtract"]]


def test_functions_with_tool_are_sent_by_name(pool: EnvPool) -> None:
    async def asked() -> Transition:
        env = pool.env(ToolEnv, "tool", {"tools": [double]})
        await env.reset(row())
        assert [schema["function"]["name"] for schema in env.tool_schemas] == ["double"]
        call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
        answered = await env.step(action(call))
        await env.close()
        return answered

    assert run(asked()).calls[0].result == "42"


def test_settings_are_checked_without_a_process() -> None:
    idle = EnvPool(processes=1, step_seconds=60)
    with pytest.raises(ConfigError, match=r"does not accept these env_kwargs.*'strat'"):
        counting(idle, strat=3)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        counting(idle, start=-1)
    assert idle._hosts == []


def test_a_class_or_setting_that_cannot_be_sent_is_refused(pool: EnvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Counting):
        pass

    @tool
    def shout(text: str) -> str:
        """Loudly."""
        return text.upper()

    refused: list[tuple[type[AgentEnv], dict[str, Any], str]] = [
        (Local, {}, "Local"),
        (Counting, {"bad_close": threading.Lock()}, "lock"),
        (ToolEnv, {"tools": [shout]}, "shout"),  # a function in a function
        (ToolEnv, {"tools": [Double()]}, "tool 'double'"),
    ]
    for cls, kwargs, reason in refused:
        with pytest.raises(ConfigError, match=rf"cannot be sent to worker processes \(task.workers\): .*{reason}"):
            pool.env(cls, "counting", kwargs)
    monkeypatch.setattr(Counting, "__module__", "__main__")
    with pytest.raises(ConfigError, match="Counting is defined in __main__"):
        counting(pool)


def test_a_row_that_cannot_be_sent_fails_alone(pool: EnvPool) -> None:
    async def asked() -> object:
        env = counting(pool)
        with pytest.raises(TypeError, match="cannot pickle"):
            await env.reset(row(question=threading.Lock()))  # type: ignore[arg-type]
        await env.close()
        return await play(counting(pool), ["1"])

    assert run(asked())


def test_a_cancelled_call_leaves_the_conversation_in_step(pool: EnvPool) -> None:
    async def cancelled() -> list[Observation | Transition]:
        env = counting(pool)
        await env.reset(row())
        slow = asyncio.create_task(env.step(action("slow")))
        await asyncio.sleep(0.02)
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await env.close()
        with pytest.raises(RuntimeError, match="after it was closed"):
            await env.step(action("1"))
        together = await asyncio.gather(*(play(counting(pool), ["1", "end"]) for _ in range(4)))
        assert all(without_info(shown) == without_info(together[0]) for shown in together)
        return together[0]

    assert without_info(run(cancelled())) == without_info(run(play(Counting(), ["1", "end"])))


def test_what_envs_print_is_logged(pool: EnvPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="agent_r1.envs.processes"):
        run(play(counting(pool), ["print", "1"]))  # more than a pipe holds
    assert "a line from an env" in caplog.text


def test_a_closed_pool_has_no_processes_and_fails_calls() -> None:
    own = EnvPool(processes=2, step_seconds=60)

    async def used() -> set[int]:
        first, second = await asyncio.gather(*(play(counting(own), ["1"]) for _ in range(2)))
        env = counting(own)
        await env.reset(row())
        waiting = asyncio.create_task(env.step(action("slow")))
        await asyncio.sleep(0)
        own.close()
        own.close()  # twice is allowed
        with pytest.raises(EnvFault, match="was closed"):
            await waiting
        await env.close()
        with pytest.raises(RuntimeError, match="after its pool was closed"):
            await counting(own).reset(row())
        return pids(first) | pids(second)

    hosts = run(used())
    assert len(hosts) == 2
    assert not any(map(is_alive, hosts))


def test_one_episode_at_a_time_needs_one_process() -> None:
    own = EnvPool(processes=8, step_seconds=60)
    hosts = set().union(*(pids(run(play(counting(own), ["1"]))) for _ in range(3)))
    own.close()
    assert len(hosts) == 1


def test_a_pool_belongs_to_one_event_loop(pool: EnvPool) -> None:
    async def outer() -> None:
        await started(pool, Counting, "r")
        with pytest.raises(RuntimeError, match="belongs to one event loop"):
            await asyncio.to_thread(lambda: asyncio.run(play(counting(pool), [])))

    run(outer())


def test_answers_may_be_nested_as_deeply_as_calls_and_info() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"inner": nested(levels - 1)} if levels > 1 else {}

    function = {"name": "f", "arguments": nested(MAX_NESTING)}
    said = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    answer = Transition(observation=Observation(messages=[said]), info=nested(MAX_INFO_NESTING))
    assert load(dump(answer, None, "Env"), Transition) == (answer, None)


def test_a_failing_close_is_logged_and_affects_no_episode(pool: EnvPool, caplog: pytest.LogCaptureFixture) -> None:
    async def closed() -> None:
        await play(counting(pool, bad_close=True), ["1"])
        # On both processes, so one of them after the failure.
        await asyncio.gather(*(play(counting(pool), ["1"]) for _ in range(2)))

    run(closed())
    assert "RuntimeError: stuck door" in caplog.text
