"""How the local engine behaves over time: event loops, cancellation, weights, errors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from agent_r1.engines.base import Completion, Engine, Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.errors import AgentR1Error, DataError, RolloutError
from tests.engines.engine_sides import both, make_engine
from tests.engines.tiny_models import VOCAB, prompts, tiny
from tests.pictures import PICTURE

GREEDY = Sampling(max_tokens=6, temperature=0.0)
ENDLESS = Sampling(max_tokens=100, temperature=0.0)


def make(model: Any = None, **settings: Any) -> LocalEngine:
    return make_engine(model or tiny("llama"), **settings)


def ask(local: Engine, prompt: list[int], sampling: Sampling = GREEDY, session: str = "s") -> Completion:
    return asyncio.run(local.generate(Prompt(prompt), sampling, session=session))


@both
def test_the_same_engine_serves_one_event_loop_after_another(side: dict[str, Any]) -> None:
    local, (prompt,) = make(**side), prompts(5)
    first = ask(local, prompt)
    again = ask(local, prompt)
    assert first.token_ids == again.token_ids
    assert local.stats.reused_tokens == 4  # the cache outlives the loop


@both
def test_an_event_loop_that_ends_with_requests_running_leaves_a_usable_engine(side: dict[str, Any]) -> None:
    local, (prompt,) = make(**side), prompts(5)

    async def leave_early() -> None:
        task = asyncio.create_task(local.generate(Prompt(prompt), ENDLESS, session="s"))
        await asyncio.sleep(0.01)
        assert not task.done()

    expected = ask(make(**side), prompt)
    asyncio.run(leave_early())
    assert ask(local, prompt).token_ids == expected.token_ids


@both
def test_episodes_join_and_leave_between_steps_and_the_batches_repeat_exactly(side: dict[str, Any]) -> None:
    asked = prompts(3, 8, 5, 11)

    async def episode(local: LocalEngine, index: int) -> list[int]:
        seen = asked[index]
        for turn in range(3):
            sampling = Sampling(max_tokens=2 + (3 * index + turn) % 5)
            completion = await local.generate(Prompt(seen), sampling, session=str(index))
            await asyncio.wait_for(asyncio.sleep(0), timeout=60)  # a tool that does not wait
            seen = [*seen, *completion.token_ids, 7]
        local.release(str(index))
        return seen

    async def batch(local: LocalEngine) -> list[list[int]]:
        return await asyncio.gather(*(episode(local, index) for index in range(4)))

    runs = []
    for _ in range(3):
        local = make(**side, max_running=3)
        runs.append((asyncio.run(batch(local)), local.stats))
    assert runs[0] == runs[1] == runs[2]
    # Responses of 2..6 tokens: 4 episodes one after another would take as many steps as tokens.
    stats = runs[0][1]
    assert stats.steps < stats.decoded_tokens


@both
def test_the_event_loop_stays_live_while_the_model_computes(side: dict[str, Any]) -> None:
    local, (prompt,) = make(**side), prompts(5)

    async def main() -> int:
        turns = 0
        task = asyncio.create_task(local.generate(Prompt(prompt), ENDLESS, session="s"))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) > local.stats.steps


@both
def test_a_cancelled_request_leaves_the_batch_without_affecting_others(side: dict[str, Any]) -> None:
    local, (gone, stays) = make(**side), prompts(9, 5)
    expected = ask(make(**side), stays)

    async def main() -> Completion:
        doomed = asyncio.create_task(local.generate(Prompt(gone), ENDLESS, session="gone"))
        other = asyncio.create_task(local.generate(Prompt(stays), GREEDY, session="stays"))
        await asyncio.sleep(0.005)
        doomed.cancel()
        completion = await other
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return completion

    assert asyncio.run(main()).token_ids == expected.token_ids
    local.release("stays")
    assert local._scheduler.free_blocks == 512 // 4


@both
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (Prompt([]), "empty"),
        (Prompt([1, VOCAB]), f"{VOCAB}; .* 0 to {VOCAB - 1}"),
        (Prompt([-1]), "-1; "),
        (Prompt([1, 2.5]), r"2\.5"),  # type: ignore[list-item]
        (Prompt([1], media=(PICTURE,)), "media"),
        (Prompt([1] * 60), r"60 tokens and a response of up to 6 .* max_cached_tokens \(64\)"),
    ],
)
def test_a_request_that_cannot_be_answered_fails_alone(prompt: Prompt, reason: str, side: dict[str, Any]) -> None:
    local = make(**side, max_cached_tokens=64)

    async def main() -> tuple[Completion | BaseException, Completion | BaseException]:
        return await asyncio.gather(
            local.generate(Prompt([1, 2]), GREEDY, session="good"),
            local.generate(prompt, GREEDY, session="bad"),
            return_exceptions=True,
        )

    good, bad = asyncio.run(main())
    assert isinstance(good, Completion)
    assert isinstance(bad, DataError)
    with pytest.raises(DataError, match=reason):
        raise bad


@both
def test_a_prompt_that_another_session_holds_is_answered_even_without_room_for_both(
    side: dict[str, Any],
) -> None:
    """12 tokens in 3 of 6 blocks. The second needs 4, beside the 3 it would be copied from."""
    local, (prompt,) = make(**side, max_cached_tokens=24), prompts(12)
    sampling = Sampling(max_tokens=1, temperature=0.0)

    async def main() -> list[Completion]:
        return [
            await asyncio.wait_for(local.generate(Prompt(prompt), sampling, session=each), 10) for each in ("a", "b")
        ]

    first, second = asyncio.run(main())
    assert first.token_ids == second.token_ids


@both
def test_only_the_sequence_with_non_finite_logits_fails(side: dict[str, Any]) -> None:
    """One token's embedding is NaN: the request that samples it fails; its neighbours in the same steps do not."""
    model, asked = tiny("llama"), [[7, 9], [1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [1, 2]]
    sampling = Sampling(max_tokens=12, temperature=0.0)

    async def play(local: LocalEngine) -> list[Any]:
        runs = [local.generate(Prompt(prompt), sampling, session=str(prompt)) for prompt in asked]
        return await asyncio.gather(*runs, return_exceptions=True)

    healthy = asyncio.run(play(make(model, **side)))
    others = {token for done, prompt in zip(healthy[1:], asked[1:], strict=True) for token in done.token_ids + prompt}
    poison = next(token for token in healthy[0].token_ids if token not in others | set(asked[0]))
    local = make(model, **side)
    with torch.no_grad():
        local._runner.model.get_input_embeddings().weight[poison] = torch.nan
    failed, *fine = asyncio.run(play(local))
    assert isinstance(failed, RolloutError)
    assert [done.token_ids for done in fine] == [done.token_ids for done in healthy[1:]]


@both
def test_a_step_that_raises_fails_the_requests_with_the_cause(
    caplog: pytest.LogCaptureFixture, side: dict[str, Any]
) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)
    local = make(model, **side)
    launch = local._runner.launch
    local._runner.launch = lambda chunks: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(RolloutError, match="step failed: ZeroDivisionError"):
        ask(local, prompt)
    assert "a step of the engine failed" in caplog.text
    local._runner.launch = launch  # type: ignore[method-assign]
    assert ask(local, prompt).token_ids == ask(make(model, **side), prompt).token_ids


@both
@pytest.mark.parametrize("seconds", [0, 0.005], ids=["before its first step", "while it runs"])
def test_closing_fails_a_request_and_refuses_new_ones(seconds: float, side: dict[str, Any]) -> None:
    local, (prompt,) = make(**side), prompts(5)

    async def main() -> None:
        task = asyncio.create_task(local.generate(Prompt(prompt), ENDLESS, session="s"))
        await asyncio.sleep(seconds)
        await local.close()
        await local.close()
        with pytest.raises(RolloutError, match="closed"):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())
    assert local.num_requests == 0
    with pytest.raises(RolloutError, match="closed"):
        ask(local, prompt)


def test_a_config_shared_with_the_learners_model_is_detected() -> None:
    model = tiny("llama")
    learner = type(model)(model.config)
    LocalEngine(model, seed=0, max_running=8, max_batch_tokens=64, max_cached_tokens=512, burst=1)
    with pytest.raises(AgentR1Error, match="outside"):
        learner(torch.tensor([[1, 2]]))


@both
def test_a_second_event_loop_is_refused_while_the_first_runs(side: dict[str, Any]) -> None:
    local, (prompt,) = make(**side), prompts(5)
    started, asked = threading.Event(), threading.Event()

    async def busy() -> None:
        """Keeps the engine busy in this loop."""
        local._driver = asyncio.create_task(asyncio.to_thread(lambda: [asked.wait()].clear()))
        started.set()
        await local._driver
        local._driver = None

    other = threading.Thread(target=lambda: asyncio.run(busy()))
    other.start()
    assert started.wait(30)
    try:
        with pytest.raises(RolloutError, match="another event loop"):
            ask(local, prompt)
    finally:
        asked.set()
        other.join()
