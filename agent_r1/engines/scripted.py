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
        completion = self._respond(prompt, sampling, session)
        if self._delay:
            await asyncio.sleep(self._delay)
        return completion

    async def stream(self, prompt: Prompt, sampling: Sampling, *, session: str, on_tokens: OnTokens) -> Completion:
        """Report the tokens one by one, `delay` apart, until the session is aborted."""
        completion = self._respond(prompt, sampling, session)
        for index, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            if session in self._aborted:
                return replace(completion.first(index), stop="abort")
            await asyncio.sleep(self._delay)
            on_tokens([token], [logprob])
        return completion

    def _respond(self, prompt: Prompt, sampling: Sampling, session: str) -> Completion:
        """Record a request and look up its completion, which ends at the first stop id or at max_tokens."""
        call = ScriptedCall(
            prompt_ids=list(prompt.ids),
            sampling=sampling,
            session=session,
            turn=self._turns[session],
            media=prompt.media,
        )
        self.calls.append(call)
        self._turns[session] += 1
        completion = self._completion(self._response(call), sampling)
        ids = completion.token_ids
        end = next((i + 1 for i, token in enumerate(ids) if token in sampling.stop_ids), len(ids))
        kept = min(end, sampling.max_tokens)
        stop = "length" if kept < end else completion.stop
        return replace(completion.first(kept), stop=stop, versions=((self.version, kept),) if kept else ())

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

    def _response(self, call: ScriptedCall) -> Response:
        if callable(self._responses):
            return self._responses(call)
        if len(self.calls) > len(self._responses):
            raise RolloutError(f"the script has no response {len(self.calls)} for session {call.session!r}")
        return self._responses[len(self.calls) - 1]

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
