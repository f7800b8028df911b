"""Context policies on messages: what each shows, and that it does not change the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import DataError
from agent_r1.flows.context import (
    NOTES_TITLE,
    SUMMARY_TITLE,
    ContextPolicy,
    ContextView,
    DropResults,
    Notes,
    Rewrite,
    Summary,
    Window,
    append_text,
    split_exchanges,
    strip_reasoning,
)
from agent_r1.types import Message


def said(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


SYSTEM, TASK = said("system", "Be brief."), said("user", "Open the vault.")
ONE = [said("assistant", "look"), said("user", "The code is 7319.")]
TWO = [said("assistant", "north"), said("tool", "a hall", name="go"), said("tool", "a door", name="see")]
THREE = [said("assistant", "east"), said("user", "The vault asks for a code.")]
TALK = [SYSTEM, TASK, *ONE, *TWO, *THREE]


def shown(policy: ContextPolicy, messages: list[Message] = TALK) -> list[Message]:
    return asyncio.run(policy.show(messages)).messages


def hidden(policy: ContextPolicy, messages: list[Message] = TALK) -> int:
    return asyncio.run(policy.show(messages)).hidden


class Author:
    """Counts messages as tokens and returns the given texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[list[Message]] = []

    def count_tokens(self, messages: list[Message]) -> int:
        return len(messages)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        self.asked.append(messages)
        return self.texts.pop(0)


def test_a_conversation_is_an_opening_and_exchanges() -> None:
    assert split_exchanges(TALK) == ([SYSTEM, TASK], [ONE, TWO, THREE])
    assert split_exchanges([TASK]) == ([TASK], [])
    assert split_exchanges([]) == ([], [])
    assert split_exchanges(TALK, 3) == (
        [SYSTEM, TASK, *ONE],
        [TWO, THREE],
    )  # up to the first reply after so many messages
    assert split_exchanges(TALK, 99) == (TALK, [])


def every_policy() -> list[ContextPolicy]:
    return [
        Window(turns=1),
        DropResults(keep=1, placeholder="-"),
        Notes(turns=1, notes=1, note_chars=9),
        summary(max_tokens=1),
    ]


async def shown_later(policy: ContextPolicy, messages: list[Message]) -> list[Message]:
    await policy.prepare(messages, Author("what I know"))
    return (await policy.show(messages)).messages


def test_examples_in_the_first_observation_are_part_of_the_opening() -> None:
    example = [SYSTEM, said("user", "Open the chest."), said("assistant", "open chest"), TASK]
    for policy in every_policy():
        policy.begin(example)
        now = asyncio.run(shown_later(policy, [*example, *ONE, *TWO, *THREE]))
        assert now[:3] == example[:3]
        assert now[3]["content"].startswith(TASK["content"])  # notes and summaries stand below it
        assert now[-2:] == THREE
        assert ONE[1] not in now


def test_the_current_question_of_a_chat_is_always_shown() -> None:
    asked = [SYSTEM, TASK, said("assistant", "It is open."), said("user", "And the chest?")]
    longer = [*asked, *ONE, *TWO, *THREE]
    again = [*longer, said("assistant", "It is, too."), said("user", "And the door?")]
    for policy in every_policy():
        policy.begin(asked[:2])
        policy.begin(asked)
        now = asyncio.run(shown_later(policy, longer))
        assert asked[2:] == [message for message in now if message in asked[2:]]
        assert now[-2:] == THREE
        assert ONE[1] not in now
        policy.begin(again)
        later = asyncio.run(shown_later(policy, [*again, *ONE, *TWO]))
        assert again[-1] in later
        assert asked[-1] not in later  # an exchange like any other by now
        assert later[-3:] == TWO


def test_a_question_among_the_last_exchanges_is_shown_once() -> None:
    asked = [TASK, said("assistant", "It is open."), said("user", "And the chest?")]
    policy = Window(turns=2)
    policy.begin(asked[:1])
    policy.begin(asked)
    assert shown(policy, [*asked, *ONE]) == [*asked, *ONE]
    assert shown(policy, [*asked, *ONE, *TWO]) == [*asked, *ONE, *TWO]
    assert shown(policy, [*asked, *ONE, *TWO, *THREE]) == [*asked, *TWO, *THREE]


def test_a_conversation_shorter_than_the_opening_is_shown_unchanged() -> None:
    for policy in every_policy():
        policy.begin([SYSTEM, TASK, TASK, TASK])
        assert asyncio.run(shown_later(policy, [SYSTEM, TASK, ONE[0]])) == [SYSTEM, TASK, ONE[0]]


def test_a_window_shows_the_opening_and_the_last_exchanges() -> None:
    assert shown(Window(turns=2)) == [SYSTEM, TASK, *TWO, *THREE]
    assert shown(Window(turns=1)) == [SYSTEM, TASK, *THREE]
    assert (hidden(Window(turns=2)), hidden(Window(turns=1))) == (2, 5)
    assert shown(Window(turns=3)) == shown(Window(turns=9)) == TALK


def test_older_results_are_replaced_by_a_placeholder() -> None:
    policy = DropResults(keep=1, placeholder="...")
    gone = [said("user", "..."), said("tool", "...", name="go"), said("tool", "...", name="see")]
    assert shown(policy) == [SYSTEM, TASK, ONE[0], gone[0], TWO[0], *gone[1:], *THREE]
    assert hidden(policy) == 3
    assert shown(DropResults(keep=3, placeholder="...")) == TALK


def test_a_placeholder_has_the_shape_of_the_result() -> None:
    parts = [{"type": "text", "text": "long"}, {"type": "text", "text": "longer"}]
    talk = [TASK, said("assistant", "a"), said("user", parts), *THREE]
    assert shown(DropResults(keep=1, placeholder="-"), talk)[2] == said("user", [{"type": "text", "text": "-"}])


def test_notes_show_the_most_relevant_earlier_exchanges() -> None:
    # of ONE and TWO only ONE shares a word with "The vault asks for a code."; "a" is in TWO, but it is not a rare word
    note = f"{NOTES_TITLE}\n[1] You: look\nThen: The code is 7319."
    noted = said("user", f"Open the vault.\n\n{note}", from_tool=note)
    assert shown(Notes(turns=1, notes=1, note_chars=100)) == [SYSTEM, noted, *THREE]
    assert hidden(Notes(turns=1, notes=1, note_chars=100)) == 5
    both = shown(Notes(turns=1, notes=2, note_chars=9))[1]["content"]
    # in their order, and cut: "look" and 5 of "The code is 7319."; 4 of "north" and 5 of "a hall" and what follows
    assert both.endswith("[1] You: look\nThen: The c ...\n[2] You: nort ...\nThen: a hal ...")
    assert shown(Notes(turns=3, notes=1, note_chars=9)) == TALK


def test_later_exchanges_win_ties_between_notes() -> None:
    talk = [TASK, *(said(role, "same") for _ in range(4) for role in ("assistant", "user")), *THREE]
    content = shown(Notes(turns=1, notes=2, note_chars=99), talk)[0]["content"]
    assert "[3]" in content
    assert "[4]" in content
    assert "[1]" not in content


def test_a_note_includes_the_calls_of_a_parsed_reply() -> None:
    call = {"type": "function", "function": {"name": "go", "arguments": {"to": "hall"}}}
    talk = [TASK, said("assistant", None, tool_calls=[call]), said("tool", [{"type": "text", "text": "done"}]), *THREE]
    content = shown(Notes(turns=1, notes=1, note_chars=99), talk)[0]["content"]
    assert content.endswith('[1] You: {"name": "go", "arguments": {"to": "hall"}}\nThen: done')


def test_a_note_has_no_reasoning_and_always_some_of_the_results() -> None:
    replies = [f"<think>{'hmm ' * 99}</think> look", f"{'hmm ' * 99}</think>look", "look " * 99]
    for reply in replies:
        talk = [TASK, said("assistant", reply), said("user", "the code is 7319"), *THREE]
        content = shown(Notes(turns=1, notes=1, note_chars=40), talk)[0]["content"]
        assert content.endswith("\nThen: the code is 7319")  # 16 of 20 characters
        assert "hmm" not in content
        assert "You: look" in content


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (" plain ", "plain"),
        ("<think>\nso\n</think>\n\nplain", "plain"),
        ("so</think>plain", "plain"),  # the prompt had opened it
        ("so</think>plain<think>more</think> text", "plain text"),
        ("plain <think>and then", "plain"),  # cut
        ("<think>and then", ""),
    ],
)
def test_reasoning_is_stripped(text: str, rest: str) -> None:
    assert strip_reasoning(text) == rest


def test_a_summary_replaces_all_but_the_last_exchanges() -> None:
    author, policy = Author(" code 7319\n"), summary(max_tokens=8)

    async def play() -> ContextView:
        await policy.prepare(TALK[:4], author)  # 4 messages: short enough
        await policy.prepare(TALK, author)  # 9
        return await policy.show(TALK)

    made = asyncio.run(play())
    last = said("user", "The vault asks for a code.\n\nSum up.")
    assert author.asked == [[*TALK[:-1], last]]  # all it has seen, the observation included
    known = f"{SUMMARY_TITLE}\ncode 7319"
    noted = said("user", f"Open the vault.\n\n{known}", from_tool=known)
    assert made.messages == [SYSTEM, noted, *THREE]
    assert made.hidden == 5


def test_a_new_summary_covers_the_old_one() -> None:
    author, policy = Author("first", "second"), summary(max_tokens=3)
    longer = [*TALK, said("assistant", "7319"), said("user", "It opens.")]

    async def play() -> ContextView:
        await policy.prepare(TALK, author)
        assert author.count_tokens((await policy.show(TALK)).messages) == 4  # still too long,
        await policy.prepare(TALK, author)  # but nothing has come that could be left out: it is not asked again
        await policy.prepare(longer, author)  # system, task with summary, two exchanges: 6
        return await policy.show(longer)

    made = asyncio.run(play())
    assert [SUMMARY_TITLE in str(asked) for asked in author.asked] == [False, True]
    assert made.messages[1]["content"] == f"Open the vault.\n\n{SUMMARY_TITLE}\nsecond"
    assert made.messages[2:] == longer[-2:]


def test_an_empty_summary_leaves_opening_and_last_exchanges() -> None:
    policy = summary(max_tokens=4)
    asyncio.run(policy.prepare(TALK, Author(" \n")))
    assert shown(policy) == [SYSTEM, TASK, *THREE]


def test_nothing_is_summarised_if_nothing_can_be_left_out() -> None:
    author = Author()
    asyncio.run(summary(max_tokens=1, keep_turns=3).prepare(TALK, author))
    asyncio.run(summary(max_tokens=1).prepare([SYSTEM, TASK], author))
    assert author.asked == []


def test_a_rewritten_history_discards_its_summary() -> None:
    policy = summary(max_tokens=4)
    talk = deepcopy(TALK)
    asyncio.run(policy.prepare(talk, Author("old news")))
    talk[3]["content"] = "The code is 1111."  # in place
    assert shown(policy, talk) == talk
    assert hidden(policy, talk) == 0


def test_a_changed_opening_keeps_the_summary() -> None:
    policy = summary(max_tokens=4)
    asyncio.run(policy.prepare(TALK, Author("code 7319")))
    counted = [SYSTEM, said("user", "Open the vault. Step 4"), *TALK[2:]]
    assert shown(policy, counted)[1]["content"] == f"Open the vault. Step 4\n\n{SUMMARY_TITLE}\ncode 7319"
    assert hidden(policy, counted) == 5


def summary(*, max_tokens: int, keep_turns: int = 1) -> Summary:
    return Summary(max_tokens=max_tokens, summary_tokens=5, keep_turns=keep_turns, instruction="Sum up.")


def last_two(messages: list[Message]) -> list[Message]:
    return messages[-2:]


async def slowly(messages: list[Message]) -> list[Message]:
    await asyncio.sleep(0)
    messages[0]["content"] = "changed"
    return messages


def test_a_rewrite_shows_what_a_function_returns_and_may_be_async() -> None:
    assert shown(Rewrite(function=last_two)) == THREE
    assert hidden(Rewrite(function=last_two)) == 7
    assert shown(Rewrite(function=slowly))[0]["content"] == "changed"
    assert SYSTEM["content"] == "Be brief."  # it got a copy


def test_a_rewrite_may_drop_messages_that_are_not_json() -> None:
    picture = said("user", [{"type": "image", "image": object()}])
    assert shown(Rewrite(function=last_two), [picture, *THREE]) == THREE
    assert hidden(Rewrite(function=last_two), [picture, *THREE]) == 1


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (None, "None"),
        ([], "messages"),
        (["hello"], "'hello'"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content"),
        ([said("user", b"x")], "content"),
        ([TASK, said("assistant", "so")], "assistant"),
    ],
)
def test_a_rewrite_must_return_messages_that_the_model_can_answer(made: Any, named: str) -> None:
    with pytest.raises(DataError, match=rf"rewrite 'rewriting' .*{named}"):
        shown(Rewrite(function=_returning(made)))


def _returning(made: Any) -> Callable[[list[Message]], Any]:
    def rewriting(messages: list[Message]) -> Any:
        return made

    return rewriting


def test_text_is_appended_to_the_last_user_message_or_becomes_one() -> None:
    assert append_text([TASK], "more") == [said("user", "Open the vault.\n\nmore")]
    assert append_text([said("user", "")], "more") == [said("user", "more")]
    assert append_text([said("user", [{"type": "image"}])], "more")[0]["content"][1] == {"type": "text", "text": "more"}
    noted = append_text([TASK], "a note", from_tool=True)
    assert noted == [{**said("user", "Open the vault.\n\na note"), "from_tool": "a note"}]  # the task is not
    both = {**said("user", "Open the vault.\n\na note\n\nmore"), "from_tool": "a note\n\nmore"}
    assert append_text(noted, "more") == [both]
    assert append_text([SYSTEM], "more") == [SYSTEM, said("user", "more")]
    assert append_text([TWO[1]], "more") == [TWO[1], said("user", "more")]  # never in a tool's name
    assert append_text([], "more", from_tool=True) == [said("user", "more", from_tool=True)]
    assert append_text([TASK], "more", from_tool=True) == [said("user", "Open the vault.\n\nmore", from_tool="more")]
    result = said("user", "found", from_tool=True)
    assert append_text([result], "more", from_tool=True) == [said("user", "found\n\nmore", from_tool=True)]


contents = st.sampled_from(["", "a red door", "code 7", "code 8", "the door needs a code"])
results = st.builds(said, st.sampled_from(["user", "tool"]), contents)
exchanges = st.builds(
    lambda text, more: [said("assistant", text), *more], contents, st.lists(results, min_size=1, max_size=3)
)
talks = st.builds(
    lambda opening, rest: [*opening, *(message for exchange in rest for message in exchange)],
    st.sampled_from([[TASK], [SYSTEM, TASK], [SYSTEM, TASK, TASK]]),
    st.lists(exchanges, max_size=6),
)
small = st.integers(1, 4)
policies: Any = st.one_of(
    st.builds(Window, turns=small),
    st.builds(DropResults, keep=small, placeholder=st.just("-")),
    st.builds(Notes, turns=small, notes=small, note_chars=st.integers(1, 20)),
    st.builds(summary, max_tokens=st.integers(1, 9), keep_turns=small),
)


@given(talk=talks, policy=policies)
def test_every_view_begins_and_ends_like_the_conversation_and_splits_no_exchange(
    talk: list[Message], policy: ContextPolicy
) -> None:
    before = deepcopy(talk)
    asyncio.run(policy.prepare(talk, Author("what I know")))
    made = asyncio.run(policy.show(talk))
    assert talk == before
    opening, whole = split_exchanges(talk)
    shown_opening, parts = split_exchanges(made.messages)
    assert [message["role"] for message in shown_opening] == [message["role"] for message in opening]
    assert all(str(now["content"]).startswith(was["content"]) for now, was in zip(shown_opening, opening, strict=True))
    kept = whole[len(whole) - len(parts) :]
    assert [[m["role"] for m in exchange] for exchange in parts] == [[m["role"] for m in exchange] for exchange in kept]
    assert [exchange[0] for exchange in parts] == [exchange[0] for exchange in kept]  # replies are never changed
    assert parts[-1:] == whole[-1:]  # nor is the latest observation
    assert made.hidden == 0 or made.messages != talk
    assert made.hidden > 0 or made.messages == talk


@given(talk=talks, policy=policies)
def test_views_only_grow_at_the_end_until_something_is_left_out(talk: list[Message], policy: ContextPolicy) -> None:
    if isinstance(policy, Summary):
        return
    made = asyncio.run(policy.show(talk))
    longer = asyncio.run(policy.show([*talk, said("assistant", "on"), said("user", "and?")]))
    if longer.hidden == 0:
        assert longer.messages[: len(made.messages)] == made.messages
