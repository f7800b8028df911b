"""Play known texts without a model: gold actions of a benchmark, an expert's answers, the actions of a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1.envs.base import AgentEnv, copy_row, make_env, merge_env_kwargs, step_env
from agent_r1.errors import DataError
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.flows.recording import attach_transition
from agent_r1.types import Action, Step, StopReason, TaskRow, Trajectory


async def replay(env: type[AgentEnv], row: TaskRow, texts: Sequence[str], **env_kwargs: Any) -> Trajectory:
    """Play the texts as the policy's responses and return a trajectory for a reward function.

    The row's `env_kwargs` are merged over the given ones, as in a run; the row itself does not change. Steps have
    rewards, calls, feedback and info, but no token ids. If the texts do not end the episode, it stops as `MAX_STEPS`.

    Raises whatever the env or a tool raises, and `DataError` if the episode ends before the last text.
    """
    if isinstance(texts, str):
        raise TypeError(f"replay takes a list of texts, one per response, got the text {texts[:80]!r}")

    def create_env(own: TaskRow) -> AgentEnv:
        kwargs = merge_env_kwargs(env_kwargs, own)
        kwargs.pop("env_type", None)
        return make_env(env, env.__name__, kwargs)

    steps: list[Step] = []
    stop = StopReason.MAX_STEPS
    async with AgentEnvLoop(create_env).playing(copy_row(row)) as (played, first):
        for text in texts:
            transition = await step_env(played, Action(text=text, token_ids=[]))
            step = Step(prompt_ids=[], response_ids=[], response_logprobs=[], action_text=text)
            attach_transition(step, transition, source=f"{env.__name__}.step")
            steps.append(step)
            if transition.terminated:
                stop = transition.stop
                break
    if len(steps) < len(texts):
        raise DataError(
            f"row {row.row_id!r}: the episode ended ({stop.value}) after {len(steps)} of {len(texts)} texts, with "
            f"{steps[-1].action_text[:200]!r}"
        )
    opening = first.messages or []
    return Trajectory(row_id=row.row_id, trajectory_id=f"{row.row_id}#replay", steps=steps, stop=stop, opening=opening)
