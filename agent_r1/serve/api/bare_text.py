"""Text completions of the bare model: prompts without a chat template."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agent_r1.engines.base import Prompt
from agent_r1.serve.api.bare_mode import BareMode
from agent_r1.serve.api.events import Delta, Ended, Event, Events, Finished, follow, together
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.served_model import Reading
from agent_r1.wire.api_error import invalid
from agent_r1.wire.chat_answer import Usage
from agent_r1.wire.text_completions import TextRequest


async def start_text(bare: BareMode, request: TextRequest, limits: ServeLimits) -> Events:
    """Check a request and return its events; answers to one prompt follow each other."""
    total = request.n * len(request.prompts)
    if total > limits.max_n:
        raise invalid(f"n times the number of prompts must be at most {limits.max_n}, got {total}", "n")
    return _answer(bare, request, [await bare.model.raw_prompt(prompt) for prompt in request.prompts])


async def _answer(bare: BareMode, request: TextRequest, prompts: list[Prompt]) -> Events:
    events: asyncio.Queue[Event | None] = asyncio.Queue()

    reading = Reading(stop=request.sampling.stop, logprobs=request.logprobs, raw=True)

    async def respond(position: int, prompt: Prompt) -> Usage:
        offset, usage = position * request.n, Usage(prompt_tokens=0, completion_tokens=0)
        async for event in bare.answer(prompt, request.sampling, reading, n=request.n):
            if isinstance(event, Ended):
                usage = event.usage
            elif isinstance(event, Delta | Finished):
                events.put_nowait(replace(event, index=event.index + offset))
        return usage

    work = asyncio.ensure_future(together(respond(*each) for each in enumerate(prompts)))
    async for event in follow(work, events):
        yield event
    usages = work.result()
    yield Ended(
        usage=Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
        )
    )
