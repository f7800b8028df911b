"""An engine without a model: it answers from a script, for tests and for the first runnable example.

It keeps the contract of a real engine (max_tokens, stop ids, versions) and records everything it was asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from torch import Tensor

# A text (the first stop id is appended to it, since text cannot spell it), exact ids, or ids with their log-probs.
Response = str | list[int] | Completion


class TextEncoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedCall:
    """One request as it arrived."""

    prompt_ids: list[int]
    sampling: Sampling
    session: str
    turn: int  # how many requests of this session came before
    media: tuple[Any, ...] = ()


Script = Callable[[ScriptedCall], Response] | Sequence[Response] | Mapping[str, Sequence[Response]]


class ScriptedEngine:
    """Answers from a function of the call, a list in order of arrival, or one list per session."""

    def __init__(self, responses: Script, *, tokenizer: TextEncoder | None = None, delay: float = 0.0) -> None:
        self.calls: list[ScriptedCall] = []
        self.released: list[str] = []
        self.startup_seconds = 0.0
        self.version = 0
        self._responses = responses
        self._tokenizer = tokenizer
        self._delay = delay
        self._turns: Counter[str] = Counter()

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
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
        if self._delay:
            await asyncio.sleep(self._delay)
        return _limited(self._completion(self._scripted(call, index), sampling), sampling, version)

    def release(self, session: str) -> None:
        self.released.append(session)

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = version

    def abort(self, session: str | None = None) -> None:
        """Nothing to do: a script says itself which responses are aborted, as a `Completion` with `stop="abort"`."""

    async def close(self) -> None:
        """Nothing is held."""

    def _scripted(self, call: ScriptedCall, index: int) -> Response:
        if callable(self._responses):
            return self._responses(call)
        if isinstance(self._responses, Mapping):
            if call.session not in self._responses:
                raise RolloutError(f"the script has no session {call.session!r}; it knows {sorted(self._responses)}")
            script, index, whose = self._responses[call.session], call.turn, f"session {call.session!r}"
        else:
            script, whose = self._responses, "all sessions"
        if index >= len(script):
            raise RolloutError(f"the script for {whose} has {len(script)} responses and was asked for one more")
        return script[index]

    def _completion(self, response: Response, sampling: Sampling) -> Completion:
        if isinstance(response, Completion):
            return response
        if isinstance(response, str):
            if self._tokenizer is None:
                raise ConfigError(f"the script holds the text {response!r}: ScriptedEngine needs a tokenizer for it")
            ids = self._tokenizer.encode(response, add_special_tokens=False) + list(sampling.stop_ids[:1])
        else:
            ids = list(response)
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")


def _limited(completion: Completion, sampling: Sampling, version: int) -> Completion:
    """What is left of a response after the first stop id and after max_tokens."""
    ids = completion.token_ids
    end = next((i + 1 for i, token in enumerate(ids) if token in sampling.stop_ids), len(ids))
    kept = min(end, sampling.max_tokens)
    return replace(
        completion,
        token_ids=ids[:kept],
        logprobs=completion.logprobs[:kept],
        support=None if completion.support is None else completion.support.first(kept),
        stop="length" if kept < end else completion.stop,
        versions=((version, kept),) if kept else (),
    )
