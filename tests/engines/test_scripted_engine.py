"""The scripted engine behaves like a real one and records its requests."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from agent_r1.engines.base import Completion, Engine, Prompt, Sampling, generate_all
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.types import Support
from tests.pictures import PICTURE

STOP = 9


class Letters:
    """a = 1, b = 2, ..."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("a") + 1 for letter in text]


def ask(engine: Engine, prompt: list[int], *, max_tokens: int = 8, session: str = "s") -> Completion:
    sampling = Sampling(max_tokens=max_tokens, stop_ids=(STOP,))
    return asyncio.run(engine.generate(Prompt(prompt), sampling, session=session))


def test_a_list_is_answered_in_order_of_arrival() -> None:
    engine = ScriptedEngine([[1, STOP], [2, STOP]])
    assert [ask(engine, [5]).token_ids, ask(engine, [6], session="other").token_ids] == [[1, STOP], [2, STOP]]
    assert [(call.prompt_ids, call.session, call.turn) for call in engine.calls] == [([5], "s", 0), ([6], "other", 0)]
    with pytest.raises(RolloutError, match="response 3 for session 's'"):
        ask(engine, [5])


def test_a_function_sees_the_call() -> None:
    def echo(call: ScriptedCall) -> list[int]:
        return [*reversed(call.prompt_ids), call.turn]

    engine = ScriptedEngine(echo)
    assert ask(engine, [1, 2]).token_ids == [2, 1, 0]
    assert ask(engine, [1, 2]).token_ids == [2, 1, 1]


def test_text_is_encoded_and_ended_by_the_first_stop_id() -> None:
    completion = ask(ScriptedEngine(["abc"], tokenizer=Letters()), [0])
    assert (completion.token_ids, completion.logprobs, completion.stop) == ([1, 2, 3, STOP], [0.0] * 4, "stop")
    with pytest.raises(ConfigError, match=r"tokenizer.*'abc'"):
        ask(ScriptedEngine(["abc"]), [0])


def test_max_tokens_and_stop_ids_cut_the_response_and_its_logprobs() -> None:
    scripted = Completion(token_ids=[1, 2, STOP, 4], logprobs=[-0.1, -0.2, -0.3, -0.4], stop="stop")
    whole = ask(ScriptedEngine([scripted]), [0])
    assert (whole.token_ids, whole.logprobs, whole.stop) == ([1, 2, STOP], [-0.1, -0.2, -0.3], "stop")
    cut = ask(ScriptedEngine([scripted]), [0], max_tokens=2)
    assert (cut.token_ids, cut.logprobs, cut.stop) == ([1, 2], [-0.1, -0.2], "length")


def test_completions_carry_the_version_of_the_weights_loaded_before_them() -> None:
    engine = ScriptedEngine([[1], [1]])
    assert ask(engine, [0]).versions == ((0, 1),)
    asyncio.run(engine.load_weights([], version=7))
    assert ask(engine, [0]).versions == ((7, 1),)


def test_an_aborted_response_is_continued_from_its_own_tokens_until_it_ends() -> None:
    def part(ids: list[int], support: list[list[int]]) -> Completion:
        stop: Literal["stop", "abort"] = "stop" if STOP in ids else "abort"
        return Completion(token_ids=ids, logprobs=[-float(i) for i in ids], stop=stop, support=Support.of(support))

    parts = [part([1, 2], [[1], [2, 3]]), part([], []), part([4, STOP], [[4], [STOP]])]
    engine = ScriptedEngine(parts)
    sampling = Sampling(max_tokens=8, stop_ids=(STOP,), seed=100)

    async def main() -> Completion:
        asked = asyncio.create_task(generate_all(engine, Prompt([5], media=(PICTURE,)), sampling, session="s"))
        while not engine.calls:
            await asyncio.sleep(0)
        await engine.load_weights([], version=3)
        return await asked

    assert asyncio.run(main()) == Completion(
        token_ids=[1, 2, 4, STOP],
        logprobs=[-1.0, -2.0, -4.0, -float(STOP)],
        stop="stop",
        versions=((0, 2), (3, 2)),
        support=Support.of([[1], [2, 3], [4], [STOP]]),
    )
    asked = [(call.prompt_ids, call.media, call.sampling.max_tokens, call.sampling.seed) for call in engine.calls]
    image = (PICTURE,)
    assert asked == [([5], image, 8, 100), ([5, 1, 2], image, 6, 102), ([5, 1, 2], image, 6, 102)]


def test_releases_are_recorded_and_closing_twice_is_fine() -> None:
    engine = ScriptedEngine([])
    engine.release("s")
    asyncio.run(engine.close())
    asyncio.run(engine.close())
    assert engine.released == ["s"]


def test_a_delay_lets_a_timeout_cancel_the_request() -> None:
    async def main() -> None:
        engine = ScriptedEngine([[1]], delay=60.0)
        await asyncio.wait_for(engine.generate(Prompt([0]), Sampling(max_tokens=1), session="s"), timeout=0.001)

    with pytest.raises(TimeoutError):
        asyncio.run(main())


def test_the_first_tokens_of_a_completion_are_as_if_sampling_had_stopped_there() -> None:
    whole = Completion(
        token_ids=[1, 2, 3],
        logprobs=[-1.0, -2.0, -3.0],
        stop="length",
        versions=((4, 1), (5, 2)),
        support=Support.of([[1], [2, 7], [3]]),
    )
    assert whole.first(2) == Completion(
        token_ids=[1, 2],
        logprobs=[-1.0, -2.0],
        stop="stop",
        versions=((4, 1), (5, 1)),
        support=Support.of([[1], [2, 7]]),
    )
    assert whole.first(1).versions == ((4, 1),)
