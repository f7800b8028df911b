"""Talking to an agent: what is shown, what is remembered, how it ends. Mostly with a policy that follows a script."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_r1 import Reply, TextEnv, ToolEnv, tool
from agent_r1.build.resolve import resolve
from agent_r1.cli.commands.chat import Chat, answer, chat_loop, open_chat
from agent_r1.config import load_config
from agent_r1.engines.scripted import ScriptedCall, ScriptedEngine
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Message, Observation, StopReason, TaskRow
from tests.chatml import _no_env, collector, renderer, row, tokenizer

ROOT = Path(__file__).parents[2]
MINI = str(ROOT / "tests" / "mini")
CALL = '<tool_call>{"name": "echo", "arguments": {"text": "%s"}}</tool_call>'


@tool
async def echo(text: str) -> str:
    """The same text, three times; fails on the word fail."""
    if text == "fail":
        raise RuntimeError("broken [/pipe]")
    return text * 3


def scripted(*said: str, rows: Sequence[TaskRow] = (), **limits: Any) -> tuple[Chat, ScriptedEngine]:
    engine = ScriptedEngine(said, tokenizer=tokenizer())
    play = collector(engine, make_env=lambda _: ToolEnv(tools=[echo]), **({"max_response_tokens": 100} | limits))
    return Chat(play, engine=engine, rows=rows or [row(question="[/q] :100:")]), engine


def shown(chat: Chat, *questions: Any) -> list[str]:
    """The lines that the answers print."""
    console = Console(file=io.StringIO(), width=200)

    async def ask() -> None:
        for question in questions:
            await answer(chat, question, console)

    asyncio.run(ask())
    return lines(console)


BROKEN_LINE = 1 + Path(__file__).read_text(encoding="utf-8").splitlines().index(
    '        raise RuntimeError("broken [/pipe]")'
)
NO_ENV_LINE = _no_env.__code__.co_firstlineno + 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def looped(
    chat: Chat, typed: str, monkeypatch: pytest.MonkeyPatch, stdin: type[io.StringIO] = io.StringIO
) -> list[str]:
    monkeypatch.setattr(sys, "stdin", stdin(typed))
    console = Console(file=io.StringIO(), width=200)
    chat_loop(chat, console)
    return lines(console)


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def said(role: str, content: str, **more: str) -> Message:
    return {"role": role, "content": content, **more}


def prompt_size(*messages: Message) -> int:
    return len(renderer().render(Observation(messages=list(messages))))


def test_calls_results_and_answers_are_shown_as_they_are() -> None:
    chat, engine = scripted(CALL % "[b]", "it is [/x] :100:")
    assert shown(chat, "?") == [f"agent {CALL % '[b]'}", "tool  echo: [b][b][b]", "agent it is [/x] :100:"]
    assert engine.released == ["chat-1"]


def test_the_conversation_is_remembered_word_for_word() -> None:
    system = said("system", "Be brief.")
    chat, _ = scripted(CALL % "a", "aaa", "yes", rows=[TaskRow(prompt=[system, said("user", "echo a")])])
    shown(chat, chat.question, "sure?")
    assert chat.history == [
        system,
        said("user", "echo a"),
        said("assistant", CALL % "a"),
        said("tool", "aaa", name="echo"),
        said("assistant", "aaa"),
        said("user", "sure?"),
        said("assistant", "yes"),
    ]
    chat.forget()
    assert chat.history == [system]


@pytest.mark.parametrize("limit", ["steps", "tokens"])
def test_a_limit_after_a_call_leaves_the_call_and_its_result_once_in_the_history(limit: str) -> None:
    before = [said("user", "hi"), said("assistant", "hello"), said("user", "echo a")]
    history = [*before, said("assistant", CALL % "a"), said("tool", "aaa", name="echo")]
    # Tokens: room for the call (its end included), one too few for the prompt that shows the result.
    limits: dict[str, Any] = {"max_steps": 1} if limit == "steps" else {"max_context_tokens": prompt_size(*history)}
    chat, engine = scripted("hello", CALL % "a", **limits)
    shown(chat, "hi")
    turn = asyncio.run(chat.ask("echo a"))
    assert (turn.played.stop, turn.full) == (
        (StopReason.MAX_STEPS, False) if limit == "steps" else (StopReason.MAX_TOKENS, True)
    )
    assert len(engine.calls) == 2  # the limit came before a third model call
    assert chat.history == history


def test_a_full_conversation_starts_afresh_and_the_question_is_asked_again() -> None:
    room = prompt_size(said("user", "one"), said("assistant", "first"), said("user", "two"))
    chat, engine = scripted("first", "second", max_context_tokens=room)
    assert shown(chat, "one") == ["agent first"]
    assert shown(chat, "two") == ["(the conversation was too long; started a new one)", "agent second"]
    assert len(engine.calls) == 2  # the full prompt was never sampled from
    assert chat.history == [said("user", "two"), said("assistant", "second")]


def test_an_answer_cut_by_a_full_conversation_is_given_again_in_a_fresh_one() -> None:
    room = prompt_size(said("user", "one"), said("assistant", "first"), said("user", "two")) + 3
    chat, _ = scripted("first", "second", "second", max_context_tokens=room)
    assert shown(chat, "one", "two") == [
        "agent first",
        "agent sec",  # three tokens were left, one per letter
        "(the conversation was too long; started a new one)",
        "agent second",
    ]


def test_a_question_too_long_even_alone_and_an_answer_too_long_are_limits_not_full_conversations() -> None:
    chat, _ = scripted("word " * 9, max_response_tokens=10, max_context_tokens=100)
    size = prompt_size(said("user", "x" * 100))
    assert shown(chat, "x" * 100) == [
        f"(failed: nothing was sampled: the prompt has {size} tokens, max_context_tokens is 100)"
    ]
    assert shown(chat, "talk") == ["agent word word", "(stopped: max_tokens)"]
    assert chat.history == [said("user", "talk"), said("assistant", "word word ")]


def test_a_failing_tool_is_shown_and_the_chat_goes_on_without_that_turn() -> None:
    chat, engine = scripted("hello", CALL % "fail", "still here")
    assert shown(chat, "hi", "fail!", "and now?") == [
        "agent hello",
        f"agent {CALL % 'fail'}",
        f"(failed: tool 'echo' raised RuntimeError: broken [/pipe] (test_chat.py:{BROKEN_LINE}))",
        "agent still here",
    ]
    assert chat.history == [
        said("user", "hi"),
        said("assistant", "hello"),
        said("user", "and now?"),
        said("assistant", "still here"),
    ]
    assert engine.released == ["chat-1", "chat-2", "chat-3"]


def test_what_failed_is_logged_with_its_traceback_as_in_training(caplog: pytest.LogCaptureFixture) -> None:
    chat, _ = scripted(CALL % "fail")
    shown(chat, "fail!")
    [record] = caplog.records
    assert record.getMessage().startswith("episode chat-1 failed: tool 'echo' raised RuntimeError: broken [/pipe]")
    assert f'test_chat.py", line {BROKEN_LINE}' in record.getMessage()


class Hangs(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        await asyncio.Event().wait()
        raise AssertionError


class SaysNothing(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        return StopReason.ANSWERED


class ReturnsNone(AgentFlowBase):
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (Hangs, "(failed: the episode was not finished after 0.01 s (rollout.episode_seconds))"),
        (SaysNothing, "(failed: the flow ended without a single model call)"),
        (ReturnsNone, "(failed: the flow returned NoneType instead of a StopReason)"),
        (AgentEnvLoop, f"(failed: AssertionError: this test's flow needs no env (chatml.py:{NO_ENV_LINE}))"),
    ],
)
def test_whatever_a_flow_does_the_chat_survives_it(flow: type[AgentFlowBase], message: str) -> None:
    engine = ScriptedEngine([], tokenizer=tokenizer())
    unused = collector(engine).make_flow(row()).make_env
    chat = Chat(collector(engine, make_flow=lambda _: flow(unused), episode_seconds=0.01), engine=engine, rows=[row()])
    assert shown(chat, "?") == [message]
    assert engine.released == ["chat-1"]


def test_the_prompt_takes_questions_and_commands_until_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = scripted("first", "second", rows=[row("a", "[/q] :100:"), row("b", "other")])
    help_line, introduction, *rest = looped(chat, "\n/row 1\nhi\n/row 7\n/row ²\n/new\n", monkeypatch)
    assert introduction == "row a: [/q] :100:"
    assert rest == [
        "you",  # Enter alone
        "agent first",
        "you   /row 1",
        "row b: other",
        "you   hi",
        "agent second",
        "you   /row 7",
        "there is no test row 7: choose 0 to 1",
        "you   /row ²",
        help_line,
        "you   /new",  # says nothing
        "you",  # Ctrl-D
    ]
    assert chat.history == []


def test_quit_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, engine = scripted("never said")
    looped(chat, "/quit\nhi\n", monkeypatch)
    assert engine.calls == []


def test_ctrl_c_during_an_answer_ends_the_chat_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(call: ScriptedCall) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "never shown"

    engine = ScriptedEngine(interrupted, tokenizer=tokenizer())
    chat = Chat(collector(engine, make_env=lambda _: ToolEnv(tools=[echo])), engine=engine, rows=[row()])
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        printed = looped(chat, "hi\nmore\n", monkeypatch)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not any("never shown" in line for line in printed)
    assert len(engine.calls) == 1
    assert engine.released == ["chat-1"]
    assert chat.history == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an untrained model for its checkpoint."""
    torch.set_num_threads(1)
    config = load_config(MINI)
    path = tmp_path_factory.mktemp("runs") / "mini"
    RunDir.create(path, config)
    checkpoint = path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    resolve("task.make_model", recipe=config.recipe)(directory=checkpoint, seed=0)
    return path


def test_answers_are_drawn_as_in_evaluation(run: Path) -> None:
    def sampled(*settings: str) -> list[list[int]]:
        chat = open_chat(load_config(MINI, settings), str(run))
        return [step.response_ids for step in asyncio.run(chat.ask("double 4")).played.steps]

    greedy, hot = sampled("eval.temperature=0"), sampled("eval.temperature=5")
    assert sampled("eval.temperature=5", "eval.top_k=1") == greedy != hot  # the best 1 of all is the greedy choice
    assert sampled("eval.temperature=5", "eval.top_p=1e-9") == greedy  # so is the smallest nucleus


def test_what_comes_through_a_pipe_is_shown_as_if_it_had_been_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, _ = scripted("hi", "hi")
    shown_after_introduction = looped(chat, "hello [/b] :100:\n/quit\n", monkeypatch)[2:]
    assert shown_after_introduction == ["you   hello [/b] :100:", "agent hi", "you   /quit"]
    by_a_terminal = looped(chat, "hello\n/quit\n", monkeypatch, Terminal)  # which shows it by itself
    assert not any("hello" in line for line in by_a_terminal)


def test_ctrl_c_at_the_prompt_ends_the_program_at_once_with_exit_code_0(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    words = [sys.executable, "-m", "agent_r1.cli", "chat", str(run)]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # programs started in the background ignore it
        os.execve(sys.executable, words, environment)
    try:
        output = b""
        while b"you   " not in output:
            output += os.read(terminal, 1024)  # fails when the program ends before it asks
        ended = status = 0
        while not ended:
            os.write(terminal, b"\x03")  # no Enter: a program that waits for it is waited for in vain
            # A terminal that is just being set up for input makes no signal of it: like people, try again.
            for _ in range(100):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    break
                time.sleep(0.1)
    finally:
        os.close(terminal)  # which also ends the program
    assert os.waitstatus_to_exitcode(status) == 0


class Stubborn(TextEnv):
    """Begins with a riddle, whatever is asked."""

    def begin(self, row: TaskRow) -> str:
        return "What has keys and opens no door?"

    def reply(self, said: str) -> Reply:
        return Reply(text="no", done=True)


def test_a_world_that_does_not_show_the_question_says_what_it_shows_instead() -> None:
    engine = ScriptedEngine(["a piano"], tokenizer=tokenizer())
    chat = Chat(collector(engine, make_env=lambda _: Stubborn()), engine=engine, rows=[row(question="")])
    assert shown(chat, "hello?") == [
        "(this environment starts from its row, not from what you type; try /row N)",
        "env   What has keys and opens no door?",
        "agent a piano",
        "env   no",
    ]
