"""Episodes in which pictures are seen: a scripted policy, real tools and envs, and the ids of a tiny model's format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from agent_r1.engines.base import Sampler, Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.flows.budgets import Limits
from agent_r1.flows.context import ContextPolicy
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.rendering import Renderer
from agent_r1.tools.base import BaseTool
from agent_r1.types import Group, Step, TaskRow, Trajectory
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import Picture, index_of, key_of
from tests.vision.seeing_envs import look as look
from tests.vision.tiny_models import make_model, make_tokenizer, picture

CALL = '<tool_call>{"name": "look", "arguments": {"at": %d}}</tool_call>'
FIRST = picture(100, 24, 40)


@cache
def parts(kind: str = "qwen3_vl") -> tuple[Any, PictureFormat, Renderer]:
    tokenizer = make_tokenizer(kind)
    _, form = make_model(kind, tokenizer)
    return tokenizer, form, Renderer(tokenizer, pictures=form)


def seeing_row(row_id: str = "r", *, text: str = "what is it?", shown: Sequence[Any] = (FIRST,)) -> TaskRow:
    content = [*({"type": "image", "image": each} for each in shown), {"type": "text", "text": text}]
    return TaskRow(prompt=[{"role": "user", "content": content}], row_id=row_id)


def collector(
    said: Sequence[Any] | Sampler,
    *,
    tools: Sequence[BaseTool] = (look,),
    make_env: Callable[[TaskRow], AgentEnv] | None = None,
    context: Callable[[], ContextPolicy] | None = None,
    kind: str = "qwen3_vl",
    **limits: Any,
) -> Collector:
    tokenizer, _, renderer = parts(kind)
    sampler = ScriptedEngine(said, tokenizer=tokenizer) if isinstance(said, Sequence) else said
    settings = {"max_steps": 8, "max_response_tokens": 200, "max_context_tokens": 8000, "episode_seconds": 20}

    def flow(_: TaskRow) -> AgentEnvLoop:
        made = AgentEnvLoop(make_env or (lambda _: ToolEnv(tools=list(tools))))
        made.context = context() if context is not None else None
        return made

    return Collector(
        make_flow=flow,
        sampler=sampler,
        renderer=renderer,
        sampling=Sampling(max_tokens=200, stop_ids=renderer.stop_ids),
        limits=Limits(**(settings | limits)),
        group_size=1,
    )


def play(said: Sequence[Any] | Sampler, row: TaskRow | None = None, **settings: Any) -> Trajectory:
    [group] = play_groups(said, [row or seeing_row()], **settings)
    return group.trajectories[0]


def play_groups(said: Sequence[Any] | Sampler, rows: Sequence[TaskRow], **settings: Any) -> list[Group]:
    return asyncio.run(collector(said, **settings)(rows, seed=0))


def shown_in(step: Step) -> list[Picture]:
    """The pictures whose ids the prompt has, in order."""
    by_key = {each.key: each for each in step.pictures}
    return [by_key[key_of(token)] for token in step.prompt_ids if token < 0 and index_of(token) == 0]


def check_exact(trajectory: Trajectory, kind: str = "qwen3_vl") -> None:
    """Every prompt has each of its pictures as a whole, the model can give them positions, and no placeholder is left
    that the policy did not sample itself."""
    tokenizer, form, _ = parts(kind)
    pad = tokenizer.convert_tokens_to_ids(form.placeholder)
    sampled = [token for step in trajectory.steps for token in step.response_ids]
    for step in trajectory.steps:
        found = [each for _, each in form.spans(np.array(step.prompt_ids), {p.key: p for p in step.pictures})]
        assert found == shown_in(step)
        assert set(found) == set(step.pictures)
        assert sum(map(form.tokens, found)) == sum(token < 0 for token in step.prompt_ids)
        assert step.prompt_ids.count(pad) <= sampled.count(pad)
        assert all(token >= 0 for token in step.response_ids)


def extends(before: Step, after: Step) -> bool:
    known = before.prompt_ids + before.response_ids
    return after.prompt_ids[: len(known)] == known
