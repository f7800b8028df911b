"""`agent-r1 chat`: talk to a trained agent, played as in evaluation (flow, env, tools, sampling), and watch its calls.

The agent acts in the environment of one row (its tables, files or game). Enter asks the row's own question, or type
another. Every question starts with a fresh environment; only the conversation is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_r1.build.collectors import eval_collector
from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.build.models.source import find_model
from agent_r1.build.task import build_task
from agent_r1.cli.terminal import converse
from agent_r1.config import RunConfig
from agent_r1.engines.base import Engine
from agent_r1.errors import ConfigError, DataError
from agent_r1.flows.context import ContextPolicy
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.guard import runner
from agent_r1.resources import Resource, opened
from agent_r1.rollout.collect import Collector
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.runs.trajectories import answer_pictures, answerer
from agent_r1.serve.terminal_pictures import show_pictures
from agent_r1.text import visible
from agent_r1.tokens.placeholders import as_parts
from agent_r1.types import Action, Message, Observation, StopReason, TaskRow, Trajectory
from agent_r1.vision.contents import text_of
from agent_r1.vision.pictures import Picture, as_picture, pictures_of

HELP = (
    "Enter asks the row's own question, /row N loads another row, /image PATH shows a picture with the next question, "
    "/new forgets the conversation, /quit exits."
)
Content = str | list[dict[str, Any]]  # content of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The agent's answer to one question."""

    played: Trajectory
    full: bool  # stopped because the conversation and its answer exceed the context
    instead: Content  # what the env showed instead of the question, if it ignores what the user says


class ChatEpisode(Episode):
    """Also remembers an observation that a limit kept from the policy: it belongs to the conversation."""

    messages: Sequence[Message] = ()  # the complete conversation of the last `act`
    is_unanswered = False  # whether the last observation got no response

    async def act(self, observation: Observation, **options: Any) -> Action:
        before = self.num_actions
        if observation.messages is not None:
            self.messages = observation.messages
        try:
            return await super().act(observation, **options)
        finally:
            self.is_unanswered = self.num_actions == before

    def conversation(self, row: TaskRow) -> list[Message]:
        """All messages. The final response is in no observation, unless a limit came right after it."""
        said = list(self.messages or row.prompt)
        return said if self.is_unanswered else [*said, {"role": "assistant", "content": self.steps[-1].action_text}]


class Chat:
    """A conversation about one row, played by `collector`. Closing it closes `engine` and `resources`."""

    def __init__(
        self, collector: Collector, *, engine: Engine, rows: Sequence[TaskRow], resources: Sequence[Resource] = ()
    ) -> None:
        self._collector = replace(collector, make_flow=self._flow)
        self._make_flow = collector.make_flow
        self._engine = engine
        self._resources = resources
        self._open = AsyncExitStack()
        self.rows = rows
        self._asked = 0
        self.shown: list[Picture] = []  # pictures to show with the next question
        self.enter(0)

    def enter(self, index: int) -> None:
        if not 0 <= index < len(self.rows):
            raise ConfigError(f"there is no test row {index}: choose 0 to {len(self.rows) - 1}")
        self.row = self.rows[index]
        self.forget()

    def about(self, row: TaskRow, *, number: int = 1) -> Chat:
        """Begin another conversation with the same agent. Each `number` has its own sampling noise."""
        other = Chat(replace(self._collector, make_flow=self._make_flow), engine=self._engine, rows=[row])
        other._asked = number - 1
        return other

    def forget(self) -> None:
        self.history: list[Message] = [dict(m) for m in self.row.prompt if m["role"] != "user"]
        self.has_past = False
        self._context: ContextPolicy | None = None  # belongs to the conversation, like its notes

    @property
    def question(self) -> Content:
        """The row's own question."""
        contents = [m["content"] for m in self.row.prompt if m["role"] == "user"]
        if pictures_of(self.row.prompt):
            return [part for content in contents for part in as_parts({"content": content})["content"]]
        return "\n".join(map(text_of, contents))

    def show(self, path: str) -> Picture:
        """Show a picture with the next question."""
        if self._collector.renderer.pictures is None:
            raise ConfigError(f"this model takes text only, so it cannot be shown {path}")
        picture = as_picture(Path(path), what="the picture")
        picture.check()  # a damaged file is refused now
        self.shown.append(picture)
        return picture

    async def ask(self, question: Content) -> Turn:
        """Let the agent act until it answers or reaches a limit. A failed turn is not remembered."""
        pictures: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in self.shown]
        content = [*pictures, *as_parts({"content": question})["content"]] if pictures else question
        self._asked += 1
        context = copy(self._context)
        row = replace(self.row, prompt=[*self.history, {"role": "user", "content": content}])
        episode = self._collector.episode(ChatEpisode, f"chat-{self._asked}", self._asked)
        trajectory = await self._collector.play(row, episode)
        if not trajectory.stop.is_failure:
            self.history, self.has_past, self.shown = episode.conversation(row), True, []
        else:
            self._context = context
        instead = "" if _is_in(question, episode.opening) else episode.opening[-1].get("content") or ""
        full = episode.limit is not None and episode.limit.setting == "max_context_tokens"
        return Turn(played=trajectory, full=full, instead=instead)

    def _flow(self, row: TaskRow) -> AgentFlowBase:
        """The recipe's flow, with the context policy of this conversation."""
        flow = self._make_flow(row)
        flow.context = self._context = self._context or flow.context
        return flow

    async def open(self) -> None:
        self._open.push_async_callback(self._engine.close)
        await self._open.enter_async_context(opened(self._resources))

    async def close(self) -> None:
        await self._open.aclose()


def open_chat(config: RunConfig, model_path: str) -> Chat:
    model = load_model(config, find_model(model_path))
    task, engine = build_task(config), build_engine(config, model)
    play = eval_collector(config, task, model.renderer, engine)
    return Chat(play, engine=engine, rows=task.test_rows(), resources=task.resources)


def run_chat(
    config: RunConfig, run: RunDir, console: Console, *, row: int, ask: str | None, images: Sequence[Path] = ()
) -> None:
    """Chat about a row, or ask a single question; an empty one is the row's own. `images` are shown with the first."""
    with logging_to(run.log_file):
        with console.status("loading the model"):
            chat = open_chat(config, str(run.path))
        chat.enter(row)
        show_pictures([chat.show(str(path)) for path in images], console)
        chat_loop(chat, console, ask=ask)


def chat_loop(chat: Chat, console: Console, *, ask: str | None = None) -> None:
    """Ask a question, or chat until the user ends it.

    Input is read in the main thread, between runs of the event loop: in any other thread Ctrl-C could not interrupt it.
    """
    with runner() as running:

        def respond(text: str) -> None:
            if text.startswith("/"):
                _command(chat, text, console)
            else:
                running.run(answer(chat, text or chat.question, console))

        try:
            if ask is None:
                console.print(HELP, style="dim", highlight=False)
                _introduce(chat, console)
            running.run(chat.open())
            if ask is None:
                converse(console, respond)
            else:
                running.run(answer(chat, ask or chat.question, console))
        finally:
            running.run(chat.close())


async def answer(chat: Chat, question: Content, console: Console) -> None:
    """Ask, and print calls, results and the answer. A conversation that has become too long starts over."""
    pictures = list(chat.shown)
    turn = await chat.ask(question)
    _show(turn, console)
    if turn.full and chat.has_past:
        console.print("(the conversation was too long; started a new one)", style="dim", highlight=False)
        chat.forget()
        chat.shown = pictures
        turn = await chat.ask(question)
        _show(turn, console)
    if turn.played.error is not None:
        console.print(Text(visible(f"(failed: {turn.played.error})"), style="red"), soft_wrap=True)
    elif turn.played.stop is not StopReason.ANSWERED:
        console.print(f"(stopped: {turn.played.stop.value})", style="red", highlight=False)


def _is_in(question: Content, messages: Sequence[Message]) -> bool:
    contents = [text_of(message.get("content")) for message in messages]
    return not messages or any(text_of(question) in content for content in contents)


def _show(turn: Turn, console: Console) -> None:
    if turn.instead:
        console.print("(this environment starts from its row, not from what you type; try /row N)", style="dim")
        _say(console, "env", "bold yellow", text_of(turn.instead))
        show_pictures(pictures_of([{"content": turn.instead}]), console)
    for index, step in enumerate(turn.played.steps):
        pictures = answer_pictures(turn.played, index)
        _say(console, "memo" if step.is_summary else "agent", "bold green", step.action_text)
        if step.feedback or pictures:
            _say(console, answerer(step), "bold yellow", step.feedback)
        show_pictures(pictures, console)


def _command(chat: Chat, text: str, console: Console) -> None:
    name, _, argument = text.partition(" ")
    try:
        if name == "/row" and argument.strip().isdecimal():
            chat.enter(int(argument))
            _introduce(chat, console)
        elif name == "/image" and argument.strip():
            show_pictures([chat.show(argument.strip())], console)
        elif name == "/new":
            chat.forget()
        else:
            console.print(HELP, style="dim", highlight=False)
    except (ConfigError, DataError) as error:
        console.print(Text(visible(str(error)), style="red"))


def _introduce(chat: Chat, console: Console) -> None:
    # Text, here and below: rich would read [brackets] and :words: in a str as markup.
    console.print(Text(visible(f"row {chat.row.row_id}: {text_of(chat.question)}")))
    show_pictures(pictures_of(chat.row.prompt), console)


def _say(console: Console, speaker: str, style: str, text: str) -> None:
    console.print(Text.assemble((f"{speaker:6s}", style), visible(text)), soft_wrap=True)
