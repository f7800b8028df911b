"""The bare model: each request is one prompt, tool calls go back to the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from agent_r1.engines.base import Prompt
from agent_r1.serve.api.events import Ended, Event, Events, follow, together
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.served_model import Reading, Response, ServedModel
from agent_r1.types import Message
from agent_r1.wire.api_error import invalid, unsupported
from agent_r1.wire.chat_answer import Usage, new_id
from agent_r1.wire.chat_request import ChatRequest, SamplingOptions


class BareMode:
    """Answers with the model alone."""

    extensions: tuple[str, ...] = ()

    def __init__(self, model: ServedModel, limits: ServeLimits) -> None:
        self.model, self._limits = model, limits

    async def start(self, request: ChatRequest) -> Events:
        check_supported(request, self._limits)
        tools = [] if request.tool_choice == "none" else request.tools
        messages = request.messages if self.model.shows_calls else self._with_written_calls(request.messages)
        prompt = await self.model.prompt(messages, tools)
        reading = Reading(
            stop=request.sampling.stop,
            tools=tools,
            parallel=request.parallel_tool_calls,
            logprobs=request.logprobs,
        )
        return self.answer(prompt, request.sampling, reading, n=request.n)

    async def answer(self, prompt: Prompt, options: SamplingOptions, reading: Reading, *, n: int) -> Events:
        """Sample `n` responses at the same time. With a seed, each has its own: the seed, the seed plus one ..."""
        sampling = self.model.sampling_for(options, prompt)
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        session = new_id("serve")

        async def respond(index: int) -> int:
            seed = None if sampling.seed is None else sampling.seed + index
            response = Response(self.model, events.put_nowait, reading, index=index)
            own = replace(sampling, seed=seed)
            finished, _ = await response.sample(prompt, own, session=f"{session}-{index}")
            events.put_nowait(finished)
            return response.num_tokens

        work = asyncio.ensure_future(together(map(respond, range(n))))
        async for event in follow(work, events):
            yield event
        yield Ended(usage=Usage(prompt_tokens=len(prompt.ids), completion_tokens=sum(work.result())))

    def _with_written_calls(self, messages: Sequence[Message]) -> list[Message]:
        """For templates that do not show calls: write them as the model does."""
        return [self._written(message) if message.get("tool_calls") else message for message in messages]

    def _written(self, message: Message) -> Message:
        parts = [str(message.get("content") or "")]
        for call in message["tool_calls"]:
            function = call["function"]
            arguments = function["arguments"] if isinstance(function["arguments"], dict) else {}
            try:
                parts.append(self.model.tool_format.write_call(function["name"], arguments))
            except ValueError:  # the format cannot write it
                parts.append(json.dumps(function, ensure_ascii=False))
        return {"role": "assistant", "content": "\n".join(filter(None, parts))}


def check_supported(request: ChatRequest, limits: ServeLimits) -> None:
    """Refuse options that the engine cannot honour exactly."""
    if request.n > limits.max_n:
        raise invalid(f"n must be at most {limits.max_n}, got {request.n}", "n")
    if request.top_logprobs:
        raise unsupported(
            "top_logprobs", "top_logprobs must be 0: the engine returns the log-prob of the sampled token only"
        )
    if request.response_format is not None:
        raise unsupported(
            "response_format",
            f"response_format {request.response_format['type']!r:.40} is not supported: sampling is not constrained "
            "by a grammar. Describe the format in the messages and check the answer",
        )
    if request.tool_choice == "required":
        raise unsupported("tool_choice", "tool_choice must be auto or none: the model decides whether it calls a tool")
