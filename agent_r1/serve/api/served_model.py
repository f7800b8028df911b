"""A model that is served: its engine and renderer, and one sampled response as a stream of texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.engines.base import Completion, Engine, OnTokens, Prompt, Sampling, Streamer
from agent_r1.errors import DataError
from agent_r1.serve.api.events import Delta, Finished
from agent_r1.serve.api.text_stream import TextStream, as_logprobs
from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation
from agent_r1.vision.pictures import check_all, pictures_of, without_repeats
from agent_r1.wire.api_error import ApiError, context_length_exceeded, invalid
from agent_r1.wire.chat_answer import Choice, FinishReason, TokenLogprob
from agent_r1.wire.chat_request import SamplingOptions
from agent_r1.wire.reply import Reply, read_reply

MAX_CHARS_PER_TOKEN = 256  # no vocabulary has longer tokens, so longer text is refused before it is tokenised
THREAD_CHARS = 50_000  # a prompt this long is rendered in a thread, so that other answers go on meanwhile

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that answers, with defaults for options that requests leave out."""

    name: str
    engine: Engine
    renderer: Renderer
    tool_format: ToolCallFormat
    shows_calls: bool  # the chat template writes calls of the history itself
    sampling: Sampling  # defaults; `max_tokens` is for responses of an agent
    max_context_tokens: int

    async def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Render a conversation. Raises ApiError if it is refused or too long."""
        pictures = without_repeats(pictures_of(messages))
        if pictures and self.renderer.pictures is None:
            raise invalid(f"the model {self.name!r} takes text only, and the messages show pictures", "messages")
        size = _text_size(messages) + _text_size(tools)
        self.check_size(size)
        try:
            ids = await self._render(Observation(messages=list(messages)), tools, size=size)
        except DataError as error:
            raise invalid(str(error)[:500], "messages") from None
        prompt = self.check_length(Prompt(ids, pictures))
        try:  # in a step of the engine, a damaged picture would fail the requests of all clients
            await asyncio.to_thread(check_all, pictures)
        except DataError as error:
            raise invalid(str(error)[:500], "messages") from None
        return prompt

    async def raw_prompt(self, given: str | list[int]) -> Prompt:
        """A prompt without the chat template. Raises ApiError if it is empty or too long."""
        self.check_size(len(given), param="prompt")
        ids = await self._render(Observation(text=given), (), size=len(given)) if isinstance(given, str) else given
        if not ids:
            raise invalid("a prompt must hold at least one token", "prompt")
        return self.check_length(Prompt(ids), param="prompt")

    async def _render(self, observation: Observation, tools: Tools, *, size: int) -> list[int]:
        """Tokenise; a long text in a thread, so that other requests go on."""
        if size > THREAD_CHARS:
            return await asyncio.to_thread(self.renderer.render, observation, tools)
        return self.renderer.render(observation, tools)

    def check_size(self, size: int, *, param: str = "messages") -> None:
        """Refuse a prompt of `size` characters that cannot fit, before it is tokenised."""
        if size > self.max_context_tokens * MAX_CHARS_PER_TOKEN:
            raise context_length_exceeded(
                f"the {param} has {size} characters; the context of this model is {self.max_context_tokens} tokens",
                param=param,
            )

    def check_length(self, prompt: Prompt, *, param: str = "messages") -> Prompt:
        if len(prompt.ids) >= self.max_context_tokens:
            raise context_length_exceeded(
                f"This model's maximum context length is {self.max_context_tokens} tokens. However, your {param} "
                f"resulted in {len(prompt.ids)} tokens. Please reduce the length of the {param}.",
                param=param,
            )
        return prompt

    def sampling_for(self, options: SamplingOptions, prompt: Prompt) -> Sampling:
        """Return the engine's settings. A token limit beyond the context is lowered to it."""
        room = self.max_context_tokens - len(prompt.ids)
        given = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        return replace(
            self.sampling,
            max_tokens=room if options.max_tokens is None else min(room, options.max_tokens),
            seed=options.seed,
            **{name: value for name, value in given.items() if value is not None},
        )


async def sample_with(
    engine: Engine, on_tokens: OnTokens, prompt: Prompt, sampling: Sampling, *, session: str
) -> Completion:
    """Sample and report tokens: as they come, or all at the end if the engine cannot."""
    try:
        if isinstance(engine, Streamer):
            return await engine.stream(prompt, sampling, session=session, on_tokens=on_tokens)
        completion = await engine.generate(prompt, sampling, session=session)
    except DataError as error:  # the engine refuses this request
        raise ApiError(400, str(error)[:500], code="invalid_value") from None
    on_tokens(completion.token_ids, completion.logprobs)
    return completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a response is read for the client."""

    stop: Sequence[str] = ()  # texts that end the response
    tools: Tools = ()  # if empty, calls are text
    parallel: bool = True  # False: only the first call counts
    logprobs: bool = False
    raw: bool = False  # everything is text, even thinking


class Response:
    """One response being sampled."""

    def __init__(
        self, model: ServedModel, on_delta: Callable[[Delta], None], reading: Reading, *, index: int = 0
    ) -> None:
        self.num_tokens = 0
        self._model, self._on_delta, self._reading, self._index = model, on_delta, reading, index
        self._stream = TextStream(
            model.renderer.decode,
            stop=reading.stop,
            tool_format=model.tool_format if reading.tools else None,
            opened=model.tool_format.prompt_thinks is True and not reading.raw,
            raw=reading.raw,
        )
        self._ids: list[int] = []  # sampled ids, up to the stop text
        self._logprobs: list[float] = []
        self._told = 0  # tokens whose log-probs were reported

    async def sample(self, prompt: Prompt, sampling: Sampling, *, session: str) -> tuple[Finished, Completion]:
        """Sample the response; its text is reported as it comes. If this is cancelled, so is the engine's request."""
        self._stop_ids, self._session = sampling.stop_ids, session
        completion = await sample_with(self._model.engine, self._take, prompt, sampling, session=session)
        choice = self._choice(completion)
        text, reasoning = self._stream.end(choice.text, choice.reasoning)
        if text or reasoning or (self._reading.logprobs and self._told < len(self._visible_ids())):
            self._tell(text, reasoning)
        return Finished(index=self._index, choice=choice), completion

    def _take(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if self._stream.stopped:
            return
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        self.num_tokens = len(self._ids)
        text, reasoning = self._stream.push(ids)
        if text or reasoning:
            self._tell(text, reasoning)
        if self._stream.stopped:
            self._model.engine.abort(self._session)

    def _tell(self, text: str, reasoning: str) -> None:
        self._on_delta(Delta(index=self._index, text=text, reasoning=reasoning, logprobs=self._take_logprobs()))

    def _visible_ids(self) -> list[int]:
        """The sampled ids without the stop token."""
        return self._ids[:-1] if self._ids and self._ids[-1] in self._stop_ids else self._ids

    def _take_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        if not self._reading.logprobs:
            return None
        ids = self._visible_ids()
        new = slice(self._told, len(ids))
        self._told = len(ids)
        return tuple(as_logprobs(ids[new], self._logprobs[new], self._model.renderer.decode))

    def _choice(self, completion: Completion) -> Choice:
        whole = self._stream.text if self._stream.stopped else self._model.renderer.decode(self._ids)
        if self._reading.raw:
            reply = Reply(text=whole)
        else:
            reply = read_reply(whole, self._model.tool_format, self._reading.tools, parallel=self._reading.parallel)
        reason: FinishReason = "length" if completion.stop == "length" and not self._stream.stopped else "stop"
        if completion.stop == "abort" and not self._stream.stopped:
            reason = "length"  # the engine ended it early, for example because the server is closing
        if reply.calls and reason == "stop":
            reason = "tool_calls"
        logprobs = None
        if self._reading.logprobs:
            ids = self._visible_ids()
            logprobs = tuple(as_logprobs(ids, self._logprobs[: len(ids)], self._model.renderer.decode))
        return Choice(
            text=reply.text, calls=reply.calls, reasoning=reply.reasoning, finish_reason=reason, logprobs=logprobs
        )


def _text_size(value: Any) -> int:
    """The characters of all texts in a nested value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_text_size, value.values())) + sum(map(_text_size, value.keys()))
    return sum(map(_text_size, value)) if isinstance(value, list | tuple) else 0
