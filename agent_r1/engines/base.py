"""What flows and training need from inference, and nothing more. Nothing here knows how tokens are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agent_r1.types import Support, Versions

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads before it responds."""

    ids: list[int]
    media: tuple[Any, ...] = ()  # images, for engines that take them; an engine that does not refuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response: the exact ids, and the log-prob of each under the distribution it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    # A stop id was sampled, max_tokens ran out, or the engine ended the request: the tokens so far are exact.
    stop: Literal["stop", "length", "abort"]
    versions: Versions = ()  # the policy versions that sampled the tokens
    support: Support | None = None  # what each token was chosen from, if `Sampling.keep_support` asked for it

    def then(self, rest: Completion) -> Completion:
        """This response, continued by `rest`."""
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


class Sampler(Protocol):
    """Token ids in, token ids out."""

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        """Sample one response. Calls of one `session` usually extend each other, so an engine may keep their cache."""
        ...

    def release(self, session: str) -> None:
        """Free what is kept for an episode that has ended. Unknown sessions are ignored."""
        ...


class Engine(Sampler, Protocol):
    """A sampler whose weights can be replaced."""

    @property
    def startup_seconds(self) -> float:
        """Time spent on compiling and other preparation."""
        ...

    async def load_weights(self, source: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample with these weights, by the model's parameter names, from now on; completions carry `version`.

        May be called while requests run. An engine that cannot swap weights inside a request waits for running requests
        and holds new ones back. If the call fails, the engine refuses requests until a later call succeeds.
        """
        ...

    def abort(self, session: str | None = None) -> None:
        """End the running requests of a session, or all of them: they return what they have with `stop="abort"`."""
        ...

    async def close(self) -> None:
        """Free what the engine holds. May be called twice."""
        ...


async def generate_all(sampler: Sampler, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
    """Sample a whole response: one that the engine aborts is continued from its own tokens until it ends.

    Each token is sampled given exactly those before it, so ids and log-probs stay exact; `Completion.versions` says
    which weights sampled which of them.
    """
    completion = await sampler.generate(prompt, sampling, session=session)
    while completion.stop == "abort":
        await asyncio.sleep(0)  # lets the caller cancel, even if the engine aborts again at once
        done = len(completion.token_ids)
        seed = None if sampling.seed is None else sampling.seed + done  # not the noise of the first tokens again
        rest = replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed)
        longer = replace(prompt, ids=prompt.ids + completion.token_ids)
        completion = completion.then(await sampler.generate(longer, rest, session=session))
    return completion
