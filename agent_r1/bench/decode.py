"""Pure decoding: so many sequences side by side, every one of them sampling its next token.

On both sides the time for the prompts and one token is taken off that for the prompts and many tokens. The engine is
asked through its own `generate`; it has the prompts in its sessions' caches by then, so what is taken off is small: the
requests, and one step.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_r1.bench.measure import spend
from agent_r1.engines.base import Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    sequences: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int

    @property
    def mean_context(self) -> float:
        return self.prompt_tokens + self.new_tokens / 2

    def tokens_per_second(self, engine: LocalEngine) -> float:
        return self.sequences * self.new_tokens / asyncio.run(self._engine_seconds(engine))

    def generate_tokens_per_second(self, model: Any) -> float:
        """The same with transformers' `model.generate`."""
        ids_BP = torch.tensor(self._prompts(), device=model.device)
        ask: dict[str, Any] = {"attention_mask": torch.ones_like(ids_BP), "do_sample": True, "temperature": 1.0}
        ask |= {"top_k": 0, "top_p": 1.0, "use_cache": True, "pad_token_id": 0}

        def seconds(new_tokens: int) -> float:
            return spend(lambda: model.generate(ids_BP, max_new_tokens=new_tokens, **ask), model.device).seconds

        return self.sequences * self.new_tokens / (seconds(1 + self.new_tokens) - seconds(1))

    def _prompts(self) -> list[list[int]]:
        shape = self.sequences, self.prompt_tokens
        drawn: list[list[int]] = np.random.default_rng().integers(self.vocabulary, size=shape).tolist()
        return drawn

    async def _engine_seconds(self, engine: LocalEngine) -> float:
        contexts = {f"decode-{index}": prompt for index, prompt in enumerate(self._prompts())}

        async def extend(new_tokens: int) -> None:
            sampling = Sampling(max_tokens=new_tokens)
            calls = [engine.generate(Prompt(ids), sampling, session=session) for session, ids in contexts.items()]
            for session, completion in zip(contexts, await asyncio.gather(*calls), strict=True):
                assert len(completion.token_ids) == new_tokens  # without stop ids
                contexts[session] = contexts[session] + completion.token_ids

        async def seconds(new_tokens: int) -> float:
            began = time.perf_counter()
            await extend(new_tokens)  # tokens arrive on the host, so there is nothing left to wait for
            return time.perf_counter() - began

        await extend(1)
        taken_off = await seconds(1)
        spent = await seconds(1 + self.new_tokens) - taken_off
        for session in contexts:
            engine.release(session)
        return spent
