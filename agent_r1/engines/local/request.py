"""A request to the engine, the pieces of it that run in one step, and what is counted along the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.blocks import START, Name
from agent_r1.engines.local.sampling import Kept


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One response being sampled."""

    session: str
    tokens: list[int]  # the prompt, then what has been sampled
    sampling: Sampling
    uniforms: NDArray[np.float64]  # one per token that may be sampled
    prompt_length: int = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)  # with `Sampling.keep_support`: the supports so far
    blocks: list[int] = field(default_factory=list)  # replaced, not emptied, when freed: a running step may read them
    cached: int = 0  # leading tokens whose keys and values are in `blocks` once all that is planned has run
    ahead: int = 0  # tokens that are being sampled and not yet in `tokens`
    prefill_end: int = 0  # tokens before this one were known when the request was admitted
    names: list[Name] = field(default_factory=list)  # of its full blocks
    whole: Name = START  # of all tokens it was admitted with
    published: int = 0  # full blocks that others can find
    admissions: int = 0  # how often it was admitted; tells a chunk of before a preemption from one of after
    branch: object = None  # the same object on two requests: they sampled it together, so their tokens are equal
    copies: list[tuple[int, int]] = field(default_factory=list)  # what `Chunk.copies` says, until there is a chunk
    table: tuple[list[int], bytes] = field(default=([], b""))  # `blocks`, and the same as int32
    keep: bool = True  # keep the cache for the session's next request
    running: bool = False
    live: bool = True  # neither finished nor cancelled

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that have to run before the next one can be sampled."""
        return len(self.tokens) + self.ahead - self.cached

    @property
    def left(self) -> int:
        """Tokens that may still be sampled, if none of those under way ends the response."""
        return self.sampling.max_tokens - len(self.logprobs) - self.ahead


@dataclass(eq=False, slots=True)  # not frozen, which would take most of the time that planning a step takes
class Chunk:
    """Consecutive tokens of one request, and of its twins, that run in one step. Nothing changes it once planned."""

    request: Request
    ids: list[int]  # empty: one token, the last that the step before samples for this request
    start: int  # position of the first token
    blocks: list[int]  # enough for the tokens before the chunk, its own, and all but the last that it samples
    count: int  # tokens to sample after the last one, unless the response ends before; 0: more of the prompt is to come
    drawn: int = 0  # tokens sampled before these
    twins: list[Request] = field(default_factory=list)
    twin_blocks: list[list[int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to) blocks, before anything is written
    admission: int = 0

    @property
    def length(self) -> int:
        return len(self.ids) or 1

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        return self.count > 0

    @property
    def draws(self) -> list[Request]:
        """Who samples from the logits after the last id."""
        return [self.request, *self.twins] if self.count else []


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counts since the engine was made."""

    steps: int = 0
    prefilled_tokens: int = 0  # run through the model to fill the cache, recomputation included
    reused_tokens: int = 0  # prompt tokens found in the session's cache
    shared_tokens: int = 0  # not run, because they ran for a request that began alike
    decoded_tokens: int = 0  # sampled
    preemptions: int = 0
    evictions: int = 0  # idle sessions whose cache was dropped to make room
