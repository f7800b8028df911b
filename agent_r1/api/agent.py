"""A trained agent as an awaitable function: the flow, environment, tools and sampling of evaluation and of chat."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from agent_r1.api.threads import Loop
from agent_r1.cli.commands.chat import Chat, open_chat
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.types import Step, StopReason, TaskRow, Trajectory

CLOSE_SECONDS = 30.0


class Answer(str):
    """The agent's last words, with the steps that led to them."""

    steps: Sequence[Step]
    stop: StopReason

    @classmethod
    def of(cls, turn: Trajectory) -> Self:
        answer = cls(turn.steps[-1].action_text if turn.steps else "")
        answer.steps, answer.stop = turn.steps, turn.stop
        return answer


class Agent:
    """`await agent("...")`, or `agent.ask("...")` where nothing can be awaited.

    Each question is an episode of its own, in the environment of a test row (its tables, files or game); `row` says
    which. Questions may be asked concurrently. The model lives until `close`, or until the agent is garbage-collected.
    """

    def __init__(self, config: RunConfig, model: str) -> None:
        self._loop = Loop()
        try:
            self._rows = self._loop.submit(self._open(config, model)).result()
        except BaseException:
            self._loop.close()
            raise
        self._asked = 0
        self._finalizer = weakref.finalize(self, _close, self._chat, self._loop)

    async def _open(self, config: RunConfig, model: str) -> Sequence[TaskRow]:
        self._chat = open_chat(config, model)
        try:
            await self._chat.open()
        except BaseException:
            await self._chat.close()
            raise
        return self._chat.rows

    async def __call__(self, question: str, *, row: int | TaskRow = 0) -> Answer:
        return await asyncio.wrap_future(self._begin(question, row))

    def ask(self, question: str, *, row: int | TaskRow = 0) -> Answer:
        """Ask and wait. In a notebook, `await agent(question)` leaves the kernel free."""
        return self._begin(question, row).result()

    def _begin(self, question: str, row: int | TaskRow) -> Future[Answer]:
        if not self._finalizer.alive:
            raise ConfigError("this agent was closed: make another with run.agent()")
        self._asked += 1
        return self._loop.submit(self._answer(question, self._row(row), self._asked))

    def _row(self, row: int | TaskRow) -> TaskRow:
        if isinstance(row, TaskRow):
            return row
        if not 0 <= row < len(self._rows):
            raise ConfigError(f"there is no test row {row}: choose 0 to {len(self._rows) - 1}")
        return self._rows[row]

    async def _answer(self, question: str, row: TaskRow, number: int) -> Answer:
        turn = (await self._chat.about(row, number=number).ask(question)).played
        if turn.error is not None:
            raise RolloutError(f"the agent failed: {turn.error}")
        return Answer.of(turn)

    def close(self) -> None:
        if (closing := self._finalizer()) is not None:
            closing.result(timeout=CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _close(chat: Chat, loop: Loop) -> Future[None]:
    """Does not wait: the agent may be garbage-collected in the loop's own thread."""
    closing = loop.submit(chat.close())
    closing.add_done_callback(lambda _: loop.close())
    return closing
