"""What flows and training need from inference: prompts, completions, and the protocols of samplers and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from agent_r1.errors import DataError
from agent_r1.types import Support, Versions
from agent_r1.vision.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor


MAX_SUPPORT = 1024  # ids kept per token: bounds what a trajectory stores and a GPU returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one response."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    keep_support: bool = False  # return the ids that top_k and top_p keep, which training needs
    stop_ids: tuple[int, ...] = ()  # sampling one of these ends the response, which includes it
    seed: int | None = None  # None: drawn from the engine's random stream

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
                f"Sampling.keep_support needs a positive temperature and a top_k from 1 to {MAX_SUPPORT}, got "
                f"{self.temperature} and {self.top_k}"
            )


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads before it responds."""

    ids: list[int]
    media: tuple[Picture, ...] = ()  # pictures behind the negative ids; an engine for text only refuses the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response: the exact ids, and the log-prob of each under the distribution it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    # A stop id was sampled, max_tokens was reached, or the engine ended the request early; the tokens are exact anyway.
    stop: Literal["stop", "length", "abort"]
    versions: Versions = ()  # the policy versions that sampled the tokens
    support: Support | None = None  # the ids each token was chosen from, with `Sampling.keep_support`

    def then(self, rest: Completion) -> Completion:
        """This response, continued by `rest`."""
        if not self.token_ids:
            return rest
        support = None
        if self.support is not None and rest.support is not None:
            support = Support(counts=self.support.counts + rest.support.counts, ids=self.support.ids + rest.support.ids)
        return Completion(
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            stop=rest.stop,
            versions=self.versions + rest.versions,
            support=support,
        )

    def first(self, tokens: int) -> Completion:
        """The first `tokens` tokens, as if sampling had stopped there."""
        versions, left = [], tokens
        for version, count in self.versions:
            versions.append((version, min(count, left)))
            left -= min(count, left)
        return Completion(
            token_ids=self.token_ids[:tokens],
            logprobs=self.logprobs[:tokens],
            stop="stop",
            versions=tuple(item for item in versions if item[1]),
            support=None if self.support is None else self.support.first(tokens),
        )


class Sampler(Protocol):
    """Token ids in, token ids out."""

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Prompts of a `session` usually extend each other, so an engine may keep its cache."""
        ...

    def release(self, session: str) -> None:
        """Free the cache of a session that has ended. Unknown sessions are ignored."""
        ...


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def startup_seconds(self) -> float:
        """Time spent on compilation and other preparation."""
        ...

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights, given by parameter name. Completions sampled with them carry `version`.

        May be called while requests run. An engine that cannot change weights within a request waits for running
        requests and delays new ones. If the call fails, the engine refuses requests until a later call succeeds.
        """
        ...

    def abort(self, session: str | None = None) -> None:
        """End the running requests of a session, or of all: they return their tokens so far with `stop="abort"`."""
        ...

    async def close(self) -> None:
        """Free all resources. May be called twice."""
        ...


# Gets new tokens and their log-probs, on the event loop. Must return soon.
OnTokens = Callable[[Sequence[int], Sequence[float]], None]


@runtime_checkable
class Streamer(Protocol):
    """An engine that reports tokens before a response is complete."""

    async def stream(self, prompt: Prompt, sampling: Sampling, *, session: str, on_tokens: OnTokens) -> Completion:
        """Like `generate`; `on_tokens` gets the tokens of the completion piece by piece, before this returns.

        `on_tokens` may call `abort` for its session.
        """
        ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can leave its device to the learner between two rollouts."""

    async def sleep(self) -> None:
        """Free device memory until the next weights."""
        ...


async def generate_all(sampler: Sampler, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
    """Sample a whole response: if the engine aborts it, continue it from its tokens until it ends.

    Each token is sampled given exactly those before it, so ids and log-probs stay exact. `Completion.versions` tells
    which weights sampled which tokens.
    """
    completion = await sampler.generate(prompt, sampling, session=session)
    while completion.stop == "abort":
        await asyncio.sleep(0)  # so that the caller can cancel even if the engine keeps aborting
        done = len(completion.token_ids)
        seed = None if sampling.seed is None else sampling.seed + done  # new noise for the new tokens
        rest = replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed)
        longer = replace(prompt, ids=prompt.ids + completion.token_ids)
        completion = completion.then(await sampler.generate(longer, rest, session=session))
    return completion


def check_fits(prompt: Prompt, sampling: Sampling, limits: Mapping[str, int]) -> None:
    """Raise DataError if a prompt and its response may be longer than one of the limits, given by name."""
    for name, limit in limits.items():
        if len(prompt.ids) + sampling.max_tokens > limit:
            raise DataError(
                f"a prompt of {len(prompt.ids)} tokens and a response of up to {sampling.max_tokens} do not fit into "
                f"{name} ({limit}). Shorten the prompt or lower max_tokens."
            )
