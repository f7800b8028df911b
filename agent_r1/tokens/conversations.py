"""The conversations of one episode: find the exchange that a prompt continues and keep its sampled ids unchanged.

    begin(observation) -> ids      finish(ids, text)      begin(observation') -> ids + sampled ids + new ids

An episode may hold any number of conversations, interleaved and each with its own tools: roles, branches, drafts. A
prompt continues the exchange that is its longest exact prefix; without one it is rendered from scratch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from agent_r1.tokens.rendering import Renderer, ToolSchemas, follows
from agent_r1.types import Message, Observation

# Some templates never let a prompt be extended. Trying renders the conversation, so only a few exchanges are tried.
MAX_TRIES = 4


@dataclass(slots=True)
class Exchange:
    """A prompt and its response."""

    observation: Observation
    tools: ToolSchemas
    ids: list[int]  # prompt, response, then what followed: exchanges of one conversation share the list
    prompt_size: int
    size: int  # tokens of prompt and response
    text: str

    @property
    def is_continued(self) -> bool:
        return len(self.ids) > self.size

    @property
    def length(self) -> int:
        """The size of the observation: messages, characters or ids."""
        return len(self.observation.messages or self.observation.text or self.observation.token_ids or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A prompt that waits for its response."""

    ids: list[int]  # the exact ids to sample from
    observation: Observation
    tools: ToolSchemas
    earlier: Exchange | None  # the exchange that it continues
    new: list[int]  # the ids of the prompt that follow that exchange


class Conversations:
    """The prompts of one episode: call `begin`, sample, call `finish`. Several prompts can wait for their responses."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._exchanges: list[Exchange] = []  # shortest observation first; of equally long ones, the oldest first

    def begin(
        self, observation: Observation, tools: ToolSchemas = (), *, among: Iterable[Exchange] | None = None
    ) -> Pending:
        """Find the exchange that the prompt continues, and its exact ids.

        `among`: the exchanges that it follows, the longest first, if the caller knows them.
        """
        earlier, new = self._continue(observation, tools, among)
        known_tools = (exchange.tools for exchange in reversed(self._exchanges))
        own_tools = next((known for known in known_tools if known == tools), None)
        return Pending(
            ids=(earlier.ids[: earlier.size] if earlier.is_continued else earlier.ids) + new if earlier else new[:],
            observation=_snapshot(observation, earlier),
            tools=deepcopy(tools) if own_tools is None else own_tools,
            earlier=earlier,
            new=new,
        )

    def finish(self, pending: Pending, response_ids: Sequence[int], text: str) -> Exchange:
        """Record the response to a prompt: its ids with the stop token, and the text that the env gets."""
        earlier = pending.earlier
        # One list per conversation, unless it branches: memory grows linearly, and nothing old is copied.
        ids = [] if earlier is None else earlier.ids[: earlier.size] if earlier.is_continued else earlier.ids
        ids += pending.new
        start = len(ids)
        ids += response_ids
        made = Exchange(pending.observation, pending.tools, ids, prompt_size=start, size=len(ids), text=text)
        insort(self._exchanges, made, key=attrgetter("length"))
        return made

    def _continue(
        self, observation: Observation, tools: ToolSchemas, among: Iterable[Exchange] | None
    ) -> tuple[Exchange | None, list[int]]:
        """Find the exchange that the observation continues, and the ids that follow it. If there is none, return all
        ids."""
        candidates = self._candidates(observation) if among is None else among
        for exchange in islice((each for each in candidates if each.tools == tools), MAX_TRIES):
            before, said = exchange.observation, exchange.ids[exchange.prompt_size : exchange.size]
            if observation.token_ids is not None:
                new: list[int] | None = observation.token_ids[exchange.size :]
            else:
                new = self._renderer.new_ids(before, said, exchange.text, observation, tools)
            if new is not None:
                return exchange, new
        return None, self._renderer.render(observation, tools)

    def _candidates(self, observation: Observation) -> Iterator[Exchange]:
        """Yield the exchanges that the observation may continue, judged without the template. The longest comes first;
        among equally long ones, the latest."""
        for exchange in reversed(self._exchanges):
            if exchange.is_continued and _adds_replies(exchange, observation):
                continue
            if _may_follow(exchange, observation):
                yield exchange


def _may_follow(exchange: Exchange, observation: Observation) -> bool:
    before = exchange.observation
    if observation.token_ids is not None:
        return observation.token_ids[: exchange.size] == exchange.ids[: exchange.size]
    if observation.text is not None:
        return before.text is not None and observation.text.startswith(before.text + exchange.text)
    assert observation.messages is not None  # Observation holds exactly one of the three
    return before.messages is not None and follows(observation.messages, before.messages, exchange.text)


def _snapshot(observation: Observation, earlier: Exchange | None) -> Observation:
    """Copy the messages: an env may edit them in place, and that must be detected as a rewritten history."""
    if observation.messages is None:
        return replace(observation, token_ids=observation.token_ids and list(observation.token_ids))
    # The messages of the exchange that it extends are copies already, and compared equal.
    known = earlier.observation.messages if earlier is not None and earlier.observation.messages else []
    added = map(_copied, observation.messages[len(known) :])
    return Observation.grown([*known, *added], by=0)


def _copied(message: Message) -> Message:
    """Copy a message. Strings cannot change, so a shallow copy is enough if all values are strings."""
    flat = type(message) is dict and {*map(type, message.values())} <= {str}
    return dict(message) if flat else deepcopy(message)


def _adds_replies(exchange: Exchange, observation: Observation) -> bool:
    """Whether more assistant messages follow the exchange's own. If the exchange was already continued, one of them has
    been rewritten since, and a rewritten history is rendered from scratch."""
    if observation.messages is None or exchange.observation.messages is None:
        return False
    added = observation.messages[len(exchange.observation.messages) + 1 :]
    return any(message.get("role") == "assistant" for message in added)
