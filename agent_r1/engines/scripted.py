"""An engine without a model, which answers from a script: for tests and examples.

It respects max_tokens, stop ids and versions like a real engine, and records all requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from agent_r1.engines.base import Completion, OnTokens, Prompt, Sampling
from agent_r1.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from torch import Tensor

# Text (to which the first stop id is appended), exact ids, or a whole completion.
Response = str | list[int] | Completion


class TextEncoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """One request."""

    prompt_ids: list[int]
    sampling: Sampling
    session: str
    turn: int  # number of earlier requests of this session
    media: tuple[Any, ...] = ()


Script = Callable[[ScriptedCall], Response] | Sequence[Response]


class ScriptedEngine:
    """Answers from a function of the call, or a list in order of arrival."""

    def __init__(self, responses: Script, *, tokenizer: TextEncoder | None = None, delay: float = 0.0) -> None:
        self.calls: list[ScriptedCall] = []
        self.released: list[str] = []
        self.startup_seconds = 0.0
        self.version = 0
        self._responses = responses
        self._tokenizer = tokenizer
        self._delay = delay
        self._turns: Counter[str] = Counter()
        self._aborted: set[str] = set()

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        respond = self._begin(prompt, sampling, session)
        if self._delay:
            await asyncio.sleep(self._delay)
        return respond()

    async def stream(self, prompt: Prompt, sampling: Sampling, *, session: str, on_tokens: OnTokens) -> Completion:
        """Report the tokens one by one, `delay` apart, until the session is aborted."""
        completion = self._begin(prompt, sampling, session)()
        for index, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            if session in self._aborted:
                return replace(completion.first(index), stop="abort")
            await asyncio.sleep(self._delay)
            on_tokens([token], [logprob])
        return completion

    def _begin(self, prompt: Prompt, sampling: Sampling, session: str) -> Callable[[], Completion]:
        """Record a request; returns what computes its completion."""
        call = ScriptedCall(
            prompt_ids=list(prompt.ids),
            sampling=sampling,
            session=session,
            turn=self._turns[session],
            media=prompt.media,
        )
        index, version = len(self.calls), self.version
        self.calls.append(call)
        self._turns[session] += 1
        return lambda: _truncate(self._completion(self._response(call, index), sampling), sampling, version)

    def release(self, session: str) -> None:
        self.released.append(session)

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def abort(self, session: str | None = None) -> None:
        """Ends responses that are streamed. A script aborts others by giving a `Completion` with `stop="abort"`."""
        if session is not None:
            self._aborted.add(session)

    async def close(self) -> None:
        """Does nothing."""

    def _response(self, call: ScriptedCall, index: int) -> Response:
        if callable(self._responses):
            return self._responses(call)
        if index >= len(self._responses):
            raise RolloutError(f"the script has no response {index + 1} for session {call.session!r}")
        return self._responses[index]

    def _completion(self, response: Response, sampling: Sampling) -> Completion:
        if isinstance(response, Completion):
            return response
        if isinstance(response, str):
            if self._tokenizer is None:
                raise ConfigError(f"ScriptedEngine needs a tokenizer for the text {response!r}")
            ids = self._tokenizer.encode(response, add_special_tokens=False) + list(sampling.stop_ids[:1])
        else:
            ids = list(response)
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")


def _truncate(completion: Completion, sampling: Sampling, version: int) -> Completion:
    """End a response at the first stop id or at max_tokens."""
    ids = completion.token_ids
    end = next((i + 1 for i, token in enumerate(ids) if token in sampling.stop_ids), len(ids))
    kept = min(end, sampling.max_tokens)
    stop = "length" if kept < end else completion.stop
    return replace(completion.first(kept), stop=stop, versions=((version, kept),) if kept else ())
