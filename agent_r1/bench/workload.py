"""Multi-step tool episodes of exactly known lengths, played through the real collector, flow and renderer.

Random weights never call a tool, so every response counts as a call and gets an answer. Prompts, responses and answers
have the lengths that a `Workload` sets, chat template included.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Any

from agent_r1.bench.models import TURN_END, TURN_START, make_tokenizer
from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling
from agent_r1.envs.base import AgentEnv
from agent_r1.errors import ConfigError
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.rollout.collect import Collector
from agent_r1.seeds import stable_seed
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Group, Observation, TaskRow, Transition

# Tokens that the template writes around an answer: the end of the last response, and the start of the next one.
ANSWER_FRAME = f"{TURN_END}\n{TURN_START}tool\n", f"{TURN_END}\n{TURN_START}assistant\n"
PROMPT_FRAME = f"{TURN_START}user\n{TURN_END}\n{TURN_START}assistant\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    rows: int
    group_size: int  # episodes per row
    at_once: int  # episodes that run at the same time
    steps: int
    prompt_tokens: int
    response_tokens: int
    observation_tokens: int
    tool_seconds: float = 0.0  # mean delay; drawn from 0.5 to 1.5 times that, so that episodes do not run in lockstep

    @property
    def episodes(self) -> int:
        return self.rows * self.group_size

    @property
    def sampled_tokens(self) -> int:
        return self.episodes * self.steps * self.response_tokens

    @property
    def episode_tokens(self) -> int:
        """Tokens of a whole episode: its last prompt and response."""
        return self.prompt_tokens + self.steps * self.response_tokens + (self.steps - 1) * self.observation_tokens

    @property
    def mean_context(self) -> float:
        """Mean context of a sampled token: the prompt and, on average, half of what follows it."""
        return (self.prompt_tokens + self.episode_tokens) / 2

    def task_rows(self, vocabulary: int, seed: int) -> list[TaskRow]:
        """Rows with different prompts, which also differ between seeds."""
        size = self.prompt_tokens - count_tokens(PROMPT_FRAME, vocabulary)
        return [_row(f"bench-{seed}-{index}", size) for index in range(self.rows)]

    def answer(self, vocabulary: int, *, frame: str = "".join(ANSWER_FRAME)) -> str:
        """The tool's text: together with the template's own tokens, an observation has the right length."""
        size = self.observation_tokens - count_tokens(frame, vocabulary)
        if size < 1:
            raise ConfigError(f"observation_tokens={self.observation_tokens} leaves no room beside the chat template")
        return "x" * size


def _row(row_id: str, size: int) -> TaskRow:
    text = "".join(random.Random(row_id).choices(ascii_lowercase, k=size))
    return TaskRow(prompt=[{"role": "user", "content": text}], row_id=row_id)


def count_tokens(text: str, vocabulary: int) -> int:
    return len(make_tokenizer(vocabulary)(text)["input_ids"])


class AnsweringEnv(AgentEnv):
    """Answers every response with the same text after a delay, and ends after the workload's steps."""

    def __init__(self, workload: Workload, answer: str) -> None:
        self._workload, self._answer = workload, answer
        self._messages: list[dict[str, Any]] = []
        self._taken = 0

    async def reset(self, row: TaskRow) -> Observation:
        self._messages = list(row.prompt)
        self._delays = random.Random(row.row_id)
        return Observation(messages=self._messages)

    async def step(self, action: Action) -> Transition:
        self._taken += 1
        if self._workload.tool_seconds:
            await asyncio.sleep(self._workload.tool_seconds * self._delays.uniform(0.5, 1.5))
        if self._taken == self._workload.steps:
            return Transition(terminated=True)
        response = {"role": "assistant", "content": action.text}
        self._messages = [*self._messages, response, {"role": "tool", "content": self._answer}]
        return Transition(observation=Observation.grown(self._messages, by=2))


class FixedLength:
    """A sampler whose responses count as complete when they reach their length, so that episodes continue."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        completion = await self._sampler.generate(prompt, sampling, session=session)
        return replace(completion, stop="stop")

    def release(self, session: str) -> None:
        self._sampler.release(session)


def make_collector(
    workload: Workload,
    sampler: Sampler,
    vocabulary: int,
    *,
    make_env: Callable[[TaskRow], AgentEnv] | None = None,
    stop_ids: tuple[int, ...] = (),
) -> Collector:
    """`stop_ids` may end a response early; without them, none ends before its length."""
    tokenizer = make_tokenizer(vocabulary)
    answer = workload.answer(vocabulary)
    sampling = Sampling(max_tokens=workload.response_tokens, stop_ids=stop_ids or (tokenizer.eos_token_id,))
    return Collector(
        make_flow=lambda row: AgentEnvLoop(make_env or (lambda row: AnsweringEnv(workload, answer))),
        sampler=FixedLength(sampler),
        renderer=Renderer(tokenizer),
        sampling=sampling,
        limits=Limits(
            max_steps=workload.steps,
            max_response_tokens=workload.response_tokens,
            max_context_tokens=workload.episode_tokens + 1,
            episode_seconds=600.0,
        ),
        group_size=workload.group_size,
        max_concurrent=workload.at_once,
    )


def check_lengths(groups: list[Group], workload: Workload, vocabulary: int) -> None:
    """Fail unless every episode has exactly the workload's lengths."""
    turn_end = make_tokenizer(vocabulary).convert_tokens_to_ids(TURN_END)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        expected = [workload.prompt_tokens]
        for step in trajectory.steps[:-1]:
            # The template does not close a response that happens to end with the end-of-turn token.
            closed = step.response_ids[-1] == turn_end
            expected.append(expected[-1] + workload.response_tokens + workload.observation_tokens - closed)
        prompts = [len(step.prompt_ids) for step in trajectory.steps]
        responses = [len(step.response_ids) for step in trajectory.steps]
        if prompts != expected or responses != [workload.response_tokens] * workload.steps:
            raise AssertionError(
                f"expected prompts of {expected} and {workload.steps} responses of {workload.response_tokens} tokens, "
                f"got {prompts} and {responses}: {trajectory.error}"
            )


def episode_seed(repeat: int) -> int:
    return stable_seed("bench", repeat)
