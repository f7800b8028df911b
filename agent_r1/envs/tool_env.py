"""`ToolEnv`: the model calls tools, reads their results, and answers when it calls nothing.

The conversation only grows: each step appends the response and the results of its calls, or what `reply` says to text
without a call. `tokens/formats` parses calls and `tools/runner.py` runs them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from itertools import groupby
from typing import Any
from uuid import uuid4

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.text_env import Reply
from agent_r1.errors import ConfigError, at_least, did_you_mean
from agent_r1.guard import blame
from agent_r1.text import sanitize
from agent_r1.tokens.formats.base import MAX_CALLS, Event, ParsedCall, ParseFailure, ToolCallFormat
from agent_r1.tokens.formats.table import AUTO, detect_format, format_name, get_format
from agent_r1.tools.base import BaseTool, ToolSet, list_tools
from agent_r1.tools.runner import ToolOutcome, run_tool
from agent_r1.types import (
    Action,
    CallFault,
    Message,
    Observation,
    StopReason,
    TaskRow,
    ToolCallRecord,
    Transition,
    check_type,
)
from agent_r1.vision.contents import shown_content
from agent_r1.vision.pictures import Picture


@AgentEnv.register("tool")
class ToolEnv(AgentEnv):
    """An episode with tools.

    `tools_kwargs` fills the parameters that tools take from the row. A key that names a tool holds the values of that
    tool; any other key goes to every tool that takes it: `{"search": {"table": ...}, "language": "en"}`.

    A bad call (malformed, to an unknown tool, or with invalid arguments) is answered with the reason. After
    `max_bad_calls` in a row, even across steps, the episode ends as `StopReason.PARSE_LIMIT`. A call that ran resets
    the count, even if its tool failed. The limit is checked after all calls of a step.

    The calls of a response run one after another, so that tools may change the state of the episode. Consecutive calls
    overlap if all their tools are `parallel`.
    """

    def __init__(  # noqa: PLR0913 (all settings of an episode with tools)
        self,
        *,
        tools: Sequence[str | BaseTool | ToolSet],
        tool_format: str | ToolCallFormat = AUTO,  # AUTO: in a run, the chat template's; otherwise hermes
        tools_kwargs: Mapping[str, Any] | None = None,
        max_bad_calls: int = 3,
        max_calls: int = MAX_CALLS,  # per response; further calls are refused
        max_result_chars: int = 8000,  # characters of one result; the rest is cut, and the model is told how much
        tool_role: str | None = None,  # None: the format's own; "user" for templates without a tool role
        parallel: bool = True,  # False: calls never overlap, not even those of `parallel` tools
    ) -> None:
        at_least(1, "ToolEnv", max_bad_calls=max_bad_calls, max_calls=max_calls, max_result_chars=max_result_chars)
        episode = uuid4().hex
        self._tools = {name: tool.for_episode(episode) for name, tool in _index_tools(tools).items()}
        self.tool_format = copy(_choose_format(tool_format, self._tools, tool_role))
        self.tool_format.max_calls = max_calls
        self._context = _split_context(self._tools, tools_kwargs or {})
        self._max_bad_calls = max_bad_calls
        self._max_result_chars = max_result_chars
        self._tool_role = tool_role
        self.parallel = parallel
        self._messages: list[Message] | None = None  # None: before the first reset and after the end
        self._bad_calls = 0  # bad calls in a row

    @property
    def parallel_tools(self) -> frozenset[str]:
        """The tools whose calls may overlap."""
        return frozenset(name for name, tool in self._tools.items() if self.parallel and tool.parallel)

    @property
    def state(self) -> Mapping[str, Mapping[str, Any]]:
        """The row's values for each tool, including changes made by its calls."""
        return self._context

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def reply(self, said: str) -> Reply | Awaitable[Reply | None] | None:
        """Answer text without a call, for example as a simulated user; sync or async.

        `said` has no thinking in it. None, the default, makes it the final answer and ends the episode.
        """
        return None

    async def reset(self, row: TaskRow) -> Observation:
        observation = Observation(messages=deepcopy(row.prompt))
        self._messages = list(observation.messages or ())
        self._bad_calls = 0
        return observation

    async def close(self) -> None:
        for tool in self._tools.values():
            await tool.end_episode()
        await super().close()

    async def step(self, action: Action) -> Transition:
        if self._messages is None:
            raise RuntimeError("ToolEnv.step was called outside an episode: call reset first")
        content, events = self.tool_format.parse(action.text)
        if not events and (found := detect_format(content, self._tools)) is not None:
            events = [self._unreadable_call(found, action.text)]
        if not events:
            return await self._reply_or_end(action, content)

        outcomes = await self._run(events)
        for outcome in outcomes:
            self._bad_calls = self._bad_calls + 1 if outcome.refused else 0
        records = tuple(map(self._record, events, outcomes))
        results = [record.result for record in records]
        reward = sum(record.reward for record in records)
        feedback = "\n".join(f"{record.name or 'unreadable call'}: {record.result}" for record in records)
        if self._bad_calls >= self._max_bad_calls:
            self._messages = None
            return Transition(
                reward=reward, terminated=True, stop=StopReason.PARSE_LIMIT, calls=records, feedback=feedback
            )
        answers = self.tool_format.result_messages(results, events, self._tool_role)
        observation = self._continue(action, _show_pictures(answers, records))
        return Transition(observation=observation, reward=reward, calls=records, feedback=feedback)

    async def _reply_or_end(self, action: Action, said: str) -> Transition:
        answered = self.reply(said)
        reply = await answered if inspect.isawaitable(answered) else answered
        if reply is None:
            self._messages = None
            return Transition(terminated=True, info={"answer": said})
        check_type(f"what {type(self).__name__}.reply returns", reply, Reply, "a Reply")
        if reply.done:
            self._messages = None
            info = {"answer": said, **reply.info}
            return Transition(reward=reply.reward, terminated=True, feedback=reply.text, info=info)
        content = shown_content(reply.text, reply.images, what="a Reply")
        observation = self._continue(action, [{"role": "user", "content": content}])
        return Transition(observation=observation, reward=reply.reward, feedback=reply.text, info=reply.info)

    def _continue(self, action: Action, answers: Sequence[Message]) -> Observation:
        assert self._messages is not None
        # A new list: observations handed out earlier must not grow. The messages themselves never change.
        self._messages = [*self._messages, self.tool_format.assistant_message(action.text), *answers]
        return Observation.grown(list(self._messages), by=1 + len(answers))

    def _unreadable_call(self, found: str, text: str) -> ParseFailure:
        """Return the failure for a response that looks like a call but would otherwise count as the answer."""
        own = found == format_name(self.tool_format)
        why = "this looks like a call" + ("" if own else f" in the format {found!r}") + ", and cannot be read as one"
        return ParseFailure(message=f"{why}. Write {self.tool_format.form}", span=(0, len(text)))

    async def _run(self, events: Sequence[Event]) -> list[ToolOutcome]:
        outcomes: list[ToolOutcome] = []
        for overlap, group in groupby(events, key=self._may_overlap):
            if overlap:
                # Exceptions are raised when all calls have ended, so that no call outlives its step.
                for outcome in await asyncio.gather(*map(self._answer, group), return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
                    outcomes.append(outcome)
            else:
                outcomes += [await self._answer(call) for call in group]
        return outcomes

    def _may_overlap(self, event: Event) -> bool:
        tool = self._tools.get(event.name)  # None: a bad call, which does not run
        return self.parallel and (tool is None or tool.parallel)

    async def _answer(self, event: Event) -> ToolOutcome:
        if isinstance(event, ParseFailure):
            fault: CallFault = "malformed" if event.malformed else "misplaced"
            return ToolOutcome(text=f"{event.message}\nTools: {', '.join(self._tools)}", fault=fault)
        tool = self._tools.get(event.name)
        if tool is None:
            text = f"there is no tool {event.name!r}.{did_you_mean(event.name, self._tools)}"
            return ToolOutcome(text=text, fault="unknown_tool")
        arguments = self.tool_format.convert_arguments(event.arguments, tool.arguments.parameters)
        try:
            outcome = await run_tool(tool, arguments, self._context[tool.name])
        except Exception as error:
            blame(error, f"tool {tool.name!r}")
            raise
        if outcome.refused:
            return replace(outcome, text=f"{outcome.text}\nTools: {', '.join(self._tools)}")
        return outcome

    def _record(self, event: Event, outcome: ToolOutcome) -> ToolCallRecord:
        result = self._cut(outcome.text)
        return ToolCallRecord(
            name=event.name,
            arguments=event.arguments if isinstance(event, ParsedCall) else {},
            result=result,
            pictures=outcome.pictures,
            reward=outcome.reward,
            error=None if outcome.fault is None else result,
            fault=outcome.fault,
            text_span=event.span,
            seconds=outcome.seconds,
            info=outcome.info,
        )

    def _cut(self, text: str) -> str:
        kept = sanitize(text[: self._max_result_chars])
        dropped = len(text) - self._max_result_chars
        return kept if dropped <= 0 else f"{kept}\n[{dropped} of {len(text)} characters cut]"


def _show_pictures(answers: list[Message], records: Sequence[ToolCallRecord]) -> list[Message]:
    """Add the pictures of each result to its message, or all of them to the last one if results share a message."""
    if len(answers) == len(records):
        return [_with_pictures(answer, record.pictures) for answer, record in zip(answers, records, strict=True)]
    pictures = [picture for record in records for picture in record.pictures]
    return [*answers[:-1], _with_pictures(answers[-1], pictures)]


def _with_pictures(message: Message, pictures: Sequence[Picture]) -> Message:
    if not pictures:
        return message
    text, marked = message["content"], message.get("from_tool")
    parts = [{"type": "image", "image": picture} for picture in pictures]
    words = [{"type": "text", "text": text}] if text else []
    # Mark the whole message: in a content of parts, the tool's text cannot be marked by its end.
    return {**message, "content": [*words, *parts], **({"from_tool": True} if marked else {})}


def _index_tools(tools: Sequence[str | BaseTool | ToolSet]) -> dict[str, BaseTool]:
    if isinstance(tools, str) or not tools:
        raise ConfigError(f"ToolEnv needs a list of at least one tool, got tools={tools!r}")
    found: dict[str, BaseTool] = {}
    for tool in list_tools(tools):
        if tool.name in found:
            raise ConfigError(f"two tools are named {tool.name!r}. Rename one, or set `prefix` for an MCP server")
        found[tool.name] = tool
    return found


def _choose_format(name: str | ToolCallFormat, tools: Mapping[str, BaseTool], role: str | None) -> ToolCallFormat:
    chosen = get_format(name)
    if role is not None and role not in chosen.roles:
        raise ConfigError(f"tool_format {name!r} has no tool_role {role!r}.{did_you_mean(role, chosen.roles)}")
    if chosen.fixed_tool is not None and list(tools) != [chosen.fixed_tool]:
        raise ConfigError(
            f"tool_format {name!r} can only call the tool {chosen.fixed_tool!r}, got tools {list(tools)}. "
            "Rename the tool, or pass the format as an object with the tool's name."
        )
    return chosen


def _split_context(tools: Mapping[str, BaseTool], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the row's values by tool. Raises ConfigError for values that no tool takes and for missing ones."""
    shared = {key: value for key, value in given.items() if key not in tools}
    for key in shared:
        if not any(tool.row_keys.takes(key) for tool in tools.values()):
            raise ConfigError(
                f"tools_kwargs has {key!r}, which is neither a tool nor a FromRow parameter of one."
                f"{did_you_mean(key, tools)}"
            )
    context: dict[str, dict[str, Any]] = {}
    for name, tool in tools.items():
        own = given.get(name, {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"tools_kwargs[{name!r}] must be a dict of values for that tool, got {own!r}")
        for key in own:
            if not tool.row_keys.takes(key):
                known = tool.row_keys.required | tool.row_keys.optional
                raise ConfigError(f"tool {name!r} takes no {key!r} from the row.{did_you_mean(key, known)}")
        context[name] = tool.row_keys.select(name, {**shared, **own})
    return context
