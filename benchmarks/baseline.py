"""The baseline for `collect`: all episodes of a batch in lockstep, one `model.generate` per turn.

    render every active episode -> one generate for all of them -> all their tools -> wait for the slowest -> again

This is the loop one writes first, in two forms. `FreshPrefill` computes whole prompts each turn; `CarriedCache` keeps
the keys and values of the batch between turns. Both are written to be fast: finished episodes leave the batch, and the
calls of a turn run concurrently. `generate` runs on the event loop's thread, since no tool runs at that time. Prompts,
tools and limits are those of `collect`. Log-probs are not computed, which favours the baseline.

Shape suffixes: B = active episodes, L = columns of the batch so far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from agent_r1.engines.base import Sampling
from agent_r1.envs.base import AgentEnv
from agent_r1.flows.budgets import Limits
from agent_r1.tokens.conversations import Conversations, Pending
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Observation, StopReason, TaskRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One episode as all sides report it: prompt and response ids, and why it ended."""

    prompts: list[list[int]]
    responses: list[list[int]]
    stop: StopReason

    @property
    def tokens(self) -> int:
        return sum(map(len, self.responses))


class Responder(Protocol):
    """Samples the turns of one batch, and may keep its state."""

    def respond(self, episodes: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        """One response per prompt. `episodes` are their numbers, ascending; a turn never has more than the last one."""
        ...


class FreshPrefill:
    """Computes whole prompts each turn."""

    def __init__(self, network: Any, sampling: Sampling) -> None:
        self._network = network
        self._sampling = sampling
        self._settings = generation_settings(network, sampling)

    @torch.inference_mode()
    def respond(self, episodes: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        ids_BL, mask_BL = left_padded(prompts, self._settings.pad_token_id)
        out = self._network.generate(input_ids=ids_BL, attention_mask=mask_BL, generation_config=self._settings)
        return cut_at_stop(out.sequences[:, ids_BL.shape[1] :], self._sampling.stop_ids)


class CarriedCache:
    """Keeps keys and values between turns; a turn computes only what its prompts add.

    All rows share their columns, so a turn ends where its longest response does and starts where its longest addition
    does. The gap between a shorter response and its next addition is hidden by the attention mask and skipped by the
    positions, which `generate` derives from the mask.
    """

    def __init__(self, network: Any, sampling: Sampling) -> None:
        self._network = network
        self._sampling = sampling
        self._settings = generation_settings(network, sampling)
        self._cache = DynamicCache(config=network.config)
        self._episodes: list[int] = []
        self._seen: list[list[int]] = []  # prompt and response so far, by row of the batch
        self._ids_BL = torch.zeros(0, 0, dtype=torch.int64)
        self._mask_BL = self._ids_BL

    @torch.inference_mode()
    def respond(self, episodes: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        if self._episodes:
            self._keep([self._episodes.index(episode) for episode in episodes])
            added = [_addition(seen, prompt) for seen, prompt in zip(self._seen, prompts, strict=True)]
            new_ids, new_mask = left_padded(added, self._settings.pad_token_id)
            ids_BL, mask_BL = torch.cat([self._ids_BL, new_ids], dim=1), torch.cat([self._mask_BL, new_mask], dim=1)
        else:
            ids_BL, mask_BL = left_padded(prompts, self._settings.pad_token_id)
        out = self._network.generate(
            input_ids=ids_BL,
            attention_mask=mask_BL,
            past_key_values=self._cache,
            generation_config=self._settings,
        )
        responses = cut_at_stop(out.sequences[:, ids_BL.shape[1] :], self._sampling.stop_ids)
        lengths_B1 = torch.tensor([len(response) for response in responses])[:, None]
        sampled_mask = torch.arange(out.sequences.shape[1] - ids_BL.shape[1]) < lengths_B1
        self._ids_BL, self._mask_BL = out.sequences, torch.cat([mask_BL, sampled_mask.long()], dim=1)
        self._episodes = list(episodes)
        self._seen = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        return responses

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self._episodes):
            return
        index = torch.tensor(rows)
        self._cache.batch_select_indices(index)
        self._ids_BL, self._mask_BL = self._ids_BL[index], self._mask_BL[index]
        self._seen = [self._seen[row] for row in rows]


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A running episode."""

    env: AgentEnv
    observation: Observation
    conversation: Conversations
    pending: Pending | None = None  # the prompt that waits for its response
    prompts: list[list[int]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    stop: StopReason | None = None  # None: still active


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLoop:
    """Plays rows in lockstep, with the limits of `agent_r1.flows.episode.Episode`."""

    make_responder: Callable[[], Responder]
    make_env: Callable[[TaskRow], AgentEnv]
    renderer: Renderer
    sampling: Sampling
    limits: Limits

    async def __call__(self, rows: Sequence[TaskRow]) -> list[Played]:
        responder = self.make_responder()
        attempts = [await self._begin(row) for row in rows]
        while True:
            for attempt in attempts:
                self._ask(attempt)
            active = [index for index, attempt in enumerate(attempts) if attempt.stop is None]
            if not active:
                break
            responses = responder.respond(active, [attempts[index].prompts[-1] for index in active])
            # The turn barrier: wait for the slowest tool.
            await asyncio.gather(
                *(self._act(attempts[index], ids) for index, ids in zip(active, responses, strict=True))
            )
        return [_played(attempt) for attempt in attempts]

    async def _begin(self, row: TaskRow) -> _Attempt:
        env = self.make_env(row)
        observation = await env.reset(row.without_ground_truth())
        return _Attempt(env=env, observation=observation, conversation=Conversations(self.renderer))

    def _ask(self, attempt: _Attempt) -> None:
        """Render the next prompt, unless a budget is used up."""
        if attempt.stop is not None:
            return
        if len(attempt.responses) >= self.limits.max_steps:
            attempt.stop = StopReason.MAX_STEPS
            return
        attempt.pending = attempt.conversation.begin(attempt.observation, attempt.env.tool_schemas)
        if len(attempt.pending.ids) >= self.limits.max_context_tokens:
            attempt.stop = StopReason.MAX_TOKENS
            return
        attempt.prompts.append(attempt.pending.ids)

    async def _act(self, attempt: _Attempt, response: list[int]) -> None:
        response = response[: self.limits.max_context_tokens - len(attempt.prompts[-1])]
        attempt.responses.append(response)
        if response[-1] not in self.sampling.stop_ids:
            attempt.stop = StopReason.MAX_TOKENS
            return
        text = self.renderer.decode(response)
        assert attempt.pending is not None  # `_ask` was called before
        attempt.conversation.finish(attempt.pending, response, text)
        transition = await attempt.env.step(Action(text=text, token_ids=response))
        if transition.terminated:
            attempt.stop = transition.stop
            await attempt.env.close()
            return
        assert transition.observation is not None  # Transition checks it
        attempt.observation = transition.observation


def generation_settings(network: Any, sampling: Sampling) -> GenerationConfig:
    # In full, since the defaults of `generate` include a top-k of 50.
    drawing = {"do_sample": True, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_ids),
        pad_token_id=network.config.pad_token_id,
        return_dict_in_generate=True,
        **(drawing if sampling.temperature else {"do_sample": False}),
    )


def left_padded(rows: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, [B, L]."""
    width = max(map(len, rows))
    ids_BL = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask_BL = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids_BL, mask_BL


def cut_at_stop(sampled_BL: Tensor, stop_ids: Sequence[int]) -> list[list[int]]:
    """Each row up to and including its first stop id; the rest is padding."""
    rows = []
    for row in sampled_BL.tolist():
        end = next((index + 1 for index, token in enumerate(row) if token in stop_ids), len(row))
        rows.append(row[:end])
    return rows


def _addition(seen: list[int], prompt: list[int]) -> list[int]:
    if prompt[: len(seen)] != seen:
        raise ValueError("a prompt does not extend what its episode has seen, so no cache of it can be carried on")
    return prompt[len(seen) :]


def _played(attempt: _Attempt) -> Played:
    assert attempt.stop is not None
    return Played(prompts=attempt.prompts, responses=attempt.responses, stop=attempt.stop)
