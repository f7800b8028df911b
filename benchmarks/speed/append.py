"""The cost of a growing episode, step by step: each prompt is the last one, its response and a new observation."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from agent_r1.bench.results import Figures
from agent_r1.engines.base import Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """A group of episodes with one prompt that take their steps together."""

    episodes: int
    steps: int
    prompt_tokens: int
    response_tokens: int
    observation_tokens: int

    def play(self, engine: LocalEngine, vocabulary: int) -> list[Figures]:
        """For every step: seconds, and the prompt tokens that were computed."""
        return asyncio.run(self._play(engine, vocabulary))

    async def _play(self, engine: LocalEngine, vocabulary: int) -> list[Figures]:
        rng = np.random.default_rng()
        prompt: list[int] = rng.integers(vocabulary, size=self.prompt_tokens).tolist()
        contexts = {f"append-{index}": prompt for index in range(self.episodes)}
        sampling, figures = Sampling(max_tokens=self.response_tokens), []
        for _ in range(self.steps):
            before, began = engine.stats.prefilled_tokens, time.perf_counter()
            calls = [engine.generate(Prompt(ids), sampling, session=session) for session, ids in contexts.items()]
            completions = await asyncio.gather(*calls)
            seconds = time.perf_counter() - began
            figures.append({"seconds": seconds, "prefilled_tokens": engine.stats.prefilled_tokens - before})
            for session, completion in zip(contexts, completions, strict=True):
                observed: list[int] = rng.integers(vocabulary, size=self.observation_tokens).tolist()
                contexts[session] = contexts[session] + completion.token_ids + observed
        for session in contexts:
            engine.release(session)
        return figures
