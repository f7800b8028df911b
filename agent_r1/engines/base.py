"""What flows and training need from inference, and nothing more. Nothing here knows how tokens are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from agent_r1.types import Support

if TYPE_CHECKING:
    from torch import Tensor


MAX_SUPPORT = 1024  # ids kept per token: a fixed bound on what a trajectory stores and a GPU returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw one response."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    keep_support: bool = False  # return the ids that top_k and top_p keep, which training needs
    stop_ids: tuple[int, ...] = ()  # sampling one of these ends the response; it is part of the response
    seed: int | None = None  # None: drawn from the engine's own stream

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"Sampling.max_tokens must be at least 1, got {self.max_tokens}")
        if self.temperature < 0:
            raise ValueError(f"Sampling.temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampling.top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"Sampling.top_k must be 0 (no limit) or positive, got {self.top_k}")
        if self.keep_support and not (self.temperature and 1 <= self.top_k <= MAX_SUPPORT):
            raise ValueError(
                f"Sampling.keep_support needs a temperature above 0 and a top_k of 1 to {MAX_SUPPORT}: got "
                f"temperature {self.temperature} and top_k {self.top_k}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response: the exact ids, and the log-prob of each under the distribution it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    stop: Literal["stop", "length"]  # a stop id was sampled, or max_tokens ran out
    policy_version: int = 0
    support: Support | None = None  # what each token was chosen from, if `Sampling.keep_support` asked for it


class Sampler(Protocol):
    """Token ids in, token ids out."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Calls of one `session` usually extend each other, so an engine may keep their cache."""
        ...

    def release(self, session: str) -> None:
        """The episode is over; whatever was kept for it may go. Unknown sessions are ignored."""
        ...


class Engine(Sampler, Protocol):
    """Token ids in, token ids out, under weights that carry a version."""

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on; completions carry `version`. Not allowed while requests run."""
        ...

    async def close(self) -> None:
        """Free what the engine holds. May be called twice."""
        ...
