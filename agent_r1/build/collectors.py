"""Build the collectors of a run: how episodes are sampled for training, for a greedy baseline and for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agent_r1.build.context import check_summary_budget
from agent_r1.build.task import Task
from agent_r1.config import RunConfig
from agent_r1.engines.base import Sampler, Sampling
from agent_r1.flows.episode import Limits
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer


def train_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    rollout = config.rollout
    sampling = Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        keep_support=rollout.top_k > 0,
        stop_ids=tuple(renderer.stop_ids),
    )
    temperatures = {name: role.temperature or rollout.temperature for name, role in rollout.roles.items()}
    return _collector(config, task, renderer, sampler, sampling, rollout.group_size, temperatures)


def greedy_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    """One attempt per row without sampling noise, for algorithms with a greedy baseline."""
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens, temperature=0.0, stop_ids=tuple(renderer.stop_ids)
    )
    return _collector(config, task, renderer, sampler, sampling, 1)


def eval_collector(config: RunConfig, task: Task, renderer: Renderer, sampler: Sampler) -> Collector:
    """Collect episodes for evaluation and chat."""
    settings = config.eval
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_ids=tuple(renderer.stop_ids),
    )
    return _collector(config, task, renderer, sampler, sampling, settings.samples)


def _collector(
    config: RunConfig,
    task: Task,
    renderer: Renderer,
    sampler: Sampler,
    sampling: Sampling,
    group_size: int,
    temperatures: Mapping[str, float] | None = None,  # by role; evaluation has one for all
) -> Collector:
    check_summary_budget(config, renderer)
    rollout = config.rollout
    limits = Limits(
        max_steps=rollout.max_steps,
        max_response_tokens=rollout.max_response_tokens,
        max_context_tokens=rollout.max_context_tokens,
        episode_seconds=rollout.episode_seconds,
    )
    return Collector(
        make_flow=task.flows_for(template_format(renderer)),
        sampler=sampler,
        renderer=renderer,
        sampling=sampling,
        limits=limits,
        group_size=group_size,
        max_concurrent=rollout.max_concurrent,
        role_sampling={
            name: replace(
                sampling,
                max_tokens=role.max_response_tokens or sampling.max_tokens,
                temperature=(temperatures or {}).get(name, sampling.temperature),
            )
            for name, role in rollout.roles.items()
        },
    )
