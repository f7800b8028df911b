"""Build the collectors of a run: how episodes are sampled for training, for a greedy baseline and for evaluation."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from agent_r1.build.context import check_keeps_reasoning, check_summary_budget
from agent_r1.build.task import Task
from agent_r1.config import RunConfig
from agent_r1.engines.base import Sampler, Sampling
from agent_r1.flows.budgets import Limits
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer


def train_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    rollout = config.rollout
    noise = rollout.model_dump(include={"temperature", "top_p", "top_k"}) | {"keep_support": rollout.top_k > 0}
    trained = _collector(config, task, renderer, sampler, noise, rollout.group_size)
    own = {name: role.temperature or rollout.temperature for name, role in rollout.roles.items()}
    sampling = {name: replace(each, temperature=own[name]) for name, each in trained.role_sampling.items()}
    return replace(trained, role_sampling=sampling)  # evaluation uses one temperature for all roles


def greedy_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    """One attempt per row without sampling noise, for algorithms with a greedy baseline."""
    return _collector(config, task, renderer, sampler, {"temperature": 0.0}, 1)


def eval_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    """Collect episodes for evaluation and chat."""
    noise = config.eval.model_dump(include={"temperature", "top_p", "top_k"})
    return _collector(config, task, renderer, sampler, noise, config.eval.samples)


def _collector(
    config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler, noise: dict[str, Any], group_size: int
) -> Collector:
    check_summary_budget(config, renderer)
    check_keeps_reasoning(config, renderer, calls_tools=task.calls_tools)
    rollout = config.rollout
    sampling = Sampling(max_tokens=rollout.max_response_tokens, stop_ids=tuple(renderer.stop_ids), **noise)
    limits = Limits(**rollout.model_dump(include={field.name for field in fields(Limits)}))
    return Collector(
        make_flow=task.flows_for(template_format(renderer)),
        sampler=sampler,
        renderer=renderer,
        sampling=sampling,
        limits=limits,
        group_size=group_size,
        max_concurrent=rollout.max_concurrent,
        role_sampling={
            name: replace(sampling, max_tokens=role.max_response_tokens or sampling.max_tokens)
            for name, role in rollout.roles.items()
        },
    )
