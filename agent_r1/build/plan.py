"""Build and check everything about a run that needs no model.

`build_plan` finds mistakes before a model is loaded or an episode is played. It does not import transformers unless
the model's chat template is at hand, so a dry run is quick. Misspelt names are found before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_r1.algorithm_names import check_early
from agent_r1.build.models.source import find_model
from agent_r1.build.recipe import recipe_path
from agent_r1.build.task import Task, build_task
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.runs.observer import Observer
from agent_r1.tokens.formats.infer import TemplateFormat, requested_format
from agent_r1.tokens.formats.table import AUTO
from agent_r1.types import TaskRow

if TYPE_CHECKING:
    from agent_r1.learn.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts of a training run that need no model."""

    task: Task
    algorithm: Algorithm
    train_rows: list[TaskRow]
    test_rows: list[TaskRow]
    tool_format: str  # which tool calls are read and why; "" for an env without tools
    observer: Observer = field(default_factory=Observer)


def build_plan(config: RunConfig, *, resume: bool = False) -> Plan:
    """With `resume`, files that only the start of a run needs are not checked: they may be gone."""
    task = build_task(config)
    check_early(config.algorithm.name)  # a recipe that adds an algorithm has done so by now

    from agent_r1.build.checks import check_device, check_disjoint, check_players, check_requirements, check_start

    algorithm = build_algorithm(config)
    check_requirements(config)
    if config.model.chat_template is not None:
        recipe_path(config.model.chat_template, recipe=config.recipe)
    if not resume:
        check_device(config)
        check_start(config)
    train_rows, test_rows = task.train_rows(), task.test_rows()
    check_disjoint(config, train_rows, test_rows)
    template = None if resume else _template(config)
    check_players(task, template, [*train_rows, *test_rows])
    observer = Observer()
    if config.track:
        from agent_r1.track.observer import Tracking

        observer = Tracking(config.track, config.model_dump(mode="json"))
    return Plan(
        task=task,
        algorithm=algorithm,
        train_rows=train_rows,
        test_rows=test_rows,
        tool_format=_describe_tool_format(config, task, template),
        observer=observer,
    )


def build_algorithm(config: RunConfig) -> Algorithm:
    """Return the configured algorithm. Raises ConfigError for settings that it does not have or cannot use."""
    from agent_r1.learn.algorithms import get_algorithm

    algorithm = get_algorithm(config.algorithm.name, **config.algorithm.settings)
    algorithm.require_group_size(config.rollout.group_size)
    algorithm.require_updates(num_epochs=config.learner.num_epochs, num_minibatches=config.learner.num_minibatches)
    if config.trainer.mode == "async" and config.trainer.max_staleness > 0 and config.correction is None:
        algorithm.require_ratio("an asynchronous run without a correction: set correction.kind=truncate")
    if config.rewards.by_role:
        algorithm.require_credit_by_role()
    if config.critic is not None and not algorithm.needs_critic:
        raise ConfigError(f"algorithm {algorithm.name!r} has no critic: leave out the section critic")
    return algorithm


def _template(config: RunConfig) -> TemplateFormat | None:
    if config.model.path is None and config.model.chat_template is None:
        return None
    from agent_r1.build.models.template import known_template  # imports transformers

    return known_template(config, config.model.path and find_model(config.model.path))


def _describe_tool_format(config: RunConfig, task: Task, template: TemplateFormat | None) -> str:
    if not task.calls_tools:
        return ""
    if (given := requested_format(config.task.env_kwargs)) != AUTO:
        return f"{given}, as set"
    return "inferred from the chat template when the model is loaded" if template is None else str(template)
