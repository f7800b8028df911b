"""Tasks of `verifiers` (its API `verifiers.v1`): rows from a taskset, the reward from its tasks, tools from toolsets.

    task: {rows: verifiers, rows_kwargs: {taskset: "my_tasks:MyTaskset"}, reward: verifiers, flow: single_step}
    task: {rows: verifiers, rows_kwargs: {taskset: "my_tasks:MyTaskset"}, reward: verifiers, env: verifiers}

With the env, the model calls the tools of the task's and the taskset's toolsets, which run in this process. Tasks that
need a runtime (containers, setup and scoring inside a box) or stop conditions, and environments with several agents,
are refused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import islice
from threading import Lock
from typing import Any

from agent_r1.adapters.require import require
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tools.base import BaseTool, ToolSet, tool
from agent_r1.types import Action, Message, Observation, Step, TaskRow, Trajectory, Transition

TRAIN_ROWS = 1000  # used for a taskset without an end, if the config does not say
_LOCK = Lock()  # rewards may run in threads


def rows(
    split: str, count: int | None = None, *, taskset: str, config: Mapping[str, Any] | None = None, held_out: int = 100
) -> list[TaskRow]:
    """Return tasks as rows. The first `held_out` tasks are for other splits than train, which begins after them."""
    source = _source(taskset, json.dumps(dict(config or {}), sort_keys=True))
    wanted = count if count is not None else None if source.bounded else TRAIN_ROWS
    first, end = (held_out, None) if split == "train" else (0, held_out)
    if split != "train" and count is not None and count > held_out:
        raise ConfigError(f"eval.rows={count} is more than task.rows_kwargs.held_out={held_out}: raise held_out")
    numbers = range(first, _end(source, first, wanted, end))
    return [_as_row(source, split, number) for number in numbers]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """The task's weighted rewards; its metrics and single rewards are reported."""
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    agent_config = import_module("verifiers.v1.configs.agent").AgentConfig
    task = _task_of(row.reward_model)
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=agent_config()),
        nodes=_nodes(task, trajectory),
        is_completed=True,
        ok=True,
    )
    states = [step.info["state"] for step in trajectory.steps if "state" in step.info]
    trace.state = _state_class(task).model_validate(states[-1] if states else {})
    await task.score(trace)
    single = {name: given.score for name, given in trace.rewards.items() if given is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **single, "reward": float(trace.reward)}


class VerifiersEnv(ToolEnv):
    """An episode with the tools of a task."""

    def __init__(
        self, *, taskset: str, config: str, index: int, tools: Sequence[str | BaseTool | ToolSet] = (), **settings: Any
    ) -> None:
        task = _source(taskset, config).task(index)
        self._servers = _toolsets(task, _source(taskset, config))
        self._state = _state_class(task)()
        self._data = task.data
        own = [made for server in self._servers for made in _tools(server, self._state)]
        if not own:
            raise ConfigError(f"the taskset {taskset!r} has no tools: set task.flow=single_step and leave out task.env")
        super().__init__(tools=[*own, *tools], **settings)

    async def reset(self, row: TaskRow) -> Observation:
        for server in self._servers:
            await server.setup()
            await server.setup_task(self._data)
        return await super().reset(row)

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        return replace(transition, info={**transition.info, "state": self._state.model_dump(mode="json")})


class _Source:
    """A taskset, read as far as needed."""

    def __init__(self, name: str, settings: str) -> None:
        self.name, self.settings = name, settings
        self._taskset = _load_taskset(name, json.loads(settings))
        self.bounded: bool = self._taskset.bounded
        self._left: Iterator[Any] = iter(self._taskset)
        self._read: list[Any] = []

    def task(self, index: int) -> Any:
        """The task at this position. Raises IndexError past the last one."""
        with _LOCK:
            self._read += islice(self._left, max(0, index + 1 - len(self._read)))
        return self._read[index]

    @property
    def taskset(self) -> Any:
        return self._taskset


@cache
def _source(name: str, settings: str) -> _Source:
    return _Source(name, settings)


def _load_taskset(name: str, settings: dict[str, Any]) -> Any:
    """Create the taskset `module:Class`, or one that is installed under a verifiers id."""
    api = require("verifiers.v1", "agent-r1[verifiers]")
    module, colon, attribute = name.partition(":")
    try:
        cls: Any = getattr(import_module(module), attribute) if colon else api.utils.loaders.taskset_class(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"task.rows_kwargs.taskset={name!r} cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, api.Taskset)):
        raise ConfigError(f"task.rows_kwargs.taskset={name!r} is {cls!r}, not a subclass of verifiers.v1.Taskset")
    config_class = import_module("verifiers.v1.utils.generic").concrete_type(cls, api.TasksetConfig)
    try:
        made: Any = cls((config_class or api.TasksetConfig)(**settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.rows_kwargs.config={settings} is not accepted by {name!r}: {error}") from error
    _check_supported(made.task_type(), name)
    return made


def _check_supported(task_type: Any, name: str) -> None:
    """Refuse tasks with features that we do not support."""
    base = import_module("verifiers.v1").Task
    marked = [value for cls in task_type.__mro__ for value in vars(cls).values() if callable(value)]
    scoring = [each for each in marked if hasattr(each, "reward") or hasattr(each, "metric")]
    runtime = [each.__name__ for each in scoring if _requires_runtime(each)]
    hooks = [hook for hook in ("setup", "finalize") if getattr(task_type, hook) is not getattr(base, hook)]
    needs = [*hooks, *runtime, *(["NEEDS_CONTAINER"] if task_type.NEEDS_CONTAINER else [])]
    if needs:
        raise ConfigError(f"tasks of {name!r} need a runtime of verifiers ({', '.join(needs)}), which is not supported")
    if stops := [each.__name__ for each in marked if hasattr(each, "stop")]:
        raise ConfigError(f"tasks of {name!r} have stop conditions ({', '.join(stops)}), which are not supported")


def _requires_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _end(source: _Source, first: int, wanted: int | None, end: int | None) -> int:
    """Return the position after the last existing row."""
    position = first
    while (wanted is None or position - first < wanted) and (end is None or position < end):
        try:
            source.task(position)
        except IndexError:
            break
        position += 1
    return position


def _as_row(source: _Source, split: str, index: int) -> TaskRow:
    data = source.task(index).data
    place = {"taskset": source.name, "config": source.settings, "index": index}
    return TaskRow(
        prompt=_opening(data, source.name),
        row_id=f"{split}-{index}",
        reward_model=place,
        env_kwargs=place,  # used by tools; without an env it is ignored
        data_source=f"verifiers/{source.name}",
    )


def _opening(data: Any, name: str) -> list[Message]:
    if data.prompt is None:
        raise ConfigError(f"task {data.idx} of {name!r} has no prompt: a user would open the conversation")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]


def _task_of(place: Mapping[str, Any]) -> Any:
    return _source(place["taskset"], place["config"]).task(place["index"])


def _toolsets(task: Any, source: _Source) -> list[Any]:
    found = [*type(task).toolsets(task.config), *type(source.taskset).toolsets(source.taskset.config)]
    return [server for server in found if server.config.url is None]


def _tools(server: Any, state: Any) -> list[BaseTool]:
    """Return the tools of a toolset, whose `self.state` is the state of the episode."""
    discover = import_module("verifiers.v1.utils.decorators").discover_decorated
    server._inert_state = state  # what `Toolset.state` returns outside a server
    made: list[BaseTool] = []
    for function in discover(server, "tool"):
        name = getattr(function, "tool_name", None) or function.__name__
        made.append(tool(name=f"{server.server_name}_{name}" if server.server_name else name)(function))
    return made


def _state_class(task: Any) -> Any:
    return import_module("verifiers.v1.state").state_cls(type(task))


def _nodes(task: Any, trajectory: Trajectory) -> list[Any]:
    """The episode as a chain of messages, as verifiers keep it."""
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import SystemMessage, UserMessage

    nodes: list[Any] = []

    def add(message: Any, *, sampled: bool = False) -> None:
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    data = task.data
    if data.system_prompt:
        add(SystemMessage(content=data.system_prompt))
    for message in [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt:
        add(message)
    for step in trajectory.steps:
        if not step.is_summary:
            for index, message in enumerate(_messages(step)):
                add(message, sampled=index == 0)
    return nodes


def _messages(step: Step) -> list[Any]:
    """The model's text and the results of its calls."""
    from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

    calls = [
        ToolCall(id=f"call_{index}", name=call.name, arguments=json.dumps(dict(call.arguments)))
        for index, call in enumerate(step.calls)
    ]
    start = min((call.text_span[0] for call in step.calls), default=len(step.action_text))
    said = AssistantMessage(content=step.action_text[:start] or None, tool_calls=calls or None)
    results = [
        ToolMessage(tool_call_id=made.id, name=call.name, content=call.result)
        for made, call in zip(calls, step.calls, strict=True)
    ]
    return [said, *results]


env = VerifiersEnv
