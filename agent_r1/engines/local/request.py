"""A request to the engine, the part of it that runs in one step, the queue of requests, and the engine's statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.blocks import START, Name
from agent_r1.engines.local.sampling import Kept
from agent_r1.vision.pictures import Picture

# What a step drew for one request: tokens, their log-probs, and their support if it was computed.
Draw = tuple[Sequence[int], Sequence[float], Kept | None]
# Returns the draws of a step, one per request of `Chunk.draws`, or None while they are not there yet.
ReadDraws = Callable[[], Sequence[Draw] | None]


# What a GPU must know to sample: temperature, top-p, top-k and stop ids. Most requests of a batch have the same.
SamplingKind = tuple[float, float, int, tuple[int, ...]]


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One response being sampled."""

    session: str
    tokens: list[int]  # the prompt and what has been sampled
    sampling: Sampling
    uniforms: NDArray[np.float64]  # one per token that may be sampled
    pictures: Mapping[int, Picture] = field(default_factory=dict)  # pictures of the prompt, by key
    positions_AL: NDArray[np.int64] | None = None  # positions of the prompt's tokens; None: 0, 1, 2 ...
    compared: tuple[list[int], int] = ([], 0)  # tokens of its session, and how many of them it begins with
    prompt_length: int = field(init=False)
    kind: SamplingKind = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)  # the supports so far, with `Sampling.keep_support`
    blocks: list[int] = field(default_factory=list)  # replaced, not changed: a step in flight may read the list
    cached: int = 0  # leading tokens whose keys and values are in `blocks` once all planned steps have run
    ahead: int = 0  # tokens that are being sampled and not yet in `tokens`
    prefill_end: int = 0  # number of tokens when the request was admitted
    names: list[Name] = field(default_factory=list)  # names of the full blocks
    whole: Name = START  # name of all tokens at admission
    published: int = 0  # full blocks that other requests can find
    promised: deque[int] = field(default_factory=deque)  # blocks that others can find, but no step computes yet
    sources: list[int] = field(default_factory=list)  # promised blocks of other requests that it shares
    admissions: int = 0  # tells chunks planned before a preemption from later ones
    branch: object = None  # requests with the same object here have equal tokens
    copies: list[tuple[int, int]] = field(default_factory=list)  # copied before the next chunk: see `Chunk.copies`
    table: tuple[list[int], bytes] = field(default=([], b""))  # `blocks`, and the same numbers as bytes (int32), cached
    keep_cache: bool = True  # whether to keep the cache for the session's next request
    running: bool = False
    live: bool = True  # neither completed nor cancelled

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        sampling = self.sampling
        self.kind = sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_ids

    @property
    def pending(self) -> int:
        """Tokens that have to run before the next one can be sampled."""
        return len(self.tokens) + self.ahead - self.cached

    @property
    def left(self) -> int:
        """Tokens that may still be sampled, unless one in flight ends the response."""
        return self.sampling.max_tokens - len(self.logprobs) - self.ahead


@dataclass(eq=False, slots=True)  # not frozen: that would take most of the time of planning a step
class Chunk:
    """Consecutive tokens of one request, and of its twins, that run in one step. Does not change once planned."""

    request: Request
    ids: list[int]  # empty: the one token that the previous step samples last for this request
    start: int  # position of the first token
    blocks: list[int]  # for earlier tokens, those of the chunk, and all but the last token that it samples
    count: int  # most tokens to sample after the last one; 0 if the chunk does not end the prompt
    drawn: int = 0  # tokens sampled before
    twins: list[Request] = field(default_factory=list)
    twin_blocks: list[list[int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks, done before anything is written
    admission: int = 0

    @property
    def length(self) -> int:
        return len(self.ids) or 1

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def draws(self) -> list[Request]:
        """The requests that sample from the logits after the last token."""
        return [self.request, *self.twins] if self.count else []


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine started."""

    steps: int = 0
    prefilled_tokens: int = 0  # prompt tokens that were run, including recomputation
    reused_tokens: int = 0  # prompt tokens found in the session's cache
    shared_tokens: int = 0  # tokens that were run once for several requests
    decoded_tokens: int = 0  # sampled tokens
    preemptions: int = 0
    evictions: int = 0  # idle sessions dropped to make room


class RequestQueue(ABC):
    """Requests that wait or run, and what is cached for them."""

    capacity: int  # tokens of the longest request that fits, response included

    @abstractmethod
    def submit(self, request: Request) -> None: ...

    @abstractmethod
    def cancel(self, request: Request) -> None:
        """Remove a request, if it is live."""

    def release(self, session: str) -> None:  # noqa: B027 (nothing is cached by default)
        """Free the cache of a session, now or when its running requests end."""

    def forget(self) -> None:  # noqa: B027
        """Drop all cached tokens."""

    def known_tokens(self, session: str) -> list[int]:
        """The tokens of an idle session's last request, if they are cached; they have been checked."""
        return []
