"""Build the task of a recipe: its rows, tools, env, flow and reward. No model is needed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any, TypeVar

from agent_r1.build.context import check_env_repeats, check_flow, context_maker
from agent_r1.build.resolve import (
    check_callable,
    import_recipe,
    make_importable,
    one_line_errors,
    recipe_folder,
    resolve,
)
from agent_r1.config import RunConfig
from agent_r1.config.checks import is_data_source
from agent_r1.config.schema import RewriteContext, SummaryContext
from agent_r1.data.rows import load_rows
from agent_r1.envs.base import AgentEnv, env_class, make_env, merge_env_kwargs, takes_setting
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import AgentR1Error, ConfigError, DataError, did_you_mean
from agent_r1.flows.context import ContextPolicy
from agent_r1.flows.flow import AgentFlowBase, flow_class
from agent_r1.places import anchored
from agent_r1.resources import Resource, opened
from agent_r1.rollout.scoring import Scorer, check_reward_signature
from agent_r1.tokens.formats.infer import TemplateFormat, requested_format
from agent_r1.tokens.formats.table import get_format
from agent_r1.tools.base import BaseTool, ToolSet, get_tool, list_tools
from agent_r1.types import TaskRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything of a recipe except the model. Creates the flows and envs of rows."""

    config: RunConfig
    source: str | Callable[..., Any]  # where rows come from; read on demand: evaluation and chat need no training rows
    scorer: Scorer
    env: type[AgentEnv]  # default env and flow; a row may name others
    flow: type[AgentFlowBase]
    tools: list[BaseTool]
    resources: Sequence[Resource]  # open while episodes are played: `task.resources`, tools, env processes
    make_env: Callable[[type[AgentEnv], str, dict[str, Any]], AgentEnv]
    make_context: Callable[[TemplateFormat | None], ContextPolicy] | None
    checked: set[tuple[type[AgentEnv], TemplateFormat]] = field(default_factory=set)  # envs that set their own format

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` with the resources open."""
        try:
            async with opened(self.resources):
                return await work
        finally:
            work.close()  # not awaited if a resource could not be opened

    def train_rows(self) -> list[TaskRow]:
        return _load(self.config, self.source, split=self.config.task.train_split, count=self.config.task.train_count)

    def test_rows(self) -> list[TaskRow]:
        return _load(self.config, self.source, split=self.config.task.test_split, count=self.config.eval.rows)

    @property
    def success_reward(self) -> float:
        return self.config.task.success_reward

    @property
    def calls_tools(self) -> bool:
        """Whether the env is a ToolEnv."""
        return issubclass(self.env, ToolEnv) and self.flow.uses_env

    def flows_for(self, template: TemplateFormat | None) -> Callable[[TaskRow], AgentFlowBase]:
        """`make_flow` for a chat template. Raises ConfigError if the task reads calls in another format."""
        if template is not None and self.calls_tools and takes_setting(self.env, "tool_format"):
            template.choose(requested_format(self.config.task.env_kwargs))
        return partial(self.make_flow, template=template)

    def make_flow(self, row: TaskRow, template: TemplateFormat | None = None) -> AgentFlowBase:
        flow = flow_class(row.agent_name) if row.agent_name else self.flow
        check_flow(flow, self.config)
        made: AgentFlowBase = flow(partial(self._make_env, template=template))
        if self.make_context is not None:
            made.context = self.make_context(template)
        return made

    def _make_env(self, row: TaskRow, template: TemplateFormat | None) -> AgentEnv:
        task = self.config.task
        env_type = row.env_kwargs.get("env_type", task.env_kwargs.get("env_type"))
        env, name = env_class(env_type) if env_type else self.env, env_type or task.env
        takes_tools = takes_setting(env, "tools")
        if self.tools and not takes_tools and not env_type:  # an env chosen by a row need not take tools
            raise ConfigError(
                f"task.tools={task.tools}: the env {task.env!r} ({env.__name__}) has no parameter `tools`"
            )
        tools = {"tools": self.tools} if self.tools and takes_tools else {}
        kwargs = merge_env_kwargs({**task.env_kwargs, **tools}, row)
        kwargs.pop("env_type", None)
        if env is ToolEnv and "tools" not in kwargs:
            raise ConfigError("task.tools is empty: name tools, another env in task.env, or set task.flow=single_step")
        if issubclass(env, ToolEnv) and isinstance(kwargs.get("tools"), list):
            for tool in list_tools(kwargs["tools"]):  # a row may name others, which nobody opens
                if tool not in self.tools and type(tool).open is not Resource.open:
                    raise ConfigError(f"tool {tool.name!r} must be opened before a run: add it to task.tools")
        check_env_repeats(env, kwargs, self.config)
        if template is not None and issubclass(env, ToolEnv):
            self._set_tool_format(env, name, kwargs, template)
        return self.make_env(env, name, kwargs)

    def _set_tool_format(self, env: type[ToolEnv], name: str, kwargs: dict[str, Any], template: TemplateFormat) -> None:
        """Set the template's format. Raises ConfigError if the env has its own, contradicting format."""
        if takes_setting(env, "tool_format"):
            kwargs["tool_format"] = template.choose(requested_format(kwargs))
        elif (env, template) not in self.checked:
            made = make_env(env, name, kwargs)
            assert isinstance(made, ToolEnv)
            try:
                template.choose(made.tool_format)
            except ConfigError as error:
                raise ConfigError(f"{env.__name__}: {error}, or pass tool_format through its __init__") from error
            self.checked.add((env, template))


def build_task(config: RunConfig) -> Task:
    task = config.task
    import_recipe(config.recipe, named_code(config))
    _check_path(config)
    source = task.rows if is_data_source(task.rows) else _rows_function(config)
    reward = resolve(task.reward, recipe=config.recipe)
    check_reward_signature(reward, task.reward)
    tools, env = _tools(config), _lookup(task.env, config, env_class)
    flow, served = build_gateway(config) if config.gateway else (_lookup(task.flow, config, flow_class), [])
    for cls, base, name in ((env, AgentEnv, task.env), (flow, AgentFlowBase, task.flow)):
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(f"{name!r} is {cls!r}, not a subclass of {base.__name__}")
    make_context = context_maker(config, env)
    check_flow(flow, config)
    pool = _env_pool(config, flow)
    return Task(
        config=config,
        source=source,
        scorer=Scorer(reward=reward, timeout=task.reward_seconds),
        env=env,
        flow=flow,
        tools=tools,
        resources=[*_resources(config), *tools, *served, *([] if pool is None else [_EnvProcesses(pool)])],
        make_env=make_env if pool is None else pool.env,
        make_context=make_context,
    )


def warm_start_code(config: RunConfig) -> list[str]:
    """Return the dotted names that a warm start uses. Plain names are registered by the recipe's own files."""
    task, context = config.task, config.context
    names = [config.model.make, config.sft.demos, task.env, task.flow, *_tool_names(config), *task.resources]
    if config.gateway is not None:
        names.append(config.gateway.agent)
    if isinstance(context, SummaryContext):
        names.append(context.demo_summary)
    if isinstance(context, RewriteContext):
        names.append(context.function)
    return [name for name in names if name is not None and "." in name]


def _tool_names(config: RunConfig) -> list[str]:
    return [tool for tool in config.task.tools if isinstance(tool, str)]


def named_code(config: RunConfig) -> list[str]:
    """Return all dotted names that a run uses."""
    rows = [] if is_data_source(config.task.rows) else [config.task.rows]
    return [*warm_start_code(config), config.task.reward, *rows]


def _lookup(name: str, config: RunConfig, registered: Callable[[str], Any]) -> Any:
    """Return the object of a dotted name or of a registered name."""
    if "." in name:
        return resolve(name, recipe=config.recipe)
    try:
        return registered(name)
    except ConfigError as error:
        raise ConfigError(f"{error}. If a file of the recipe registers it, import that file in task.py") from error


def build_gateway(config: RunConfig) -> tuple[type[AgentFlowBase], list[Resource]]:
    """Return the flow that starts an agent written elsewhere, and the server that must be open while it plays. The
    gateway is imported only by runs that use it."""
    settings, serve = config.gateway, "agent_r1.serve.gateway"
    assert settings is not None
    if config.backend != "local":
        raise ConfigError(f"task.flow=gateway works with backend=local, not with backend={config.backend}")
    get_format(settings.tool_format)
    if settings.agent is not None:
        function = resolve(settings.agent, recipe=config.recipe)
        check_callable("gateway.agent", settings.agent, function, None, None)
        agent = import_module(f"{serve}.agents").FunctionAgent(function=function, name=settings.agent)
    else:
        command = import_module(f"{serve}.command")
        agent = command.CommandAgent(
            command=command.split_command(settings.command),
            recipe=recipe_folder(config.recipe),
            stdin=settings.stdin,
            env=settings.env,
        )
    server = import_module(f"{serve}.server").GatewayServer(episode_seconds=config.rollout.episode_seconds)
    flow = import_module(f"{serve}.flow").gateway_flow(
        server=server,
        agent=agent,
        **settings.model_dump(include={"tool_format", "tool_role", "on_failure", "shows_ground_truth"}),
    )
    return flow, [server]


def _env_pool(config: RunConfig, flow: type[AgentFlowBase]) -> EnvPool | None:
    """Return the pool that hosts envs. Its processes start with the first episodes."""
    workers = config.task.workers
    if workers is None:
        return None
    if not flow.uses_env:
        raise ConfigError(f"task.workers has no effect with task.flow={config.task.flow}, which has no env")
    return EnvPool(**workers.model_dump(), prepare=partial(make_importable, config.recipe))


class _EnvProcesses(Resource):
    """Ends the pool's processes with the task."""

    def __init__(self, pool: EnvPool) -> None:
        self._pool = pool

    async def close(self) -> None:
        self._pool.close()


def _resources(config: RunConfig) -> list[Resource]:
    found = [resolve(name, recipe=config.recipe) for name in config.task.resources]
    for name, resource in zip(config.task.resources, found, strict=True):
        if not isinstance(resource, Resource):
            raise ConfigError(f"task.resources: {name!r} is {resource!r}, not an instance of a subclass of Resource")
    return found


def _tools(config: RunConfig) -> list[BaseTool]:
    settings = dict(config.task.tool_kwargs)
    made = list_tools(
        _tool(entry, config, settings) if isinstance(entry, str) else _tool_set(entry, config)
        for entry in config.task.tools
    )
    if settings:
        name = next(iter(settings))
        if name in (known := [tool.name for tool in made]):
            raise ConfigError(f"task.tool_kwargs has settings for {name!r}, which takes none: it is not a class")
        hint = did_you_mean(name, known)
        raise ConfigError(f"task.tool_kwargs has settings for {name!r}, which is not in task.tools.{hint}")
    for name, count in Counter(tool.name for tool in made).items():
        if count > 1:
            raise ConfigError(f"task.tools has two tools named {name!r}. Rename one, or set `prefix` for an MCP server")
    return made


def _tool_set(entry: dict[str, dict[str, Any]], config: RunConfig) -> ToolSet:
    """Return the tools of an entry such as `{mcp: {command: ...}}`."""
    if list(entry) != ["mcp"]:
        raise ConfigError(f"task.tools: {entry!r:.200} is neither a name nor of the form {{mcp: {{command: ...}}}}")
    from agent_r1.tools.mcp.tool_set import MCPTools

    folder, settings = recipe_folder(config.recipe), entry["mcp"]
    if settings.get("command") is not None and isinstance(settings.get("cwd"), str | None):
        settings = {**settings, "cwd": folder / (settings.get("cwd") or "")}
    known = inspect.signature(MCPTools).parameters
    for key in settings:
        if key not in known:
            raise ConfigError(f"task.tools: mcp has no setting {key!r}.{did_you_mean(key, known)}")
    return MCPTools(**settings)


def _tool(name: str, config: RunConfig, settings: dict[str, dict[str, Any]]) -> BaseTool | ToolSet:
    """Return the tool; a class is called with its settings, which are removed from `settings`."""
    found = _lookup(name, config, get_tool)
    if isinstance(found, type) and issubclass(found, BaseTool):
        kwargs = settings.pop(getattr(found, "name", name), {})
        try:
            return get_tool(found(**kwargs))
        except AgentR1Error:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"task.tool_kwargs: {found.__name__}(**{kwargs}) failed: {error}") from error
    if not isinstance(found, BaseTool | ToolSet):
        raise ConfigError(f"task.tools: {name!r} is {found!r}, not a tool; put @tool on the function")
    return found


def _load(config: RunConfig, source: str | Callable[..., Any], *, split: str, count: int | None) -> list[TaskRow]:
    if isinstance(source, str):
        beside = recipe_folder(config.recipe)
        return load_rows(source, split=split, count=count, beside=beside, columns=config.data.map)
    with one_line_errors(f"task.rows={config.task.rows!r} for split {split!r} raised", DataError):
        return load_rows(source, split=split, count=count)


def _rows_function(config: RunConfig) -> Callable[..., Any]:
    """Return the function that makes rows. It gets `count` only if the config has one."""
    task = config.task
    for count in (task.train_count, config.eval.rows):
        check_call(config, "task.rows", task.rows, [*task.rows_kwargs, "split", *([] if count is None else ["count"])])
    found = recipe_function(task.rows, config)
    return update_wrapper(partial(found, **task.rows_kwargs), found)


def recipe_function(name: str, config: RunConfig) -> Callable[..., Any]:
    """Return a function of the recipe that makes rows or demonstrations, with `path` bound if it takes one."""
    found: Callable[..., Any] = resolve(name, recipe=config.recipe)
    path = None if config.data.path is None else str(anchored(config.data.path))
    return update_wrapper(partial(found, path=path), found) if _takes_path(found) else found


def check_call(config: RunConfig, setting: str, name: str, keywords: Sequence[str]) -> None:
    """Raise ConfigError if a function of the recipe cannot be called the way it will be."""
    check_callable(setting, name, recipe_function(name, config), **dict.fromkeys(keywords))


def _check_path(config: RunConfig) -> None:
    names = [name for name in (config.task.rows, config.sft.demos) if name and not is_data_source(name)]
    if config.data.path is not None and not any(_takes_path(resolve(name, recipe=config.recipe)) for name in names):
        raise ConfigError(f"data.path={config.data.path!r}: neither task.rows nor sft.demos takes a parameter path")


def _takes_path(function: Any) -> bool:
    return callable(function) and "path" in inspect.signature(function).parameters
