"""Several conversations in one episode, with any tools: what each role sampled keeps its exact ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.flows.budgets import Limits
from agent_r1.flows.episode import Episode
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation, Step
from tests.tokens.small_tokenizers import TOOL, renderer_of, tokenizer_of
from tests.tokens.talk import Talk

OTHER_TOOL = {"type": "function", "function": {**TOOL["function"], "name": "buy"}}
Tools = list[dict[str, Any]]


def in_letters(text: str) -> list[int]:
    """Ids that the tokenizer itself would not choose for this text, so encoding it again is noticed."""
    tokenizer = tokenizer_of("qwen2_5")
    ids = [i for letter in text for i in tokenizer.encode(letter, add_special_tokens=False)]
    assert ids != tokenizer.encode(text, add_special_tokens=False)
    return [*ids, *renderer_of("qwen2_5").stop_ids[:1]]


def episode(responses: Sequence[list[int]], renderer: Renderer | None = None) -> Episode:
    renderer = renderer or renderer_of("qwen2_5")
    return Episode(
        episode_id="e",
        sampler=ScriptedEngine(list(responses)),
        sampling=Sampling(max_tokens=64, stop_ids=renderer.stop_ids),
        renderer=renderer,
        limits=Limits(max_steps=1000, max_response_tokens=64, max_context_tokens=8192, episode_seconds=20),
        seed=0,
    )


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def exact(before: Step, after: Step) -> bool:
    """Whether the later prompt begins with the exact ids of the earlier exchange."""
    seen = before.prompt_ids + before.response_ids
    return after.prompt_ids[: len(seen)] == seen


async def interleave(roles: Sequence[Tools], rounds: int) -> list[list[Step]]:
    """The steps of each role, in an episode where they take turns. Role r says "hello r" in every round."""
    words = [f"hello world {role}" for role in range(len(roles))]
    playing = episode([in_letters(text) for _ in range(rounds) for text in words])
    messages = [[user(f"You are {role}.")] for role in range(len(roles))]
    for _ in range(rounds):
        for role, tools in enumerate(roles):
            action = await playing.act(Observation(messages=messages[role]), tools=tools)
            messages[role] = [*messages[role], said(action.text), user("the answer")]
    return [playing.steps[role :: len(roles)] for role in range(len(roles))]


@pytest.mark.parametrize(
    "roles",
    [[[TOOL], [OTHER_TOOL]], [[TOOL], []], [[]] * 12, [[TOOL], [OTHER_TOOL], []] * 4],
    ids=["two tools", "tools and none", "twelve roles", "twelve roles with tools"],
)
def test_each_of_several_roles_keeps_the_ids_it_sampled(roles: list[Tools]) -> None:
    for steps in asyncio.run(interleave(roles, rounds=3)):
        assert exact(steps[0], steps[1])
        assert exact(steps[1], steps[2])


def test_each_prompt_shows_its_own_tools() -> None:
    [first], [second] = asyncio.run(interleave([[TOOL], [OTHER_TOOL]], rounds=1))
    shown = [renderer_of("qwen2_5").decode(step.prompt_ids) for step in (first, second)]
    assert ['"search"' in text for text in shown] == [True, False]
    assert ['"buy"' in text for text in shown] == [False, True]


def test_prompts_may_wait_for_their_responses_at_once() -> None:
    """Two branches of one exchange begin before either has a response."""
    conversations, start = Talk(renderer_of("qwen2_5")), [user("?")]
    first = conversations.finish(conversations.begin(Observation(messages=start)), in_letters("hello"), "hello")
    left, right = (
        conversations.begin(Observation(messages=[*start, said("hello"), user(text)]), among=[first]) for text in "lr"
    )
    ends = [conversations.finish(each, in_letters("world"), "world") for each in (right, left)]
    for end, begun in zip(ends, (right, left), strict=True):
        assert begun.ids[: first.size] == first.ids[: first.size]
        assert end.ids[: end.size] == begun.ids + in_letters("world")


def test_exchanges_that_the_caller_names_are_continued_even_if_the_messages_after_them_were_rewritten() -> None:
    conversations, start = Talk(renderer_of("qwen2_5")), [user("?")]
    first = conversations.finish(conversations.begin(Observation(messages=start)), in_letters("hello"), "hello")
    second = [*start, said("hello"), user("and?")]
    conversations.finish(conversations.begin(Observation(messages=second), among=[first]), in_letters("world"), "world")
    rewritten = Observation(messages=[*second, said("another"), user("so?")])
    assert conversations.begin(rewritten, among=[first]).ids[: first.size] == first.ids[: first.size]
    assert conversations.begin(rewritten, among=[]).earlier is None


def test_tools_changed_in_place_are_noticed() -> None:
    tools = [TOOL]
    conversations = Talk(renderer_of("qwen2_5"))
    conversations.prompt(Observation(messages=[user("?")]), tools)
    conversations.record(in_letters("hello world"), "hello world")
    tools.append(OTHER_TOOL)
    again = conversations.prompt(Observation(messages=[user("?"), said("hello world"), user("!")]), tools)
    assert '"buy"' in renderer_of("qwen2_5").decode(again)


def test_the_longest_prefix_is_continued_not_the_latest() -> None:
    async def play() -> list[Step]:
        playing = episode([in_letters("hello"), in_letters("world"), in_letters("hello")])
        start = [user("?")]
        longer = [*start, said("hello"), user("and?")]
        await playing.act(Observation(messages=start))
        await playing.act(Observation(messages=longer))
        await playing.act(Observation(messages=start))  # another branch, which says the same
        playing._sampler = ScriptedEngine([in_letters("world")] * 2)
        await playing.act(Observation(messages=[*longer, said("world"), user("so?")]))
        await playing.act(Observation(messages=longer))
        return playing.steps

    first, second, branch, fourth, fifth = asyncio.run(play())
    assert branch.prompt_ids == first.prompt_ids
    assert exact(first, second)
    assert exact(second, fourth)
    assert fifth.prompt_ids == second.prompt_ids


def test_ids_before_a_reply_that_was_not_sampled_are_kept() -> None:
    async def play() -> list[Step]:
        playing = episode([in_letters("hello world")] * 3)
        await playing.act(Observation(messages=[user("?")]))
        await playing.act(Observation(messages=[user("another")]))
        written = [said("hello world"), user("and?"), said("an example"), user("so?")]
        await playing.act(Observation(messages=[user("?"), *written]))
        return playing.steps

    first, _, third = asyncio.run(play())
    assert exact(first, third)


def test_the_exchanges_of_a_conversation_share_one_list_of_ids() -> None:
    conversations, messages = Talk(renderer_of("qwen2_5")), [user("?")]
    for _ in range(20):
        ids = conversations.prompt(Observation(messages=messages))
        conversations.record(in_letters("hello"), "hello")
        messages = [*messages, said("hello"), user("on")]
    kept = {id(exchange.ids): len(exchange.ids) for exchange in conversations._exchanges}
    assert list(kept.values()) == [len(ids) + len(in_letters("hello"))]


def counting_tokenizer() -> tuple[Any, list[None]]:
    """A tokenizer, and a list with one entry per use of its template."""
    calls: list[None] = []
    tokenizer = deepcopy(tokenizer_of("qwen2_5"))
    render = tokenizer.apply_chat_template

    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return render(*args, **kwargs)

    tokenizer.apply_chat_template = apply_chat_template
    return tokenizer, calls


TWICE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' %}{{ m.content }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "changing"), [(None, True), (TWICE, False)], ids=["tools change", "replies shown twice"]
)
def test_the_cost_of_a_fresh_prompt_does_not_grow_with_the_number_of_exchanges(
    template: str | None, changing: bool
) -> None:
    tokenizer, calls = counting_tokenizer()
    conversations = Talk(Renderer(tokenizer, chat_template=template))
    messages, asked = [user("?")], []
    for number in range(30):
        tools = [{"type": "function", "function": {**TOOL["function"], "name": f"tool{number}"}}] if changing else []
        before = len(calls)
        conversations.prompt(Observation(messages=messages), tools)
        assert not conversations.extended
        asked.append(len(calls) - before)
        conversations.record(in_letters("hello world"), "hello world")
        messages = [*messages, said("hello world"), user(f"answer {number}")]
    assert max(asked[10:]) <= max(asked[:10])


@pytest.mark.parametrize("form", ["messages", "text", "token_ids"])
def test_any_of_many_branches_from_one_prompt_can_be_continued(form: str) -> None:
    conversations = Talk(renderer_of("qwen2_5"))
    answers = [f"hello world {number}" for number in range(12)]
    stop = "<|im_end|>"

    def observation(*more: str) -> Observation:
        if form == "messages":
            return Observation(messages=[user("?"), *([said(more[0]), user("on")] if more else [])])
        if form == "text":
            return Observation(text="?" + (f"{more[0]}{stop}on" if more else ""))
        return Observation(token_ids=[1, 2, 3, *([*in_letters(more[0]), 4] if more else [])])

    prompts = {}
    for answer in answers:
        prompts[answer] = conversations.prompt(observation())
        conversations.record(in_letters(answer), answer)
    for answer in answers:
        ids = conversations.prompt(observation(answer))
        seen = prompts[answer] + in_letters(answer)
        assert ids[: len(seen)] == seen
