"""Talk to a trained agent in the terminal: the same flow, env and tools as in training, with its calls shown.

The agent lives in the world of one row (its tables, files or game), so a row is chosen first; its own question is
offered, any other can be typed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_r1.agent.flow import Episode, EpisodeLimit
from agent_r1.agent.sampler import Sampling
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.rollout.engine import Engine
from agent_r1.run.build import Model, Task, build_engine, build_task, find_model, limits, load_model
from agent_r1.types import Message, Step, StopReason, TaskRow

HELP = "Enter asks the row's own question, /row N goes to another row, /new forgets the conversation, /quit ends."


class Chat:
    """A conversation about one row."""

    def __init__(self, config: RunConfig, *, model: Model, task: Task, engine: Engine, rows: list[TaskRow]) -> None:
        self._config = config
        self._model = model
        self._task = task
        self._engine = engine
        self._rows = rows
        self._turn = 0
        self.enter(0)

    def enter(self, index: int) -> None:
        if not 0 <= index < len(self._rows):
            raise ConfigError(f"there is no test row {index}; choose 0 to {len(self._rows) - 1}")
        self.row = self._rows[index]
        self.forget()

    def forget(self) -> None:
        self._history: list[Message] = [dict(m) for m in self.row.prompt if m["role"] != "user"]

    @property
    def question(self) -> str:
        """The row's own question."""
        return "\n".join(str(m["content"]) for m in self.row.prompt if m["role"] == "user")

    async def ask(self, text: str) -> tuple[list[Step], StopReason]:
        """One user turn: the agent acts until it answers or a limit ends it."""
        self._turn += 1
        row = replace(self.row, prompt=[*self._history, {"role": "user", "content": text}])
        episode = Episode(
            episode_id=f"chat-{self._turn}",
            sampler=self._engine,
            sampling=Sampling(
                max_tokens=self._config.rollout.max_response_tokens,
                temperature=self._config.eval.temperature,
                stop_ids=tuple(self._model.renderer.stop_ids),
            ),
            renderer=self._model.renderer,
            limits=limits(self._config.rollout),
            seed=self._turn,
        )
        try:
            async with asyncio.timeout(self._config.rollout.episode_seconds):
                stop = await self._task.make_flow(row).run(row, episode)
        except EpisodeLimit as limit:
            stop = limit.stop
        except TimeoutError:
            stop = StopReason.TIMEOUT
        self._engine.release(episode.episode_id)
        if episode.steps:
            final: Message = {"role": "assistant", "content": episode.steps[-1].action_text}
            self._history = [*(episode.messages or row.prompt), final]
        return episode.steps, stop


def open_chat(config: RunConfig, model_path: str) -> Chat:
    model = load_model(config, find_model(model_path))
    task = build_task(config)
    return Chat(config, model=model, task=task, engine=build_engine(config, model), rows=task.test_rows())


async def chat_loop(chat: Chat, console: Console) -> None:
    console.print(HELP, style="dim", highlight=False)
    _introduce(chat, console)
    while True:
        try:
            text = (await asyncio.to_thread(console.input, "[bold blue]you[/]   ")).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text in ("/quit", "/exit"):
            return
        if text.startswith("/"):
            _command(chat, text, console)
            continue
        await answer(chat, text or chat.question, console)


async def answer(chat: Chat, text: str, console: Console) -> None:
    """Ask and print call, result, call, result, answer."""
    steps, stop = await chat.ask(text)
    for step in steps:
        _say(console, "agent", "bold green", step.action_text)
        if step.feedback:
            _say(console, "tool", "bold yellow", step.feedback)
    if stop is not StopReason.ANSWERED:
        console.print(f"(stopped: {stop.value})", style="red", highlight=False)


def _command(chat: Chat, text: str, console: Console) -> None:
    name, _, argument = text.partition(" ")
    try:
        if name == "/row" and argument.strip().isdigit():
            chat.enter(int(argument))
            _introduce(chat, console)
        elif name == "/new":
            chat.forget()
        else:
            console.print(HELP, style="dim", highlight=False)
    except ConfigError as error:
        console.print(str(error), style="red", highlight=False)


def _introduce(chat: Chat, console: Console) -> None:
    console.print(f"row {chat.row.row_id}: {chat.question}", highlight=False, markup=False)


def _say(console: Console, speaker: str, style: str, text: Any) -> None:
    console.print(Text.assemble((f"{speaker:6s}", style), str(text)), soft_wrap=True)
