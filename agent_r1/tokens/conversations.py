"""The conversations of one episode: find the exchange that a prompt continues and keep its sampled ids unchanged.

    prompt(observation) -> ids      record(ids, text)      prompt(observation') -> ids + sampled ids + new ids

An episode may hold any number of conversations, interleaved and each with its own tools: roles, branches, drafts. A
prompt continues the exchange that is its longest exact prefix; without one it is rendered from scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice

from agent_r1.tokens.rendering import Renderer, ToolSchemas, Turn, follows
from agent_r1.types import Observation

# Some templates never let a prompt be extended. Trying renders the conversation, so only a few exchanges are tried.
MAX_TRIES = 4


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """A prompt and its response."""

    observation: Observation
    tools: ToolSchemas
    ids: list[int]  # prompt, response, then what continued them: exchanges of one conversation share the list
    prompt_size: int
    size: int  # of prompt and response
    text: str

    @property
    def is_continued(self) -> bool:
        return len(self.ids) > self.size

    @property
    def turn(self) -> Turn:
        prompt_ids, response_ids = self.ids[: self.prompt_size], self.ids[self.prompt_size : self.size]
        return Turn(observation=self.observation, prompt_ids=prompt_ids, response_ids=response_ids, text=self.text)


class Conversations:
    """The prompts of one episode: call `prompt`, sample, call `record`, and so on."""

    def __init__(self, renderer: Renderer) -> None:
        self.extended = False  # whether the last prompt extends an earlier prompt and its response
        self._renderer = renderer
        self._pending: tuple[Observation, ToolSchemas, list[int], _Exchange | None] | None = None
        self._exchanges: list[_Exchange] = []
        self._tools_matter = False  # the template has shown two lists of tools differently

    def prompt(self, observation: Observation, tools: ToolSchemas = ()) -> list[int]:
        """The exact ids to sample from next."""
        earlier, ids = self._continue(observation, tools)
        self.extended = earlier is not None
        if ids is None:
            ids = self._renderer.render(observation, tools)
        known_tools = (exchange.tools for exchange in reversed(self._exchanges))
        own_tools = next((known for known in known_tools if known == tools), None) or deepcopy(tools)
        self._pending = _snapshot(observation, earlier), own_tools, list(ids), earlier
        return ids

    def record(self, response_ids: Sequence[int], text: str) -> None:
        """Record the response to the last prompt: its ids with the stop token, and the text that the env gets."""
        if self._pending is None:
            raise ValueError("Conversations.record was called without a prompt; call prompt(observation) first")
        observation, tools, prompt_ids, earlier = self._pending
        ids = [*prompt_ids, *response_ids]
        size = len(ids)
        if earlier is not None and not earlier.is_continued:  # one list per conversation: memory grows linearly
            earlier.ids.extend(ids[earlier.size :])
            ids = earlier.ids
        self._exchanges.append(
            _Exchange(observation=observation, tools=tools, ids=ids, prompt_size=len(prompt_ids), size=size, text=text)
        )
        self._pending = None

    def _continue(self, observation: Observation, tools: ToolSchemas) -> tuple[_Exchange | None, list[int] | None]:
        """Find the exchange that the observation continues, and build the prompt that extends it."""
        for exchange in islice(self._candidates(observation, tools), MAX_TRIES):
            ids = self._renderer.extend(exchange.turn, observation, tools)
            if ids is not None and self._shows_the_same(exchange, tools):
                return exchange, ids
        return None, None

    def _candidates(self, observation: Observation, tools: ToolSchemas) -> Iterator[_Exchange]:
        """Yield the exchanges that the observation may continue, judged without the template. The longest comes first;
        among equally long ones, the latest."""
        latest_first = reversed(self._exchanges)
        for exchange in sorted(latest_first, key=lambda exchange: _length(exchange.observation), reverse=True):
            if exchange.is_continued and _adds_replies(exchange, observation):
                continue
            if _may_follow(exchange, observation) and not (self._tools_matter and tools != exchange.tools):
                yield exchange

    def _shows_the_same(self, exchange: _Exchange, tools: ToolSchemas) -> bool:
        """Whether these tools render the same prompt: they are equal, or the template ignores them."""
        if tools == exchange.tools:
            return True
        before, now = (self._renderer.render(exchange.observation, each) for each in (exchange.tools, tools))
        self._tools_matter = before != now
        return before == now


def _may_follow(exchange: _Exchange, observation: Observation) -> bool:
    before = exchange.observation
    if observation.token_ids is not None:
        return observation.token_ids[: exchange.size] == exchange.ids[: exchange.size]
    if observation.text is not None:
        return before.text is not None and observation.text.startswith(before.text + exchange.text)
    assert observation.messages is not None  # Observation holds exactly one of the three
    return before.messages is not None and follows(observation.messages, before.messages, exchange.text)


def _length(observation: Observation) -> int:
    return len(observation.messages or observation.text or observation.token_ids or ())


def _snapshot(observation: Observation, earlier: _Exchange | None) -> Observation:
    """Copy the messages: an env may edit them in place, and that must be detected as a rewritten history."""
    if observation.messages is None:
        return replace(observation, token_ids=observation.token_ids and list(observation.token_ids))
    # The part that it extends is already a copy and compared equal.
    known = earlier.observation.messages if earlier is not None and earlier.observation.messages else []
    return Observation(messages=[*known, *deepcopy(observation.messages[len(known) :])])


def _adds_replies(exchange: _Exchange, observation: Observation) -> bool:
    """Whether more assistant messages follow the exchange's own. If the exchange was already continued, one of them was
    rewritten since, and a rewritten history is rendered from scratch."""
    if observation.messages is None or exchange.observation.messages is None:
        return False
    added = observation.messages[len(exchange.observation.messages) + 1 :]
    return any(message.get("role") == "assistant" for message in added)
