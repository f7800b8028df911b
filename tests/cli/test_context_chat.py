"""Context policies in a chat: the whole conversation is remembered, the policy shows of it what it showed in training,
and the question at hand always."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from agent_r1 import ToolEnv, tool
from agent_r1.cli.commands.chat import Chat, answer
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.flows.context import ContextPolicy, DropResults, Notes, Window
from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase
from agent_r1.types import StopReason, TaskRow
from tests.chatml import collector, row, tokenizer
from tests.flows.test_context_episode import POLICIES, summary


@tool
async def echo(text: str) -> str:
    """The same text; fails on the word fail."""
    if text == "fail":
        raise RuntimeError("broken")
    return text


def chatting(context: Callable[[], ContextPolicy | None], script: Any, **limits: Any) -> tuple[Chat, ScriptedEngine]:
    sampler = ScriptedEngine(script, tokenizer=tokenizer())

    def make_flow(_: TaskRow) -> AgentFlowBase:
        flow = AgentEnvLoop(lambda _: ToolEnv(tools=[echo]))
        flow.context = context()
        return flow

    played = collector(sampler, make_flow=make_flow, **({"max_steps": 3} | limits))
    return Chat(played, engine=sampler, rows=[row()]), sampler


def ask(chat: Chat, *questions: str) -> str:
    console = Console(file=io.StringIO(), width=200)

    async def all_of_them() -> None:
        for question in questions:
            await answer(chat, question, console)

    asyncio.run(all_of_them())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_chat_remembers_everything_and_shows_what_the_policy_shows() -> None:
    chat, sampler = chatting(POLICIES["window"], ["one", "two", "three", "four"])
    ask(chat, "a?", "b?", "c?", "d?")
    assert [message["content"] for message in chat.history] == ["a?", "one", "b?", "two", "c?", "three", "d?", "four"]
    last = tokenizer().decode(sampler.calls[-1].prompt_ids)
    assert "a?" in last  # the head
    assert "one" not in last
    assert "two" in last


def test_what_a_chat_wrote_down_stands_for_the_beginning_until_it_is_forgotten() -> None:
    def script(call: ScriptedCall) -> str:
        text = tokenizer().decode(call.prompt_ids)
        return "we greeted" if "Sum up." in text else "hello" * 10

    chat, sampler = chatting(lambda: summary(150), script)
    printed = ask(chat, "a?", "b?", "c?")
    assert printed.count("memo  we greeted") == 1
    shown = [tokenizer().decode(call.prompt_ids) for call in sampler.calls]
    assert ["we greeted" in text for text in shown] == [False, False, False, True]
    assert [message["content"] for message in chat.history][::2] == ["a?", "b?", "c?"]
    chat.forget()
    ask(chat, "d?")
    assert "we greeted" not in tokenizer().decode(sampler.calls[-1].prompt_ids)


def calling(text: str) -> str:
    return f'<tool_call>{{"name": "echo", "arguments": {{"text": "{text}"}}}}</tool_call>'


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "rewrite"])
def test_the_question_at_hand_is_shown_however_much_was_called_since(policy: str) -> None:
    tight: dict[str, Callable[[], ContextPolicy | None]] = {
        **POLICIES,
        "window": lambda: Window(turns=1),
        "drop_results": lambda: DropResults(keep=1, placeholder="-"),
        "notes": lambda: Notes(turns=1, notes=1, note_chars=9),
        "summary": lambda: summary(200),
    }
    said = iter(["hello", *map(calling, "xyz"), "bye"])

    def script(call: ScriptedCall) -> str:
        return "I echoed" if is_asked(call) else next(said)

    chat, sampler = chatting(tight[policy], script, max_steps=6, max_response_tokens=200)
    ask(chat, "the first?", "the second?")
    prompts = [tokenizer().decode(call.prompt_ids) for call in sampler.calls]
    assert ["the second?" in prompt for prompt in prompts] == [False, *[True] * (len(prompts) - 1)]
    assert any(map(is_asked, sampler.calls)) is (policy == "summary")
    assert next(said, None) is None


def is_asked(call: ScriptedCall) -> bool:
    text = tokenizer().decode(call.prompt_ids)
    return bool(text.rstrip().removesuffix("<|im_start|>assistant").rstrip().endswith("Sum up.<|im_end|>"))


def test_a_turn_that_failed_leaves_no_summary_behind() -> None:
    said = iter(["a" * 60, "b" * 60, calling("z" * 60), calling("fail"), "c", "d"])
    written = iter(["of what failed", "of what was said"])

    def script(call: ScriptedCall) -> str:
        return next(written) if is_asked(call) else next(said)

    chat, sampler = chatting(lambda: summary(260), script, max_steps=6, max_response_tokens=200)
    ask(chat, "one?", "two?")
    before = list(chat.history)
    turn = asyncio.run(chat.ask("three?")).played
    assert (turn.stop, [step.summary for step in turn.steps if step.is_summary]) == (StopReason.ERROR, ["whole"])
    assert chat.history == before
    count = len(sampler.calls)
    ask(chat, "four?")
    prompts = [tokenizer().decode(call.prompt_ids) for call in sampler.calls[count:]]
    assert "a" * 60 in prompts[0]  # nothing stands for it yet
    assert not any("of what failed" in prompt for prompt in prompts)
    assert "four?" in prompts[-1]
